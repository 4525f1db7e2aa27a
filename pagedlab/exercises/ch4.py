"""Exercises of chapter 4: the kernel that reads the blocks."""

import dataclasses
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from pagedlab import portable
from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch1 import random_layout
from pagedlab.exercises.ch2 import random_table
from pagedlab.layout import KVLayout
from pagedlab.stand_in import Kernel, NeedsTriton


def is_kernel(function: Any) -> bool:
    """Whether it is one, or a wrong answer of ours; a kernel without its decorator is refused."""
    if hasattr(function, "fn"):
        return True
    if any(name.endswith("_ptr") for name in inspect.signature(function).parameters):
        raise ValueError("expected a kernel, got a function: @triton.jit is missing above it")
    return False


OUTSIDE = "a {} outside the kernel's arguments"
FAR = 6_000_000  # from this block on, a small layout's offsets are beyond int32


def blocks_of(table: np.ndarray) -> list[int]:
    """The blocks that a cache for `table` needs: all up to the largest, or, where they would fill
    the memory, only those in the table."""
    if table.max() < FAR:
        return list(range(int(table.max()) + 1))
    return sorted(set(table[table >= 0].tolist()))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    cache: torch.Tensor | None = None,
    blocks: Sequence[int] = (),
) -> None:
    """`kernel[grid](*args)`; where it is interpreted, an access outside its arguments raises.

    Args:
        cache: the tensor among `args` that holds `blocks`, one after another. The kernel sees each
            at the place that its number gives it, as if all blocks before it were there.
    """
    if type(kernel).__name__ == "InterpretedFunction":
        launch_interpreted(kernel, grid, args, cache, blocks)
    elif cache is None or len(blocks) > blocks[-1]:
        kernel[grid](*args)
    else:
        at = next(i for i, arg in enumerate(args) if arg is cache)
        there = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        there = portable.run_in_process(launched, kernel, grid, there, at, blocks, interpret=True)
        for arg, result in zip(args, there, strict=True):
            if isinstance(arg, torch.Tensor):
                arg.copy_(result)


def launched(
    kernel: Any, grid: tuple[int, ...], args: list, at: int, blocks: Sequence[int]
) -> list:
    """The arguments after the launch; a failure is a ValueError, which crosses processes."""
    try:
        launch_interpreted(kernel, grid, args, args[at], blocks)
    except Exception as error:
        raise ValueError(str(error.__cause__ or error)) from None
    return args


def launch_interpreted(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence,
    cache: torch.Tensor | None,
    blocks: Sequence[int],
) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    from pagedlab.trace_recorder import MEMORY_OPS, OTHER_AT, leave_undefined

    tensors = [t for t in args if isinstance(t, torch.Tensor) and t is not cache]
    memory = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]

    def locate(pointers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The true addresses, and which of them are inside the arguments."""
        true, inside = pointers.astype(np.int64), np.zeros(pointers.shape, bool)
        for start, end in memory:
            inside |= (true >= start) & (true < end)
        if cache is not None:
            block_bytes = cache.nbytes // len(blocks)
            block, rest = np.divmod(true - cache.data_ptr(), block_bytes)
            rank = np.searchsorted(blocks, block).clip(max=len(blocks) - 1)
            known = ~inside & (np.take(blocks, rank) == block)
            true = np.where(known, cache.data_ptr() + rank * block_bytes + rest, true)
            inside |= known
        return true.astype(np.uint64), inside

    def guard(operation: Callable, kind: str, pointer_at: int, mask_at: int | None) -> Callable:
        def guarded(*operands: Any, **options: Any) -> Any:
            handle, changed = operands[pointer_at], list(operands)
            true, inside = locate(handle.data)
            mask = np.ones(inside.shape, bool)
            if mask_at is not None:
                mask = np.broadcast_to(operands[mask_at].data, inside.shape).astype(bool)
                inside |= ~mask
            if not inside.all():
                raise ValueError(OUTSIDE.format(kind))
            changed[pointer_at] = dataclasses.replace(handle, data=true)
            result = operation(*changed, **options)
            if kind == "load" and operands[OTHER_AT] is None:
                leave_undefined(result.data, mask)
            return result

        return guarded

    guards: dict[str, Any] = {
        op: guard(getattr(builder, op), *where[:3]) for op, where in MEMORY_OPS.items()
    }
    with mock.patch.multiple(builder, **guards), np.errstate(all="ignore"):
        kernel[grid](*args)


def device_of(kernel: Any) -> str:
    """Where an interpreted or a compiled kernel wants its tensors."""
    if isinstance(kernel, Kernel):
        raise NeedsTriton(kernel.fn.__name__)
    if type(kernel).__name__ == "InterpretedFunction":
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError(
            "expected an interpreted kernel, since there is no GPU: import pagedlab before triton"
        )
    return "cuda"


# 4.1 ----------------------------------------------------------------------------------------------


def kv_heads(num_q_heads, num_kv_heads):
    group_size = num_q_heads // num_kv_heads
    return [q_head // group_size for q_head in range(num_q_heads)]


def head_cases(rng: random.Random) -> Iterator[tuple]:
    yield 1, 1
    yield 32, 8
    for _ in range(12):
        num_kv_heads = rng.choice([2, 3, 5, 7])
        group_size = rng.choice([size for size in (1, 2, 3, 4, 6) if size != num_kv_heads])
        yield num_kv_heads * group_size, num_kv_heads
    yield 6, 2


# 4.2 ----------------------------------------------------------------------------------------------


def tokens_per_block(seq_len, block_size):
    num_blocks = -(-seq_len // block_size)
    return [min(seq_len - block * block_size, block_size) for block in range(num_blocks)]


def length_cases(rng: random.Random) -> Iterator[tuple]:
    for seq_len in (0, 1, 15, 16, 17, 63, 256):
        yield seq_len, 16
    for _ in range(12):
        block_size = rng.choice([4, 8, 32])
        yield rng.randint(1, 5 * block_size), block_size
        yield rng.randint(1, 5) * block_size, block_size


def rest_of_division(seq_len, block_size):
    counts = tokens_per_block(seq_len, block_size)
    return [*counts[:-1], seq_len % block_size] if counts else []


def one_block_too_many(seq_len, block_size):
    return [*([block_size] * (seq_len // block_size)), seq_len % block_size]


# 4.3 ----------------------------------------------------------------------------------------------


def k_offsets(table, active_slots, seq_lens, layer, layout, group_size, active_slot, q_head):
    slot, offsets = active_slots[active_slot], []
    for position in range(seq_lens[active_slot]):
        logical_block, token_in_block = divmod(position, layout.block_size)
        row = 2 * int(table[slot, layer, logical_block]) * layout.block_size + token_in_block
        offsets.append(row * layout.kv_dim + q_head // group_size * layout.head_dim)
    return offsets


def program_cases(rng: random.Random) -> Iterator[tuple]:
    for far in [False] * 8 + [True] * 4:
        table, layout = random_table(rng, 3, 2, 4), random_layout(rng)
        if far:
            table = np.where(table >= 0, table + (1 << 21), -1).astype(np.int32)
        active_slots = rng.sample([[1, 2], [2, 0], [2, 1], [1, 0]], 1)[0]
        seq_lens = random_lengths(rng, table, active_slots, layout.block_size)
        group_size = rng.choice([2, 4])
        q_head = rng.randrange(layout.num_kv_heads * group_size)
        yield table, active_slots, seq_lens, 1, layout, group_size, rng.randrange(2), q_head


def random_lengths(
    rng: random.Random, table: np.ndarray, active_slots: list[int], block_size: int
) -> list[int]:
    """A length for each row that its assigned blocks can hold, the edges of a block among them."""
    full = [int((table[slot, 0] >= 0).sum()) * block_size for slot in active_slots]
    return [rng.choice([n - block_size + 1, n - 1, n]) for n in full]


def offsets_by_active_slot(table, active_slots, *rest):
    return k_offsets(table, range(len(active_slots)), *rest)


def offsets_length_by_slot(
    table, active_slots, seq_lens, layer, layout, group, active_slot, q_head
):
    lengths = [seq_lens[slot % len(seq_lens)] for slot in active_slots]
    return k_offsets(table, active_slots, lengths, layer, layout, group, active_slot, q_head)


def offsets_in_bytes(table, active_slots, seq_lens, layer, layout, *program):
    offsets = k_offsets(table, active_slots, seq_lens, layer, layout, *program)
    return [offset * layout.dtype.itemsize for offset in offsets]


def offsets_blocks_of_one_section(table, active_slots, seq_lens, layer, layout, *program):
    section = layout.block_size * layout.kv_dim
    offsets = k_offsets(table, active_slots, seq_lens, layer, layout, *program)
    return [offset - offset // (2 * section) * section for offset in offsets]


def offsets_of_tiled_heads(
    table, active_slots, seq_lens, layer, layout, group, active_slot, q_head
):
    q_head = q_head % layout.num_kv_heads * group
    return k_offsets(table, active_slots, seq_lens, layer, layout, group, active_slot, q_head)


def offsets_in_int32(*where):
    return [(offset + 2**31) % 2**32 - 2**31 for offset in k_offsets(*where)]


# 4.4 ----------------------------------------------------------------------------------------------


def numbered_cache(table, active_slots, seq_lens, layer, layout) -> np.ndarray:
    """float32 [blocks_of(table), 2, block_size, num_kv_heads, head_dim]: each element of a token
    that is there holds its own offset, all others NaN."""
    blocks = blocks_of(table)
    shape = len(blocks), 2, layout.block_size, layout.num_kv_heads, layout.head_dim
    numbers = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    cache = np.full_like(numbers, np.nan)
    for slot, seq_len in zip(active_slots, seq_lens, strict=True):
        for position in range(seq_len):
            logical_block, token = divmod(position, layout.block_size)
            block = blocks.index(table[slot, layer, logical_block])
            cache[block, :, token] = numbers[block, :, token]
    return cache


def mean_of_v(table, active_slots, seq_lens, layer, layout):
    return mean_over(table, active_slots, seq_lens, layer, layout)


def mean_over(
    table, active_slots, seq_lens, layer, layout, *, section=1, slots=None, lengths=None, over=None
) -> np.ndarray:
    """Means of what `slots` hold up to `lengths`; the keywords are what a wrong answer mistakes."""
    cache, blocks = numbered_cache(table, active_slots, seq_lens, layer, layout), blocks_of(table)
    means = np.zeros((len(active_slots), layout.num_kv_heads, layout.head_dim), np.float32)
    rows = zip(slots or active_slots, lengths or seq_lens, strict=True)
    for row, (slot, length) in enumerate(rows):
        for position in range(length):
            logical_block, token = divmod(position, layout.block_size)
            block = table[slot, layer, logical_block]
            means[row] += cache[blocks.index(block) if block >= 0 else -1, section, token]
        with np.errstate(invalid="ignore"):
            means[row] /= np.float32(max(length, 1) if over is None else over[row])
    return means


def rounded_up(seq_lens: list[int], block_size: int) -> list[int]:
    return [-(-seq_len // block_size) * block_size for seq_len in seq_lens]


def mean_of_whole_blocks(table, active_slots, seq_lens, layer, layout):
    lengths = rounded_up(seq_lens, layout.block_size)
    return mean_over(table, active_slots, seq_lens, layer, layout, lengths=lengths)


def mean_over_whole_blocks(table, active_slots, seq_lens, layer, layout):
    over = [max(length, 1) for length in rounded_up(seq_lens, layout.block_size)]
    return mean_over(table, active_slots, seq_lens, layer, layout, over=over)


def mean_by_active_slot(table, active_slots, *rest):
    return mean_over(table, active_slots, *rest, slots=range(len(active_slots)))


def mean_of_k(*where):
    return mean_over(*where, section=0)


def mean_divided_by_zero(table, active_slots, seq_lens, layer, layout):
    return mean_over(table, active_slots, seq_lens, layer, layout, over=seq_lens)


def mean_without_new_token(table, active_slots, seq_lens, layer, layout):
    lengths = [max(seq_len - 1, 0) for seq_len in seq_lens]
    return mean_over(table, active_slots, seq_lens, layer, layout, lengths=lengths)


def mean_in_int32(table, *rest):
    if table.max() >= FAR:
        raise ValueError(OUTSIDE.format("load"))
    return mean_over(table, *rest)


def launch_mean_of_v(function, table, active_slots, seq_lens, layer, layout):
    if not is_kernel(function):
        return function(table, active_slots, seq_lens, layer, layout)
    device = device_of(function)
    numbers = numbered_cache(table, active_slots, seq_lens, layer, layout)
    cache = torch.from_numpy(numbers.reshape(-1)).to(device)
    rows = torch.tensor([seq_lens, active_slots], dtype=torch.int32, device=device)
    shape = len(active_slots), layout.num_kv_heads, layout.head_dim
    means = torch.full(shape, math.nan, device=device)
    arguments = (
        cache,
        torch.from_numpy(table).to(device),
        *rows,
        means,
        layer,
        *(table.shape[1] * table.shape[2], table.shape[2]),
        *(layout.block_size, layout.kv_dim, layout.head_dim),
    )
    launch(function, shape[:2], *arguments, cache=cache, blocks=blocks_of(table))
    return means


def mean_cases(rng: random.Random) -> Iterator[tuple]:
    layout = KVLayout(4, 3, 16, torch.float32)
    for seq_lens in ([1, 0], [4, 3], [5, 8], [0, rng.choice([6, 7])], [2, 5]):
        table, first = np.full((3, 2, 5), -1, np.int32), FAR if seq_lens == [2, 5] else 0
        table[:, :, :2] = np.reshape(rng.sample(range(first, first + 20), 12), (3, 2, 2))
        yield table, rng.choice([[1, 2], [2, 1], [1, 0], [2, 0]]), seq_lens, 1, layout


EXERCISES = (
    Exercise(
        "4.1",
        "which KV head?",
        kv_heads,
        head_cases,
        "num_q_heads // num_kv_heads consecutive query heads share one KV head.",
        (
            Confusion(
                "Heads that share a KV head are consecutive: divide, do not take the remainder.",
                lambda num_q, num_kv: [q_head % num_kv for q_head in range(num_q)],
            ),
            Confusion(
                "The divisor is the group's size, not the number of KV heads.",
                lambda num_q, num_kv: [q_head // num_kv for q_head in range(num_q)],
            ),
            Confusion(
                "The remainder is the place in the group; the quotient is the group.",
                lambda num_q, num_kv: [q_head % (num_q // num_kv) for q_head in range(num_q)],
            ),
            Confusion(
                "There are fewer KV heads than query heads: several share one.",
                lambda num_q, num_kv: list(range(num_q)),
            ),
            Confusion(
                "That lists each KV head once; every query head needs an entry.",
                lambda num_q, num_kv: list(range(num_kv)),
            ),
        ),
    ),
    Exercise(
        "4.2",
        "how far in each block?",
        tokens_per_block,
        length_cases,
        "As many blocks as the length fills, rounded up; in each the smaller of block_size and "
        "what is left.",
        (
            Confusion(
                "The last block may be filled only in part: min(what is left, block_size).",
                lambda seq_len, size: [size] * -(-seq_len // size),
            ),
            Confusion(
                "The last block, filled in part, is read, too: round up.",
                lambda seq_len, size: [size] * (seq_len // size),
            ),
            Confusion(
                "When the length is a multiple of block_size, that is one block too many.",
                one_block_too_many,
            ),
            Confusion(
                "When the last block is full, the remainder is 0, but block_size tokens are in it.",
                rest_of_division,
            ),
            Confusion(
                "The length counts the new token already: do not take one off.",
                lambda seq_len, size: tokens_per_block(max(seq_len - 1, 0), size),
            ),
        ),
    ),
    Exercise(
        "4.3",
        "what one program reads",
        k_offsets,
        program_cases,
        "active_slot -> slot and length; position -> logical block -> physical block; then the "
        "offset in elements, with the program's KV head.",
        (
            Confusion(
                "The table's rows belong to slots: use active_slots[active_slot].",
                offsets_by_active_slot,
            ),
            Confusion(
                "seq_lens is indexed by the place in the batch, not by the slot.",
                offsets_length_by_slot,
            ),
            Confusion("Offsets count elements here, not bytes.", offsets_in_bytes),
            Confusion(
                "From one block to the next it is K and V: 2 * block_size * kv_dim elements.",
                offsets_blocks_of_one_section,
            ),
            Confusion(
                "Consecutive query heads share a KV head: q_head // group_size.",
                offsets_of_tiled_heads,
            ),
            Confusion(
                "The table's int32 overflows when multiplied: turn the block into an int first.",
                offsets_in_int32,
            ),
        ),
    ),
    Exercise(
        "4.4",
        "step your own kernel: the mean of V",
        mean_of_v,
        mean_cases,
        "Compare what was read with the element numbers: slot from active_slots, V after K, as "
        "many tokens as the length says.",
        (
            Confusion(
                "The last block was read to its end: only the length says where its tokens stop.",
                mean_of_whole_blocks,
            ),
            Confusion(
                "The sum is right, but the divisor counts places, not tokens.",
                mean_over_whole_blocks,
            ),
            Confusion(
                "The table was indexed by active_slot; its rows belong to slots.",
                mean_by_active_slot,
            ),
            Confusion(
                "That is the mean of K: V lies block_size * kv_dim elements later.", mean_of_k
            ),
            Confusion("An empty row divides zero by zero.", mean_divided_by_zero),
            Confusion(
                "The length counts the new token already: do not take one off.",
                mean_without_new_token,
            ),
            Confusion(
                "A large block's offset is beyond int32, and wraps to a negative one: turn the "
                "block into tl.int64 before you multiply.",
                mean_in_int32,
            ),
        ),
        launch_mean_of_v,
    ),
)

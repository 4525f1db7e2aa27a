"""Exercises of chapter 4: the kernel that reads the blocks."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch1 import random_layout
from pagedlab.exercises.ch2 import random_table
from pagedlab.layout import KVLayout
from pagedlab.stand_in import Kernel, NeedsTriton


def is_kernel(function: Any) -> bool:
    return hasattr(function, "fn")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
    """`kernel[grid](*args)`; where it is interpreted, an access outside its arguments raises."""
    if type(kernel).__name__ != "InterpretedFunction":
        kernel[grid](*args)
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    from pagedlab.trace_recorder import MEMORY_OPS

    memory = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in args if isinstance(t, torch.Tensor)]

    def guard(operation: Callable, kind: str, pointer_at: int, mask_at: int | None) -> Callable:
        def guarded(*operands: Any, **options: Any) -> Any:
            pointers = operands[pointer_at].data
            if mask_at is not None:
                pointers = pointers[np.broadcast_to(operands[mask_at].data, pointers.shape)]
            inside = np.zeros(pointers.shape, bool)
            for start, end in memory:
                inside |= (pointers >= start) & (pointers < end)
            if not inside.all():
                raise IndexError(f"a {kind} outside the kernel's arguments")
            return operation(*operands, **options)

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
    """float32 [num_blocks, 2, block_size, num_kv_heads, head_dim]: each element of a token that is
    there holds its own offset, all others NaN."""
    shape = int(table.max()) + 1, 2, layout.block_size, layout.num_kv_heads, layout.head_dim
    numbers = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    cache = np.full_like(numbers, np.nan)
    for slot, seq_len in zip(active_slots, seq_lens, strict=True):
        for position in range(seq_len):
            logical_block, token = divmod(position, layout.block_size)
            block = table[slot, layer, logical_block]
            cache[block, :, token] = numbers[block, :, token]
    return cache


def mean_of_v(table, active_slots, seq_lens, layer, layout):
    return mean_over(table, active_slots, seq_lens, layer, layout)


def mean_over(
    table, active_slots, seq_lens, layer, layout, *, section=1, slots=None, lengths=None, over=None
) -> np.ndarray:
    """Means of what `slots` hold up to `lengths`; the keywords are what a wrong answer mistakes."""
    cache = numbered_cache(table, active_slots, seq_lens, layer, layout)
    means = np.zeros((len(active_slots), layout.num_kv_heads, layout.head_dim), np.float32)
    rows = zip(slots or active_slots, lengths or seq_lens, strict=True)
    for row, (slot, length) in enumerate(rows):
        for position in range(length):
            logical_block, token = divmod(position, layout.block_size)
            means[row] += cache[table[slot, layer, logical_block], section, token]
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


def launch_mean_of_v(function, table, active_slots, seq_lens, layer, layout):
    if not is_kernel(function):
        return function(table, active_slots, seq_lens, layer, layout)
    device = device_of(function)
    cache = numbered_cache(table, active_slots, seq_lens, layer, layout)
    rows = torch.tensor([seq_lens, active_slots], dtype=torch.int32, device=device)
    shape = len(active_slots), layout.num_kv_heads, layout.head_dim
    means = torch.full(shape, math.nan, device=device)
    arguments = (
        torch.from_numpy(cache.reshape(-1)).to(device),
        torch.from_numpy(table).to(device),
        *rows,
        means,
        layer,
        *(table.shape[1] * table.shape[2], table.shape[2]),
        *(layout.block_size, layout.kv_dim, layout.head_dim),
    )
    launch(function, shape[:2], *arguments)
    return means


def mean_cases(rng: random.Random) -> Iterator[tuple]:
    layout = KVLayout(4, 3, 16, torch.float32)
    for seq_lens in ([1, 0], [4, 3], [5, 8], [0, rng.choice([6, 7])]):
        table = np.full((3, 2, 5), -1, np.int32)
        table[:, :, :2] = np.reshape(rng.sample(range(20), 12), (3, 2, 2))
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
        ),
        launch_mean_of_v,
    ),
)

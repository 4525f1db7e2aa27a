"""Exercises of chapter 3: writing K and V into blocks."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch2 import random_table
from pagedlab.exercises.ch4 import FAR, OUTSIDE, blocks_of, device_of, is_kernel, launch
from pagedlab.layout import KVLayout

# 3.1 ----------------------------------------------------------------------------------------------


def new_blocks(old_length, new_length, block_size):
    def num_blocks(length):
        return (length + block_size - 1) // block_size

    return num_blocks(new_length) - num_blocks(old_length)


def growth_cases(rng: random.Random) -> Iterator[tuple]:
    yield from ((0, 0, 4), (0, 1, 4), (3, 4, 4), (4, 5, 4), (4, 4, 4), (0, 37, 16), (15, 17, 16))
    for _ in range(20):
        block_size = rng.choice([4, 8, 16, 32])
        old = rng.choice([rng.randint(0, 90), block_size * rng.randint(0, 5)])
        yield old, old + rng.choice([1, 1, rng.randint(2, 60)]), block_size


def blocks_of_the_difference(old_length, new_length, block_size):
    return new_blocks(0, new_length - old_length, block_size)


def blocks_when_full(old_length, new_length, block_size):
    return new_length // block_size - old_length // block_size


def blocks_with_one_spare(old_length, new_length, block_size):
    return new_length // block_size + 1 - new_blocks(0, old_length, block_size)


def all_blocks_again(old_length, new_length, block_size):
    return new_blocks(0, new_length, block_size)


def blocks_by_true_division(old_length, new_length, block_size):
    return (new_length - old_length) / block_size


# 3.2 ----------------------------------------------------------------------------------------------


def places(row, start, num_tokens, block_size):
    found = []
    for position in range(start, start + num_tokens):
        logical_block, token_in_block = divmod(position, block_size)
        found.append((row[logical_block], token_in_block))
    return found


def place_cases(rng: random.Random) -> Iterator[tuple]:
    for _ in range(24):
        block_size, width = rng.choice([(2, 5), (4, 3), (8, 3)])
        row = rng.sample(range(40), width)
        start = rng.choice([0, 1, block_size - 1, block_size, rng.randrange(block_size * 2)])
        yield row, start, rng.randint(0, block_size * width - start), block_size


def places_from_zero(row, start, num_tokens, block_size):
    return places(row, 0, num_tokens, block_size)


def places_with_start_as_block_start(row, start, num_tokens, block_size):
    first = start // block_size * block_size
    return places(row, first, num_tokens, block_size)


def places_restart_in_block(row, start, num_tokens, block_size):
    found = places(row, start, num_tokens, block_size)
    return [(block, i % block_size) for i, (block, _) in enumerate(found)]


def places_of_logical_blocks(row, start, num_tokens, block_size):
    return places(range(len(row)), start, num_tokens, block_size)


def places_swapped(row, start, num_tokens, block_size):
    return [(token, block) for block, token in places(row, start, num_tokens, block_size)]


# 3.3 ----------------------------------------------------------------------------------------------


def append_places(table, active_slots, seq_lens, layer, block_size):
    found = []
    for slot, seq_len in zip(active_slots, seq_lens, strict=True):
        if seq_len > 0:
            logical_block, token_in_block = divmod(seq_len - 1, block_size)
            found.append((int(table[slot, layer, logical_block]), token_in_block))
    return found


def append_cases(rng: random.Random) -> Iterator[tuple]:
    for _ in range(24):
        table, block_size = random_table(rng, 3, 2, 4), rng.choice([4, 8])
        active_slots = rng.choice([[1], [2], [1, 2], [2, 0], [2, 1], [1, 0], [2, 0, 1]])
        filled = [int((table[slot, 0] >= 0).sum()) * block_size for slot in active_slots]
        seq_lens = [rng.choice([0, 1, n - block_size + 1, n - 1, n]) for n in filled]
        yield table, active_slots, seq_lens, 1, block_size


def append_behind_the_end(table, active_slots, seq_lens, layer, block_size):
    longer = [seq_len + 1 if seq_len else 0 for seq_len in seq_lens]
    table = np.concatenate((table, np.full_like(table[:, :, :1], -1)), axis=2)
    return append_places(table, active_slots, longer, layer, block_size)


def append_by_batch_order(table, active_slots, seq_lens, layer, block_size):
    return append_places(table, range(len(active_slots)), seq_lens, layer, block_size)


def append_empty_rows_too(table, active_slots, seq_lens, layer, block_size):
    lengths = [max(seq_len, 1) for seq_len in seq_lens]
    return append_places(table, active_slots, lengths, layer, block_size)


def append_empty_rows_at_the_end(table, active_slots, seq_lens, layer, block_size):
    found = []
    for slot, seq_len in zip(active_slots, seq_lens, strict=True):
        logical_block, token_in_block = divmod(seq_len - 1, block_size)
        found.append((int(table[slot, layer, logical_block]), token_in_block))
    return found


def append_in_layer_zero(table, active_slots, seq_lens, layer, block_size):
    return append_places(table, active_slots, seq_lens, 0, block_size)


# 3.4 ----------------------------------------------------------------------------------------------


def append_token(table, active_slots, seq_lens, layer, layout):
    return appended(table, active_slots, seq_lens, layer, layout)


def appended(
    table, active_slots, seq_lens, layer, layout, *, slots=None, lengths=None, v_after=None
) -> list:
    """What appending k and v of `new_tokens` leaves in an empty cache, as `written` shows it; the
    keywords are what a wrong answer mistakes."""
    k, v = new_tokens(len(active_slots), layout)
    blocks = blocks_of(table)
    cache = np.zeros(len(blocks) * layout.block_bytes // 4, np.float32)
    v_after = layout.v_offset // 4 if v_after is None else v_after
    rows = zip(slots or active_slots, lengths or seq_lens, strict=True)
    for row, (slot, seq_len) in enumerate(rows):
        if seq_len > 0:
            logical_block, token = divmod(seq_len - 1, layout.block_size)
            block = table[slot, layer, logical_block]
            block = blocks.index(block) if block in blocks else 0
            for section, first in ((k, 0), (v, v_after)):
                start = (2 * block * layout.block_size + token) * layout.kv_dim + first
                cache[start : start + layout.kv_dim] = section[row].reshape(-1)
    return written(cache, blocks)


def new_tokens(num_active: int, layout: KVLayout) -> np.ndarray:
    """k and v, float32 [2, num_active, num_kv_heads, head_dim], every number another one."""
    shape = 2, num_active, layout.num_kv_heads, layout.head_dim
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def written(cache: np.ndarray, blocks: list[int]) -> list[list[float]]:
    """The elements that are not 0, as runs: first element, number of elements, value of the first;
    a run ends where the values do not go on by 1."""
    block_elements = len(cache) // len(blocks)
    runs: list[list[float]] = []
    for place in np.flatnonzero(cache).tolist():
        rank, rest = divmod(place, block_elements)
        element, value = blocks[rank] * block_elements + rest, cache[place].item()
        if runs and element == runs[-1][0] + runs[-1][1] and value == runs[-1][2] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([element, 1, value])
    return runs


def launch_append_token(function: Callable, table, active_slots, seq_lens, layer, layout):
    if not is_kernel(function):
        return function(table, active_slots, seq_lens, layer, layout)
    device = device_of(function)
    k, v = torch.from_numpy(new_tokens(len(active_slots), layout)).to(device)
    blocks = blocks_of(table)
    cache = torch.zeros(len(blocks) * layout.block_bytes // 4, device=device)
    rows = torch.tensor([seq_lens, active_slots], dtype=torch.int32, device=device)
    arguments = (
        *(k, v, cache, torch.from_numpy(table).to(device), *rows, layer),
        *(table.shape[1] * table.shape[2], table.shape[2]),
        *(layout.block_size, layout.kv_dim, layout.head_dim),
    )
    grid = len(active_slots), layout.num_kv_heads
    launch(function, grid, *arguments, cache=cache, blocks=blocks)
    return written(cache.cpu().numpy(), blocks)


def append_token_cases(rng: random.Random) -> Iterator[tuple]:
    layout = KVLayout(4, 3, 16, torch.float32)
    for seq_lens in ([1, 0], [4, 3], [5, 8], [0, rng.choice([6, 7])], [2, 5]):
        table, first = np.full((3, 2, 4), -1, np.int32), FAR if seq_lens == [2, 5] else 0
        table[:, :, :3] = np.reshape(rng.sample(range(first + 1, first + 30), 18), (3, 2, 3))
        yield table, rng.choice([[1, 2], [2, 1], [1, 0], [2, 0]]), seq_lens, 1, layout


def append_token_behind(table, active_slots, seq_lens, *rest):
    lengths = [seq_len + 1 if seq_len else 0 for seq_len in seq_lens]
    return appended(table, active_slots, seq_lens, *rest, lengths=lengths)


def append_token_by_row(table, active_slots, *rest):
    return appended(table, active_slots, *rest, slots=range(len(active_slots)))


def append_token_to_empty(table, active_slots, seq_lens, *rest):
    lengths = [max(seq_len, 1) for seq_len in seq_lens]
    return appended(table, active_slots, seq_lens, *rest, lengths=lengths)


def append_token_v_after_k(table, active_slots, seq_lens, layer, layout):
    return appended(table, active_slots, seq_lens, layer, layout, v_after=layout.kv_dim)


def append_token_without_v(table, active_slots, seq_lens, layer, layout):
    k_only = appended(table, active_slots, seq_lens, layer, layout)
    return [run for run in k_only if run[0] // (layout.v_offset // 4) % 2 == 0]


def append_token_in_int32(table, *rest):
    if table.max() >= FAR:
        raise ValueError(OUTSIDE.format("store"))
    return appended(table, *rest)


EXERCISES = (
    Exercise(
        "3.1",
        "new blocks",
        new_blocks,
        growth_cases,
        "Count the blocks that each length fills, the last one perhaps in part, and subtract.",
        (
            Confusion(
                "A block that is filled in part has room: count blocks of both lengths.",
                blocks_of_the_difference,
            ),
            Confusion(
                "That counts the blocks that are full; one with a single token is a block, too.",
                blocks_when_full,
            ),
            Confusion(
                "When the length is a multiple of block_size, no further block is needed yet.",
                blocks_with_one_spare,
            ),
            Confusion("The blocks of the old length are there already.", all_blocks_again),
            Confusion("A count of blocks is a whole number.", blocks_by_true_division),
        ),
    ),
    Exercise(
        "3.2",
        "where a prompt goes",
        places,
        place_cases,
        "Each token's position is start + i; divide it by block_size and look its block up.",
        (
            Confusion("The first token is at position start, not at 0.", places_from_zero),
            Confusion(
                "start need not be the beginning of a block.", places_with_start_as_block_start
            ),
            Confusion(
                "The token in block is position % block_size, not the index in this chunk.",
                places_restart_in_block,
            ),
            Confusion(
                "That is the logical block: the row says which physical one it is.",
                places_of_logical_blocks,
            ),
            Confusion("First the physical block, then the token in it.", places_swapped),
        ),
    ),
    Exercise(
        "3.3",
        "where new tokens go",
        append_places,
        append_cases,
        "The new token is the last one that the length counts: position seq_len - 1 of its slot.",
        (
            Confusion(
                "The length counts the new token: its position is seq_len - 1.",
                append_behind_the_end,
            ),
            Confusion(
                "The table's rows belong to slots, not to places in the batch.",
                append_by_batch_order,
            ),
            Confusion("A row of length 0 has no token to write.", append_empty_rows_too),
            Confusion(
                "Position -1 of an empty row leads Python to the table's last entry.",
                append_empty_rows_at_the_end,
            ),
            Confusion("Each layer has a row of its own.", append_in_layer_zero),
        ),
    ),
    Exercise(
        "3.4",
        "step your own kernel",
        append_token,
        append_token_cases,
        "Position seq_len - 1 of the row's slot; V lies BLOCK_SIZE * KV_DIM elements after K.",
        (
            Confusion(
                "The length counts the new token: its position is seq_len - 1.",
                append_token_behind,
            ),
            Confusion(
                "The table's rows belong to slots: load active_slots first.", append_token_by_row
            ),
            Confusion("A row of length 0 has no token to write.", append_token_to_empty),
            Confusion(
                "V lies a whole section after K, BLOCK_SIZE tokens of it, not one token.",
                append_token_v_after_k,
            ),
            Confusion("V has to be written, too.", append_token_without_v),
            Confusion(
                "A large block's offset is beyond int32, and wraps to a negative one: turn the "
                "block into tl.int64 before you multiply.",
                append_token_in_int32,
            ),
        ),
        launch_append_token,
    ),
)

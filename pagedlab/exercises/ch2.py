"""Exercises of chapter 2: the block table."""

import random
from collections.abc import Iterator

import numpy as np

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch1 import random_layout


def random_table(rng: random.Random, num_slots: int, num_layers: int, width: int) -> np.ndarray:
    """A [slot, layer, logical block] table of distinct blocks, block 0 among them; each row is
    filled from its start and -1 after that."""
    table = np.full((num_slots, num_layers, width), -1, np.int32)
    blocks = list(range(2 * table.size))
    rng.shuffle(blocks)
    lengths = [rng.randint(1, width - 1) for _ in range(num_slots)]
    for slot, length in enumerate(lengths):
        for row in table[slot]:
            row[:length] = [blocks.pop() for _ in range(length)]
    if 0 not in table:
        table[rng.randrange(num_slots), rng.randrange(num_layers), 0] = 0
    return table


# 2.1 ----------------------------------------------------------------------------------------------


def k_byte_of_token(table, layout, slot, layer, position, kv_head, lane):
    logical_block, token_in_block = divmod(position, layout.block_size)
    physical_block = table[slot, layer, logical_block]
    if physical_block == -1:
        return None
    return layout.k_address(int(physical_block), token_in_block, kv_head, lane)


def token_cases(rng: random.Random) -> Iterator[tuple]:
    for _ in range(12):
        layout, table = random_layout(rng), random_table(rng, 2, 3, 4)
        for position in (0, layout.block_size - 1, layout.block_size, 4 * layout.block_size - 1):
            kv_head, lane = rng.randrange(layout.num_kv_heads), rng.randrange(layout.head_dim)
            yield table, layout, rng.randrange(2), rng.randrange(3), position, kv_head, lane


def formula(layout, physical_block, token_in_block, kv_head, lane):
    element = token_in_block * layout.kv_dim + kv_head * layout.head_dim + lane
    return int(physical_block) * layout.block_bytes + element * layout.dtype.itemsize


def minus_one_multiplied(table, layout, slot, layer, position, kv_head, lane):
    logical_block, token_in_block = divmod(position, layout.block_size)
    return formula(layout, table[slot, layer, logical_block], token_in_block, kv_head, lane)


def minus_one_as_block_zero(table, *where):
    return minus_one_multiplied(np.maximum(table, 0), *where)


def quotient_and_rest_swapped(table, layout, slot, layer, position, kv_head, lane):
    token_in_block, logical_block = divmod(position, layout.block_size)
    row = table[slot, layer]
    if logical_block >= len(row) or row[logical_block] == -1:
        return None
    return formula(layout, row[logical_block], token_in_block, kv_head, lane)


def token_not_reduced(table, layout, slot, layer, position, kv_head, lane):
    block = table[slot, layer, position // layout.block_size]
    return None if block == -1 else formula(layout, block, position, kv_head, lane)


def table_skipped(table, layout, slot, layer, position, kv_head, lane):
    logical_block, token_in_block = divmod(position, layout.block_size)
    return formula(layout, logical_block, token_in_block, kv_head, lane)


def layer_zero_for_all(table, layout, slot, _, position, kv_head, lane):
    return k_byte_of_token(table, layout, slot, 0, position, kv_head, lane)


# 2.2 ----------------------------------------------------------------------------------------------


def blocks_to_read(table, active_slots, seq_lens, layer, block_size):
    rows = []
    for active_slot, slot in enumerate(active_slots):
        num_blocks = -(-seq_lens[active_slot] // block_size)
        rows.append(table[slot, layer, :num_blocks].tolist())
    return rows


def batch_cases(rng: random.Random) -> Iterator[tuple]:
    yield random_table(rng, 3, 2, 4), [], [], 0, 8
    for _ in range(24):
        table, block_size = random_table(rng, 3, 2, 4), rng.choice([8, 16, 32])
        active_slots = rng.sample(range(3), rng.randint(1, 3))
        filled = [int((table[slot, 0] >= 0).sum()) for slot in active_slots]
        seq_lens = [
            rng.choice([0, 1, (n - 1) * block_size + 1, n * block_size - 1, n * block_size])
            for n in filled
        ]
        yield table, active_slots, seq_lens, rng.randrange(2), block_size


def rows_by_batch_order(table, active_slots, seq_lens, layer, block_size):
    return blocks_to_read(table, range(len(active_slots)), seq_lens, layer, block_size)


def lengths_by_slot(table, active_slots, seq_lens, layer, block_size):
    return [
        table[slot, layer, : -(-seq_lens[slot % len(seq_lens)] // block_size)].tolist()
        for slot in active_slots
    ]


def one_block_too_many(table, active_slots, seq_lens, layer, block_size):
    lengths = [length // block_size * block_size + 1 for length in seq_lens]
    return blocks_to_read(table, active_slots, lengths, layer, block_size)


def last_block_forgotten(table, active_slots, seq_lens, layer, block_size):
    lengths = [length // block_size * block_size for length in seq_lens]
    return blocks_to_read(table, active_slots, lengths, layer, block_size)


def current_token_not_counted(table, active_slots, seq_lens, layer, block_size):
    lengths = [max(length - 1, 0) for length in seq_lens]
    return blocks_to_read(table, active_slots, lengths, layer, block_size)


def whole_row(table, active_slots, seq_lens, layer, block_size):
    return [[block for block in table[slot, layer].tolist() if block >= 0] for slot in active_slots]


# 2.3 ----------------------------------------------------------------------------------------------


def owner_of_block(flat_table, num_layers, max_blocks_per_seq, physical_block):
    if physical_block not in flat_table:
        return None
    index = flat_table.index(physical_block)
    slot, rest = divmod(index, num_layers * max_blocks_per_seq)
    layer, logical_block = divmod(rest, max_blocks_per_seq)
    return slot, layer, logical_block


def owner_cases(rng: random.Random) -> Iterator[tuple]:
    for _ in range(12):
        shape = rng.choice([(2, 3, 5), (3, 4, 7), (4, 3, 6)])
        table = random_table(rng, *shape)
        flat, owned = table.reshape(-1).tolist(), table[table >= 0].tolist()
        free = [block for block in range(2 * table.size) if block not in owned]
        yield flat, *shape[1:], 0
        yield flat, *shape[1:], owned[-1]
        yield flat, *shape[1:], rng.choice(owned)
        yield flat, *shape[1:], rng.choice(free)


def free_block_as_zeros(flat_table, num_layers, max_blocks_per_seq, physical_block):
    return owner_of_block(flat_table, num_layers, max_blocks_per_seq, physical_block) or (0, 0, 0)


def slots_and_layers_swapped(flat_table, num_layers, max_blocks_per_seq, physical_block):
    owner = owner_of_block(flat_table, num_layers, max_blocks_per_seq, physical_block)
    return owner and (owner[1], owner[0], owner[2])


def divided_by_num_layers(flat_table, num_layers, max_blocks_per_seq, physical_block):
    if physical_block not in flat_table:
        return None
    slot, rest = divmod(flat_table.index(physical_block), num_layers * max_blocks_per_seq)
    return slot, rest // num_layers, rest % num_layers


def slot_size_without_layers(flat_table, num_layers, max_blocks_per_seq, physical_block):
    owner = owner_of_block(flat_table, num_layers, max_blocks_per_seq, physical_block)
    return owner and (owner[0] * num_layers + owner[1], 0, owner[2])


def block_number_as_index(flat_table, num_layers, max_blocks_per_seq, physical_block):
    if physical_block not in flat_table:
        return None
    slot, rest = divmod(physical_block, num_layers * max_blocks_per_seq)
    return slot, *divmod(rest, max_blocks_per_seq)


EXERCISES = (
    Exercise(
        "2.1",
        "from a token to its byte",
        k_byte_of_token,
        token_cases,
        "Three substitutions in order: position to logical block and token in block, logical to "
        "physical block, physical block to byte. An entry of -1 has no byte: return None.",
        (
            Confusion(
                "-1 says that no block is there; multiplied, it is an address before the cache.",
                minus_one_multiplied,
            ),
            Confusion(
                "-1 turned into 0 reads block 0, which belongs to somebody else.",
                minus_one_as_block_zero,
            ),
            Confusion(
                "The quotient is the logical block, the remainder the token in it.",
                quotient_and_rest_swapped,
            ),
            Confusion(
                "The address wants the token's place in its block: position % block_size.",
                token_not_reduced,
            ),
            Confusion(
                "That takes the logical block for the physical one: ask the table.", table_skipped
            ),
            Confusion("Each layer has a row of its own: the layer matters.", layer_zero_for_all),
        ),
    ),
    Exercise(
        "2.2",
        "the blocks a batch reads",
        blocks_to_read,
        batch_cases,
        "The table is indexed by the slot, seq_lens by the place in the batch; a last block counts "
        "even when it is not full.",
        (
            Confusion(
                "The table's rows belong to slots: use active_slots[active_slot], not active_slot.",
                rows_by_batch_order,
            ),
            Confusion(
                "seq_lens is compact, too: its index is the place in the batch, not the slot.",
                lengths_by_slot,
            ),
            Confusion(
                "When the length is a multiple of block_size, that is one block too many.",
                one_block_too_many,
            ),
            Confusion(
                "The last block, filled in part, holds tokens as well: round up.",
                last_block_forgotten,
            ),
            Confusion(
                "seq_lens already counts the current token: do not take one off.",
                current_token_not_counted,
            ),
            Confusion("The length says how far to read, not what is assigned.", whole_row),
        ),
    ),
    Exercise(
        "2.3",
        "whose block is it?",
        owner_of_block,
        owner_cases,
        "A slot spans num_layers * max_blocks_per_seq entries, a layer max_blocks_per_seq: divide "
        "by the larger first.",
        (
            Confusion(
                "A block that stands nowhere has no owner: None, not (0, 0, 0).",
                free_block_as_zeros,
            ),
            Confusion(
                "The outermost index is the slot, then comes the layer.", slots_and_layers_swapped
            ),
            Confusion(
                "Within a slot, a layer is max_blocks_per_seq entries long.", divided_by_num_layers
            ),
            Confusion(
                "A slot spans all its layers: num_layers * max_blocks_per_seq entries.",
                slot_size_without_layers,
            ),
            Confusion(
                "Divide the place where the block stands, not the block's own number.",
                block_number_as_index,
            ),
        ),
    ),
)

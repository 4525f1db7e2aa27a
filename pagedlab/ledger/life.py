"""Claims on how blocks are handed out and come back, and on what their table costs to copy."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pagedlab.block_pool import BlockPool
from pagedlab.block_table import UNASSIGNED, BlockTable
from pagedlab.layout import LLAMA_3_2_1B, ModelLayout
from pagedlab.ledger.claim import Claim, Evidence, refute_unless
from pagedlab.ledger.table import own_blocks


def check_reach(reachable: Callable[[ModelLayout], int], device: str) -> Evidence:
    """Both slots full to the last token: how many blocks are out, and can the list run dry?"""
    m = LLAMA_3_2_1B
    pool, table = BlockPool(m.num_blocks(m.cache_bytes)), new_table_of(m)
    for slot in range(m.num_slots):
        for logical_block in range(m.max_blocks_per_seq):
            own_blocks(table, pool, slot, logical_block)
    out = pool.num_blocks - pool.num_free
    refute_unless(reachable(m) == out, f"{reachable(m)} for {out} blocks")
    many = replace(m, num_slots=64)
    refute_unless(reachable(many) > pool.num_blocks, "64 slots cannot empty the list either")
    return {"blocks out at most": out, "of": pool.num_blocks, "64 slots want": reachable(many)}


def new_table_of(m: ModelLayout) -> BlockTable:
    return BlockTable(m.num_slots, m.num_layers, m.max_blocks_per_seq)


def check_lifo(pool_class: Callable[[int], Any], device: str) -> Evidence:
    """The highest block goes out first; what came back last goes out next, to whoever asks."""
    pool = pool_class(65_536)
    first = pool.allocate(3)
    refute_unless(first == [65_535, 65_534, 65_533], f"first handed out: {first}")
    pool.release([65_534, 65_535])
    again = pool.allocate(2)
    refute_unless(again == [65_535, 65_534], f"handed out again: {again}")
    return {"first block out": first[0], "released last, out next": again[0]}


class FirstInFirstOut(BlockPool):
    def allocate(self, n: int) -> list[int]:
        self.free_blocks.reverse()
        try:
            return super().allocate(n)
        finally:
            self.free_blocks.reverse()


class ReleasedToTheFront(BlockPool):
    def release(self, blocks: Any) -> None:
        super().release(blocks)
        for _ in range(len(blocks)):
            self.free_blocks.insert(0, self.free_blocks.pop())


def check_allocation(needs_block: Callable[[int, int], bool], device: str) -> Evidence:
    """Prompts and tokens of every length up to three blocks: as many blocks as are needed."""
    tried = 0
    for block_size in (1, 4, 16):
        for prompt_len in range(1, 3 * block_size + 2):
            num_blocks = -(-prompt_len // block_size)
            for seq_len in range(prompt_len + 1, prompt_len + 2 * block_size + 2):
                num_blocks += needs_block(seq_len, block_size)
                wanted = -(-seq_len // block_size)
                refute_unless(
                    num_blocks == wanted,
                    f"{num_blocks} blocks of {block_size} for {seq_len} tokens, not {wanted}",
                )
                tried += 1
    return {"lengths tried": tried}


def check_release(release: Callable[..., None], device: str) -> Evidence:
    """A slot's blocks come back once each, its entries are -1, the other slot keeps its own."""
    rng = random.Random(1)
    for _ in range(30):
        pool, table = list(range(90)), np.full((2, 7, 5), UNASSIGNED, np.int32)
        for slot in range(2):
            for logical_block in range(rng.randint(0, 5)):
                for layer in range(7):
                    table[slot, layer, logical_block] = pool.pop()
        before, other = sorted([*pool, *table[table >= 0].tolist()]), table[1].copy()
        release(table, 0, pool)
        refute_unless((table[0] == UNASSIGNED).all(), "an entry of the slot is not -1")
        refute_unless((table[1] == other).all(), "the other slot lost a block")
        after = sorted([*pool, *table[table >= 0].tolist()])
        refute_unless(after == before, "blocks are lost, doubled, or not blocks")
    return {"tables released": 30, "entries walked": 7 * 5}


def release_walk(
    table: np.ndarray, slot: int, free_blocks: list[int], first: int = UNASSIGNED + 1
) -> None:
    """Our re-creation of the engine's loop over layers and logical blocks."""
    for row in table[slot]:
        for logical_block, block in enumerate(row.tolist()):
            if block >= first:
                free_blocks.append(block)
                row[logical_block] = UNASSIGNED


def without_reset(table: np.ndarray, slot: int, free_blocks: list[int]) -> None:
    release_walk(table.copy(), slot, free_blocks)


def layer_zero_only(table: np.ndarray, slot: int, free_blocks: list[int]) -> None:
    release_walk(table[:, :1], slot, free_blocks)


def minus_one_too(table: np.ndarray, slot: int, free_blocks: list[int]) -> None:
    release_walk(table, slot, free_blocks, first=UNASSIGNED)


def check_waste(reserved: Callable[[Sequence[int], int], int], device: str) -> Evidence:
    """Places that a paged cache keeps for sequences that it does not use, by its real pool."""
    rng, m = random.Random(1), LLAMA_3_2_1B
    for lengths in ([1], [16, 17], [rng.randint(1, m.max_seq_len) for _ in range(40)]):
        pool = BlockPool(40 * m.max_blocks_per_seq)
        for length in lengths:
            pool.allocate(m.num_logical_blocks(length))
        places = (pool.num_blocks - pool.num_free) * m.block_size
        refute_unless(reserved(lengths, m.block_size) == places, f"not {places} places")
        refute_unless(
            places - sum(lengths) < m.block_size * len(lengths), "more than a block is unused"
        )
    contiguous = m.max_seq_len * len(lengths)
    return {
        "sequences": len(lengths),
        "unused, paged": f"{1 - sum(lengths) / places:.1%}",
        "unused, contiguous": f"{1 - sum(lengths) / contiguous:.1%}",
    }


CLAIMS = (
    Claim(
        "paging_saves",
        "Blocks on demand do not leave the unused stretches of one long buffer per sequence.",
        "introduction",
        "holds",
        "less than a block a sequence and layer is unused",
        lambda lengths, block_size: sum(-(-n // block_size) * block_size for n in lengths),
        check_waste,
        {
            "whole blocks only": lambda lengths, size: sum(n // size * size for n in lengths),
            "one block to spare": lambda lengths, size: sum(
                (n // size + 1) * size for n in lengths
            ),
        },
    ),
    Claim(
        "reach",
        "65,536 blocks stand ready, and the table has 4,096 entries.",
        "block table",
        "silent",
        "so no more can ever be out, and taking from an empty list, unchecked, cannot happen there",
        lambda m: m.table_entries,
        check_reach,
        {
            "one layer counted": lambda m: m.num_slots * m.max_blocks_per_seq,
            "all blocks of the cache": lambda m: m.num_blocks(m.cache_bytes),
        },
    ),
    Claim(
        "lifo",
        "Allocation takes the back of the free list, release adds to it; other slots get those "
        "blocks next.",
        "life of a block",
        "holds",
        "the highest block goes out first",
        BlockPool,
        check_lifo,
        {"first in, first out": FirstInFirstOut, "released to the front": ReleasedToTheFront},
    ),
    Claim(
        "allocation",
        "Prefill takes a block where the entry is -1, decode only for a block's first token.",
        "life of a block",
        "holds",
        "as many blocks as tokens need, never one early",
        lambda seq_len, block_size: (seq_len - 1) % block_size == 0,
        check_allocation,
        {
            "asked of the length": lambda seq_len, block_size: seq_len % block_size == 0,
            "asked of the length, of 1": lambda seq_len, block_size: seq_len % block_size == 1,
        },
    ),
    Claim(
        "release",
        "At a sequence's end all layers and logical blocks are walked: entries other than -1 go "
        "to the free list and become -1.",
        "life of a block",
        "holds",
        "each block comes back once",
        release_walk,
        check_release,
        {
            "entries stay": without_reset,
            "layer 0 only": layer_zero_only,
            "-1 given back as well": minus_one_too,
        },
    ),
)

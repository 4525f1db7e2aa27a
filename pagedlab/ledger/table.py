"""Claims on the table that finds a sequence's blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedlab import triton
from pagedlab.attention import paged_attention
from pagedlab.block_pool import BlockPool
from pagedlab.block_table import UNASSIGNED, BlockTable
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import LLAMA_3_2_1B, KVLayout
from pagedlab.ledger.blocks import ODD
from pagedlab.ledger.claim import Claim, Evidence, close, mutants, refute_unless
from pagedlab.ledger.probes import read_entries
from pagedlab.ledger.scene import exact_attention


def check_index(kernel: Any, device: str) -> Evidence:
    """A kernel with the three-part index reads every entry of a table, at the article's sizes."""
    for m in (LLAMA_3_2_1B, ODD):
        shape = (m.num_slots, m.num_layers, m.max_blocks_per_seq)
        table = BlockTable(*shape, device)
        blocks = torch.randperm(m.table_entries).view(shape).tolist()
        for slot in range(shape[0]):
            for layer in range(shape[1]):
                for logical_block in range(shape[2]):
                    table.assign(slot, layer, logical_block, blocks[slot][layer][logical_block])
        table.sync()
        out = torch.full(shape[::-1], UNASSIGNED, dtype=torch.int32, device=device)
        lanes = triton.next_power_of_2(shape[2])
        kernel[shape[:2]](table.device, out, shape[1], shape[2], LANES=lanes)
        read = out.permute(2, 1, 0).cpu()
        wrong = int((read != torch.from_numpy(table.host.copy())).sum())
        refute_unless(wrong == 0, f"{wrong} of {m.table_entries} entries are others")
    m = LLAMA_3_2_1B
    return {"entries read": m.table_entries, "wrong": 0, "entries at odd sizes": ODD.table_entries}


PLACES: dict[str, Callable[..., Any]] = {  # who looks up a block, each with slot and layer
    "prefill": lambda cache, table, k, v, slot, layer: cache.write(k, v, table, slot, layer, 0),
    "decode": lambda cache, table, *k_v_rows: cache.append(*k_v_rows[:2], table, *k_v_rows[2:]),
    "kernel": partial(paged_attention, backend="triton", kernel="by_token"),
    "release": lambda table, slot: table.release_slot(slot),
}


def check_places(places: dict[str, Callable[..., Any]], device: str) -> Evidence:
    """A prompt written, a token appended, both read, and the slot released: the same blocks."""
    layout, slot, layer = KVLayout(4, 2, 16, torch.float32), 2, 3
    cache, pool = PagedKVCache(layout, 40, device), BlockPool(40)
    cache.buffer.fill_(float("nan"))
    table = BlockTable(3, 5, 7, device)
    for logical_block in range(2):
        for its_slot in range(3):
            own_blocks(table, pool, its_slot, logical_block)
    given = table.host[slot, :, :2].flatten().tolist()
    k, v = torch.randn(2, 7, 2, 16, device=device)
    places["prefill"](cache, table, k[:6], v[:6], slot, layer)
    rows = torch.tensor([[7], [slot]], dtype=torch.int32, device=device)
    places["decode"](cache, table, k[6:], v[6:], *rows, layer)
    q = torch.randn(1, 6, 16, device=device)
    out = places["kernel"](q, cache, table, *rows, layer)
    refute_unless(close(out[0], exact_attention(q[0], k, v), 2e-5), "what was written is not read")
    released = places["release"](table, slot)
    refute_unless(released == given, "other blocks are released than were given")
    return {"places that agree": len(places), "blocks released": len(released)}


def check_unassigned(new_table: Callable[..., np.ndarray], device: str) -> Evidence:
    """A fresh table names no block; taken for an address, -1 lies before the cache."""
    table = new_table(ODD.num_slots, ODD.num_layers, ODD.max_blocks_per_seq)
    blocks = range(ODD.num_blocks(ODD.cache_bytes))
    refute_unless(not np.isin(table, blocks).any(), "a fresh table names a block of the cache")
    refute_unless((table == UNASSIGNED).all(), "a fresh entry is not -1")
    return {
        "fresh entries": table.size,
        "byte of block -1": int(table.max()) * LLAMA_3_2_1B.block_bytes,
    }


def package_table(num_slots: int, num_layers: int, max_blocks_per_seq: int) -> np.ndarray:
    return BlockTable(num_slots, num_layers, max_blocks_per_seq).host


def check_layers(assign: Callable[..., None], device: str) -> Evidence:
    """Each layer finds its own K again, though all layers wrote theirs."""
    layout, num_layers = ODD, ODD.num_layers
    pool, table = BlockPool(40), BlockTable(2, num_layers, 5, device)
    cache = PagedKVCache(KVLayout(4, 3, 16, torch.float32), 40, device)
    for logical_block in range(2):
        assign(table, pool, 1, logical_block)
    k = torch.randn(num_layers, 7, layout.num_kv_heads, layout.head_dim, device=device)
    for layer in range(num_layers):
        cache.write(k[layer], -k[layer], table, 1, layer, start=0)
    for layer in range(num_layers):
        found, _ = cache.gather(table, 1, layer, 7)
        refute_unless(torch.equal(found, k[layer]), f"layer {layer} finds another layer's K")
    return {"layers": num_layers, "blocks of 7 tokens": int((table.host >= 0).sum())}


def own_blocks(table: BlockTable, pool: BlockPool, slot: int, logical_block: int) -> None:
    table.assign_layers(slot, logical_block, pool.allocate(table.num_layers))


def shared_block(table: BlockTable, pool: BlockPool, slot: int, logical_block: int) -> None:
    table.assign_layers(slot, logical_block, pool.allocate(1) * table.num_layers)


CLAIMS = (
    Claim(
        "table_index",
        "slot x layers x blocks a sequence + layer x blocks a sequence + logical block finds the "
        "entry of a table with three dimensions.",
        "block table",
        "holds",
        "a kernel reads all entries by it",
        read_entries,
        check_index,
        mutants(
            read_entries,
            {
                "layers counted in layers": (
                    "layer * max_blocks_per_seq + logical_block",
                    "layer * num_layers + logical_block",
                ),
                "slots a layer apart": (
                    "slot * num_layers * max_blocks_per_seq",
                    "slot * max_blocks_per_seq",
                ),
                "layers before slots": (
                    "slot * num_layers * max_blocks_per_seq + layer * max_blocks_per_seq",
                    "(layer * tl.num_programs(0) + slot) * max_blocks_per_seq",
                ),
            },
        ),
        unverified=True,
    ),
    Claim(
        "four_places",
        "The same index stands at four places: prefill's scatter, decode's, the kernel, and the "
        "release.",
        "block table",
        "holds",
        "one of them differs, and what was written is not found again",
        PLACES,
        check_places,
        {
            "the kernel reads layer 0": PLACES
            | {"kernel": lambda *args: PLACES["kernel"](*args[:-1], 0)},
            "decode scatters to the batch row": PLACES
            | {
                "decode": lambda cache, table, k, v, lens, slots, layer: cache.append(
                    k, v, table, lens, slots * 0, layer
                )
            },
            "the release takes the batch row": PLACES
            | {"release": lambda table, slot: table.release_slot(0)},
        },
    ),
    Claim(
        "unassigned",
        "An entry starts as -1, which says that no block is assigned.",
        "block table",
        "holds only when",
        "nobody reads beyond a sequence's blocks: as an address it lies before the cache",
        package_table,
        check_unassigned,
        {
            "0 for none": lambda *shape: np.zeros(shape, np.int32),
            "a number that no block has": lambda *shape: np.full(shape, 2**31 - 1, np.int32),
        },
    ),
    Claim(
        "layers_own_blocks",
        "The table has three dimensions since each layer of a sequence has blocks of its own.",
        "block table",
        "holds",
        "with one block for all layers, each overwrites the last",
        own_blocks,
        check_layers,
        {"one block for all layers": shared_block},
    ),
)

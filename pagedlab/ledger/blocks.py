"""Claims on what a block holds and on the table that finds it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pagedlab.block_table import BlockTable
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import LLAMA_3_2_1B, KVLayout, ModelLayout
from pagedlab.ledger.claim import Claim, Evidence, refute_unless

# No two sizes are equal; the number of layers could be a block size, so that a mix-up runs.
ODD = ModelLayout(
    block_size=4,
    num_kv_heads=3,
    head_dim=16,
    dtype=torch.float32,
    num_q_heads=15,
    num_layers=8,
    max_seq_len=44,
    num_slots=2,
    cache_bytes=13 * 2 * 4 * 3 * 16 * 4,  # 13 blocks
)
ADDRESS_SIZES = (KVLayout(4, 3, 24, torch.float32), KVLayout(8, 2, 40, torch.bfloat16))
ARTICLE = {  # its figures, as it states them
    "KV_DIM": 512,
    "V_OFFSET": 16_384,
    "BLOCK_BYTES": 32_768,
    "NUM_BLOCKS": 65_536,
    "MAX_BLOCKS_PER_SEQ": 128,
    "table entries": 4_096,
}


def figures(m: ModelLayout) -> dict[str, int]:
    """The article's derived constants, from the sizes of a model and its server."""
    return {
        "KV_DIM": m.kv_dim,
        "V_OFFSET": m.v_offset,
        "BLOCK_BYTES": m.block_bytes,
        "NUM_BLOCKS": m.num_blocks(m.cache_bytes),
        "MAX_BLOCKS_PER_SEQ": m.max_blocks_per_seq,
        "table entries": m.table_entries,
    }


def check_sizes(derive: Callable[[ModelLayout], dict[str, int]], device: str) -> Evidence:
    """The figures as stated, and at other sizes those of a real cache and table, counted."""
    refute_unless(derive(LLAMA_3_2_1B) == ARTICLE, "not the article's figures")
    cache = PagedKVCache(ODD, ODD.num_blocks(ODD.cache_bytes), device)
    table = BlockTable(ODD.num_slots, ODD.num_layers, -(-ODD.max_seq_len // 4), device)
    counted = {
        "KV_DIM": cache.k_view()[0, 0].numel(),
        "V_OFFSET": cache.k_view()[0].numel() * cache.buffer.itemsize,
        "BLOCK_BYTES": cache.blocks[0].numel() * cache.buffer.itemsize,
        "NUM_BLOCKS": cache.blocks.shape[0],
        "MAX_BLOCKS_PER_SEQ": table.device.shape[2],
        "table entries": table.device.numel(),
    }
    wrong = [name for name, value in derive(ODD).items() if value != counted[name]]
    refute_unless(not wrong, f"at other sizes wrong: {', '.join(wrong)}")
    return dict(ARTICLE)


def layers_for_tokens(m: ModelLayout) -> dict[str, int]:
    return figures(replace(m, block_size=m.num_layers))


def k_only(m: ModelLayout) -> dict[str, int]:
    return figures(m) | {"BLOCK_BYTES": m.v_offset}


def check_twice(reader_layout: Callable[[KVLayout], KVLayout], device: str) -> Evidence:
    """Written with one set of constants and read with a second: found only if they agree."""
    tried = found_out = 0
    for layout in ADDRESS_SIZES:
        refute_unless(misread(layout, reader_layout(layout)) == 0, "bytes are misread")
        for other in (
            replace(layout, block_size=layout.block_size // 2),
            replace(layout, num_kv_heads=layout.num_kv_heads - 1),
            replace(layout, head_dim=layout.head_dim - 8),
        ):
            tried, found_out = tried + 1, found_out + (misread(layout, other) > 0)
    refute_unless(found_out == tried, f"{tried - found_out} other constants read the same bytes")
    return {"second copies with one constant changed": tried, "that misread bytes": found_out}


def misread(writer: KVLayout, reader: KVLayout) -> int:
    """How many heads' last lanes, of those that both layouts have, lie at different bytes."""
    wrong = 0
    for block in range(3):
        for token in range(min(writer.block_size, reader.block_size)):
            for head in range(min(writer.num_kv_heads, reader.num_kv_heads)):
                place = block, token, head, min(writer.head_dim, reader.head_dim) - 1
                wrong += writer.k_address(*place) != reader.k_address(*place)
                wrong += writer.v_address(*place) != reader.v_address(*place)
    return wrong


TWINS = {  # two quantities that are one number at the article's sizes
    "tokens in a block, layers": lambda m: (m.block_size, m.num_layers),
    "bytes of a block, K and V bytes of a token in all layers": lambda m: (
        m.block_bytes,
        2 * m.kv_dim * m.dtype.itemsize * m.num_layers,
    ),
    "blocks, tokens that fit in all layers": lambda m: (
        m.num_blocks(m.cache_bytes),
        m.num_blocks(m.cache_bytes) * m.block_size // m.num_layers,
    ),
    "longest sequence, elements of q": lambda m: (m.max_seq_len, m.num_q_heads * m.head_dim),
}


def check_twins(twins: dict[str, Callable], device: str) -> Evidence:
    """Each pair is equal at the article's sizes and at no other."""
    for name, pair in twins.items():
        first, second = pair(LLAMA_3_2_1B)
        refute_unless(first == second, f"{name}: {first} and {second} at the article's sizes")
        first, second = pair(ODD)
        refute_unless(first != second, f"{name}: equal at other sizes as well")
    return {name: twins[name](LLAMA_3_2_1B)[0] for name in twins}


def check_k_then_v(address: Callable[..., int], device: str) -> Evidence:
    """Every element of a cache lies where the formula says, and no two at one byte."""
    found = 0
    for layout in ADDRESS_SIZES:
        shape = (3, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        for number, (block, section, *place) in enumerate(np.ndindex(shape)):
            byte = address(layout, "KV"[section], block, *place)
            expected = number * layout.dtype.itemsize
            refute_unless(byte == expected, f"{'KV'[section]} of block {block}, {place}: {byte}")
            found += 1
    m = LLAMA_3_2_1B
    apart = address(m, "V", 3, 1, 2, 7) - address(m, "K", 3, 1, 2, 7)
    return {"elements found": found, "V behind K, bytes": apart}


def package_address(layout: KVLayout, section: str, *place: int) -> int:
    return layout.v_address(*place) if section == "V" else layout.k_address(*place)


def side_by_side(layout: KVLayout, section: str, block: int, token: int, *head_lane: int) -> int:
    """K and V of each token next to each other: a block has the same bytes."""
    in_token = layout.k_address(0, 0, *head_lane)
    row = layout.kv_dim * layout.dtype.itemsize
    return block * layout.block_bytes + (2 * token + (section == "V")) * row + in_token


CLAIMS = (
    Claim(
        "sizes",
        "KV_DIM 512, V_OFFSET 16,384 B, BLOCK_BYTES 32,768 B, 65,536 blocks in 2 GiB, 128 blocks "
        "a sequence and layer, 4,096 table entries.",
        "one block",
        "holds",
        "and a real cache and table, counted, have the derived sizes",
        figures,
        check_sizes,
        {"the layers for the block size": layers_for_tokens, "room for K alone": k_only},
    ),
    Claim(
        "constants_twice",
        "The constants stand in two files, and addresses go wrong unless they agree.",
        "one block",
        "holds",
        "one constant of a second copy changed, and bytes are misread",
        lambda layout: layout,
        check_twice,
        {"a copy that still says 16": lambda layout: replace(layout, block_size=16)},
    ),
    Claim(
        "twins",
        "The article's sizes are those of one model.",
        "one block",
        "silent",
        "they coincide four times, and a mix-up of the two passes every test at these sizes",
        TWINS,
        check_twins,
        {
            "a pair that differs here": {"heads, layers": lambda m: (m.num_q_heads, m.num_layers)},
            "a pair equal everywhere": {"K, V": lambda m: (m.v_offset, m.block_bytes // 2)},
        },
    ),
    Claim(
        "k_then_v",
        "A block holds the K of its tokens, then, V_OFFSET bytes later, their V.",
        "one block",
        "holds",
        "every element lies there, no two at one byte",
        package_address,
        check_k_then_v,
        {
            "K and V of a token side by side": side_by_side,
            "V where K is": lambda layout, section, *place: layout.k_address(*place),
        },
    ),
)

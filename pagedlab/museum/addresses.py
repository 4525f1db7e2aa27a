"""The room of addresses: a token's place in the table, in its block, in the cache (chapter 12)."""

from functools import partial

import torch

from pagedlab import tl, triton
from pagedlab.attention import paged_attention
from pagedlab.kernels.write_kv import write_kv
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import KVLayout
from pagedlab.museum import runs
from pagedlab.museum.checks import (
    check_addresses,
    check_append,
    check_attention,
    check_write,
)
from pagedlab.museum.exhibit import Exhibit
from pagedlab.museum.launchers import addresses_with, attention_with, write_with


@triton.jit
def k_addresses(
    blocks_ptr,  # [num_entries] int32
    tokens_ptr,  # [num_entries] int32
    out_ptr,  # [num_entries] int64
    BLOCK_BYTES: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
):
    entry = tl.program_id(0)
    physical_block = tl.load(blocks_ptr + entry)
    token_in_block = tl.load(tokens_ptr + entry)
    byte = physical_block * BLOCK_BYTES + token_in_block * TOKEN_BYTES
    tl.store(out_ptr + entry, byte)


def layout_addresses(layout: KVLayout, blocks: list[int], tokens: list[int]) -> list[int]:
    """What KVLayout says, for each block and token."""
    pairs = zip(blocks, tokens, strict=True)
    return [layout.k_address(block, token, 0, 0) for block, token in pairs]


def append_by_slot_mapping(cache, k, v, table, seq_lens, active_slots, layer):
    block_size = cache.layout.block_size
    for row, slot in enumerate(active_slots.tolist()):
        position = int(seq_lens[row]) - 1
        block = table.lookup(slot, layer, position // block_size)
        mapped = block * block_size + position % block_size  # one number for block and token
        block, token = mapped // cache.num_blocks, mapped % block_size
        cache.k_view()[block, token] = k[row]
        cache.v_view()[block, token] = v[row]


@triton.jit
def append_kernel(
    k_ptr,  # [num_active, kv_dim]
    v_ptr,  # [num_active, kv_dim]
    cache_ptr,  # [num_blocks, 2, block_size, kv_dim]
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32
    seq_lens_ptr,  # [num_active] int32
    active_slots_ptr,  # [num_active] int32
    layer,
    num_layers,
    max_blocks_per_seq,
    BLOCK_SIZE: tl.constexpr,
    KV_DIM: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(active_slots_ptr + row)
    position = tl.load(seq_lens_ptr + row) - 1
    logical_block = position // BLOCK_SIZE
    entry = (slot * num_layers + layer) * max_blocks_per_seq + logical_block
    block = tl.load(table_ptr + entry).to(tl.int64)
    lane = tl.arange(0, KV_DIM)
    there = cache_ptr + (2 * BLOCK_SIZE * block + position % BLOCK_SIZE) * KV_DIM + lane
    k, v = tl.load(k_ptr + row * KV_DIM + lane), tl.load(v_ptr + row * KV_DIM + lane)
    tl.store(there, k)
    tl.store(there + BLOCK_SIZE * KV_DIM, v)


@triton.jit
def by_position_kernel(
    q_ptr,  # [num_active, num_q_heads, head_dim]
    cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32
    seq_lens_ptr,  # [num_active] int32
    active_slots_ptr,  # [num_active] int32
    out_ptr,  # [num_active, num_q_heads, head_dim]
    layer,
    num_layers,
    max_blocks_per_seq,
    scale,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    active_slot, q_head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(active_slots_ptr + active_slot)
    seq_len = tl.load(seq_lens_ptr + active_slot)
    row_ptr = table_ptr + (slot * num_layers + layer) * max_blocks_per_seq
    lane = tl.arange(0, HEAD_DIM)
    q_offset = (active_slot * tl.num_programs(1) + q_head) * HEAD_DIM + lane
    q = tl.load(q_ptr + q_offset)
    head_ptr = cache_ptr + q_head // GROUP_SIZE * HEAD_DIM + lane
    running_max, d, acc = float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for position in range(seq_len):
        physical_block = tl.load(row_ptr + position // BLOCK_SIZE).to(tl.int64)
        physical_block = tl.maximum(physical_block, 0)
        token_row = 2 * BLOCK_SIZE * physical_block + position % BLOCK_SIZE
        k = tl.load(head_ptr + token_row * NUM_KV_HEADS * HEAD_DIM)
        v = tl.load(head_ptr + (token_row + BLOCK_SIZE) * NUM_KV_HEADS * HEAD_DIM)
        score = tl.sum(q * k, 0) * scale
        new_max = tl.maximum(running_max, score)
        correction, weight = tl.exp(running_max - new_max), tl.exp(score - new_max)
        d, acc = d * correction + weight, acc * correction + weight * v
        running_max = new_max
    tl.store(out_ptr + q_offset, acc / tl.where(seq_len > 0, d, 1.0))


def tiled_attention(q, cache, table, seq_lens, active_slots, layer):
    out = torch.zeros_like(q)
    for row, slot in enumerate(active_slots.tolist()):
        k, v = cache.gather(table, slot, layer, int(seq_lens[row]))
        group_size = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, group_size, 1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", q[row], k) / q.shape[2] ** 0.5
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), v)
    return out


ROOM = (
    Exhibit(
        id="large-cache",
        title="Worked for years, until the cache grew",
        broken=k_addresses,
        install=addresses_with,
        real=layout_addresses,
        run=runs.first_blocks,
        check=check_addresses,
        look="step the kernel and compare `byte` with KVLayout.k_address",
        cause="The product of two 32-bit integers is a 32-bit integer, and from 2**31 on it wraps.",
        failure=r"block 65536, token 0: expected byte 2147483648, got -2147483648",
        source="vllm-project/vllm#47671",
        fix=(
            (
                "physical_block = tl.load(blocks_ptr + entry)",
                "physical_block = tl.load(blocks_ptr + entry).to(tl.int64)",
            ),
        ),
    ),
    Exhibit(
        id="lost-token",
        title="Correct with sixteen blocks",
        broken=append_by_slot_mapping,
        real=PagedKVCache.append,
        run=runs.where_tokens_went,
        check=check_append,
        look="write with sizes that differ, and ask KVLayout.locate where the bytes went",
        cause="A block is found by dividing by the block's size, not by the number of blocks.",
        failure=r"token \d+ of slot \d: expected its own K and V, got others",
        source="pytorch/pytorch#121465",
        fix=(
            (
                "block, token = mapped // cache.num_blocks, mapped % block_size",
                "block, token = mapped // block_size, mapped % block_size",
            ),
        ),
    ),
    Exhibit(
        id="long-sequence",
        title="One token too far",
        broken=append_kernel,
        install=write_with,
        real=write_kv,
        run=runs.who_was_overwritten,
        check=check_write,
        look="step the kernel, watch `entry`, and find its slot and layer in BlockTableView",
        cause="Nothing ends a row of the table: past its end stands the next layer's first entry.",
        failure=r"tokens written by two rows that fit: expected 2, got 3",
        source="vllm-project/vllm#53982",
        fix=(
            (
                "block = tl.load(table_ptr + entry).to(tl.int64)",
                "inside = logical_block < max_blocks_per_seq\n"
                "    block = tl.load(table_ptr + entry, mask=inside, other=-1).to(tl.int64)",
            ),
            ("tl.store(there, k)", "tl.store(there, k, mask=block >= 0)"),
            (
                "tl.store(there + BLOCK_SIZE * KV_DIM, v)",
                "tl.store(there + BLOCK_SIZE * KV_DIM, v, mask=block >= 0)",
            ),
        ),
    ),
    Exhibit(
        id="uninvited-block",
        title="The crash that was fixed",
        broken=by_position_kernel,
        install=partial(attention_with, checked=False),
        real=paged_attention,
        run=runs.with_a_missing_block,
        check=check_attention,
        look="check_batch on the same batch; step the kernel and compare `physical_block` with it",
        cause="-1 is no block, and 0 is somebody's: a missing block must not become an answer.",
        failure=r"a row with -1 inside its length: expected nan, got -?\d",
        source="microsoft/onnxruntime#32391",
        fix=(
            (
                "        physical_block = tl.maximum(physical_block, 0)\n",
                "        seq_len = tl.where(physical_block < 0, -1, seq_len)\n"
                "        physical_block = tl.maximum(physical_block, 0)\n",
            ),
            (
                "tl.store(out_ptr + q_offset, acc / tl.where(seq_len > 0, d, 1.0))",
                'acc = tl.where(seq_len < 0, float("nan"), acc)\n'
                "    tl.store(out_ptr + q_offset, acc / tl.where(seq_len != 0, d, 1.0))",
            ),
        ),
    ),
    Exhibit(
        id="mixed-voices",
        title="The shapes fit",
        broken=tiled_attention,
        real=paged_attention,
        run=runs.says_with_attention,
        check=check_attention,
        look="compare each query head with gathered_attention: which agree, and why those?",
        cause="Query heads that share a KV head are consecutive; repeat puts them side by side.",
        failure=r"row of \d tokens, query head 1, lane \d+: expected -?\d",
        source="onnx/onnx#7274",
        fix=(
            (
                "k, v = (x.repeat(1, group_size, 1) for x in (k, v))",
                "k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))",
            ),
        ),
    ),
)

"""Write the K and V of new tokens into their blocks (chapter 3)."""

import torch
import triton
import triton.language as tl

from pagedlab.kernels.launch import RUNTIME_INTEGERS
from pagedlab.layout import KVLayout


@triton.jit(do_not_specialize=[*RUNTIME_INTEGERS, "slot", "start"])
def write_kv_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, head_dim], row stride stride_k
    v_ptr,  # the same shape, row stride stride_v
    cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32
    seq_lens_ptr,  # [num_tokens] int32, decode only
    active_slots_ptr,  # [num_tokens] int32, decode only
    layer,
    slot,  # prefill: the slot of every token
    start,  # prefill: the position of the first token
    num_slots,
    num_blocks,
    max_blocks_per_seq,
    stride_k,
    stride_v,
    stride_slot,
    stride_layer,
    DECODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,  # head_dim, padded to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    if DECODE:
        slot = tl.load(active_slots_ptr + token)
        position = tl.load(seq_lens_ptr + token).to(tl.int64) - 1
    else:
        position = start + token

    logical_block = position // BLOCK_SIZE
    token_in_block = position % BLOCK_SIZE
    valid = (
        (slot >= 0) & (slot < num_slots) & (position >= 0) & (logical_block < max_blocks_per_seq)
    )
    entry = slot.to(tl.int64) * stride_slot + layer * stride_layer + logical_block
    physical_block = tl.load(table_ptr + entry, mask=valid, other=-1).to(tl.int64)
    valid = valid & (physical_block >= 0) & (physical_block < num_blocks)

    lane = tl.arange(0, LANES)
    mask = valid & (lane < HEAD_DIM)
    k = tl.load(k_ptr + token * stride_k + kv_head * HEAD_DIM + lane, mask=mask)
    v = tl.load(v_ptr + token * stride_v + kv_head * HEAD_DIM + lane, mask=mask)
    KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    k_offset = physical_block * (2 * BLOCK_SIZE * KV_DIM) + token_in_block * KV_DIM
    k_offset += kv_head * HEAD_DIM + lane
    tl.store(cache_ptr + k_offset, k, mask=mask)
    tl.store(cache_ptr + k_offset + BLOCK_SIZE * KV_DIM, v, mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    layer: int,
    layout: KVLayout,
    *,
    slot: int = 0,
    start: int = 0,
    seq_lens: torch.Tensor | None = None,
    active_slots: torch.Tensor | None = None,
) -> None:
    """Launch write_kv_kernel over (token, kv_head): one slot from `start` on, or one token per row.

    With seq_lens and active_slots (decode) row i goes to position seq_lens[i] - 1 of slot
    active_slots[i]; without them (prefill) to position start + i of `slot`. A row whose slot,
    position or block does not exist writes nothing.
    """
    decode = seq_lens is not None
    write_kv_kernel[(k.shape[0], layout.num_kv_heads)](
        k,
        v,
        cache,
        block_table,
        seq_lens if decode else block_table,
        active_slots if decode else block_table,
        layer,
        slot,
        start,
        block_table.shape[0],
        cache.numel() * cache.itemsize // layout.block_bytes,
        block_table.shape[2],
        k.stride(0),
        v.stride(0),
        block_table.stride(0),
        block_table.stride(1),
        DECODE=decode,
        BLOCK_SIZE=layout.block_size,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        LANES=triton.next_power_of_2(layout.head_dim),
        num_warps=1,
    )

"""Attention that takes all tokens of a block at a time (chapter 6)."""

import torch
import triton
import triton.language as tl

from pagedlab.kernels.launch import RUNTIME_INTEGERS, attention_arguments
from pagedlab.layout import KVLayout


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def by_block_kernel(
    q_ptr,  # [num_active, num_q_heads, head_dim], row stride stride_q
    cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32
    seq_lens_ptr,  # [num_active] int32
    active_slots_ptr,  # [num_active] int32
    out_ptr,  # [num_active, num_q_heads, head_dim], row stride stride_out; may be q_ptr
    layer,
    scale,
    num_slots,
    num_blocks,
    max_blocks_per_seq,
    stride_q,
    stride_out,
    stride_slot,
    stride_layer,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,  # head_dim, padded to a power of two
    GROUP_SIZE: tl.constexpr,  # q heads that share a kv head
):
    active_slot = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    kv_head = q_head // GROUP_SIZE
    lane = tl.arange(0, LANES)
    in_head = lane < HEAD_DIM
    q_offset = q_head * HEAD_DIM + lane
    q = tl.load(q_ptr + active_slot * stride_q + q_offset, mask=in_head, other=0.0).to(tl.float32)

    slot = tl.load(active_slots_ptr + active_slot).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + active_slot)
    valid = (slot >= 0) & (slot < num_slots)
    valid = valid & (seq_len >= 0) & (seq_len <= max_blocks_per_seq * BLOCK_SIZE)
    seq_len = tl.where(valid, seq_len, 0)
    row_ptr = table_ptr + slot * stride_slot + layer * stride_layer

    KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    V_OFFSET: tl.constexpr = BLOCK_SIZE * KV_DIM
    token_in_block = tl.arange(0, BLOCK_SIZE)
    in_block = token_in_block[:, None] * KV_DIM + kv_head * HEAD_DIM + lane[None, :]
    running_max = float("-inf")
    d = 0.0
    acc = tl.zeros([LANES], tl.float32)
    for logical_block in range((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE):
        physical_block = tl.load(row_ptr + logical_block).to(tl.int64)
        assigned = (physical_block >= 0) & (physical_block < num_blocks)
        valid = valid & assigned
        alive = assigned & (logical_block * BLOCK_SIZE + token_in_block < seq_len)  # [BLOCK_SIZE]
        mask = alive[:, None] & in_head[None, :]
        block_ptr = cache_ptr + physical_block * (2 * V_OFFSET)
        k = tl.load(block_ptr + in_block, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(block_ptr + V_OFFSET + in_block, mask=mask, other=0.0).to(tl.float32)

        score = tl.sum(q[None, :] * k, 1) * scale  # [BLOCK_SIZE]
        score = tl.where(alive, score, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 0))
        correction = tl.exp(running_max - new_max)
        weight = tl.exp(score - new_max)
        d = d * correction + tl.sum(weight, 0)
        acc = acc * correction + tl.sum(weight[:, None] * v, 0)
        running_max = new_max

    out = acc / tl.where(seq_len > 0, d, 1.0)  # length 0 gives zeros
    out = tl.where(valid, out, float("nan"))
    out_ptrs = out_ptr + active_slot * stride_out + q_offset
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_head)


def by_block(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    layout: KVLayout,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Launch by_block_kernel over (active_slot, q_head), one block of tokens at a time."""
    arguments = attention_arguments(
        q, cache, block_table, seq_lens, active_slots, layer, layout, out, scale
    )
    lanes = triton.next_power_of_2(layout.head_dim)
    num_warps = min(16, max(1, layout.block_size * lanes // 1024))
    by_block_kernel[q.shape[:2]](**arguments, LANES=lanes, num_warps=num_warps)

"""The seed's kernel in Triton: one token at a time, one lane per element (chapter 4)."""

import torch
import triton
import triton.language as tl

from pagedlab.kernels.launch import RUNTIME_INTEGERS, attention_arguments
from pagedlab.layout import KVLayout


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def by_token_kernel(
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
    GROUP_SIZE: tl.constexpr,  # q heads that share a kv head
    HALVINGS: tl.constexpr,  # log2(head_dim)
):
    active_slot = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    kv_head = q_head // GROUP_SIZE
    lane = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + active_slot * stride_q + q_head * HEAD_DIM + lane).to(tl.float32)

    slot = tl.load(active_slots_ptr + active_slot).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + active_slot)
    valid = (slot >= 0) & (slot < num_slots)
    valid = valid & (seq_len >= 0) & (seq_len <= max_blocks_per_seq * BLOCK_SIZE)
    seq_len = tl.where(valid, seq_len, 0)
    row_ptr = table_ptr + slot * stride_slot + layer * stride_layer

    KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    V_OFFSET: tl.constexpr = BLOCK_SIZE * KV_DIM
    running_max = float("-inf")
    d = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for logical_block in range((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE):
        physical_block = tl.load(row_ptr + logical_block).to(tl.int64)
        assigned = (physical_block >= 0) & (physical_block < num_blocks)
        valid = valid & assigned
        tokens_in_block = tl.minimum(seq_len - logical_block * BLOCK_SIZE, BLOCK_SIZE)
        for token_in_block in range(tl.where(assigned, tokens_in_block, 0)):
            offset = physical_block * (2 * V_OFFSET) + token_in_block * KV_DIM + kv_head * HEAD_DIM
            k = tl.load(cache_ptr + offset + lane).to(tl.float32)
            v = tl.load(cache_ptr + offset + V_OFFSET + lane).to(tl.float32)

            # [head_dim] -> [2, ..., 2]: axis 0 is the warp, the others the bits of the lane in it
            partial = tl.reshape(q * k, (2,) * HALVINGS)
            for _ in tl.static_range(HALVINGS - 1):
                partial = tl.sum(partial, 1)  # lanes 16, 8, 4, 2, 1 apart
            score = tl.sum(partial, 0) * scale  # the two warps

            new_max = tl.maximum(running_max, score)
            correction = tl.exp(running_max - new_max)
            weight = tl.exp(score - new_max)
            d = d * correction + weight
            acc = acc * correction + weight * v
            running_max = new_max

    out = acc / tl.where(seq_len > 0, d, 1.0)  # length 0 gives zeros
    out = tl.where(valid, out, float("nan"))
    out_ptrs = out_ptr + active_slot * stride_out + q_head * HEAD_DIM + lane
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty))


def by_token(
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
    """Launch by_token_kernel over (active_slot, q_head), head_dim lanes each.

    Raises:
        ValueError: head_dim is not a power of two, which the reduction tree needs.
    """
    halvings = layout.head_dim.bit_length() - 1
    if layout.head_dim != 1 << halvings:
        raise ValueError(f"by_token: expected head_dim a power of two, got {layout.head_dim}")
    arguments = attention_arguments(
        q, cache, block_table, seq_lens, active_slots, layer, layout, out, scale
    )
    num_warps = max(1, layout.head_dim // 32)
    by_token_kernel[q.shape[:2]](**arguments, HALVINGS=halvings, num_warps=num_warps)

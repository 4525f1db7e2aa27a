"""The fast kernel: q heads grouped, long sequences split, and their parts merged (chapter 11).

plan.py cuts the batch into work items once a step. In each layer split_kv_kernel takes one item
and the q heads of one kv head (or two) per program; merge_kernel joins the parts of sequences that
were split.
"""

import torch
import triton
import triton.language as tl

from pagedlab.kernels.launch import SIZES, attention_arguments
from pagedlab.kernels.plan import Work, device_facts, launch_rule, plan_work
from pagedlab.layout import KVLayout

LOG2_E = 1.4426950408889634


@triton.jit
def prefetch_to_l2(address):
    """Bring the 128 bytes around each address to the L2 cache; nothing is read, nothing waits."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=[*SIZES, "num_q_heads", "stride_slot", "stride_layer"])
def split_kv_kernel(
    q_ptr,  # [num_active, num_q_heads, head_dim], row stride stride_q
    cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32
    counts_ptr,  # of Work
    items_ptr,  # of Work
    out_ptr,  # [num_active, num_q_heads, head_dim], row stride stride_out; may be q_ptr
    parts_ptr,  # [max_parts, num_q_heads, head_dim] float32
    lses_ptr,  # [max_parts, num_q_heads] float32: log2 of the sum of 2 ** score
    layer,
    scale,  # of the scores, times log2(e), since exp(x) = 2 ** (x * log2(e))
    num_slots,
    num_blocks,
    max_blocks_per_seq,
    num_q_heads,
    stride_q,
    stride_out,
    stride_slot,
    stride_layer,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,  # head_dim, padded to a power of two
    GROUP_SIZE: tl.constexpr,  # q heads that share a kv head
    KV_HEADS: tl.constexpr,  # kv heads that one program takes, side by side
    HEADS: tl.constexpr,  # q heads that one program takes
    TOKENS: tl.constexpr,  # taken at a time
    USE_DOT: tl.constexpr,  # whether there are matrix units for this dtype
    PDL: tl.constexpr,  # programmatic dependent launch: starts while the kernel before still runs
    PREFETCH: tl.constexpr,
    TRIGGER_EARLY: tl.constexpr,  # let the next kernel start at once, not after the loop
):
    TILES: tl.constexpr = (GROUP_SIZE * KV_HEADS + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // TILES * KV_HEADS
    item = tl.program_id(1)
    if TRIGGER_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(items_ptr + 4 * item).to(tl.int64)
    slot = tl.load(items_ptr + 4 * item + 1).to(tl.int64)
    first = tl.load(items_ptr + 4 * item + 2)
    end = tl.load(items_ptr + 4 * item + 3)
    num_parts = tl.load(counts_ptr)
    if row < 0:
        return

    valid = (slot >= 0) & (slot < num_slots) & (end >= 0) & (end <= max_blocks_per_seq * BLOCK_SIZE)
    end = tl.where(valid, end, first)
    row_ptr = table_ptr + slot * stride_slot + layer * stride_layer
    KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    V_OFFSET: tl.constexpr = BLOCK_SIZE * KV_DIM
    token = first + tl.arange(0, TOKENS)
    next_block = tl.load(row_ptr + token // BLOCK_SIZE, mask=token < end, other=0)
    if PDL:
        # Before the wait only the plan and the table may be read: they are settled. q and the
        # newest token may not be there yet, so the first tile is only brought to the L2 cache.
        if PREFETCH:
            block = tl.where((next_block >= 0) & (next_block < num_blocks), next_block, 0)
            offset = block.to(tl.int64) * (2 * V_OFFSET) + token % BLOCK_SIZE * KV_DIM
            line_ptr = cache_ptr + offset + kv_head * HEAD_DIM
            prefetch_to_l2(line_ptr)
            prefetch_to_l2(line_ptr + V_OFFSET)
        tl.extra.cuda.gdc_wait()

    lane = tl.arange(0, KV_HEADS * LANES)
    in_head = lane < HEAD_DIM * KV_HEADS
    head_in_group = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)
    q_head = kv_head * GROUP_SIZE + head_in_group
    has_head = head_in_group < GROUP_SIZE * KV_HEADS
    q_mask = has_head[:, None] & in_head[None, :]
    q_offset = q_head[:, None] * HEAD_DIM + lane[None, :]
    if KV_HEADS > 1:
        # One product for several kv heads: each q head has zeros in the lanes of the others. So an
        # infinite or NaN key of one kv head reaches the q heads of its neighbour in this sequence.
        q_mask = q_mask & ((head_in_group // GROUP_SIZE)[:, None] == (lane // HEAD_DIM)[None, :])
        q_offset = q_head[:, None] * HEAD_DIM + (lane % HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * stride_q + q_offset, mask=q_mask, other=0.0)  # [HEADS, LANES]

    running_max = tl.full([HEADS], float("-inf"), tl.float32)
    d = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, KV_HEADS * LANES], tl.float32)
    for start in range(first, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        alive = token < end
        block = next_block
        next_token = token + TOKENS
        next_block = tl.load(row_ptr + next_token // BLOCK_SIZE, mask=next_token < end, other=0)
        assigned = (block >= 0) & (block < num_blocks)
        offset = block.to(tl.int64) * (2 * V_OFFSET) + token % BLOCK_SIZE * KV_DIM
        k_ptrs = cache_ptr + (offset + kv_head * HEAD_DIM)[:, None] + lane[None, :]
        mask = (alive & assigned)[:, None]
        if HEAD_DIM < LANES:
            mask = mask & in_head[None, :]
        k = tl.load(k_ptrs, mask=mask, other=0.0)  # [TOKENS, LANES]
        v = tl.load(k_ptrs + V_OFFSET, mask=mask, other=0.0)

        if USE_DOT:
            score = tl.dot(q, tl.trans(k))
        else:
            score = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
        bias = tl.where(alive, tl.where(assigned, 0.0, float("nan")), float("-inf"))
        score = score * scale + bias[None, :]  # [HEADS, TOKENS]
        new_max = tl.maximum(running_max, tl.max(score, 1))
        correction = tl.exp2(running_max - new_max)
        weight = tl.exp2(score - new_max[:, None])
        d = d * correction + tl.sum(weight, 1)
        acc = acc * correction[:, None]
        if USE_DOT:
            acc = tl.dot(weight.to(v.dtype), v, acc)
        else:
            acc += tl.sum(weight[:, :, None] * v.to(tl.float32)[None, :, :], 1)
        running_max = new_max
    if PDL and not TRIGGER_EARLY:
        tl.extra.cuda.gdc_launch_dependents()

    out = acc / tl.where(end > first, d, 1.0)[:, None]  # length 0 gives zeros
    out = tl.where(valid, out, float("nan"))
    if item < num_parts:
        part = item.to(tl.int64) * num_q_heads
        tl.store(parts_ptr + part * HEAD_DIM + q_offset, out, mask=q_mask)
        lse = running_max + tl.log2(d)
        tl.store(lses_ptr + part + q_head, lse, mask=has_head)
    else:
        out_ptrs = out_ptr + row * stride_out + q_offset
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def merge_kernel(
    parts_ptr,  # [max_parts, num_q_heads, head_dim] float32
    lses_ptr,  # [max_parts, num_q_heads] float32
    counts_ptr,  # of Work
    merges_ptr,  # of Work
    out_ptr,  # [num_active, num_q_heads, head_dim], row stride stride_out
    stride_out,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,  # that one program takes
    PARTS: tl.constexpr,  # taken at a time
    PDL: tl.constexpr,
):
    q_head = tl.program_id(0)
    num_q_heads = tl.num_programs(0)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    in_head = lane < HEAD_DIM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_split = tl.load(counts_ptr + 1)
    if PDL:
        tl.extra.cuda.gdc_wait()  # every program: what comes next waits for this kernel only
    for rank in range(tl.program_id(2), num_split, tl.num_programs(2)):
        row = tl.load(merges_ptr + 3 * rank).to(tl.int64)
        first_part = tl.load(merges_ptr + 3 * rank + 1)
        num_parts = tl.load(merges_ptr + 3 * rank + 2)
        running_max = float("-inf")
        d = 0.0
        acc = tl.zeros([LANES], tl.float32)
        for start in range(0, num_parts, PARTS):
            part = start + tl.arange(0, PARTS)
            exists = part < num_parts
            head = (first_part + part).to(tl.int64) * num_q_heads + q_head
            lse = tl.load(lses_ptr + head, mask=exists, other=float("-inf"))
            mask = exists[:, None] & in_head[None, :]
            out = tl.load(
                parts_ptr + head[:, None] * HEAD_DIM + lane[None, :], mask=mask, other=0.0
            )
            new_max = tl.maximum(running_max, tl.max(lse, 0))
            correction = tl.exp2(running_max - new_max)
            weight = tl.exp2(lse - new_max)
            d = d * correction + tl.sum(weight, 0)
            acc = acc * correction + tl.sum(weight[:, None] * out, 0)
            running_max = new_max
        out_ptrs = out_ptr + row * stride_out + q_head * HEAD_DIM + lane
        tl.store(out_ptrs, (acc / d).to(out_ptr.dtype.element_ty), mask=in_head)


def split_kv(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    layout: KVLayout,
    out: torch.Tensor,
    scale: float,
    work: Work | None = None,
) -> None:
    """Launch split_kv_kernel over (kv_head, item), merge_kernel over (q_head, lanes, sequence).

    Args:
        work: this step's plan_work, made here if None.
    """
    num_active, num_q_heads, head_dim = q.shape
    if work is None:
        work = plan_work(seq_lens, active_slots, block_table, layout)
    device = device_facts(q.device)
    use_dot = device.has_dot and q.dtype != torch.float32  # matrix units have no IEEE float32
    rule = launch_rule(num_active, layout, device, use_dot)
    group_size = num_q_heads // layout.num_kv_heads
    kv_heads = rule.kv_heads if group_size <= 16 else 1
    heads = max(16, triton.next_power_of_2(min(16, group_size) * kv_heads)) if use_dot else 1
    programs = layout.num_kv_heads // kv_heads * triton.cdiv(group_size * kv_heads, heads)
    parts_per_lane = work.max_parts * num_q_heads
    parts = q.new_empty(parts_per_lane * (head_dim + 1), dtype=torch.float32)
    parts, lses = parts.split([parts_per_lane * head_dim, parts_per_lane])
    arguments = attention_arguments(
        q, cache, block_table, seq_lens, active_slots, layer, layout, out, scale * LOG2_E
    )
    del arguments["seq_lens_ptr"], arguments["active_slots_ptr"]  # read by the plan
    early = device.has_pdl and work.settled
    split_kv_kernel[(programs, len(work.items))](
        **arguments,
        counts_ptr=work.counts,
        items_ptr=work.items,
        parts_ptr=parts,
        lses_ptr=lses,
        num_q_heads=num_q_heads,
        LANES=triton.next_power_of_2(head_dim),
        KV_HEADS=kv_heads,
        HEADS=heads,
        TOKENS=rule.tokens,
        USE_DOT=use_dot,
        PDL=early,
        PREFETCH=rule.trigger_early and kv_heads == 1,
        TRIGGER_EARLY=rule.trigger_early and device.has_pdl,
        num_warps=rule.num_warps,
        num_stages=rule.num_stages,
        **{"launch_pdl": True} if early else {},
    )
    work.settled = True
    rows = min(num_active, rule.merge_rows)
    merge_kernel[(num_q_heads, triton.cdiv(head_dim, rule.merge_lanes), rows)](
        parts,
        lses,
        work.counts,
        work.merges,
        out,
        out.stride(0),
        HEAD_DIM=head_dim,
        LANES=rule.merge_lanes,
        PARTS=rule.merge_parts,
        PDL=device.has_pdl,
        num_warps=1,
        **{"launch_pdl": True} if device.has_pdl else {},
    )

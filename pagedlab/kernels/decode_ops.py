"""What a decode step does between attention and attention, in few kernels (chapter 11).

A row alone is multiplied by matvec_kernel, which reads each weight once, with the norm before the
product and SiLU or the sum after it. Several rows go through torch's matrix product, which adds the
sum by itself, between kernels for the norm and for SiLU. rope_append_kernel replaces a rotation and
cache.append. Where the GPU can, each kernel starts while the one before still runs (programmatic
dependent launch, PDL) and loads what that one does not write, the weights, before it waits.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagedlab.kernels.launch import RUNTIME_INTEGERS, attention_arguments
from pagedlab.kernels.plan import device_facts
from pagedlab.layout import KVLayout

MATVEC_ELEMENTS = 16384  # of the weight that a program of matvec_kernel takes, in whole rows
SILU_LANES = 1024


@triton.jit
def start_early(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the one before to end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def normalize(x, norm, eps, COLUMNS: tl.constexpr):
    """RMSNorm of a row in float32."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps) * norm


@triton.jit
def matvec_kernel(
    x_ptr,  # [COLUMNS]
    norm_ptr,  # [COLUMNS], RMSNorm's weight
    weight_ptr,  # [PARTS * num_rows, COLUMNS]
    out_ptr,  # [num_rows]
    eps,
    num_rows,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,  # COLUMNS, padded to a power of two
    ROWS: tl.constexpr,  # that one program takes
    NORM: tl.constexpr,
    PARTS: tl.constexpr,  # 2: silu(gate) * up, the two halves of the weight
    ADD: tl.constexpr,  # to what is in out
    PDL: tl.constexpr,
):
    part = tl.arange(0, ROWS * PARTS)
    row = tl.program_id(0) * ROWS + part // PARTS
    weight_row = (row + part % PARTS * num_rows).to(tl.int64)
    column = tl.arange(0, LANES)
    in_row = column < COLUMNS
    mask = (row < num_rows)[:, None] & in_row[None, :]
    weight_ptrs = weight_ptr + weight_row[:, None] * COLUMNS + column[None, :]
    weight = tl.load(weight_ptrs, mask=mask, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    start_early(PDL)

    x = tl.load(x_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if NORM:
        x = normalize(x, norm, eps, COLUMNS)
    y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if PARTS == 2:
        gate, up = tl.split(tl.reshape(y, [ROWS, 2]))
        y = gate / (1 + tl.exp(-gate)) * up
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ADD:
        y += tl.load(out_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < num_rows)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_rows, COLUMNS]
    norm_ptr,  # [COLUMNS]
    out_ptr,  # [num_rows, COLUMNS]
    eps,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,  # COLUMNS, padded to a power of two
    PDL: tl.constexpr,
):
    column = tl.arange(0, LANES)
    in_row = column < COLUMNS
    norm = tl.load(norm_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    start_early(PDL)
    place = tl.program_id(0).to(tl.int64) * COLUMNS + column
    x = tl.load(x_ptr + place, mask=in_row, other=0.0).to(tl.float32)
    y = normalize(x, norm, eps, COLUMNS)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * COLUMNS]
    out_ptr,  # [num_rows, COLUMNS]
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,  # that one program takes
    PDL: tl.constexpr,
):
    start_early(PDL)
    row = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = column < COLUMNS
    gate = tl.load(gate_up_ptr + 2 * row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + 2 * row + COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """x @ weight.T with what comes before and after it, for the few rows of a decode step.

    Args:
        x: [num_rows, num_columns], contiguous.
        weight: [num_outputs, num_columns], contiguous; gated: [2 * num_outputs, num_columns].
        norm: [num_columns], the weight of an RMSNorm of x with `eps`; no norm if None.
        gated: silu of the first half of the products times the second.
        add_to: [num_rows, num_outputs], to which the product is added, in place.

    Returns:
        [num_rows, num_outputs]; add_to if given.
    """
    num_columns, num_outputs = x.shape[1], weight.shape[0] // (1 + gated)
    lanes, early = triton.next_power_of_2(num_columns), launch_options(x)
    if len(x) == 1:
        out = x.new_empty(1, num_outputs) if add_to is None else add_to
        rows = max(1, MATVEC_ELEMENTS // lanes // (1 + gated))
        sizes = {"COLUMNS": num_columns, "LANES": lanes, "ROWS": rows}
        flags = {"NORM": norm is not None, "PARTS": 1 + gated, "ADD": add_to is not None}
        tensors = (x, weight if norm is None else norm, weight, out)
        options = sizes | flags | early | {"num_warps": 8}
        matvec_kernel[(triton.cdiv(num_outputs, rows),)](*tensors, eps, num_outputs, **options)
        return out
    if norm is not None:
        plain, x = x, torch.empty_like(x)
        rms_norm_kernel[(len(x),)](plain, norm, x, eps, num_columns, lanes, num_warps=8, **early)
    if add_to is not None:
        return add_to.addmm_(x, weight.t())
    product = F.linear(x, weight)
    if not gated:
        return product
    out = x.new_empty(len(x), num_outputs)
    grid = (len(x), triton.cdiv(num_outputs, SILU_LANES))
    silu_mul_kernel[grid](product, out, num_outputs, SILU_LANES, **early)
    return out


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def rope_append_kernel(
    qkv_ptr,  # [num_active, num_q_heads + 2 * num_kv_heads, head_dim]
    cos_ptr,  # [max_blocks_per_seq * block_size, head_dim] float32
    sin_ptr,  # the same shape, of the first half negative
    cache_ptr,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32
    seq_lens_ptr,  # [num_active] int32
    active_slots_ptr,  # [num_active] int32
    q_ptr,  # [num_active, num_q_heads, head_dim]
    layer,
    num_slots,
    num_blocks,
    max_blocks_per_seq,
    stride_q,
    stride_slot,
    stride_layer,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # q heads that share a kv head
    LANES: tl.constexpr,  # head_dim, padded to a power of two
    PDL: tl.constexpr,
):
    NUM_Q_HEADS: tl.constexpr = GROUP_SIZE * NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # q heads, then kv heads
    slot = tl.load(active_slots_ptr + row).to(tl.int64)
    position = tl.load(seq_lens_ptr + row).to(tl.int64) - 1
    lane = tl.arange(0, LANES)
    in_head = lane < HEAD_DIM
    valid = (position >= 0) & (position < max_blocks_per_seq * BLOCK_SIZE)
    angle = position * HEAD_DIM + lane
    cos = tl.load(cos_ptr + angle, mask=in_head & valid, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=in_head & valid, other=0.0)
    # q heads ask for no block; what the step's kernels read of the table is settled
    valid = valid & (head >= NUM_Q_HEADS) & (slot >= 0) & (slot < num_slots)
    entry = slot * stride_slot + layer * stride_layer + position // BLOCK_SIZE
    block = tl.load(table_ptr + entry, mask=valid, other=-1).to(tl.int64)
    start_early(PDL)

    head_ptr = qkv_ptr + (row * (NUM_Q_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    x = tl.load(head_ptr + lane, mask=in_head, other=0.0)
    other_half = (lane + HEAD_DIM // 2) % HEAD_DIM
    swapped = tl.load(head_ptr + other_half, mask=in_head, other=0.0)
    rotated = (x.to(tl.float32) * cos + swapped.to(tl.float32) * sin).to(x.dtype)
    if head < NUM_Q_HEADS:
        tl.store(q_ptr + row * stride_q + head * HEAD_DIM + lane, rotated, mask=in_head)
    else:
        mask = in_head & valid & (block >= 0) & (block < num_blocks)
        KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        k_offset = (2 * block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_DIM
        k_ptrs = cache_ptr + k_offset + (head - NUM_Q_HEADS) * HEAD_DIM + lane
        v = tl.load(head_ptr + NUM_KV_HEADS * HEAD_DIM + lane, mask=mask, other=0.0)
        tl.store(k_ptrs, rotated, mask=mask)
        tl.store(k_ptrs + BLOCK_SIZE * KV_DIM, v, mask=mask)


def rope_append(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    active_slots: Tensor,
    layer: int,
    layout: KVLayout,
) -> Tensor:
    """Rotate each row's q and k to position seq_len - 1; k and v go to the cache as in `append`.

    Args:
        qkv: [num_active, (num_q_heads + 2 * num_kv_heads) * head_dim], contiguous.
        rope: rope_rotation of each position the table can hold: two float32 [n, 1, head_dim].
        block_table, seq_lens, active_slots: not written by the kernel launched just before.

    Returns:
        q, [num_active, num_q_heads, head_dim]. A row that does not fit writes nothing else.
    """
    num_q_heads = qkv.shape[1] // layout.head_dim - 2 * layout.num_kv_heads
    q = qkv.new_empty(len(qkv), num_q_heads, layout.head_dim)
    arguments = attention_arguments(
        q, cache, block_table, seq_lens, active_slots, layer, layout, q, scale=1
    )
    del arguments["out_ptr"], arguments["stride_out"], arguments["scale"]
    grid = (len(qkv), num_q_heads + layout.num_kv_heads)
    arguments["LANES"] = triton.next_power_of_2(layout.head_dim)
    rope_append_kernel[grid](qkv, *rope, **arguments, num_warps=1, **launch_options(qkv))
    return q


def launch_options(x: Tensor) -> dict[str, bool]:
    """PDL where the GPU has it."""
    has_pdl = device_facts(x.device).has_pdl
    return {"PDL": has_pdl} | ({"launch_pdl": True} if has_pdl else {})

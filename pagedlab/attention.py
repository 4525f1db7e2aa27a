"""paged_attention: one call, several kernels and a torch backend behind it (chapter 4)."""

import math
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedlab.block_table import BlockTable
from pagedlab.kv_cache import PagedKVCache, expect_rows, expect_tensor
from pagedlab.layout import LLAMA_3_2_1B, KVLayout, expect_in_range
from pagedlab.stand_in import NeedsTriton, has_triton

BACKENDS = ("auto", "triton", "torch")
KERNELS = ("by_token", "by_block", "split_kv")


class AttentionPlan(NamedTuple):
    """What one step's lengths decide for all its layers; attention_plan makes it."""

    num_active: int
    seq_lens: list[int] | None  # tokens per row, read and checked; None while they stay on the GPU
    active_slots: list[int] | None
    work: Any = None  # split_kv's work items, on the GPU


def check_batch(
    table: BlockTable,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    *,
    block_size: int = LLAMA_3_2_1B.block_size,
    num_blocks: int = 2**31,
    layers: slice = slice(None),
) -> tuple[list[int], list[int]]:
    """Check the values that a kernel relies on; on CUDA this waits for the device.

    Args:
        seq_lens: int32 [num_active], tokens: 0 to max_blocks_per_seq * block_size.
        active_slots: int32 [num_active]: 0 to num_slots - 1.
        block_size: tokens per block of the cache in use.
        num_blocks: blocks of that cache.
        layers: the table rows to look at, all of them by default.

    Returns:
        lengths and slots as Python lists.

    Raises:
        ValueError: the first row that does not hold, or a block inside a length that is
            unassigned (-1) or not in the cache.

    >>> table = BlockTable(num_slots=2, num_layers=1, max_blocks_per_seq=4)
    >>> table.assign(slot=1, layer=0, logical_block=0, physical_block=9)
    >>> rows = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> check_batch(table, rows(16), rows(1))
    ([16], [1])
    >>> check_batch(table, rows(17), rows(1))
    Traceback (most recent call last):
    ValueError: block_table[1, 0, 1]: expected a block of the cache (0 to 2147483647), got -1
    """
    expect_tensor("seq_lens", seq_lens)
    expect_rows(seq_lens, active_slots, seq_lens.numel(), seq_lens.device)
    lengths, slots = seq_lens.tolist(), active_slots.tolist()
    # The last block is within int32: numpy 2.1 crashes when it compares with 2**31.
    capacity, last = table.max_blocks_per_seq * block_size, num_blocks - 1
    for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if not 0 <= slot < table.num_slots:
            raise ValueError(
                f"active_slots[{row}]: expected 0 to {table.num_slots - 1}, got {slot}"
            )
        if not 0 <= length <= capacity:
            raise ValueError(f"seq_lens[{row}]: expected 0 to {capacity} tokens, got {length}")
        if length == 0:
            continue
        blocks = table.host[slot, layers, : -(-length // block_size)]
        if blocks.min() < 0 or blocks.max() > last:
            layer, logical_block = ((blocks < 0) | (blocks > last)).nonzero()
            raise ValueError(
                f"block_table[{slot}, {layer[0] + (layers.start or 0)}, {logical_block[0]}]:"
                f" expected a block of the cache (0 to {last}),"
                f" got {blocks[layer[0], logical_block[0]]}"
            )
    return lengths, slots


def attention_plan(
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    table: BlockTable,
    cache: PagedKVCache,
    layers: slice = slice(None),
) -> AttentionPlan:
    """Plan one step, once for all its layers; on a CPU this also checks the values.

    Args: as paged_attention's.

    Raises:
        ValueError: see check_batch (CPU only; on CUDA values are left to check_batch).
    """
    num_active = seq_lens.shape[0]
    if seq_lens.is_cuda:
        work = None
        if num_active and has_triton():
            from pagedlab.kernels.plan import plan_work

            work = plan_work(seq_lens, active_slots, table.device, cache.layout)
        return AttentionPlan(num_active, None, None, work)
    lengths, slots = check_batch(
        table,
        seq_lens,
        active_slots,
        block_size=cache.layout.block_size,
        num_blocks=cache.num_blocks,
        layers=layers,
    )
    return AttentionPlan(num_active, lengths, slots)


def paged_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: BlockTable,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    kernel: str = "auto",
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of each active slot's new token over all tokens in that slot's blocks.

    Args:
        q: [num_active, num_q_heads, head_dim], the cache's dtype; last two dimensions dense, row
            stride free. num_q_heads is a multiple of the cache's num_kv_heads; num_active may be 0.
        cache: keys and values, this step's token already appended.
        table: blocks of each slot; indexed by slot, everything else by position in the batch.
        seq_lens: int32 [num_active], tokens to read, the new one included; on q's device.
        active_slots: int32 [num_active], the slot of each row; on q's device.
        layer: which layer's row of the table.
        out: [num_active, num_q_heads, head_dim], q's dtype, dense like q; may be q itself, the
            article's in-place form. Allocated if None.
        scale: factor of the scores, 1 / sqrt(head_dim) by default.
        backend: "triton", "torch", or "auto": triton on a CUDA device, torch elsewhere.
        kernel: which Triton kernel, "by_token" (tiny-vllm's), "by_block" or "split_kv";
            "auto" is split_kv, the fastest.
        plan: attention_plan of this step, shared by all layers; made here if None.

    Returns:
        out. Length 0 gives zeros. On CUDA, a row whose slot, length or block does not exist
        gives NaN.

    Raises:
        ValueError: shape, dtype, device, stride, layer or overlap do not fit; on a CPU also
            values (see check_batch).

    Source: Kwon et al. 2023 (PagedAttention); the tiny-vllm article's kernel.

    >>> layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    >>> cache, table = PagedKVCache(layout, num_blocks=8), BlockTable(2, 1, 3)
    >>> table.assign(slot=1, layer=0, logical_block=0, physical_block=5)
    >>> k = torch.ones(2, 1, 16)
    >>> cache.write(k, 3 * k, table, slot=1, layer=0, start=0)
    >>> rows = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> paged_attention(torch.ones(1, 2, 16), cache, table, rows(2), rows(1), layer=0)[0, :, 0]
    tensor([3., 3.])
    """
    check_metadata(q, cache, table, seq_lens, active_slots, layer, out)
    layout, layer = cache.layout, int(layer)
    scale = 1 / math.sqrt(layout.head_dim) if scale is None else float(scale)
    run = _pick(backend, kernel, layout, q.device)
    if plan is not None and plan.num_active != q.shape[0]:
        raise ValueError(f"plan: expected one for {q.shape[0]} rows, got {plan.num_active}")
    if not q.is_cuda:  # table and lengths may have changed since the plan was made
        plan = attention_plan(seq_lens, active_slots, table, cache, slice(layer, layer + 1))
    elif plan is None:
        plan = AttentionPlan(q.shape[0], None, None)  # a kernel that needs work items makes them
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        uploaded_bytes = table.sync(layer)
        if uploaded_bytes and plan.work is not None:
            plan.work.settled = False  # the kernel must wait for the upload
    if run is None:
        _torch_attention(q, cache, table, seq_lens, active_slots, layer, out, scale, plan)
    else:
        work = {"work": plan.work} if run.__name__ == "split_kv" else {}
        rows = (seq_lens, active_slots)
        run(q, cache.buffer, table.device, *rows, layer, layout, out, scale, **work)
    return out


def check_metadata(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: BlockTable,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    out: torch.Tensor | None,
) -> None:
    """Check shapes, dtypes, devices, strides, layer and overlap, without reading any value."""
    _expect_q(q, "q", cache.layout, cache.buffer.device)
    expect_rows(seq_lens, active_slots, q.shape[0], q.device)
    expect_in_range("layer", layer, table.num_layers)
    if table.device.device != q.device:
        raise ValueError(f"table: expected device {q.device}, got {table.device.device}")
    if out is not None:
        _expect_out(out, q, cache)


def _expect_q(x: torch.Tensor, name: str, layout: KVLayout, device: torch.device) -> None:
    heads, head_dim = layout.num_kv_heads, layout.head_dim
    expect_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != head_dim or x.shape[1] == 0 or x.shape[1] % heads:
        raise ValueError(
            f"{name}: expected [num_active, a multiple of {heads}, {head_dim}], got {list(x.shape)}"
        )
    if x.dtype != layout.dtype:
        raise ValueError(f"{name}: expected the cache's {layout.dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name}: expected the cache's device {device}, got {x.device}")
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != head_dim):
        raise ValueError(f"{name}: expected dense last two dimensions, got stride {x.stride()}")


def _expect_out(out: torch.Tensor, q: torch.Tensor, cache: PagedKVCache) -> None:
    expect_tensor("out", out)
    if out.shape != q.shape:
        raise ValueError(f"out: expected q's shape {list(q.shape)}, got {list(out.shape)}")
    if out is not q:
        _expect_q(out, "out", cache.layout, q.device)
    num_active, num_q_heads, head_dim = q.shape
    row = num_q_heads * head_dim * q.itemsize
    if num_active > 1 and out.stride(0) < num_q_heads * head_dim:
        raise ValueError(f"out: expected rows that do not overlap, got stride {out.stride()}")
    if num_active == 0:
        return
    in_place = out.data_ptr() == q.data_ptr() and out.stride() == q.stride()
    overlaps = "" if in_place or not _overlap(out, q, row, row) else "q"
    if _overlap(out, cache.rows, row, cache.layout.v_offset):
        overlaps = "the cache"
    if overlaps:
        raise ValueError(f"out: expected q itself or memory of its own, got part of {overlaps}")


def _overlap(a: torch.Tensor, b: torch.Tensor, a_row: int, b_row: int) -> bool:
    """Whether two tensors of dense rows (a_row and b_row bytes long) share a byte."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    a_stride, b_stride = a.stride(0) * a.itemsize, b.stride(0) * b.itemsize
    a_end = a_start + (a.shape[0] - 1) * a_stride + a_row
    b_end = b_start + (b.shape[0] - 1) * b_stride + b_row
    if a_end <= b_start or b_end <= a_start:
        return False
    if a_stride == b_stride and a_stride >= a_row + b_row:  # columns of one wider buffer
        return not a_row <= (b_start - a_start) % a_stride <= a_stride - b_row
    return True


def _pick(
    backend: str, kernel: str, layout: KVLayout, device: torch.device
) -> Callable[..., None] | None:
    """The launcher to call, None for the torch backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel: expected one of auto, {', '.join(KERNELS)}, got {kernel!r}")
    if backend == "torch" or (backend == "auto" and not (device.type == "cuda" and has_triton())):
        if kernel != "auto" and backend == "torch":
            raise ValueError(f"kernel: expected auto with the torch backend, got {kernel!r}")
        if kernel == "auto":
            return None
    if not has_triton():
        raise NeedsTriton("backend triton")
    if device.type == "cpu" and layout.dtype is torch.bfloat16:
        raise ValueError(
            "backend: expected torch, since Triton's interpreter computes bfloat16 wrongly,"
            " got triton"
        )
    name = "split_kv" if kernel == "auto" else kernel
    module = import_module(f"pagedlab.kernels.{name}")
    functions = getattr(module, f"{name}_kernel"), import_module("triton.language").sum
    compiled = any(isinstance(f, import_module("triton").JITFunction) for f in functions)
    if device.type == "cpu" and compiled:
        raise ValueError(
            "backend: expected a CUDA tensor, or TRITON_INTERPRET=1 set before triton is imported,"
            " got a CPU tensor with compiled kernels"
        )
    return getattr(module, name)


@torch.no_grad()
def _torch_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: BlockTable,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    out: torch.Tensor,
    scale: float,
    plan: AttentionPlan,
) -> None:
    """Gather every row's tokens, padded to the longest row, for torch; float32 inside."""
    layout = cache.layout
    capacity = table.max_blocks_per_seq * layout.block_size
    lengths = plan.seq_lens if plan.seq_lens is not None else seq_lens.tolist()
    slots = plan.active_slots if plan.active_slots is not None else active_slots.tolist()
    alive = []
    for row, (seq_len, slot) in enumerate(zip(lengths, slots, strict=True)):
        valid = 0 <= slot < table.num_slots and 0 <= seq_len <= capacity
        if valid and seq_len > 0 and plan.seq_lens is None:  # not checked yet
            blocks = table.host[slot, layer, : layout.num_logical_blocks(seq_len)]
            valid = bool(((blocks >= 0) & (blocks < cache.num_blocks)).all())
        if valid and seq_len > 0:
            alive.append(row)
        else:
            out[row] = 0 if valid else math.nan
    if not alive:
        return
    whole = len(alive) == len(lengths)
    alive_lengths = tuple(lengths[row] for row in alive)
    logical_blocks, tokens, seen = _positions(alive_lengths, layout.block_size)
    blocks = table.host[[[slots[row]] for row in alive], layer, logical_blocks]
    k_rows = 2 * layout.block_size * blocks.astype(np.int64) + tokens
    both = torch.from_numpy(np.stack((k_rows, k_rows + layout.block_size))).to(q.device)
    # [2 (K, V), rows, num_kv_heads, tokens, head_dim]
    gathered = cache.tokens.index_select(0, both.flatten()).float()
    k, v = gathered.view(*both.shape, -1, layout.head_dim).transpose(2, 3)
    # the q heads that share a kv head are queries over the same keys
    group_size = q.shape[1] // layout.num_kv_heads
    grouped_q = (q if whole else q[alive]).float().unflatten(1, (-1, group_size))
    mask = None if seen is None else seen.to(q.device)
    result = scaled_dot_product_attention(grouped_q, k, v, mask, scale=scale)
    result = result.reshape(-1, *q.shape[1:]).to(q.dtype)  # not contiguous on every device
    out[slice(None) if whole else alive] = result


@lru_cache(maxsize=8)
def _positions(
    lengths: tuple[int, ...], block_size: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
    """Where each row's tokens are, every row as long as the longest; a step's layers share it.

    Returns:
        logical block and token in block, [rows, longest], beyond a row's end those of its last
        token; and which of them count, [rows, 1, 1, longest], None if all do.
    """
    last = np.array(lengths)[:, None] - 1
    positions = np.arange(max(lengths))
    padded = min(lengths) < max(lengths)
    seen = torch.from_numpy(positions <= last)[:, None, None] if padded else None
    logical_blocks, tokens = np.divmod(np.minimum(positions, last), block_size)
    return logical_blocks, tokens, seen

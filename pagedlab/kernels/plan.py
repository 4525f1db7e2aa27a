"""What split_kv does with a batch: the launch rule, and the plan that cuts it into work items.

The grids and buffers depend on the batch size, the layout and the GPU, never on the lengths, which
plan_kernel reads on the device: so a CUDA graph of plan and layers serves every length.
"""

from dataclasses import dataclass
from functools import cache as cached
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagedlab.layout import KVLayout

MIN_PIECE = 64  # tokens; pieces are multiples of it


class Device(NamedTuple):
    """What the launch rule needs to know of a GPU; a CPU stands for a tiny one."""

    num_sms: int = 2
    shared_bytes: int = 2**16  # of one SM
    has_dot: bool = True  # matrix units that tl.dot uses
    has_pdl: bool = False  # programmatic dependent launch; measured on sm_90 alone


@cached
def device_facts(device: torch.device) -> Device:
    """The facts of a torch device."""
    if device.type != "cuda":
        return Device()
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes = gpu.shared_memory_per_multiprocessor
    return Device(gpu.multi_processor_count, shared_bytes, gpu.major >= 8, gpu.major == 9)


class Launch(NamedTuple):
    """How the kernels of one batch size are launched."""

    pieces: int  # that all sequences together are cut into
    fine_pieces: int  # the same, if one sequence is much longer than a piece
    tokens: int  # that a program takes at a time
    kv_heads: int  # side by side, that a program takes
    num_warps: int
    num_stages: int
    trigger_early: bool
    merge_parts: int  # that a program of merge_kernel takes at a time
    merge_lanes: int
    merge_rows: int


def launch_rule(num_active: int, layout: KVLayout, device: Device, use_dot: bool = True) -> Launch:
    """Choose tiles, pipeline depth and pieces; benchmarks/NOTES.md has the measurements behind it.

    What decides is how many programs there are per SM while no sequence is split, a program reading
    64 lanes. Few: cut the sequences and start early. Many: leave them whole. In between, tile and
    pipeline are such that all programs are resident and 128 to 192 KB per SM are on their way.
    """
    lanes = triton.next_power_of_2(layout.head_dim)
    wide = max(1, lanes // 64)
    sms_per_head = device.num_sms / layout.num_kv_heads
    per_sm = num_active * wide / sms_per_head
    pair = 2 if lanes == 64 and layout.num_kv_heads % 2 == 0 else 1  # rows of 256 bytes
    alone = lanes * pair == 128 and 1.5 < per_sm <= 2
    tokens, kv_heads, stages, early = 64, 1, 4, True
    merge = (16, 64, 32)
    # half a piece per sequence less than programs fit, since rounding may add as much
    if not use_dot or per_sm <= 0.25:
        pieces = round(4 / wide * sms_per_head) - num_active // 2
        merge = (128, 16, 32)
    elif alone:  # a program takes an SM for itself
        tokens, kv_heads, stages, merge = 128, pair, 3, (16, 64, 4)
        pieces = round(pair * sms_per_head)
    elif per_sm <= 2:
        tokens = 32
        pieces = round(8 / wide * sms_per_head) - num_active // 2
    elif per_sm <= 3:  # too few to leave them whole: two pieces each
        stages, early, pieces = 3, False, 2 * num_active
    else:
        early, merge, pieces = False, (16, 64, 4), round(8 / max(2, wide) * sms_per_head)
        if per_sm > 12:
            kv_heads, stages, early, pieces = pair, 2, pair == 2, pair * pieces
        else:
            tokens = 64 if per_sm <= 6 else 32
            stages = 4 if per_sm <= 4 or 6 < per_sm <= 8 else 3
    fine_pieces = 2 * pieces if alone else pieces
    num_warps = 4
    if use_dot:
        tokens = tokens // 2 if lanes == 256 else tokens
        num_warps = min(4, max(1, tokens * kv_heads * lanes // 2048))
    else:
        tokens, stages = min(64, max(8, 2048 // lanes)), 2
    tile_bytes = 2 * tokens * kv_heads * lanes * layout.dtype.itemsize
    stages = max(2, min(stages, device.shared_bytes * 7 // 8 // tile_bytes + 1))
    pieces = max(1, pieces)
    return Launch(pieces, max(1, fine_pieces), tokens, kv_heads, num_warps, stages, early, *merge)


@dataclass
class Work:
    """The work items of one step, on the device; plan_work makes them.

    counts: int32 [2], the items that are parts of split sequences (they come first), and those
        sequences.
    items: int32 [max_items, 4], each row (-1: no item), slot, first token, end (-1: invalid row).
    merges: int32 [num_active, 3], each row, its first item, its items; the longest sequence first.
    max_parts: items of split sequences, at most.
    settled: whether a kernel has been launched that waited for plan_kernel and the table, so that
        the next ones may look at them before their wait.
    """

    counts: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    max_parts: int
    settled: bool = False


@triton.jit
def cut(seq_len, chunk, MIN_PIECE: tl.constexpr):
    """Cut a sequence evenly into pieces of about `chunk` tokens: tokens per piece, pieces."""
    pieces = tl.maximum((2 * seq_len + chunk) // (2 * chunk), 1)
    piece = (seq_len + pieces * MIN_PIECE - 1) // (pieces * MIN_PIECE) * MIN_PIECE
    piece = tl.maximum(piece, MIN_PIECE)
    return piece, tl.maximum((seq_len + piece - 1) // piece, 1)


@triton.jit(
    do_not_specialize=[
        "num_active",
        "num_slots",
        "max_blocks_per_seq",
        "max_items",
        "pieces_wanted",
        "fine_pieces_wanted",
    ]
)
def plan_kernel(
    seq_lens_ptr,  # [num_active] int32
    active_slots_ptr,  # [num_active] int32
    counts_ptr,  # of Work
    items_ptr,  # of Work
    merges_ptr,  # of Work
    num_active,
    num_slots,
    max_blocks_per_seq,
    max_items,
    pieces_wanted,  # of all sequences together
    fine_pieces_wanted,  # the same, if one is much longer than such a piece
    BLOCK_SIZE: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    ROWS: tl.constexpr,  # num_active, padded to a power of two
):
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    exists = rows < num_active
    capacity = max_blocks_per_seq * BLOCK_SIZE
    slots = tl.load(active_slots_ptr + rows, mask=exists, other=-1)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=exists, other=0)
    valid = (slots >= 0) & (slots < num_slots) & (seq_lens >= 0) & (seq_lens <= capacity)
    seq_lens = tl.where(valid, seq_lens, 0)
    slot = tl.load(active_slots_ptr + row)
    seq_len = tl.sum(tl.where(rows == row, seq_lens, 0), 0)
    row_valid = tl.sum(((rows == row) & valid).to(tl.int32), 0) > 0

    total, longest = tl.sum(seq_lens, 0), tl.max(seq_lens, 0)
    wanted = tl.where(2 * longest * pieces_wanted > 3 * total, fine_pieces_wanted, pieces_wanted)
    chunk = tl.maximum((total + wanted - 1) // wanted, MIN_PIECE)
    _, all_pieces = cut(seq_lens, chunk, MIN_PIECE)
    all_pieces = tl.where(exists, all_pieces, 0)
    piece, pieces = cut(seq_len, chunk, MIN_PIECE)
    if row == 0:
        split = all_pieces > 1
        tl.store(counts_ptr, tl.sum(tl.where(split, all_pieces, 0), 0))
        tl.store(counts_ptr + 1, tl.sum(split.to(tl.int32), 0))
        for i in range(tl.sum(all_pieces, 0), max_items):
            tl.store(items_ptr + 4 * i, -1)

    earlier = exists & ((seq_lens > seq_len) | ((seq_lens == seq_len) & (rows < row)))
    first_item = tl.sum(tl.where(earlier, all_pieces, 0), 0)
    merge_ptr = merges_ptr + 3 * tl.sum(earlier.to(tl.int32), 0)
    tl.store(merge_ptr, row)
    tl.store(merge_ptr + 1, first_item)
    tl.store(merge_ptr + 2, pieces)
    for i in range(pieces):
        item_ptr = items_ptr + 4 * (first_item + i)
        tl.store(item_ptr, row)
        tl.store(item_ptr + 1, slot)
        tl.store(item_ptr + 2, i * piece)
        tl.store(item_ptr + 3, tl.where(row_valid, tl.minimum((i + 1) * piece, seq_len), -1))


def plan_work(
    seq_lens: torch.Tensor, active_slots: torch.Tensor, block_table: torch.Tensor, layout: KVLayout
) -> Work:
    """Launch plan_kernel over the rows of a batch: cut it into work items, longest row first.

    Args:
        seq_lens, active_slots: int32 [num_active]; a row that does not fit the table gets NaN.
        block_table: only its shape is read.
    """
    num_active = seq_lens.shape[0]
    rule = launch_rule(num_active, layout, device_facts(seq_lens.device))
    max_pieces = max(rule.pieces, rule.fine_pieces)
    max_items = num_active + max_pieces
    sizes = [4 * max_items, 3 * num_active, 2]
    items, merges, counts = seq_lens.new_empty(sum(sizes)).split(sizes)
    plan_kernel[(num_active,)](
        seq_lens,
        active_slots,
        counts,
        items,
        merges,
        num_active,
        block_table.shape[0],
        block_table.shape[2],
        max_items,
        rule.pieces,
        rule.fine_pieces,
        BLOCK_SIZE=layout.block_size,
        MIN_PIECE=MIN_PIECE,
        ROWS=triton.next_power_of_2(num_active),
        num_warps=1,
    )
    return Work(counts, items.view(-1, 4), merges.view(-1, 3), max_pieces * 4 // 3)

"""The room of the empty: sequences and parts with no token in them (chapter 12)."""

import torch

from pagedlab import tl, triton
from pagedlab.attention import paged_attention
from pagedlab.museum import runs
from pagedlab.museum.checks import check_attention, check_merge
from pagedlab.museum.exhibit import Exhibit
from pagedlab.museum.launchers import attention_with, merge_with


@triton.jit
def undoubting_kernel(
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
        token_row = 2 * BLOCK_SIZE * physical_block + position % BLOCK_SIZE
        k = tl.load(head_ptr + token_row * NUM_KV_HEADS * HEAD_DIM)
        v = tl.load(head_ptr + (token_row + BLOCK_SIZE) * NUM_KV_HEADS * HEAD_DIM)
        score = tl.sum(q * k, 0) * scale
        new_max = tl.maximum(running_max, score)
        correction, weight = tl.exp(running_max - new_max), tl.exp(score - new_max)
        d, acc = d * correction + weight, acc * correction + weight * v
        running_max = new_max
    tl.store(out_ptr + q_offset, acc / d)


@triton.jit
def merge_kernel(
    maxima_ptr,  # [2], the largest score of each part
    sums_ptr,  # [2], each part's d
    accs_ptr,  # [2, head_dim], each part's acc
    out_ptr,  # [head_dim]
    HEAD_DIM: tl.constexpr,
):
    lane = tl.arange(0, HEAD_DIM)
    first_max, second_max = tl.load(maxima_ptr), tl.load(maxima_ptr + 1)
    new_max = tl.maximum(first_max, second_max)
    first = tl.exp(first_max - new_max)
    second = tl.exp(second_max - new_max)
    d = tl.load(sums_ptr) * first + tl.load(sums_ptr + 1) * second
    acc = tl.load(accs_ptr + lane) * first + tl.load(accs_ptr + HEAD_DIM + lane) * second
    tl.store(out_ptr + lane, acc / tl.where(d == 0, 1.0, d))


def whole_softmax(maxima: torch.Tensor, sums: torch.Tensor, accs: torch.Tensor) -> torch.Tensor:
    """The merge in plain torch, where empty parts are left out first."""
    filled = sums > 0
    if not filled.any():
        return torch.zeros_like(accs[0])
    weights = torch.exp(maxima[filled] - maxima.max())
    return weights @ accs[filled] / (weights @ sums[filled])


ROOM = (
    Exhibit(
        id="empty-row",
        title="Whoever says nothing",
        broken=undoubting_kernel,
        install=attention_with,
        real=paged_attention,
        run=runs.with_an_empty_row,
        check=check_attention,
        look="step the program of the empty row: which lines run, and what is `d` at the end?",
        cause="No token, no weight: d is 0, acc is 0, and 0 / 0 is NaN.",
        failure=r"row of 0 tokens, query head 0, lane 0: expected 0\.0000, got nan",
        source="vllm-project/vllm#57094",
        fix=(("acc / d)", "acc / tl.where(seq_len > 0, d, 1.0))"),),
    ),
    Exhibit(
        id="two-empties",
        title="Nothing and nothing",
        broken=merge_kernel,
        install=merge_with,
        real=whole_softmax,
        run=runs.of_parts,
        check=check_merge,
        look="step the merge with both parts empty, and look at `first`",
        cause="An empty part has the maximum -inf, and -inf - -inf is NaN.",
        failure=r"parts of 0 and 0 tokens: expected 0\.0000, got nan",
        source="flashinfer-ai/flashinfer#4051",
        fix=(
            (
                "    first = tl.exp(first_max - new_max)\n",
                '    new_max = tl.where(new_max == float("-inf"), 0.0, new_max)\n'
                "    first = tl.exp(first_max - new_max)\n",
            ),
        ),
    ),
)

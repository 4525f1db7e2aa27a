"""The room of scores: what a softmax must count, and what it must not (chapter 12)."""

from pagedlab import tl, triton
from pagedlab.attention import paged_attention
from pagedlab.museum import runs
from pagedlab.museum.checks import check_attention
from pagedlab.museum.exhibit import Exhibit
from pagedlab.museum.launchers import attention_with


@triton.jit
def careless_load_kernel(
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
    token_in_block = tl.arange(0, BLOCK_SIZE)
    KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    head_offset = q_head // GROUP_SIZE * HEAD_DIM + lane
    in_block = token_in_block[:, None] * KV_DIM + head_offset[None, :]
    running_max, d, acc = float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for logical_block in range((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE):
        physical_block = tl.load(row_ptr + logical_block).to(tl.int64)
        alive = logical_block * BLOCK_SIZE + token_in_block < seq_len
        k_ptrs = cache_ptr + 2 * BLOCK_SIZE * KV_DIM * physical_block + in_block
        k = tl.load(k_ptrs, mask=alive[:, None], other=0.0)
        v = tl.load(k_ptrs + BLOCK_SIZE * KV_DIM)
        score = tl.sum(q[None, :] * k, 1) * scale
        score = tl.where(alive, score, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 0))
        correction, weight = tl.exp(running_max - new_max), tl.exp(score - new_max)
        d = d * correction + tl.sum(weight, 0)
        acc = acc * correction + tl.sum(weight[:, None] * v, 0)
        running_max = new_max
    tl.store(out_ptr + q_offset, acc / tl.where(seq_len > 0, d, 1.0))


@triton.jit
def polite_padding_kernel(
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
    token_in_block = tl.arange(0, BLOCK_SIZE)
    KV_DIM: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    head_offset = q_head // GROUP_SIZE * HEAD_DIM + lane
    in_block = token_in_block[:, None] * KV_DIM + head_offset[None, :]
    running_max, d, acc = float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for logical_block in range((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE):
        physical_block = tl.load(row_ptr + logical_block).to(tl.int64)
        alive = logical_block * BLOCK_SIZE + token_in_block < seq_len
        k_ptrs = cache_ptr + 2 * BLOCK_SIZE * KV_DIM * physical_block + in_block
        k = tl.load(k_ptrs, mask=alive[:, None], other=0.0)
        v = tl.load(k_ptrs + BLOCK_SIZE * KV_DIM, mask=alive[:, None], other=0.0)
        score = tl.sum(q[None, :] * k, 1) * scale
        score = tl.where(alive, score, 0.0)
        new_max = tl.maximum(running_max, tl.max(score, 0))
        correction, weight = tl.exp(running_max - new_max), tl.exp(score - new_max)
        d = d * correction + tl.sum(weight, 0)
        acc = acc * correction + tl.sum(weight[:, None] * v, 0)
        running_max = new_max
    tl.store(out_ptr + q_offset, acc / tl.where(seq_len > 0, d, 1.0))


@triton.jit
def floored_kernel(
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
    running_max, d, acc = -5e4, 0.0, tl.zeros([HEAD_DIM], tl.float32)
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
    tl.store(out_ptr + q_offset, acc / tl.where(d == 0, 1.0, d))


ROOM = (
    Exhibit(
        id="nan-answer",
        title="All weights are right, and the answer is NaN",
        broken=careless_load_kernel,
        install=attention_with,
        real=paged_attention,
        run=runs.in_a_used_block,
        check=check_attention,
        look="step the kernel to the last block: is `weight` right, is `v`, is their sum?",
        cause="0 times NaN is NaN: a weight of zero does not remove what was loaded.",
        failure=r"row of 5 tokens, query head 0, lane 0: expected -?\d.*, got nan",
        source="vllm-project/vllm#47305",
        fix=(
            (
                "v = tl.load(k_ptrs + BLOCK_SIZE * KV_DIM)",
                "v = tl.load(k_ptrs + BLOCK_SIZE * KV_DIM, mask=alive[:, None], other=0.0)",
            ),
        ),
    ),
    Exhibit(
        id="faded-answer",
        title="A little too quiet",
        broken=polite_padding_kernel,
        install=attention_with,
        real=paged_attention,
        run=runs.of_equal_values,
        check=check_attention,
        look="let all values be 1, so that the answer must be 1; then step to `d` after each block",
        cause="A score of 0 has the weight exp(0 - max): the padding counts in the denominator.",
        failure=r"row of 5 tokens, query head 0, lane 0: expected -?\d\.\d+, got -?\d",
        source="hw-native-sys/simpler#72",
        fix=(
            (
                "score = tl.where(alive, score, 0.0)",
                'score = tl.where(alive, score, float("-inf"))',
            ),
        ),
    ),
    Exhibit(
        id="silent-zeros",
        title="Nothing to say",
        broken=floored_kernel,
        install=attention_with,
        real=paged_attention,
        run=runs.with_low_scores,
        check=check_attention,
        look="step the kernel, and watch `new_max` next to `score`",
        cause="A finite stand-in for minus infinity is too large once every score is below it.",
        failure=r"row of 3 tokens, query head 0, lane 0: expected -?\d\.\d+, got 0\.0000",
        source="flashinfer-ai/flashinfer#4450",
        fix=(
            (
                "running_max, d, acc = -5e4, 0.0,",
                'running_max, d, acc = float("-inf"), 0.0,',
            ),
        ),
    ),
)

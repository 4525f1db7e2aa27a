"""sampling.py's choice of a token for a decode step, without its filters, in two small kernels.

score_kernel finds the best token of each part of the vocabulary, choose_kernel the best of those;
it also readies the next step: the token is its input, one position further on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 1024  # tokens of the vocabulary that one program takes


@triton.jit
def mix(word):
    """sampling._mix, in 32-bit words whose products wrap around."""
    word = (word ^ (word >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def score_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    temperatures_ptr,  # [num_rows] float32, 0: greedy
    seeds_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int32
    scores_ptr,  # [num_rows, num_parts] float64, the best of each part; inf where a logit is NaN
    tokens_ptr,  # [num_rows, num_parts] int32, whose they are
    vocab_size,
    PART: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    temperature = tl.load(temperatures_ptr + row)
    logits_ptr += row.to(tl.int64) * vocab_size
    score = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf"))
    score = tl.where(score == score, score, float("inf")).to(tl.float64)
    if temperature > 0:
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        hashed = mix(mix(mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ position)
        word = mix(mix(hashed ^ token.to(tl.uint32)) + hashed)
        noise = -tl.log(-tl.log((word.to(tl.float64) + 0.5) / 4294967296.0))
        scale = tl.minimum(tl.maximum(temperature, 1e-30), 1e30)  # quotients stay finite
        score = score / scale.to(tl.float64) + noise
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores_ptr + part, tl.max(score, 0))
    tl.store(tokens_ptr + part, tl.program_id(1) * PART + tl.argmax(score, 0))


@triton.jit
def choose_kernel(
    scores_ptr,  # [num_rows, num_parts] float64
    tokens_ptr,  # [num_rows, num_parts] int32
    chosen_ptr,  # [num_rows] int32: the token, -1 where the largest logit is not finite
    inputs_ptr,  # [num_rows] int32: the token as the next step's input
    seq_lens_ptr,  # [num_rows] int32: one more, unless 0
    num_parts,
    PARTS: tl.constexpr,  # num_parts, padded to a power of two
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    mask = part < num_parts
    scores = tl.load(scores_ptr + row * num_parts + part, mask=mask, other=float("-inf"))
    token = tl.load(tokens_ptr + row * num_parts + tl.argmax(scores, 0))
    finite = tl.abs(tl.max(scores, 0)) < float("inf")
    seq_len = tl.load(seq_lens_ptr + row)
    tl.store(chosen_ptr + row, tl.where(finite, token, -1))
    tl.store(inputs_ptr + row, tl.where(finite, token, 0))
    tl.store(seq_lens_ptr + row, tl.where(seq_len > 0, seq_len + 1, seq_len))


def choose(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, chosen: Tensor, rows: tuple[Tensor, Tensor]
) -> None:
    """Write the token of each row into `chosen`, and into `rows` the next step's.

    Args:
        logits: [num_rows, vocab_size], contiguous; a token's position is its row's seq_len.
        temperatures, seeds: float32 and int64 [num_rows], as in Sampling.
        chosen: [num_rows], any kind of integer.
        rows: int32 [num_rows] each, the step's input tokens and seq_lens.
    """
    (num_rows, vocab_size), (inputs, seq_lens) = logits.shape, rows
    num_parts = triton.cdiv(vocab_size, PART)
    scores = temperatures.new_empty(num_rows, num_parts, dtype=torch.float64)
    tokens = inputs.new_empty(num_rows, num_parts)
    parts = (scores, tokens)
    settings = (temperatures, seeds, seq_lens)
    score_kernel[(num_rows, num_parts)](logits, *settings, *parts, vocab_size, PART)
    sizes = (num_parts, triton.next_power_of_2(num_parts))
    choose_kernel[(num_rows,)](*parts, chosen, inputs, seq_lens, *sizes)

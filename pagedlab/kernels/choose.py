"""sampling.py's choice of a token for a decode step, without its filters, in two small kernels.

score_kernel finds the best token of each part of the vocabulary, choose_kernel the best of those;
it also readies the next step: the token is its input, one position further on. sampling.py adds the
noise of a draw in float64, which a GPU does slowly: float32 finds the few tokens of a part that may
be the best, and float64 decides between those.
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
def random_word(seed, position, token):
    """sampling.random_words, a token's 32 random bits."""
    hashed = mix(mix(mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ position)
    return mix(mix(hashed ^ token.to(tl.uint32)) + hashed)


@triton.jit
def rough_gumbel(word):
    """Gumbel noise in float32, within 1e-5: where the word is large, log(1 - d) is a series."""
    d = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) / 4294967296.0
    series = d * (1 + d * (0.5 + d * (1 / 3 + d * 0.25)))
    plain = -tl.log((word.to(tl.float32) + 0.5) / 4294967296.0)
    return -tl.log(tl.where(d < 1 / 64, series, plain))


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
    place = tl.arange(0, PART)
    token = tl.program_id(1) * PART + place
    temperature = tl.load(temperatures_ptr + row)
    logits_ptr += row.to(tl.int64) * vocab_size
    logit = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    best, best_place = tl.max(logit, 0).to(tl.float64), tl.argmax(logit, 0)
    if temperature > 0 and tl.abs(best) < float("inf"):
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        scale = tl.minimum(tl.maximum(temperature, 1e-30), 1e30)  # quotients stay finite
        rough = logit / scale + rough_gumbel(random_word(seed, position, token))
        bound = tl.max(rough, 0)
        bound -= 1e-4 + 1e-6 * tl.abs(bound)
        left = ~(rough < bound)
        best = best * 0 - float("inf")
        for _ in range(tl.sum(left.to(tl.int32), 0)):
            i = tl.argmax(left.to(tl.int32), 0)  # the first that is left
            word = random_word(seed, position, tl.program_id(1) * PART + i)
            noise = -tl.log(-tl.log((word.to(tl.float64) + 0.5) / 4294967296.0))
            one = tl.sum(tl.where(place == i, logit, 0.0), 0)
            score = one.to(tl.float64) / scale.to(tl.float64) + noise
            best_place = tl.where(score > best, i, best_place)
            best = tl.maximum(best, score)
            left = left & (place != i)
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores_ptr + part, best)
    tl.store(tokens_ptr + part, tl.program_id(1) * PART + best_place)


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

"""Choose the next token: greedy, or a draw whose randomness is a hash and not a generator's state.

The noise of a draw is a function of (request seed, position, token id) alone, so a request's text
depends neither on its slot nor on its batch, and a request that was preempted goes on as if nothing
had happened. It is integer tensor arithmetic: the same bits on a CPU, on a GPU, in a graph.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 2**32 - 1
DRAWN_AT_A_TIME = 2**20  # logits, which bounds the memory that a draw takes
INVALID = -1  # in place of a token id, from a row whose largest logit is not finite


class Sampling(NamedTuple):
    """How one request's tokens are chosen; see `check` for the ranges."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # 1: all tokens
    seed: int = 0

    def check(self) -> "Sampling":
        """The same as plain numbers, or ValueError naming the first field out of its range.

        >>> Sampling(top_p=0).check()
        Traceback (most recent call last):
        ValueError: top_p: expected 0 < top_p <= 1, got 0
        """
        for name, kind, legal, expected in (
            ("temperature", Real, lambda x: 0 <= x < torch.inf, "a finite number >= 0"),
            ("top_k", Integral, lambda x: 0 <= x < 2**63, "an integer >= 0"),
            ("top_p", Real, lambda x: 0 < x <= 1, "0 < top_p <= 1"),
            ("seed", Integral, lambda x: 0 <= x < 2**63, "an integer, 0 <= seed < 2**63"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or not legal(value):
                raise ValueError(f"{name}: expected {expected}, got {value!r}")
        return Sampling(float(self.temperature), int(self.top_k), float(self.top_p), int(self.seed))


def random_words(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Hash (seed, position, token id) to 32 random bits, held in int64.

    The three int64 tensors broadcast; seeds are 0..2**63-1, the others 0..2**32-1. The mixer is
    Wellons' `lowbias32` (2018).

    >>> random_words(torch.tensor(1), torch.tensor(2), torch.arange(3)).tolist()
    [8317718, 4092949550, 4024694327]
    """
    row = _mix(_mix(_mix(seeds & WORD) ^ (seeds >> 32)) ^ positions)
    return _mix((_mix(row ^ token_ids) + row) & WORD)


def _mix(word: Tensor) -> Tensor:
    # Neither product leaves int64: a 32-bit word times a factor below 2**31 in magnitude.
    word = (word ^ (word >> 16)) * 0x7FEB352D & WORD
    word = (word ^ (word >> 15)) * (0x846CA68B - 2**32) & WORD
    return word ^ (word >> 16)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float64 [num_rows, vocab_size], for int64 seeds, positions [num_rows].

    The largest of `logits + noise` is a draw from softmax(logits): the Gumbel-max trick.
    """
    token_ids = torch.arange(vocab_size, device=seeds.device)
    words = random_words(seeds[:, None], positions[:, None], token_ids)
    return -torch.log(-torch.log((words.double() + 0.5) / 2**32))


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what top-k, and then top-p, drop; of equal logits the lower token id goes first.

    logits: [num_rows, vocab_size]; top_k: int64 [num_rows], 0 keeps all; top_p: float [num_rows]:
    the fewest likeliest tokens that together reach it stay, at least one; 1 keeps all.

    >>> keep_top(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2]), torch.tensor([1.0])).tolist()
    [[-inf, 2.0, 1.0]]
    """
    ordered, order = logits.sort(descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, len(rank))[:, None]
    probability = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability
    keep &= (before < torch.where(top_p < 1, top_p, torch.inf)[:, None]) | (rank == 0)
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, order, keep), -torch.inf)


def sample(logits: Tensor, sampling: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Choose one token id a row: int64 [num_rows], `INVALID` where the logits are not numbers.

    logits: [num_rows, vocab_size]; positions: the place in its text that each token will take. The
    settings are known on the host, so greedy rows cost no noise and unfiltered ones no sort.

    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), [Sampling()], [5]).tolist()
    [1]
    """
    most = max(1, DRAWN_AT_A_TIME // logits.shape[1])
    if len(sampling) > most and any(s.temperature for s in sampling):
        parts = (slice(start, start + most) for start in range(0, len(sampling), most))
        return torch.cat([sample(logits[i], sampling[i], positions[i]) for i in parts])
    largest, token_ids = logits.max(-1)
    if any(s.temperature for s in sampling):
        temperature, top_k, top_p, seeds = (
            torch.tensor(column, device=logits.device) for column in zip(*sampling, strict=True)
        )
        scale = torch.where(temperature > 0, temperature, 1).double()[:, None]
        scaled = (logits.double() - largest[:, None]) / scale
        if any(s.top_k or s.top_p < 1 for s in sampling):
            scaled = keep_top(scaled, top_k, top_p)
        noise = gumbel(seeds, torch.tensor(positions, device=logits.device), logits.shape[1])
        token_ids = torch.where(temperature > 0, (scaled + noise).argmax(-1), token_ids)
    return torch.where(largest.isfinite(), token_ids, INVALID)

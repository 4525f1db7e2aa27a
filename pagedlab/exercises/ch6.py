"""Exercises of chapter 6: online softmax."""

import math
import random
from collections.abc import Iterator

import numpy as np
import torch

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch4 import device_of, is_kernel, launch

INF = math.inf


def exp(x: float) -> float:
    """math.exp as a GPU has it: infinite where it overflows."""
    return math.exp(x) if x < 700 else INF


# 6.1 ----------------------------------------------------------------------------------------------


def softmax_weights(scores):
    largest = max(scores, default=0)
    exponentials = [math.exp(score - largest) for score in scores]
    return [e / sum(exponentials) for e in exponentials]


def score_cases(rng: random.Random) -> Iterator[tuple]:
    yield ([],)
    yield ([0.0],)
    yield ([1.0, 2.0],)
    yield ([1000.0, 1001.0],)
    yield ([-1000.0, -1001.0, -INF],)
    yield ([0.0, 1000.0],)
    yield ([rng.uniform(-800, -700), rng.uniform(-9, 9), rng.uniform(700, 800)],)
    for _ in range(8):
        scores = [rng.randint(-600, 600) / 64 for _ in range(rng.randint(2, 7))]  # float32 has them
        yield ([*scores, -INF] if rng.random() < 0.5 else scores,)
        offset = rng.choice([-900, 900])
        yield ([score + offset for score in scores],)


def weights_of(scores, subtract) -> list[float]:
    exponentials = [exp(score - subtract) for score in scores]
    total = sum(exponentials)
    return [e / total if total and e < INF else math.nan for e in exponentials]


def largest_size(scores):
    return weights_of(scores, max((abs(s) for s in scores if s > -INF), default=0))


def smallest_subtracted(scores):
    return weights_of(scores, min((s for s in scores if s > -INF), default=0))


def not_normalised(scores):
    return [math.exp(score - max(scores)) for score in scores]


def padding_counted(scores):
    """-inf taken for 0."""
    return softmax_weights([0.0 if score == -INF else score for score in scores])


# 6.2 ----------------------------------------------------------------------------------------------


def absorb_block(running_max, d, acc, scores, values):
    new_max = max(running_max, *scores)
    correction = math.exp(running_max - new_max)
    d, acc = d * correction, acc * correction
    for score, value in zip(scores, values, strict=True):
        if score > -INF:
            d += math.exp(score - new_max)
            acc += math.exp(score - new_max) * value
    return new_max, d, acc


def block_cases(rng: random.Random) -> Iterator[tuple]:
    yield -INF, 0.0, 0.0, [2.0], [3.0]
    for offset in (0, 0, 0, 0, 900, -900):
        for before in (-INF, offset + rng.uniform(-3, -1), offset + rng.uniform(4, 6)):
            started = before > -INF
            d, acc = (rng.uniform(1, 3), rng.uniform(-5, 5)) if started else (0.0, 0.0)
            scores = [offset + rng.uniform(0, 3) for _ in range(4)]
            values = [rng.uniform(-5, 5) for _ in range(4)]
            if rng.random() < 0.5:
                scores[2:], values[2:] = [-INF, -INF], [rng.uniform(-5, 5), math.nan]
            yield before, d, acc, scores, values


def absorbed(
    running_max,
    d,
    acc,
    scores,
    values,
    *,
    d_too=True,
    acc_too=True,
    inverted=False,
    own_max=False,
    shrinks=False,
    multiply_all=False,
):
    """absorb_block, with what a wrong answer mistakes."""
    new_max = max(scores) if shrinks else max(running_max, *scores)
    correction = exp(new_max - running_max if inverted else running_max - new_max)
    correction = 0.0 if running_max == -INF else correction
    d *= correction if d_too else 1
    acc *= correction if acc_too else 1
    for score, value in zip(scores, values, strict=True):
        weight = math.exp(score - (max(scores) if own_max else new_max))
        d += weight
        acc += weight * value if multiply_all or weight else 0
    return new_max, d, acc


# 6.3 ----------------------------------------------------------------------------------------------


def merge(first, second):
    new_max = max(first[0], second[0])
    if new_max == -INF:
        return -INF, 0.0, 0.0
    corrections = [math.exp(part[0] - new_max) for part in (first, second)]
    d, acc = (first[i] * corrections[0] + second[i] * corrections[1] for i in (1, 2))
    return new_max, d, acc


def part_cases(rng: random.Random) -> Iterator[tuple]:
    empty = (-INF, 0.0, 0.0)
    yield empty, empty
    for offset in (0, 0, 0, 900, -900):
        first = offset + rng.uniform(-5, 5), rng.uniform(1, 4), rng.uniform(-9, 9)
        second = offset + rng.uniform(-5, 5), rng.uniform(1, 4), rng.uniform(-9, 9)
        yield first, empty
        yield empty, second
        yield first, second


def merged_without_question(first, second):
    return (-INF, math.nan, math.nan) if first[0] == second[0] == -INF else merge(first, second)


def merged_without_correction(first, second):
    return max(first[0], second[0]), first[1] + second[1], first[2] + second[2]


def second_corrected_only(first, second):
    if second[0] == -INF:
        return first
    correction = exp(second[0] - first[0])
    return first[0], first[1] + second[1] * correction, first[2] + second[2] * correction


def merged_d_uncorrected(first, second):
    new_max, _, acc = merge(first, second)
    return new_max, first[1] + second[1], acc


def merged_as_mean(first, second):
    new_max, d, acc = merge(first, second)
    return new_max, d, acc / d if d else acc


# 6.4 ----------------------------------------------------------------------------------------------


def softmax_mean(scores, v, lengths, block):
    return mean_of_rows(scores, v, lengths)


def mean_of_rows(
    scores, v, lengths, *, padding=None, safe=True, empty=0.0, divide=True, whole=None
) -> np.ndarray:
    """Softmax means in float32; the keywords are what a wrong answer mistakes."""
    means = np.zeros((len(lengths), v.shape[2]), np.float32)
    for row, length in enumerate(lengths):
        s, values = scores[row, :length], v[row, :length]
        if padding is not None:
            rest = -length % padding
            s = np.concatenate([s, np.zeros(rest, np.float32)])
            values = np.concatenate([values, np.zeros((rest, v.shape[2]), np.float32)])
        if length == 0:
            means[row] = empty
            continue
        with np.errstate(all="ignore"):
            weights = np.exp(s - s.max() if safe else s)
            means[row] = weights @ values / (weights.sum() if divide else 1)
        if whole and length % whole:
            means[row] = math.nan
    return means


def launch_softmax_mean(function, scores, v, lengths, block):
    if not is_kernel(function):
        return function(scores, v, lengths, block)
    device = device_of(function)
    means = torch.full((len(lengths), v.shape[2]), math.nan, device=device)
    rows = torch.tensor(lengths, dtype=torch.int32, device=device)
    tensors = [torch.from_numpy(x).to(device) for x in (scores, v)]
    launch(function, (len(lengths),), *tensors, rows, means, v.shape[1], block, v.shape[2])
    return means


def row_cases(rng: random.Random) -> Iterator[tuple]:
    """scores [num_rows, 6] and v [num_rows, 6, 2], NaN beyond the lengths; 4 tokens at a time."""
    for lengths, offset in (
        ([1], 0),
        ([0], 0),
        ([2, 1, 4], 0),
        ([5], 0),
        ([5], 300),
        ([5], -300),
        ([6], -4),
    ):
        scores = np.full((len(lengths), 6), math.nan, np.float32)
        v = np.full((len(lengths), 6, 2), math.nan, np.float32)
        for row, length in enumerate(lengths):
            found = sorted(rng.sample(range(-30, 30), length), reverse=offset < 0)
            scores[row, :length] = np.array(found) / 10 + offset
            for token in range(length):
                v[row, token] = rng.randint(1, 9), rng.randint(1, 9)
        yield scores, v, lengths, 4


def uncorrected_mean(scores, v, lengths, block, *, d_too, acc_too):
    means = np.zeros((len(lengths), v.shape[2]), np.float32)
    for row, length in enumerate(lengths):
        running_max, d, acc = -INF, 0.0, np.zeros(v.shape[2])
        for start in range(0, length, block):
            s = scores[row, start : min(start + block, length)].astype(np.float64)
            new_max = max(running_max, s.max())
            correction, weights = np.exp(running_max - new_max), np.exp(s - new_max)
            d = d * (correction if d_too else 1) + weights.sum()
            acc = acc * (correction if acc_too else 1) + weights @ v[row, start : start + len(s)]
            running_max = new_max
        means[row] = acc / max(d, 1e-30)
    return means


EXERCISES = (
    Exercise(
        "6.1",
        "safe weights",
        softmax_weights,
        score_cases,
        "Subtract the largest score, take exponentials, divide by their sum.",
        (
            Confusion(
                "Exponentials of large scores overflow: subtract the largest score first.",
                lambda scores: weights_of(scores, 0),
            ),
            Confusion(
                "Subtract the largest score; with the smallest it gets worse.", smallest_subtracted
            ),
            Confusion(
                "The largest score, not the largest in size: -1000 is a small one.", largest_size
            ),
            Confusion("The weights must add up to 1: divide by their sum.", not_normalised),
            Confusion(
                "-inf means weight 0. As a score, 0 is not small: e**0 is 1.", padding_counted
            ),
        ),
    ),
    Exercise(
        "6.2",
        "absorb a block",
        absorb_block,
        block_cases,
        "The new maximum is the larger of the old one and the block's; d and acc are corrected by "
        "exp(old - new), then the block's weights are added.",
        (
            Confusion(
                "d was summed relative to the old maximum, too: correct it like acc.",
                lambda *state: absorbed(*state, d_too=False),
            ),
            Confusion(
                "acc was summed relative to the old maximum, too: correct it like d.",
                lambda *state: absorbed(*state, acc_too=False),
            ),
            Confusion(
                "The correction is exp(old - new): it makes smaller what was measured too large.",
                lambda *state: absorbed(*state, inverted=True),
            ),
            Confusion(
                "The block's weights are relative to the new maximum, not to the block's own.",
                lambda *state: absorbed(*state, own_max=True),
            ),
            Confusion(
                "The running maximum never shrinks: take the old one into account.",
                lambda *state: absorbed(*state, shrinks=True),
            ),
            Confusion(
                "Weight 0 times NaN is NaN: leave out the values of tokens that do not count.",
                lambda *state: absorbed(*state, multiply_all=True),
            ),
        ),
    ),
    Exercise(
        "6.3",
        "merge two parts",
        merge,
        part_cases,
        "Both parts are corrected to the common maximum, exp(part's max - new max), then added.",
        (
            Confusion(
                "With two empty parts -inf - -inf is NaN: that case needs a question first.",
                merged_without_question,
            ),
            Confusion(
                "The parts were summed relative to different maxima: correct both first.",
                merged_without_correction,
            ),
            Confusion(
                "The second part may have the larger maximum: then the first needs correcting.",
                second_corrected_only,
            ),
            Confusion("d is corrected like acc.", merged_d_uncorrected),
            Confusion(
                "The division comes at the very end: a state keeps acc undivided.", merged_as_mean
            ),
        ),
    ),
    Exercise(
        "6.4",
        "step your own kernel: the softmax mean",
        softmax_mean,
        row_cases,
        "Mask both loads: scores with -inf, values with 0.0; correct d and acc once per block; "
        "length 0 gives zeros.",
        (
            Confusion(
                "Weight 0 times NaN is NaN: mask the loads of what lies beyond the length.",
                lambda scores, v, lengths, block: mean_of_rows(scores, v, lengths, whole=block),
            ),
            Confusion(
                "A masked score of 0 is a token: use float('-inf') for those beyond the length.",
                lambda scores, v, lengths, block: mean_of_rows(scores, v, lengths, padding=block),
            ),
            Confusion(
                "The exponential of a large score is infinite: subtract the maximum.",
                lambda scores, v, lengths, block: mean_of_rows(scores, v, lengths, safe=False),
            ),
            Confusion(
                "An empty row divides zero by zero.",
                lambda scores, v, lengths, block: mean_of_rows(scores, v, lengths, empty=math.nan),
            ),
            Confusion(
                "The weights must add up to 1: divide acc by d at the end.",
                lambda scores, v, lengths, block: mean_of_rows(scores, v, lengths, divide=False),
            ),
            Confusion(
                "acc must be corrected when the maximum grows.",
                lambda *case: uncorrected_mean(*case, d_too=True, acc_too=False),
            ),
            Confusion(
                "d must be corrected when the maximum grows.",
                lambda *case: uncorrected_mean(*case, d_too=False, acc_too=True),
            ),
        ),
        launch_softmax_mean,
    ),
)

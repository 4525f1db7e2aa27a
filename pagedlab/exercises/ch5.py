"""Exercises of chapter 5: one score."""

import math
import random
from collections.abc import Iterator

import torch

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch4 import device_of, is_kernel, launch

WARP = 32

# 5.1 ----------------------------------------------------------------------------------------------


def add_shuffled_down(values, offset):
    last = len(values) - offset
    return [v + values[lane + offset if lane < last else lane] for lane, v in enumerate(values)]


def shuffle_cases(rng: random.Random) -> Iterator[tuple]:
    for width in (2, 4, 8, 8, 16, 32):
        yield rng.sample(range(1, 100), width), 1
        yield rng.sample(range(1, 100), width), width // 2
        yield rng.sample(range(1, 100), width), 2 ** rng.randrange(width.bit_length() - 1)


def shuffled_up(values, offset):
    return [v + values[lane - offset if lane >= offset else lane] for lane, v in enumerate(values)]


def shuffled_around(values, offset):
    return [v + values[(lane + offset) % len(values)] for lane, v in enumerate(values)]


def no_partner_adds_nothing(values, offset):
    return [v + sum(values[lane + offset : lane + offset + 1]) for lane, v in enumerate(values)]


# 5.2 ----------------------------------------------------------------------------------------------


def lanes_added(lane, offsets):
    added = [lane]
    for offset in offsets:
        added += [other ^ offset for other in added]
    return sorted(added)


def step_cases(rng: random.Random) -> Iterator[tuple]:
    yield 7, []
    yield 0, [1]
    yield 3, [2, 1]
    yield 7, [16, 8, 4, 2, 1]
    for _ in range(12):
        yield rng.randrange(32), rng.sample([16, 8, 4, 2, 1], rng.randint(1, 4))


def partners_alone(lane, offsets):
    return sorted([lane, *(lane ^ offset for offset in offsets)])


def lanes_added_down(lane, offsets):
    added = {lane}
    for offset in offsets:
        added |= {other + offset for other in added if other + offset < WARP}
    return sorted(added)


def lanes_added_around(lane, offsets):
    added = {lane}
    for offset in offsets:
        added |= {(other + offset) % WARP for other in added}
    return sorted(added)


def without_itself(lane, offsets):
    return [other for other in lanes_added(lane, offsets) if other != lane]


# 5.3 ----------------------------------------------------------------------------------------------


def two_step_score(products):
    shared = [sum(products[first : first + WARP]) for first in range(0, len(products), WARP)]
    return shared, sum(shared) / len(products) ** 0.5


def product_cases(rng: random.Random) -> Iterator[tuple]:
    for num_lanes in (16, 32, 64, 80, 96, 128, 256, rng.choice([40, 72, 104])):
        yield ([rng.randint(1, 9) for _ in range(num_lanes)],)


def two_warps_only(products):
    shared, _ = two_step_score(products)
    return shared, sum(shared[:2]) / len(products) ** 0.5


def full_warps_only(products):
    whole = len(products) // WARP * WARP
    shared, _ = two_step_score(products[:whole] or [0])
    return shared[: whole // WARP], sum(shared) / len(products) ** 0.5


def scaled_by_eight(products):
    shared, _ = two_step_score(products)
    return shared, sum(shared) / 8


def not_scaled(products):
    shared, _ = two_step_score(products)
    return shared, float(sum(shared))


def scaled_without_root(products):
    shared, _ = two_step_score(products)
    return shared, sum(shared) / len(products)


# 5.4 ----------------------------------------------------------------------------------------------

PADDING = 9.0  # what lies behind q and behind the last key


def cosine(q, k):
    return [dot(q, row) / math.sqrt(dot(q, q) * dot(row, row)) for row in k]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def launch_cosine(function, q, k):
    if not is_kernel(function):
        return function(q, k)
    device, lanes = device_of(function), lanes_of(q)
    cosines = torch.full((len(k),), math.nan, device=device)
    q_and_more = torch.tensor(padded(q, lanes), device=device)
    k_and_more = torch.tensor(flat_keys(k, lanes), device=device)
    launch(function, (len(k),), q_and_more, k_and_more, cosines, len(q), lanes)
    return cosines


def lanes_of(q: list) -> int:
    return 1 << (len(q) - 1).bit_length()


def padded(values: list, length: int) -> list[float]:
    return [*map(float, values), *[PADDING] * (length - len(values))]


def flat_keys(k: list[list], lanes: int) -> list[float]:
    return padded([x for row in k for x in row], len(k) * lanes + lanes)


def key_cases(rng: random.Random) -> Iterator[tuple]:
    for head_dim in (2, 3, 5, 8, 12):
        numbers = [[rng.choice([-3, -2, -1, 1, 2, 4]) for _ in range(head_dim)] for _ in range(4)]
        yield numbers[0], numbers[1:]


def cosine_of_all_lanes(q, k):
    lanes = lanes_of(q)
    starts = range(0, len(k) * len(q), len(q))
    return cosine(padded(q, lanes), [flat_keys(k, lanes)[i : i + lanes] for i in starts])


def cosine_of_undefined_lanes(q, k):
    return cosine(q, k) if lanes_of(q) == len(q) else [math.nan] * len(k)


def cosine_of_padded_rows(q, k):
    lanes = lanes_of(q)
    starts = range(0, len(k) * lanes, lanes)
    return cosine(q, [flat_keys(k, lanes)[i : i + len(q)] for i in starts])


EXERCISES = (
    Exercise(
        "5.1",
        "one shuffle down",
        add_shuffled_down,
        shuffle_cases,
        "Lane i adds what lane i + offset had before the step, or its own value if there is no "
        "such lane.",
        (
            Confusion(
                "Down means that a lane reads from a higher one: i + offset, not i - offset.",
                shuffled_up,
            ),
            Confusion(
                "A shuffle does not wrap around: a lane with no partner reads itself.",
                shuffled_around,
            ),
            Confusion(
                "That is the butterfly: partners i and i ^ offset exchange.",
                lambda values, offset: [v + values[i ^ offset] for i, v in enumerate(values)],
            ),
            Confusion(
                "A lane with no partner adds its own value; it does not skip the addition.",
                no_partner_adds_nothing,
            ),
            Confusion(
                "offset is a distance, not a lane: everybody read from one lane.",
                lambda values, offset: [v + values[offset] for v in values],
            ),
        ),
    ),
    Exercise(
        "5.2",
        "who has been added?",
        lanes_added,
        step_cases,
        "A step adds the partner's whole sum as it was before; the partner is lane ^ offset.",
        (
            Confusion(
                "A partner brings all that it has added before, not only its own value.",
                partners_alone,
            ),
            Confusion(
                "That is shuffling down; in a butterfly the partner is lane ^ offset.",
                lanes_added_down,
            ),
            Confusion(
                "lane ^ offset flips a bit; it does not add and wrap around.", lanes_added_around
            ),
            Confusion("A lane's own value is part of its sum from the start.", without_itself),
            Confusion("Who is added depends on the lane.", lambda _, o: lanes_added(0, o)),
        ),
    ),
    Exercise(
        "5.3",
        "beyond 64",
        two_step_score,
        product_cases,
        "One sum per warp of 32 lanes, the last perhaps not full; all of them added, and scaled "
        "by the root of the number of lanes.",
        (
            Confusion("There may be more than two warps: add all their sums.", two_warps_only),
            Confusion("The last warp counts, too, when it is not full.", full_warps_only),
            Confusion(
                "8 is the root of 64 only; the scale follows from the lanes.", scaled_by_eight
            ),
            Confusion("The scale is missing.", not_scaled),
            Confusion(
                "The scale is one over the root of the number of lanes.", scaled_without_root
            ),
        ),
    ),
    Exercise(
        "5.4",
        "step your own kernel: the cosine",
        cosine,
        key_cases,
        "Three sums over HEAD_DIM lanes: q * k, q * q and k * k; the others must read as zero.",
        (
            Confusion(
                "Lanes from HEAD_DIM on belong to somebody else: mask them, with 0.0 instead.",
                cosine_of_all_lanes,
            ),
            Confusion(
                "A load without `other` leaves the lanes behind its mask open: ask for 0.0.",
                cosine_of_undefined_lanes,
            ),
            Confusion(
                "Rows of k are HEAD_DIM apart; only the vector is LANES long.",
                cosine_of_padded_rows,
            ),
            Confusion(
                "That is the product alone; divide by both lengths.",
                lambda q, k: [dot(q, r) for r in k],
            ),
            Confusion(
                "A length is the root of the sum of squares.",
                lambda q, k: [dot(q, r) / (dot(q, q) * dot(r, r)) for r in k],
            ),
            Confusion(
                "That is a score: scaled by head_dim, not by the lengths of q and k.",
                lambda q, k: [dot(q, r) / math.sqrt(len(q)) for r in k],
            ),
            Confusion(
                "q has a length, too.", lambda q, k: [dot(q, r) / math.sqrt(dot(r, r)) for r in k]
            ),
        ),
        launch_cosine,
    ),
)

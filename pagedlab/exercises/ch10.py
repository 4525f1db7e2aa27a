"""Exercises of chapter 10: what the article could not run."""

import random
from collections.abc import Iterator
from itertools import pairwise

from pagedlab.exercises import Confusion, Exercise

# 10.1 ---------------------------------------------------------------------------------------------


def racing_places(warp_0, warp_1):
    racing = set()
    for ours, theirs in zip(stretches(warp_0), stretches(warp_1), strict=True):
        for kind, place in ours:
            others = [other for other, its_place in theirs if its_place == place]
            if others and "write" in [kind, *others]:
                racing.add(place)
    return sorted(racing)


def stretches(accesses):
    """What lies between the barriers."""
    ends = [i for i, (kind, _) in enumerate(accesses) if kind == "barrier"]
    return [accesses[a + 1 : b] for a, b in pairwise([-1, *ends, len(accesses)])]


BARRIER = ("barrier", -1)


def race_cases(rng: random.Random) -> Iterator[tuple]:
    yield [("write", 0)], [("read", 0)]
    yield [("read", 0)], [("write", 0)]
    yield [("write", 0)], [("write", 0)]
    yield [("read", 0)], [("read", 0)]
    yield [("write", 0)], [("write", 1)]
    yield [("write", 0), ("read", 0)], [("write", 1), ("read", 1)]
    yield [("write", 0), BARRIER], [BARRIER, ("read", 0)]
    yield [("read", 0), BARRIER, ("write", 1)], [("write", 1), BARRIER, ("read", 0)]
    yield [("read", 3), ("write", 4)], [("write", 3), ("read", 4)]
    yield [("write", 4), ("write", 1)], [("read", 1), ("read", 4)]
    yield [("read", 0), ("write", 0)], [("read", 0)]
    yield [("write", 0), ("read", 0)], [("read", 0)]
    yield [("write", 0), ("read", 0)], [("write", 0)]
    yield [("write", 0), BARRIER, ("read", 0)], [("read", 0), BARRIER, ("read", 0)]
    for _ in range(30):
        num_barriers = rng.randint(0, 3)
        yield tuple(random_accesses(rng, num_barriers) for _ in range(2))


def random_accesses(rng: random.Random, num_barriers: int) -> list[tuple[str, int]]:
    accesses = []
    for stretch in range(num_barriers + 1):
        accesses += [BARRIER] * (stretch > 0)
        for _ in range(rng.randint(0, 2)):
            accesses.append((rng.choice(["read", "write"]), rng.randrange(5)))
    return accesses


def without_barriers(warp_0, warp_1):
    return racing_places(*([a for a in warp if a[0] != "barrier"] for warp in (warp_0, warp_1)))


def two_reads_race(warp_0, warp_1):
    return racing_places(*([("write", p) if k == "read" else (k, p) for k, p in warp]
                           for warp in (warp_0, warp_1)))  # fmt: skip


def only_both_write(warp_0, warp_1):
    return racing_places(*([a for a in warp if a[0] != "read"] for warp in (warp_0, warp_1)))


def only_read_after_write(warp_0, warp_1):
    return racing_places(warp_0, [a for a in warp_1 if a[0] != "write"])


def also_alone(warp_0, warp_1):
    alone = [racing_places(warp, warp) for warp in (warp_0, warp_1)]
    return sorted({*racing_places(warp_0, warp_1), *alone[0], *alone[1]})


# 10.2 ---------------------------------------------------------------------------------------------


def int32_bytes(block_bytes, num_blocks):
    last = (num_blocks - 1) * block_bytes
    wrapped = (last + 2**31) % 2**32 - 2**31
    num_right = min(num_blocks, (2**31 - 1) // block_bytes + 1)
    return wrapped, num_blocks - num_right


def int32_cases(rng: random.Random) -> Iterator[tuple]:
    yield 32_768, 1
    yield 32_768, 65_536
    yield 32_768, 65_537
    yield 32_768, 131_072
    yield 32_768, 300_000
    yield 98_304, 21_845
    yield 98_304, 21_847
    for _ in range(25):
        block_bytes = rng.choice([3, 5, 8, 12]) * 2 ** rng.randint(10, 15)
        fits = 2**31 // block_bytes
        yield block_bytes, rng.choice([rng.randint(1, fits), fits + rng.randint(1, 4 * fits)])


def in_64_bits(block_bytes, num_blocks):
    return (num_blocks - 1) * block_bytes, int32_bytes(block_bytes, num_blocks)[1]


def unsigned(block_bytes, num_blocks):
    wrapped, wrong = int32_bytes(block_bytes, num_blocks)
    return wrapped % 2**32, wrong


def stays_at_the_largest(block_bytes, num_blocks):
    last = (num_blocks - 1) * block_bytes
    return min(last, 2**31 - 1), int32_bytes(block_bytes, num_blocks)[1]


def last_plus_one(block_bytes, num_blocks):
    wrong = int32_bytes(block_bytes, num_blocks)[1]
    return int32_bytes(block_bytes, num_blocks + 1)[0], wrong


def counts_ends(block_bytes, num_blocks):
    right = min(num_blocks, (2**31 - 1) // block_bytes)
    return int32_bytes(block_bytes, num_blocks)[0], num_blocks - right


# 10.3 ---------------------------------------------------------------------------------------------


class Index:
    """A table index to be judged; called as index(slot, layer, logical_block, layers, blocks)."""

    def __init__(self, formula: str) -> None:
        self.formula = formula

    def __call__(self, slot, layer, logical_block, num_layers, max_blocks):
        s, l, b, L, M = slot, layer, logical_block, num_layers, max_blocks  # noqa: E741
        return eval(self.formula, {"s": s, "l": l, "b": b, "L": L, "M": M})

    def __repr__(self) -> str:
        return f"a function that gives {self.formula}"


RIGHT = ("s * L * M + l * M + b", "(s * L + l) * M + b", "b + M * (l + L * s)")
WRONG = (
    "s * L * M + l * L + b",  # seen only where L and M differ
    "s * M * M + l * M + b",
    "s * 16 * M + l * M + b",  # seen only where there are not 16 layers
    "s * L * 128 + l * 128 + b",  # ... not 128 blocks
    "s * L * M + l * M",  # ... a logical block other than 0
    "l * M + b",  # ... a slot other than 0
    "s * L * M + b",  # ... a layer other than 0
    "(l * 2 + s) * M + b",  # each entry has a place of its own, but another one
    "s * L * M + b * L + l",
    "s * L * M + l * M + b + (s > 1)",  # ... a third slot
    "(l * L + s) * M + b",  # ... a slot and a layer that differ
)


def is_right(index):
    expected = 0
    for slot in range(3):
        for layer in range(5):
            for logical_block in range(7):
                if index(slot, layer, logical_block, 5, 7) != expected:
                    return False
                expected += 1
    return True


def index_cases(rng: random.Random) -> Iterator[tuple]:
    formulas = [*RIGHT, *WRONG]
    rng.shuffle(formulas)
    for formula in formulas:
        yield (Index(formula),)


def agrees(index, num_slots, num_layers, max_blocks, layers=(), blocks=()):
    return all(
        index(s, l, b, num_layers, max_blocks) == (s * num_layers + l) * max_blocks + b
        for s in range(num_slots)
        for l in layers or range(num_layers)  # noqa: E741
        for b in blocks or range(max_blocks)
    )


def at_the_articles_sizes(index):
    return agrees(index, 2, 16, 128)


def with_equal_sizes(index):
    return agrees(index, 4, 4, 4)


def in_slot_zero(index):
    return agrees(index, 1, 5, 7)


def in_layer_zero(index):
    return agrees(index, 3, 5, 7, layers=(0,))


def no_two_alike(index):
    places = {index(s, l, b, 5, 7) for s in range(2) for l in range(5) for b in range(7)}  # noqa: E741
    return len(places) == 2 * 5 * 7


# 10.4 ---------------------------------------------------------------------------------------------


def copied_bytes(table_shape, block_size, prompt_len, num_steps):
    num_slots, num_layers, max_blocks = table_shape
    whole_table = 4 * num_slots * num_layers * max_blocks
    num_copies = 1 + num_layers * num_steps + 1
    logical_blocks = -(-(prompt_len + num_steps) // block_size)
    changed_entries = 2 * logical_blocks * num_layers
    return num_copies * whole_table, 4 * changed_entries


def copy_cases(rng: random.Random) -> Iterator[tuple]:
    yield (1, 1, 1), 4, 1, 0
    yield (2, 3, 5), 4, 4, 1
    yield (2, 3, 5), 4, 5, 3
    for _ in range(25):
        num_slots, num_layers = rng.sample(range(2, 12), 2)
        shape = num_slots, num_layers, rng.randint(12, 20)
        yield shape, rng.choice([4, 8, 16]), rng.randint(1, 30), rng.randint(1, 18)


def once_a_step(shape, block_size, prompt_len, num_steps):
    right = copied_bytes(shape, block_size, prompt_len, num_steps)
    copies = right[0] // (1 + shape[1] * num_steps + 1)
    return copies * (1 + num_steps + 1), right[1]


def only_the_steps(shape, block_size, prompt_len, num_steps):
    right = copied_bytes(shape, block_size, prompt_len, num_steps)
    return right[0] // (shape[1] * num_steps + 2) * shape[1] * num_steps, right[1]


def entries_for_bytes(*arguments):
    return tuple(value // 4 for value in copied_bytes(*arguments))


def without_the_release(*arguments):
    whole, changed = copied_bytes(*arguments)
    return whole, changed // 2


def one_layers_blocks(shape, *arguments):
    whole, changed = copied_bytes(shape, *arguments)
    return whole, changed // shape[1]


def whole_blocks_only(shape, block_size, prompt_len, num_steps):
    whole, _ = copied_bytes(shape, block_size, prompt_len, num_steps)
    return whole, 8 * ((prompt_len + num_steps) // block_size) * shape[1]


EXERCISES = (
    Exercise(
        "10.1",
        "a race detector",
        racing_places,
        race_cases,
        "Cut both lists at the barriers. Within a stretch, a place that both warps touch races if "
        "at least one of them writes it.",
        (
            Confusion("What a barrier separates cannot race.", without_barriers),
            Confusion("Two reads do not disturb each other: one must write.", two_reads_race),
            Confusion("A read beside a write races as well.", only_both_write),
            Confusion("Warp 1 may be the one that writes.", only_read_after_write),
            Confusion("A warp's own accesses come in order: it takes both for a race.", also_alone),
        ),
    ),
    Exercise(
        "10.2",
        "in 32 bits",
        int32_bytes,
        int32_cases,
        "An int32 goes from -2**31 to 2**31 - 1, and what leaves it at the top comes back at the "
        "bottom. A block is wrong if the byte at which it starts does not fit.",
        (
            Confusion("Python's integers do not wrap; an int32 does.", in_64_bits),
            Confusion("An int32 has a sign: from 2**31 on it is negative.", unsigned),
            Confusion("It wraps; it does not stop at the largest number.", stays_at_the_largest),
            Confusion("Blocks count from 0: the last is num_blocks - 1.", last_plus_one),
            Confusion("Where a block starts must fit, not where it ends.", counts_ends),
        ),
    ),
    Exercise(
        "10.3",
        "choose the sizes",
        is_right,
        index_cases,
        "Compare every entry of a small table with its number in order, at sizes that differ from "
        "each other and from the article's.",
        (
            Confusion(
                "At the article's sizes a constant 16 or 128 looks right: choose others.",
                at_the_articles_sizes,
            ),
            Confusion("With equal sizes a mix-up of two is not seen.", with_equal_sizes),
            Confusion("Slot 0 alone does not show a slot that is left out.", in_slot_zero),
            Confusion("Layer 0 alone does not show a layer that is left out.", in_layer_zero),
            Confusion(
                "A place of its own for each entry is not enough: it must be the right one.",
                no_two_alike,
            ),
        ),
    ),
    Exercise(
        "10.4",
        "what is copied",
        copied_bytes,
        copy_cases,
        "The whole table goes once after prefill, once a layer and step, and once after the "
        "release. Changed are a block's entries when it is given and when it is taken back.",
        (
            Confusion("The engine copies at every layer of a step.", once_a_step),
            Confusion(
                "Prefill and release copy the table as well, once each.",
                only_the_steps,
            ),
            Confusion("An entry has four bytes.", entries_for_bytes),
            Confusion("The release changes each entry again, to -1.", without_the_release),
            Confusion("Each layer has blocks of its own.", one_layers_blocks),
            Confusion("A block that is begun is assigned: round up.", whole_blocks_only),
        ),
    ),
)

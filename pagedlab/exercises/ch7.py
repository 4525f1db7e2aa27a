"""Exercises of chapter 7: block recycling."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch2 import random_table

# 7.1 ----------------------------------------------------------------------------------------------


class MyPool:
    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks))
        self.owned = set()

    def allocate(self, n):
        if n > len(self.free_blocks):
            raise ValueError("not enough free blocks")
        blocks = [self.free_blocks.pop() for _ in range(n)]
        self.owned.update(blocks)
        return blocks

    def release(self, blocks):
        if len(set(blocks)) < len(blocks) or not self.owned.issuperset(blocks):
            raise ValueError("not allocated")
        self.owned.difference_update(blocks)
        self.free_blocks.extend(blocks)


def run_pool(pool_class: Callable, num_blocks: int, operations: list) -> list:
    """What each operation gave: blocks, "done", or "refused" where it raised ValueError."""
    pool, results = pool_class(num_blocks), []
    for name, argument in operations:
        try:
            result = getattr(pool, name)(argument)
            results.append(result if name == "allocate" else "done")
        except ValueError:
            results.append("refused")
    return results


def pool_cases(rng: random.Random) -> Iterator[tuple]:
    yield 2, [("allocate", 2), ("allocate", 1), ("release", [0, 1]), ("allocate", 2)]
    yield 2, [("allocate", 3), ("allocate", 2)]
    yield 3, [("allocate", 1), ("release", [2]), ("release", [2]), ("allocate", 3)]
    yield 3, [("allocate", 2), ("release", [1, 1]), ("allocate", 1), ("allocate", 1)]
    yield 3, [("allocate", 2), ("release", [1, 0]), ("allocate", 1), ("allocate", 1)]
    yield 2, [("release", [5]), ("allocate", 2), ("release", [0]), ("release", [-1])]
    for _ in range(12):
        yield random_operations(rng, rng.randint(3, 7))


def random_operations(rng: random.Random, num_blocks: int) -> tuple[int, list]:
    pool, operations = MyPool(num_blocks), []
    for _ in range(8):
        operation: tuple[str, Any]
        if rng.random() < 0.5:
            operation = "allocate", rng.randint(0, 3)
        else:
            owned = rng.sample(sorted(pool.owned), min(len(pool.owned), rng.randint(1, 2)))
            wrong = [rng.randrange(-1, num_blocks + 1)] if rng.random() < 0.4 else []
            operation = "release", owned + wrong
        operations.append(operation)
        run_pool(lambda _, pool=pool: pool, num_blocks, [operation])
    return num_blocks, operations


class QueuePool(MyPool):
    def allocate(self, n):
        self.free_blocks.reverse()
        try:
            return super().allocate(n)
        finally:
            self.free_blocks.reverse()


class TakesWhatIsThere(MyPool):
    def allocate(self, n):
        return super().allocate(min(n, len(self.free_blocks)))


class LosesOnRefusal(MyPool):
    def allocate(self, n):
        if n > len(self.free_blocks):
            self.free_blocks.clear()
        return super().allocate(n)


class TakesAnyRelease(MyPool):
    def release(self, blocks):
        self.owned.difference_update(blocks)
        self.free_blocks.extend(blocks)


class ReleasesHalf(MyPool):
    def release(self, blocks):
        for block in blocks:
            super().release([block])


class KnowsOnlyTheRange(MyPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.all_blocks = set(range(num_blocks))

    def release(self, blocks):
        if not self.all_blocks.issuperset(blocks):
            raise ValueError("no such block")
        self.owned.difference_update(blocks)
        self.free_blocks.extend(blocks)


# 7.2 ----------------------------------------------------------------------------------------------


def release_slot(table, slot, free_blocks):
    _, num_layers, max_blocks_per_seq = table.shape
    for layer in range(num_layers):
        for logical_block in range(max_blocks_per_seq):
            if table[slot, layer, logical_block] != -1:
                free_blocks.append(int(table[slot, layer, logical_block]))
                table[slot, layer, logical_block] = -1


def release_and_look(function: Callable, table, slot, free_blocks) -> dict:
    function(table, slot, free_blocks)
    return {"free_blocks": free_blocks, "table": table}


def release_cases(rng: random.Random) -> Iterator[tuple]:
    yield np.array([[[3, 0, -1], [5, 1, -1]], [[2, -1, -1], [4, -1, -1]]], np.int32), 0, [6]
    for shape in [(2, 3, 4)] * 12:
        table = random_table(rng, *shape)
        slot = rng.randrange(2)
        if rng.random() < 0.3:
            table[slot] = -1
        owned = set(table[table >= 0].tolist())
        free = [block for block in range(40) if block not in owned]
        yield table, slot, rng.sample(free, 3)


def release_minus_one_too(table, slot, free_blocks):
    free_blocks.extend(table[slot].reshape(-1).tolist())
    table[slot] = -1


def release_without_reset(table, slot, free_blocks):
    release_slot(table.copy(), slot, free_blocks)


def release_layer_zero(table, slot, free_blocks):
    release_slot(table[:, :1], slot, free_blocks)


def release_all_slots(table, slot, free_blocks):
    for every in range(len(table)):
        release_slot(table, every, free_blocks)


def release_by_block_first(table, slot, free_blocks):
    release_slot(np.swapaxes(table, 1, 2), slot, free_blocks)


def release_until_zero(table, slot, free_blocks):
    kept = table[slot] == 0
    release_slot(table, slot, free_blocks)
    table[slot][kept] = 0
    free_blocks[:] = [block for block in free_blocks if block != 0 or not kept.any()]


def release_to_zero(table, slot, free_blocks):
    release_slot(table, slot, free_blocks)
    table[slot] = 0


# 7.3 ----------------------------------------------------------------------------------------------


def who_must_go(running, num_needed, num_free):
    preempted = []
    while num_free < num_needed:
        if len(preempted) == len(running) - 1:
            return None
        request, num_blocks = running[-1 - len(preempted)]
        preempted.append(request)
        num_free += num_blocks
    return preempted


def preemption_cases(rng: random.Random) -> Iterator[tuple]:
    yield [("A", 3)], 1, 1
    yield [("A", 3)], 1, 0
    yield [("A", 1), ("B", 1), ("C", 2)], 3, 1
    yield [("A", 1), ("B", 1), ("C", 2)], 4, 2
    for _ in range(24):
        names = "ABCDE"[: rng.randint(2, 5)]
        running = [(name, rng.randint(1, 6)) for name in names]
        younger, num_free = [n for _, n in running[1:]], rng.randint(0, 2)
        exact = num_free + sum(younger[-rng.randint(1, len(younger)) :])
        yield running, rng.choice([num_free, num_free + 1, exact, exact + 1]), num_free


def oldest_must_go(running, num_needed, num_free):
    first, *younger = running
    return who_must_go([first, *younger[::-1]], num_needed, num_free)


def free_ones_forgotten(running, num_needed, num_free):
    return who_must_go(running, num_needed, 0) if num_needed > num_free else []


def one_more_to_be_sure(running, num_needed, num_free):
    return who_must_go(running, num_needed + 1, num_free) if num_needed > num_free else []


def only_the_youngest(running, num_needed, num_free):
    if num_free >= num_needed:
        return []
    return [running[-1][0]] if len(running) > 1 else None


def itself_as_well(running, num_needed, num_free):
    return who_must_go([(None, 0), *running], num_needed, num_free)


def largest_must_go(running, num_needed, num_free):
    first, *younger = running
    younger = sorted(younger, key=lambda request: request[1])
    return who_must_go([first, *younger], num_needed, num_free)


EXERCISES = (
    Exercise(
        "7.1",
        "your own pool",
        MyPool,
        pool_cases,
        "Take from the end of the list, put back at the end, and refuse before anything changes.",
        (
            Confusion("The block released last is handed out first: take from the end.", QueuePool),
            Confusion("Asked for more than there is, refuse: all or none.", TakesWhatIsThere),
            Confusion(
                "A refused allocation must leave the free blocks as they were.", LosesOnRefusal
            ),
            Confusion(
                "Release only what is allocated: a block released twice gets two owners.",
                TakesAnyRelease,
            ),
            Confusion(
                "Check all blocks before the first is released: a refused call changes nothing.",
                ReleasesHalf,
            ),
            Confusion(
                "A block that exists need not be allocated: keep account of who is out.",
                KnowsOnlyTheRange,
            ),
        ),
        run_pool,
    ),
    Exercise(
        "7.2",
        "release a slot",
        release_slot,
        release_cases,
        "Every layer, every logical block: push what is not -1, then set it to -1.",
        (
            Confusion("-1 is not a block: do not push it.", release_minus_one_too),
            Confusion(
                "The entries must become -1, or the table points at blocks that are free.",
                release_without_reset,
            ),
            Confusion("Every layer owns blocks, not only layer 0.", release_layer_zero),
            Confusion("Only this slot has finished.", release_all_slots),
            Confusion(
                "Layer by layer, and in each layer in logical order.", release_by_block_first
            ),
            Confusion("0 is a block like any other; only -1 is none.", release_until_zero),
            Confusion("Unassigned is -1; 0 would point at somebody's block.", release_to_zero),
        ),
        release_and_look,
    ),
    Exercise(
        "7.3",
        "who must go?",
        who_must_go,
        preemption_cases,
        "The youngest goes first, one after another until the blocks suffice; the oldest stays. "
        "If all the others do not suffice, return None.",
        (
            Confusion("The youngest goes first: the oldest has waited longest.", oldest_must_go),
            Confusion("The blocks that are free already count.", free_ones_forgotten),
            Confusion("Stop as soon as the blocks suffice.", one_more_to_be_sure),
            Confusion("One may not be enough: go on until it is.", only_the_youngest),
            Confusion("The one that needs the blocks cannot make room itself.", itself_as_well),
            Confusion("Age decides, not size.", largest_must_go),
        ),
    ),
)

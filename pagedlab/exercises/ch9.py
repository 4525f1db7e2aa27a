"""Exercises of chapter 9: many sequences."""

import random
from collections.abc import Iterator

from pagedlab.exercises import Confusion, Exercise

# 9.1 ----------------------------------------------------------------------------------------------


def continuous_steps(answer_lens, num_slots):
    waiting, running, steps = list(answer_lens), [], 0
    while waiting or running:
        while waiting and len(running) < num_slots:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


def arrival_cases(rng: random.Random) -> Iterator[tuple]:
    yield [], 2
    yield [3], 2
    yield [1, 1, 1], 1
    yield [2, 5, 1], 2
    yield [2, 3, 3, 6], 2
    for _ in range(24):
        yield [rng.randint(1, 12) for _ in range(rng.randint(4, 9))], rng.randint(2, 4)


def steps_of_groups(answer_lens, num_slots):
    starts = range(0, len(answer_lens), num_slots)
    return sum(max(answer_lens[start : start + num_slots]) for start in starts)


def steps_without_gaps(answer_lens, num_slots):
    return max([-(-sum(answer_lens) // num_slots), *answer_lens])


def steps_one_by_one(answer_lens, num_slots):
    return sum(answer_lens)


def steps_of_the_longest(answer_lens, num_slots):
    return max(answer_lens, default=0)


def steps_longest_first(answer_lens, num_slots):
    return continuous_steps(sorted(answer_lens, reverse=True), num_slots)


def steps_by_turns(answer_lens, num_slots):
    return max(sum(answer_lens[slot::num_slots]) for slot in range(num_slots))


def refilled_a_step_late(answer_lens, num_slots):
    waiting, running, steps = list(answer_lens), [], 0
    while waiting or running:
        admitted = [waiting.pop(0) for _ in range(min(len(waiting), num_slots - len(running)))]
        running = [left - 1 for left in running] + admitted
        running = [left for left in running if left > 0]
        steps += 1
    return steps


# 9.2 ----------------------------------------------------------------------------------------------


def batch_of(slots):
    rows = sorted((entry[0], slot, entry[1]) for slot, entry in enumerate(slots) if entry)
    active_slots = [slot for _, slot, _ in rows]
    seq_lens = [num_tokens for _, _, num_tokens in rows]
    return active_slots, seq_lens, [seq_len - 1 for seq_len in seq_lens]


def slot_cases(rng: random.Random) -> Iterator[tuple]:
    yield ([None, None],)
    yield ([None, (0, 1)],)
    yield ([(2, 17), None, (1, 16)],)
    for _ in range(24):
        lengths = [rng.choice([1, 15, 16, 17, 40]) for _ in range(5)]
        slots: list[tuple[int, int] | None] = [*enumerate(lengths)]
        slots[rng.randrange(4)] = None
        rng.shuffle(slots)
        yield (slots,)


def rows_as_slots(slots):
    active_slots, *rest = batch_of(slots)
    return list(range(len(active_slots))), *rest


def requests_as_slots(slots):
    _, *rest = batch_of(slots)
    return sorted(entry[0] for entry in slots if entry), *rest


def rows_in_slot_order(slots):
    in_order = [entry and (slot, entry[1]) for slot, entry in enumerate(slots)]
    return batch_of(in_order)


def new_token_not_counted(slots):
    active_slots, _, positions = batch_of(slots)
    return active_slots, positions, positions


def position_is_the_length(slots):
    active_slots, seq_lens, _ = batch_of(slots)
    return active_slots, seq_lens, seq_lens


def empty_slots_as_rows(slots):
    return batch_of([entry or (99 + slot, 0) for slot, entry in enumerate(slots)])


# 9.3 ----------------------------------------------------------------------------------------------


def grow_or_go(seq_lens, owned, free_blocks, block_size):
    preempted = []
    for i, seq_len in enumerate(seq_lens):
        while i < len(owned) and len(owned[i]) * block_size < seq_len:
            if free_blocks:
                owned[i].append(free_blocks.pop())
            else:
                free_blocks += owned.pop()
                preempted.insert(0, len(owned))
    return owned, preempted, free_blocks


def growth_cases(rng: random.Random) -> Iterator[tuple]:
    yield [], [], [3], 8
    yield [8], [[0]], [3], 8
    yield [8], [[0]], [], 8
    yield [9, 8], [[0], [1]], [3, 2], 8
    yield [9, 5], [[0], [1]], [], 8
    yield [9], [[0]], [], 8
    yield [3, 9], [[2], [0]], [], 8
    yield [9, 20, 3, 8], [[0], [1, 2, 3], [5], [4]], [], 8
    yield [9, 9, 9], [[0], [1], [2]], [], 8
    for _ in range(24):
        block_size, blocks = rng.choice([4, 8]), rng.sample(range(20), 20)
        counts = [rng.randint(1, 3) for _ in range(rng.randint(2, 5))]
        seq_lens = [count * block_size + rng.choice([-1, 0, 1, 1]) for count in counts]
        owned = [[blocks.pop() for _ in range(count)] for count in counts]
        yield seq_lens, owned, blocks[: rng.randint(0, 2)], block_size


def block_taken_when_full(seq_lens, owned, free_blocks, block_size):
    return grow_or_go([seq_len + 1 for seq_len in seq_lens], owned, free_blocks, block_size)


def grown_by_earlier_tokens(seq_lens, owned, free_blocks, block_size):
    return grow_or_go([seq_len - 1 for seq_len in seq_lens], owned, free_blocks, block_size)


def oldest_goes(seq_lens, owned, free_blocks, block_size):
    waiting, preempted = list(range(len(owned))), []
    for i, seq_len in enumerate(seq_lens):
        while i in waiting and len(owned[i]) * block_size < seq_len:
            if free_blocks:
                owned[i].append(free_blocks.pop())
            else:
                preempted.append(waiting.pop(0))
                free_blocks += owned[preempted[-1]]
    return [owned[i] for i in waiting], preempted, free_blocks


def asker_goes(seq_lens, owned, free_blocks, block_size):
    running, preempted = [], []
    for i, seq_len in enumerate(seq_lens):
        if len(owned[i]) * block_size < seq_len and not free_blocks:
            preempted.append(i)
            free_blocks += owned[i]
            continue
        if len(owned[i]) * block_size < seq_len:
            owned[i].append(free_blocks.pop())
        running.append(owned[i])
    return running, preempted, free_blocks


def row_kept(seq_lens, owned, free_blocks, block_size):
    before = [list(blocks) for blocks in owned]
    owned, preempted, free_blocks = grow_or_go(seq_lens, owned, free_blocks, block_size)
    return owned + before[len(owned) :], preempted, free_blocks


def released_twice(seq_lens, owned, free_blocks, block_size):
    owned, preempted = list(owned), []
    for i, seq_len in enumerate(seq_lens):
        while i < len(owned) and len(owned[i]) * block_size < seq_len:
            if free_blocks:
                owned[i].append(free_blocks.pop())
            else:
                free_blocks += 2 * owned.pop()
                preempted.insert(0, len(owned))
    return owned, preempted, free_blocks


def youngest_waits_last(seq_lens, owned, free_blocks, block_size):
    owned, preempted, free_blocks = grow_or_go(seq_lens, owned, free_blocks, block_size)
    return owned, preempted[::-1], free_blocks


def taken_from_the_front(seq_lens, owned, free_blocks, block_size):
    owned, preempted = list(owned), []
    for i, seq_len in enumerate(seq_lens):
        while i < len(owned) and len(owned[i]) * block_size < seq_len:
            if free_blocks:
                owned[i].append(free_blocks.pop(0))
            else:
                free_blocks += owned.pop()
                preempted.insert(0, len(owned))
    return owned, preempted, free_blocks


# 9.4 ----------------------------------------------------------------------------------------------


def draw(logits, temperature, noise, num_tokens):
    if temperature == 0:
        return logits.index(max(logits))
    sums = [x / temperature + extra for x, extra in zip(logits, noise[num_tokens], strict=True)]
    return sums.index(max(sums))


def draw_cases(rng: random.Random) -> Iterator[tuple]:
    yield [1.0, 3.0, 3.0], 0, [[0.0, 0.0, 9.0]] * 3, 1
    for _ in range(40):
        logits = [round(rng.gauss(0, 1), 1) for _ in range(5)]
        noise = [[round(rng.gauss(0, 1.3), 1) for _ in range(5)] for _ in range(4)]
        yield logits, rng.choice([0, 0.25, 0.5, 2.0]), noise, rng.randint(1, 3)


def noise_divided_too(logits, temperature, noise, num_tokens):
    if temperature == 0:
        return draw(logits, 0, noise, num_tokens)
    return draw(logits, 1, noise, num_tokens)


def noise_of_the_last_token(logits, temperature, noise, num_tokens):
    return draw(logits, temperature, noise, num_tokens - 1)


def temperature_multiplied(logits, temperature, noise, num_tokens):
    return draw(logits, temperature and 1 / temperature, noise, num_tokens)


def always_the_largest(logits, temperature, noise, num_tokens):
    return logits.index(max(logits))


def zero_taken_for_one(logits, temperature, noise, num_tokens):
    return draw(logits, temperature or 1, noise, num_tokens)


def one_noise_for_all(logits, temperature, noise, num_tokens):
    return draw(logits, temperature, noise, 0)


EXERCISES = (
    Exercise(
        "9.1",
        "how many steps?",
        continuous_steps,
        arrival_cases,
        "Before every step the free slots are filled from the queue; then each running request "
        "gets one token.",
        (
            Confusion(
                "That is a batch that waits: a free slot need not wait for the group's longest.",
                steps_of_groups,
            ),
            Confusion(
                "One answer cannot be cut over two slots: some slots idle at the end.",
                steps_without_gaps,
            ),
            Confusion("The slots run at the same time.", steps_one_by_one),
            Confusion("There are fewer slots than requests: some wait.", steps_of_the_longest),
            Confusion(
                "Nobody knows the lengths beforehand: first come, first served.",
                steps_longest_first,
            ),
            Confusion(
                "Requests have no slot before they run: the first one that is free.",
                steps_by_turns,
            ),
            Confusion(
                "Who was admitted before a step gets a token in that step.", refilled_a_step_late
            ),
        ),
    ),
    Exercise(
        "9.2",
        "from slots to a batch",
        batch_of,
        slot_cases,
        "Rows are the requests that run, oldest first; the slot says where in the table they are.",
        (
            Confusion(
                "The place in the batch is not the slot: keep the slot's own number.",
                rows_as_slots,
            ),
            Confusion("A request's id is not its slot either.", requests_as_slots),
            Confusion("The oldest request comes first, whatever its slot.", rows_in_slot_order),
            Confusion(
                "seq_lens counts the token that is fed, whose K and V are written first.",
                new_token_not_counted,
            ),
            Confusion(
                "Positions count from 0: the last of n tokens is at n - 1.",
                position_is_the_length,
            ),
            Confusion("An empty slot has no row: the batch is compact.", empty_slots_as_rows),
        ),
    ),
    Exercise(
        "9.3",
        "grow or go",
        grow_or_go,
        growth_cases,
        "Oldest first; while a block is missing and none is free, the youngest gives all of its.",
        (
            Confusion(
                "A full block needs no other yet: the token after it does.", block_taken_when_full
            ),
            Confusion(
                "seq_lens counts the new token already, and it needs a place.",
                grown_by_earlier_tokens,
            ),
            Confusion(
                "The youngest goes: it loses least, and the oldest always gets on.", oldest_goes
            ),
            Confusion(
                "Not the one that asks has to go, but the youngest; it may be the same.",
                asker_goes,
            ),
            Confusion(
                "A released block must leave its owner's row, or two sequences use it.", row_kept
            ),
            Confusion(
                "A block released twice will be handed out twice: two owners.", released_twice
            ),
            Confusion("The older of the preempted comes first again.", youngest_waits_last),
            Confusion("Take from the end of free_blocks.", taken_from_the_front),
        ),
    ),
    Exercise(
        "9.4",
        "draw by sums",
        draw,
        draw_cases,
        "The largest of logit / temperature + noise, with the noise of the new token's position; "
        "at temperature 0 the largest logit.",
        (
            Confusion(
                "Only the logits are divided; divide the sum and temperature does nothing.",
                noise_divided_too,
            ),
            Confusion(
                "Positions count from 0: the last token is at num_tokens - 1, the new one at "
                "num_tokens.",
                noise_of_the_last_token,
            ),
            Confusion(
                "A high temperature makes the logits matter less: divide.", temperature_multiplied
            ),
            Confusion("That is greedy at any temperature.", always_the_largest),
            Confusion("Temperature 0 is greedy: no division, no noise.", zero_taken_for_one),
            Confusion("Each position has noise of its own.", one_noise_for_all),
        ),
    ),
)

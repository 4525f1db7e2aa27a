"""Exercises of chapter 12: the bug museum."""

import math
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from pagedlab.exercises import Confusion, Exercise
from pagedlab.exercises.ch1 import random_layout
from pagedlab.exercises.ch2 import random_table
from pagedlab.exercises.ch4 import device_of, is_kernel, launch

INF = math.inf

# 12.1 ---------------------------------------------------------------------------------------------


def kv_addresses(layout, blocks, tokens):
    pairs = zip(blocks, tokens, strict=True)
    return [[f(block, token, 0, 0) for f in (layout.k_address, layout.v_address)]
            for block, token in pairs]  # fmt: skip


def address_cases(rng: random.Random) -> Iterator[tuple]:
    for _ in range(4):
        layout = random_layout(rng)
        border = 2**31 // layout.block_bytes
        for far in (1, border - 1, border, 2 * border + 3):
            blocks = [far + rng.randrange(4), rng.randrange(9)]
            yield layout, blocks, [rng.randrange(1, layout.block_size) for _ in blocks]


def launch_kv_addresses(function, layout, blocks, tokens):
    if not is_kernel(function):
        return function(layout, blocks, tokens)
    device = device_of(function)
    pairs = torch.tensor([blocks, tokens], dtype=torch.int32, device=device)
    out = torch.zeros(len(blocks), 2, dtype=torch.int64, device=device)
    token_bytes = layout.kv_dim * layout.dtype.itemsize
    sizes = layout.block_bytes, layout.v_offset, token_bytes
    launch(function, (len(blocks),), *pairs, out, *sizes)
    return out


def addresses_in(bits: int, *, signed: bool):
    low = 2 ** (bits - 1) if signed else 0

    def wrapped(*case):
        return [[(byte + low) % 2**bits - low for byte in pair] for pair in kv_addresses(*case)]

    return wrapped


def addresses_in_float32(layout, blocks, tokens):
    pairs = kv_addresses(layout, blocks, tokens)
    return [[int(np.float32(byte)) for byte in pair] for pair in pairs]


def v_in_the_next_block(layout, *case):
    return [[k, k + layout.block_bytes] for k, _ in kv_addresses(layout, *case)]


def v_beside_k(layout, *case):
    token_bytes = layout.kv_dim * layout.dtype.itemsize
    return [[k, k + token_bytes] for k, _ in kv_addresses(layout, *case)]


def tokens_forgotten(layout, blocks, tokens):
    return kv_addresses(layout, blocks, [0] * len(tokens))


# 12.2 ---------------------------------------------------------------------------------------------


def wrong_blocks(free_blocks, table, num_blocks):
    places = Counter([*free_blocks, *table[table >= 0].tolist()])
    return [block for block in range(num_blocks) if places[block] != 1]


def owner_cases(rng: random.Random) -> Iterator[tuple]:
    yield [0], np.full((1, 1, 1), -1, np.int32), 1
    for _ in range(24):
        table = random_table(rng, 2, 2, 3)
        num_blocks = 2 * table.size
        owned = table[table >= 0].tolist()
        free = [block for block in range(num_blocks) if block not in owned]
        rng.shuffle(free)
        for fault in rng.sample(range(5), rng.choice([0, 1, 2, 3])):
            if fault == 0:  # released twice
                free.append(rng.choice(free))
            elif fault == 1:  # freed while a table points at it
                free.append(rng.choice(owned))
            elif fault == 2:  # two owners
                table[1, rng.randrange(2), 0] = table[0, 0, 0]
            elif fault == 3:  # lost
                free.remove(rng.choice(free))
            else:  # two entries of one slot
                table[0, 1, 0] = table[0, 0, 0]
        yield free, table, num_blocks
    for twin in (1, 0, 0), (0, 1, 0), (0, 0, 1):  # of another slot, layer, logical block
        table = np.array([[[3, 2, -1], [5, 4, -1]], [[7, 6, -1], [1, 0, -1]]], np.int32)
        table[twin] = table[0, 0, 0]
        yield [8], table, 10  # and block 9 is lost


def more_than_once(free_blocks, table, num_blocks):
    places = Counter([*free_blocks, *table[table >= 0].tolist()])
    return [block for block in range(num_blocks) if places[block] > 1]


def as_sets(free_blocks, table, num_blocks):
    free, owned = set(free_blocks), set(table[table >= 0].tolist())
    return [block for block in range(num_blocks) if (block in free) == (block in owned)]


def free_list_only(free_blocks, table, num_blocks):
    places = Counter(free_blocks)
    return [block for block in range(num_blocks) if places[block] > 1]


def first_layer_only(free_blocks, table, num_blocks):
    return wrong_blocks(free_blocks, table[:, :1], num_blocks)


def minus_one_counted(free_blocks, table, num_blocks):
    wrong = wrong_blocks(free_blocks, table, num_blocks)
    return [-1, *wrong] if (table == -1).sum() != 1 else wrong


def both_free_and_owned(free_blocks, table, num_blocks):
    return sorted(set(free_blocks) & set(table[table >= 0].tolist()))


# 12.3 ---------------------------------------------------------------------------------------------


def merge_means(first, second):
    (first_lse, first_mean), (second_lse, second_mean) = first, second
    if second_lse == -INF:
        return (-INF, [0.0] * len(first_mean)) if first_lse == -INF else first
    if first_lse == -INF:
        return second
    largest = max(first_lse, second_lse)
    weights = [math.exp(lse - largest) for lse in (first_lse, second_lse)]
    total = sum(weights)
    pairs = zip(first_mean, second_mean, strict=True)
    mean = [(a * weights[0] + b * weights[1]) / total for a, b in pairs]
    return largest + math.log(total), mean


def mean_cases(rng: random.Random) -> Iterator[tuple]:
    def part(low, high):  # eighths, which float32 has
        return rng.randint(8 * low, 8 * high) / 8, [rng.randint(-24, 24) / 8 for _ in range(2)]

    def empty():
        return -INF, [rng.choice([0.0, math.nan])] * 2

    yield (-INF, [0.0, 0.0]), (-INF, [0.0, 0.0])
    yield (-INF, [math.nan] * 2), (-INF, [0.0, 0.0])
    yield (-INF, [math.nan] * 2), part(-2, 2)
    yield part(-2, 2), (-INF, [math.nan] * 2)
    yield part(-901, -900), part(900, 901)
    yield part(900, 901), part(-901, -900)
    for _ in range(4):
        yield part(-2, 2), part(-2, 2)
        yield part(900, 901), part(899, 900)
        yield part(-2, 2), empty()
        yield empty(), part(800, 900)


def merged(first, second, *, question=True, largest=None, lse=None, weights=None, multiply=False):
    """merge_means, with what a wrong answer mistakes."""
    lses, means = (first[0], second[0]), (first[1], second[1])
    if lses == (-INF, -INF):
        return (-INF, [0.0] * len(first[1])) if question else (math.nan, [math.nan] * len(first[1]))
    top = max(lses) if largest is None else largest
    with np.errstate(all="ignore"):
        factors = np.exp(np.subtract(lses, top)) if weights is None else np.array(weights)
        total = factors.sum()
        used = [(f, m) for f, m in zip(factors, means, strict=True) if f or multiply]
        mean = sum(f * np.array(m) for f, m in used) / total
        return float(top + np.log(total)) if lse is None else lse(*lses), mean.tolist()


def merged_with_empty_ones(first, second):
    return merged(first, second, multiply=True)


def merged_without_question(first, second):
    return merged(first, second, question=False)


def merged_without_max(first, second):
    return merged(first, second, largest=0.0)


def merged_lse_as_max(first, second):
    return merged(first, second, lse=max)


def merged_half_and_half(first, second):
    if -INF in (first[0], second[0]):
        return merged(first, second)
    lse, _ = merged(first, second)
    return lse, merged(first, second, weights=(0.5, 0.5))[1]


# 12.4 ---------------------------------------------------------------------------------------------


def masked_weights(scores, alive):
    largest = max((s for s, a in zip(scores, alive, strict=True) if a), default=0.0)
    pairs = zip(scores, alive, strict=True)
    weights = [math.exp(s - largest) if a else 0.0 for s, a in pairs]
    return [weight / max(sum(weights), 1e-300) for weight in weights]


def mask_cases(rng: random.Random) -> Iterator[tuple]:
    yield [1.0], [True]
    yield [1.0, 2.0], [False, False]
    yield [math.nan, 1.0], [False, False]
    yield [1.0, 2000.0], [True, False]
    for _ in range(5):
        for offset in (0.0, -60_000.0, -1e30, 500.0):
            n = rng.randint(2, 4)
            scores = [offset + rng.randint(-16, 16) / 8 for _ in range(n)]
            alive = [True, *(rng.random() < 0.5 for _ in range(n - 2)), False]
            rng.shuffle(alive)
            if rng.random() < 0.4:
                scores[alive.index(False)] = math.nan
            yield scores, alive


def softmax(scores) -> list[float]:
    with np.errstate(all="ignore"):
        weights = np.exp(np.array(scores) - np.max(scores))
        return (weights / weights.sum()).tolist()


def filled_with(sentinel: float):
    def weights(scores, alive):
        if not any(alive):
            return [0.0] * len(scores)
        return softmax([s if a else sentinel for s, a in zip(scores, alive, strict=True)])

    return weights


def minus_infinity_added(scores, alive):
    if not any(alive):
        return [0.0] * len(scores)
    return softmax([s + (0 if a else -INF) for s, a in zip(scores, alive, strict=True)])


def masked_afterwards(scores, alive):
    weights = softmax(scores)
    return [w if a else 0.0 for w, a in zip(weights, alive, strict=True)]


def nobody_alive_uniform(scores, alive):
    return masked_weights(scores, alive) if any(alive) else [1 / len(scores)] * len(scores)


def largest_of_all(scores, alive):
    if not any(alive):
        return [0.0] * len(scores)
    weights = [w if a else 0.0 for w, a in zip(relative_to_all(scores), alive, strict=True)]
    return [weight / max(sum(weights), 1e-300) for weight in weights]


def relative_to_all(scores) -> list[float]:
    return [math.exp(s - np.nanmax(scores)) if s == s else 0.0 for s in scores]


def nobody_alive_forgotten(scores, alive):
    return masked_weights(scores, alive) if any(alive) else [math.nan] * len(scores)


# 12.5 ---------------------------------------------------------------------------------------------


def num_reused(ids, known, block_size):
    reused = 0
    while ids[: reused + block_size] in known and reused + block_size <= len(ids):
        reused += block_size
    return min(reused, len(ids) - 1)


def prefix_cases(rng: random.Random) -> Iterator[tuple]:
    yield [0, 0, 1, 1, 0], [[0, 0], [0, 1, 1, 1]], 2
    yield [0, 0, 1, 1, 0, 0, 1], [[0, 0], [0, 0, 1, 1], [0, 1, 1, 1, 0, 0]], 2
    for _ in range(40):
        block_size = rng.choice([2, 3])
        ids = [rng.randrange(2) for _ in range(rng.randint(1, 4 * block_size))]
        if rng.random() < 0.4:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 3) * block_size)]
        ends = range(block_size, len(ids) + block_size, block_size)
        known = [ids[:end] for end in ends if end <= len(ids) and rng.random() < 0.6]
        other = ids[: rng.randrange(len(ids))]  # begins alike, and goes on differently
        other += [rng.randrange(2) for _ in range(len(ids) // block_size * block_size)]
        ends = range(block_size, len(other) + 1, block_size)
        known += [other[:end] for end in ends if rng.random() < 0.6]
        rng.shuffle(known)
        yield ids, [list(text) for text in {tuple(text) for text in known}], block_size


def reused_to_the_last(ids, known, block_size):
    reused = 0
    while ids[: reused + block_size] in known and reused + block_size <= len(ids):
        reused += block_size
    return reused


def reused_over_gaps(ids, known, block_size):
    lengths = [len(text) for text in known if ids[: len(text)] == text]
    return min(max(lengths, default=0), len(ids) - 1)


def reused_in_part(ids, known, block_size):
    same = 0
    for text in known:
        pairs = zip(ids, text, strict=False)
        same = max(
            same, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(text)))
        )
    return min(same, len(ids) - 1)


def reused_by_block_alone(ids, known, block_size):
    blocks, reused = [text[-block_size:] for text in known], 0
    while ids[reused : reused + block_size] in blocks and reused + block_size <= len(ids):
        reused += block_size
    return min(reused, len(ids) - 1)


def reused_without_last_block(ids, known, block_size):
    reused = reused_to_the_last(ids, known, block_size)
    return reused - block_size if reused == len(ids) else reused


def reused_in_blocks(ids, known, block_size):
    return num_reused(ids, known, block_size) // block_size


EXERCISES = (
    Exercise(
        "12.1",
        "repair the address kernel",
        kv_addresses,
        address_cases,
        "Take the block's number to int64, then multiply; V lies V_OFFSET bytes after K.",
        (
            Confusion(
                "The product is computed in 32 bits: take the block to int64 first.",
                addresses_in(32, signed=True),
            ),
            Confusion(
                "Unsigned 32 bits end as well, at 4 GiB: use int64.", addresses_in(32, signed=False)
            ),
            Confusion(
                "float32 has 24 bits of precision; an address needs all of its own.",
                addresses_in_float32,
            ),
            Confusion("V is in the same block: V_OFFSET bytes after K.", v_in_the_next_block),
            Confusion(
                "First the K of all tokens, then their V: add V_OFFSET, not TOKEN_BYTES.",
                v_beside_k,
            ),
            Confusion("Each token has a place of its own in the block.", tokens_forgotten),
        ),
        launch_kv_addresses,
    ),
    Exercise(
        "12.2",
        "every block in one place",
        wrong_blocks,
        owner_cases,
        "Count each block in the free list and in the whole table: it must be there exactly once.",
        (
            Confusion("A block that is in no place is lost: report it, too.", more_than_once),
            Confusion(
                "As sets, a block that is twice in the free list looks right: count.", as_sets
            ),
            Confusion("A block can be wrong without being in the free list.", free_list_only),
            Confusion("Every layer owns blocks, not only layer 0.", first_layer_only),
            Confusion("-1 is not a block.", minus_one_counted),
            Confusion(
                "Free and owned at once is one way; twice in the table is another.",
                both_free_and_owned,
            ),
        ),
    ),
    Exercise(
        "12.3",
        "merge two means",
        merge_means,
        mean_cases,
        "Weights exp(lse - the larger lse), normalised; an empty part is left out.",
        (
            Confusion("Two empty parts: -inf - -inf is NaN. Ask first.", merged_without_question),
            Confusion(
                "The mean of an empty part may be NaN, and 0 times NaN is NaN: leave it out.",
                merged_with_empty_ones,
            ),
            Confusion(
                "The exponential of a large lse overflows: subtract the larger one.",
                merged_without_max,
            ),
            Confusion(
                "The new lse is the logarithm of the sum, larger than either.", merged_lse_as_max
            ),
            Confusion("The parts weigh exp(lse), not the same.", merged_half_and_half),
        ),
    ),
    Exercise(
        "12.4",
        "weights behind a mask",
        masked_weights,
        mask_cases,
        "Only scores that are alive may be looked at; the others get weight 0, whatever they are.",
        (
            Confusion(
                "-1e4 is not below every score: with a finite sentinel the dead may win.",
                filled_with(-1e4),
            ),
            Confusion("As a score, 0 is a token: the dead count in the sum.", filled_with(0.0)),
            Confusion(
                "The largest score of those alive: the others may be anything, also large.",
                largest_of_all,
            ),
            Confusion(
                "With nobody alive equal sentinels become equal weights: ask for that case first.",
                nobody_alive_uniform,
            ),
            Confusion("NaN + -inf is NaN: replace a dead score, do not add.", minus_infinity_added),
            Confusion(
                "Masked after the softmax, the dead are still in its denominator.",
                masked_afterwards,
            ),
            Confusion("With nobody alive the sum is 0, and 0 / 0 is NaN.", nobody_alive_forgotten),
        ),
    ),
    Exercise(
        "12.5",
        "how much is known already?",
        num_reused,
        prefix_cases,
        "Whole blocks from the start, as long as each is known; at least one token is computed.",
        (
            Confusion(
                "Someone must be computed for the logits: the last token.", reused_to_the_last
            ),
            Confusion(
                "Stop at the first block that is not known: a later one does not help.",
                reused_over_gaps,
            ),
            Confusion("Blocks are shared whole, not in part.", reused_in_part),
            Confusion(
                "The same tokens after another text have other K and V: look for the whole text.",
                reused_by_block_alone,
            ),
            Confusion(
                "Of a full hit only the last token is computed again, not its block.",
                reused_without_last_block,
            ),
            Confusion("Count tokens, not blocks.", reused_in_blocks),
        ),
    ),
)

"""Exercises of chapter 11: what it costs."""

import random
from collections.abc import Iterator

from pagedlab.exercises import Confusion, Exercise

# 11.1 ---------------------------------------------------------------------------------------------


def bytes_read(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    per_token = 2 * num_kv_heads * head_dim * element_bytes
    return sum(length * per_token + -(-length // block_size) * 4 for length in seq_lens)


def batch_cases(rng: random.Random) -> Iterator[tuple]:
    yield [], 2, 16, 2, 4
    yield [1], 1, 16, 4, 8
    yield [8, 0], 3, 24, 1, 4
    yield [7, 7], 3, 24, 2, 4
    yield [5, 16, 17], 3, 32, 4, 16
    for _ in range(24):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(2, 5))]
        kv_heads, element_bytes, block_size = rng.choice([(3, 2, 8), (5, 4, 16), (6, 2, 4)])
        yield lengths, kv_heads, rng.choice([16, 24, 32]), element_bytes, block_size


def keys_alone(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    per_token = num_kv_heads * head_dim * element_bytes
    return sum(length * per_token + -(-length // block_size) * 4 for length in seq_lens)


def whole_blocks(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    padded = [-(-length // block_size) * block_size for length in seq_lens]
    return bytes_read(padded, num_kv_heads, head_dim, element_bytes, block_size)


def all_as_long_as_the_longest(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    padded = [max(seq_lens)] * len(seq_lens) if seq_lens else []
    return bytes_read(padded, num_kv_heads, head_dim, element_bytes, block_size)


def no_table(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    return sum(seq_lens) * 2 * num_kv_heads * head_dim * element_bytes


def an_entry_per_token(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    return bytes_read(seq_lens, num_kv_heads, head_dim, element_bytes, 1)


def full_blocks_entries(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    per_token = 2 * num_kv_heads * head_dim * element_bytes
    return sum(length * per_token + length // block_size * 4 for length in seq_lens)


def elements(seq_lens, num_kv_heads, head_dim, element_bytes, block_size):
    return bytes_read(seq_lens, num_kv_heads, head_dim, 1, block_size)


# 11.2 ---------------------------------------------------------------------------------------------


def least_time(flops, num_bytes, peak_flops, bandwidth):
    computing, reading = flops / peak_flops, num_bytes / bandwidth
    return (computing, "arithmetic") if computing > reading else (reading, "memory")


def roof_cases(rng: random.Random) -> Iterator[tuple]:
    yield 6, 4, 3, 4
    yield 3, 8, 3, 4
    yield 10, 30, 5, 2
    yield 100, 2, 4, 8
    for _ in range(24):
        yield tuple(rng.sample(range(1, 200), 4))


def one_after_the_other(flops, num_bytes, peak_flops, bandwidth):
    _, bound = least_time(flops, num_bytes, peak_flops, bandwidth)
    return flops / peak_flops + num_bytes / bandwidth, bound


def the_faster_counts(flops, num_bytes, peak_flops, bandwidth):
    computing, reading = flops / peak_flops, num_bytes / bandwidth
    return (computing, "arithmetic") if computing < reading else (reading, "memory")


def wrong_name(flops, num_bytes, peak_flops, bandwidth):
    seconds, bound = least_time(flops, num_bytes, peak_flops, bandwidth)
    return seconds, "memory" if bound == "arithmetic" else "arithmetic"


def rates_upside_down(flops, num_bytes, peak_flops, bandwidth):
    computing, reading = peak_flops / flops, bandwidth / num_bytes
    return (computing, "arithmetic") if computing > reading else (reading, "memory")


def larger_number_bounds(flops, num_bytes, peak_flops, bandwidth):
    seconds, _ = least_time(flops, num_bytes, peak_flops, bandwidth)
    return seconds, "arithmetic" if flops > num_bytes else "memory"


# 11.3 ---------------------------------------------------------------------------------------------


def wasted_share(seq_lens, block_size):
    places = sum(-(-length // block_size) * block_size for length in seq_lens)
    return (places - sum(seq_lens)) / places if places else 0.0


def waste_cases(rng: random.Random) -> Iterator[tuple]:
    yield [], 4
    yield [1], 4
    yield [8], 4
    yield [7, 16, 1], 8
    for _ in range(24):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(2, 6))]
        yield [*lengths, 32], rng.choice([4, 8, 16])


def one_block_too_many(seq_lens, block_size):
    places = sum((length // block_size + 1) * block_size for length in seq_lens)
    return (places - sum(seq_lens)) / places if places else 0.0


def share_of_tokens(seq_lens, block_size):
    places = sum(-(-length // block_size) * block_size for length in seq_lens)
    return (places - sum(seq_lens)) / sum(seq_lens) if seq_lens else 0.0


def used_share(seq_lens, block_size):
    return 1 - wasted_share(seq_lens, block_size)


def mean_of_shares(seq_lens, block_size):
    shares = [wasted_share([length], block_size) for length in seq_lens]
    return sum(shares) / len(shares) if shares else 0.0


def half_a_block_each(seq_lens, block_size):
    waste = len(seq_lens) * (block_size - 1) / 2
    return waste / (sum(seq_lens) + waste) if seq_lens else 0.0


def as_one_sequence(seq_lens, block_size):
    return wasted_share([sum(seq_lens)], block_size)


# 11.4 ---------------------------------------------------------------------------------------------


def pieces_of(seq_len, num_pieces, block_size):
    num_blocks = -(-seq_len // block_size)
    size = -(-num_blocks // num_pieces) * block_size
    return [(first, min(first + size, seq_len)) for first in range(0, seq_len, size or 1)]


def piece_cases(rng: random.Random) -> Iterator[tuple]:
    yield 0, 3, 4
    yield 1, 3, 4
    yield 8, 2, 4
    yield 9, 2, 4
    yield 17, 5, 4
    for _ in range(24):
        block_size = rng.choice([4, 8, 16])
        yield rng.randint(1, 12 * block_size), rng.randint(2, 7), block_size
    for block_size in (4, 16):  # neither the blocks nor the tokens come out even
        yield 10 * block_size + 3, 4, block_size


def forgets_the_rest(seq_len, num_pieces, block_size):
    size = max(1, seq_len // block_size // num_pieces) * block_size
    return [(i * size, min((i + 1) * size, seq_len)) for i in range(num_pieces)]


def through_the_middle_of_a_block(seq_len, num_pieces, block_size):
    return pieces_of(seq_len, num_pieces, 1)


def past_the_end(seq_len, num_pieces, block_size):
    pieces = pieces_of(seq_len, num_pieces, block_size)
    return [(first, -(-end // block_size) * block_size) for first, end in pieces]


def empty_pieces(seq_len, num_pieces, block_size):
    pieces = pieces_of(seq_len, num_pieces, block_size)
    return pieces + [(seq_len, seq_len)] * (num_pieces - len(pieces))


def more_pieces_than_asked(seq_len, num_pieces, block_size):
    size = max(1, seq_len // block_size // num_pieces) * block_size
    return [(first, min(first + size, seq_len)) for first in range(0, seq_len, size)]


def end_is_the_last_token(seq_len, num_pieces, block_size):
    return [(first, end - 1) for first, end in pieces_of(seq_len, num_pieces, block_size)]


EXERCISES = (
    Exercise(
        "11.1",
        "bytes of a step",
        bytes_read,
        batch_cases,
        "Per token K and V of every kv head; per block, the last one included, one table entry.",
        (
            Confusion("A token leaves a key and a value.", keys_alone),
            Confusion("Only tokens are read: the rest of the last block is masked.", whole_blocks),
            Confusion(
                "No sequence is padded to the longest one's length.", all_as_long_as_the_longest
            ),
            Confusion("The table is read, too: one entry per block.", no_table),
            Confusion("One entry serves all tokens of its block.", an_entry_per_token),
            Confusion("The last block needs its entry, however full it is.", full_blocks_entries),
            Confusion("A number may have more than one byte.", elements),
        ),
    ),
    Exercise(
        "11.2",
        "the lower bound",
        least_time,
        roof_cases,
        "Work divided by its rate is a time; the longer of the two times is the bound.",
        (
            Confusion(
                "Reading and computing go on at the same time: do not add.", one_after_the_other
            ),
            Confusion("Both must be finished: the slower one decides.", the_faster_counts),
            Confusion("The bound is named after what takes longer.", wrong_name),
            Confusion("Time is work divided by rate.", rates_upside_down),
            Confusion("Operations and bytes do not compare; their times do.", larger_number_bounds),
        ),
    ),
    Exercise(
        "11.3",
        "waste of a block size",
        wasted_share,
        waste_cases,
        "Places in owned blocks minus tokens, over places; a full block wastes nothing.",
        (
            Confusion(
                "A length that fills its last block needs no further one.", one_block_too_many
            ),
            Confusion("A share of the places, not of the tokens.", share_of_tokens),
            Confusion("What holds no token is asked for.", used_share),
            Confusion("Sum first, then divide: long sequences weigh more.", mean_of_shares),
            Confusion(
                "Half a block each is the average; here the lengths are known.", half_a_block_each
            ),
            Confusion("Sequences do not share a block: round up each length.", as_one_sequence),
        ),
    ),
    Exercise(
        "11.4",
        "cut a sequence",
        pieces_of,
        piece_cases,
        "Share out the blocks, rounded up, and end the last piece at the last token.",
        (
            Confusion("No token may be left over: round the piece up.", forgets_the_rest),
            Confusion("A piece begins where a block does.", through_the_middle_of_a_block),
            Confusion("The last piece ends with the sequence.", past_the_end),
            Confusion("A piece without tokens is a program without work.", empty_pieces),
            Confusion("At most num_pieces: round the piece up.", more_pieces_than_asked),
            Confusion(
                "The end is the first token that is not in the piece.", end_is_the_last_token
            ),
        ),
    ),
)

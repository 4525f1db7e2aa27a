"""Exercises of chapter 1: the block and its bytes."""

import random
from collections.abc import Iterator

import torch

from pagedlab.exercises import Confusion, Exercise
from pagedlab.layout import KVLayout


def random_layout(rng: random.Random) -> KVLayout:
    """A layout whose sizes differ pairwise, so that no two can be mistaken for one another."""
    dtype = rng.choice([torch.bfloat16, torch.float32])
    sizes = [8, 16, 32], [3, 5, 6, 7], [24, 40, 48, 56, 80]
    return KVLayout(rng.choice(sizes[0]), rng.choice(sizes[1]), rng.choice(sizes[2]), dtype)


# 1.1 ----------------------------------------------------------------------------------------------


def blocks_that_fit(cache_bytes, block_size, num_kv_heads, head_dim, element_bytes):
    block_bytes = 2 * block_size * num_kv_heads * head_dim * element_bytes
    return cache_bytes // block_bytes


def fitting_cases(rng: random.Random) -> Iterator[tuple]:
    yield 32, 1, 1, 16, 1
    yield 2 * 1024**3, 16, 8, 64, 2
    for _ in range(12):
        sizes = rng.choice([8, 16, 32]), rng.choice([3, 5, 7]), rng.choice([24, 40, 80]), 2
        whole = rng.randrange(2, 60) * blocks_that_fit_bytes(*sizes)
        yield from ((whole + off, *sizes) for off in (-1, 0, 1, sizes[0] * sizes[1] * sizes[2] * 3))


def blocks_that_fit_bytes(block_size, num_kv_heads, head_dim, element_bytes):
    return 2 * block_size * num_kv_heads * head_dim * element_bytes


# 1.2 ----------------------------------------------------------------------------------------------


def v_byte(layout, physical_block, token_in_block, kv_head, lane):
    kv_dim = layout.num_kv_heads * layout.head_dim
    section = layout.block_size * kv_dim
    element = token_in_block * kv_dim + kv_head * layout.head_dim + lane
    return (2 * physical_block * section + section + element) * layout.dtype.itemsize


def address_cases(rng: random.Random) -> Iterator[tuple]:
    yield KVLayout(1, 1, 16, torch.float16), 0, 0, 0, 0
    for _ in range(30):
        layout = random_layout(rng)
        last = layout.block_size - 1, layout.num_kv_heads - 1, layout.head_dim - 1
        yield layout, 0, 0, 0, 0
        yield layout, rng.randrange(1, 9), *last
        yield layout, rng.randrange(1, 9), *(rng.randint(0, top) for top in last)


def v_after_each_token(layout, physical_block, token_in_block, kv_head, lane):
    in_block = (2 * token_in_block + 1) * layout.kv_dim + kv_head * layout.head_dim + lane
    return physical_block * layout.block_bytes + in_block * layout.dtype.itemsize


def v_heads_before_tokens(layout, physical_block, token_in_block, kv_head, lane):
    element = (kv_head * layout.block_size + token_in_block) * layout.head_dim + lane
    start = physical_block * layout.block_bytes + layout.v_offset
    return start + element * layout.dtype.itemsize


def v_blocks_of_one_section(layout, physical_block, token_in_block, kv_head, lane):
    element = token_in_block * layout.kv_dim + kv_head * layout.head_dim + lane
    return (physical_block + 1) * layout.v_offset + element * layout.dtype.itemsize


def v_lane_as_byte(layout, physical_block, token_in_block, kv_head, lane):
    element = token_in_block * layout.kv_dim + kv_head * layout.head_dim
    start = physical_block * layout.block_bytes + layout.v_offset
    return start + element * layout.dtype.itemsize + lane


def v_offset_forgotten(layout, physical_block, token_in_block, kv_head, lane):
    return v_byte(layout, physical_block, token_in_block, kv_head, lane) - layout.v_offset


# 1.3 ----------------------------------------------------------------------------------------------


def owner_of(layout, byte):
    physical_block, rest = divmod(byte, layout.block_bytes)
    is_v, rest = divmod(rest, layout.v_offset)
    token_in_block, rest = divmod(rest, layout.kv_dim * layout.dtype.itemsize)
    kv_head, rest = divmod(rest, layout.head_dim * layout.dtype.itemsize)
    return "KV"[is_v], physical_block, token_in_block, kv_head, rest // layout.dtype.itemsize


def byte_cases(rng: random.Random) -> Iterator[tuple]:
    yield KVLayout(1, 1, 16, torch.float16), 0
    for _ in range(20):
        layout = random_layout(rng)
        start = rng.randrange(1, 9) * layout.block_bytes
        yield layout, start - 1
        yield layout, start + layout.v_offset - 1
        yield layout, start + layout.v_offset
        yield layout, start + rng.randrange(layout.block_bytes)


def owner_blocks_of_one_section(layout, byte):
    section, _, token_in_block, kv_head, lane = owner_of(layout, byte)
    return section, byte // layout.v_offset, token_in_block, kv_head, lane


def owner_token_runs_into_v(layout, byte):
    section, physical_block, _, kv_head, lane = owner_of(layout, byte)
    token = byte % layout.block_bytes // (layout.kv_dim * layout.dtype.itemsize)
    return section, physical_block, token, kv_head, lane


def owner_lane_in_bytes(layout, byte):
    *owner, _ = owner_of(layout, byte)
    return *owner, byte % (layout.head_dim * layout.dtype.itemsize)


def owner_heads_before_tokens(layout, byte):
    section, physical_block, *_ = owner_of(layout, byte)
    element = byte % layout.v_offset // layout.dtype.itemsize
    kv_head, rest = divmod(element, layout.block_size * layout.head_dim)
    return section, physical_block, rest // layout.head_dim, kv_head, rest % layout.head_dim


# 1.4 ----------------------------------------------------------------------------------------------


def blocks_within_int32(block_bytes):
    return 2**31 // block_bytes


def block_bytes_cases(rng: random.Random) -> Iterator[tuple]:
    yield from ((size,) for size in (64, 12_288, 24_576, 32_768, 65_536))
    for _ in range(30):
        yield (blocks_that_fit_bytes(rng.choice([8, 16, 32]), rng.choice([3, 5, 7]), 40, 2),)


EXERCISES = (
    Exercise(
        "1.1",
        "blocks that fit",
        blocks_that_fit,
        fitting_cases,
        "A block holds K and V of block_size tokens; only whole blocks count.",
        (
            Confusion(
                "A block has two sections, K and V; this counts one.",
                lambda cache, *sizes: cache // (blocks_that_fit_bytes(*sizes) // 2),
            ),
            Confusion(
                "That counts elements; an element has element_bytes bytes.",
                lambda cache, size, heads, dim, _: cache // (2 * size * heads * dim),
            ),
            Confusion(
                "That rounds up; a block that does not fit whole cannot be used.",
                lambda cache, *sizes: -(-cache // blocks_that_fit_bytes(*sizes)),
            ),
            Confusion(
                "That is the number of tokens, not of blocks.",
                lambda cache, _, *sizes: cache // blocks_that_fit_bytes(1, *sizes),
            ),
            Confusion(
                "/ gives a fraction; a count of whole things is made with //.",
                lambda cache, *sizes: cache / blocks_that_fit_bytes(*sizes),
            ),
        ),
    ),
    Exercise(
        "1.2",
        "the byte of a V element",
        v_byte,
        address_cases,
        "V has the shape of K and begins where the K of its block ends, a section later.",
        (
            Confusion("That is K's byte: V begins v_offset bytes later.", v_offset_forgotten),
            Confusion(
                "All K of a block come first, then all V; here each token's V follows its K.",
                v_after_each_token,
            ),
            Confusion(
                "Tokens are the outer order in a section: one token's heads lie side by side.",
                v_heads_before_tokens,
            ),
            Confusion(
                "From one block to the next it is block_bytes, K and V together.",
                v_blocks_of_one_section,
            ),
            Confusion("A lane is one element, not one byte.", v_lane_as_byte),
        ),
    ),
    Exercise(
        "1.3",
        "whose byte is it?",
        owner_of,
        byte_cases,
        "Divide by the largest unit first and go on with the remainder: block, section, token, "
        "head, lane.",
        (
            Confusion(
                "A block is K and V together: divide by block_bytes, not by v_offset.",
                owner_blocks_of_one_section,
            ),
            Confusion(
                "Take the section off first: in V, tokens count from 0 again.",
                owner_token_runs_into_v,
            ),
            Confusion(
                "A lane is one element: divide by the bytes of an element.", owner_lane_in_bytes
            ),
            Confusion(
                "Tokens are the outer order in a section, heads the inner one.",
                owner_heads_before_tokens,
            ),
        ),
    ),
    Exercise(
        "1.4",
        "how many blocks int32 can address",
        blocks_within_int32,
        block_bytes_cases,
        "int32 ends at 2**31 - 1; every byte of the last block must be at most that.",
        (
            Confusion(
                "int32 has a sign: it ends at 2**31 - 1, not 2**32 - 1.", lambda b: 2**32 // b
            ),
            Confusion(
                "The last byte is one less than the number of bytes: 2**31 bytes have addresses "
                "0 to 2**31 - 1.",
                lambda b: (2**31 - 1) // b,
            ),
            Confusion(
                "The block's end must fit too, not only its start.", lambda b: (2**31 - 1) // b + 1
            ),
            Confusion(
                "That is the last block's number; with block 0 there is one more.",
                lambda b: 2**31 // b - 1,
            ),
        ),
    ),
)

"""Kernels that the debugger's tests step: small, and not the package's own."""

import pagedlab  # noqa: F401  isort: skip  before triton, whose mode it sets
import triton
import triton.language as tl

HALF = tl.constexpr(0.5)
SIZES = (2, 2, 2)


@triton.jit
def halve(x):
    return x * HALF


@triton.jit
def scale_rows(x_ptr, out_ptr, length, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = 0.0
    for start in range(0, length, WIDTH):
        mask = start + column < length
        x = tl.load(
            x_ptr + row * length + start + column,
            mask=mask,
            other=0.0,
        )
        total += tl.sum(halve(x), 0)
        tl.store(out_ptr + row * length + start + column, halve(x), mask=mask)
    tl.store(out_ptr + tl.num_programs(0) * length + row, total)


@triton.jit
def no_other(x_ptr, n_ptr, out_ptr, length, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    number = tl.load(x_ptr + column, mask=column < length)
    index = tl.load(n_ptr + column, mask=column < length)
    tl.store(out_ptr + column, number + index, mask=column < length)


@triton.jit
def by_block_pointer(x_ptr, out_ptr, length, WIDTH: tl.constexpr):
    block = tl.make_block_ptr(x_ptr, (length,), (1,), (0,), (WIDTH,), (0,))
    x = tl.load(block, boundary_check=(0,), padding_option="zero")
    tl.store(out_ptr + tl.arange(0, WIDTH), 2 * x)


@triton.jit
def tree(x_ptr, out_ptr):
    partial = tl.reshape(tl.load(x_ptr + tl.arange(0, 8)), SIZES)
    for _ in tl.static_range(2):
        partial = tl.sum(partial, 1)
    tl.store(out_ptr, tl.sum(partial, 0))


@triton.jit
def add_one_in_place(x_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    first = tl.load(x_ptr + lane)
    tl.store(out_ptr + lane, first + 1)
    second = tl.load(x_ptr + lane)
    tl.store(out_ptr + lane, second + 1)


@triton.jit
def count_up(counter_ptr, before_ptr):
    before = tl.atomic_add(counter_ptr, 5)
    tl.store(before_ptr, before)


@triton.jit
def read_at(x_ptr, out_ptr, offset):
    pointers = x_ptr + offset
    x = tl.load(pointers)
    tl.store(out_ptr, x)


@triton.jit
def to_bfloat16(x_ptr, out_ptr):
    x = tl.load(x_ptr)
    y = x.to(tl.bfloat16)
    tl.store(out_ptr, y.to(tl.float32))


@triton.jit
def forever(x_ptr):
    i = 0
    while i >= 0:
        i = i + 0
    tl.store(x_ptr, i)


@triton.jit
def not_a_number(x_ptr, out_ptr):
    low = float("-inf")
    x = tl.load(x_ptr)
    y = low - low
    z = tl.exp(x)
    tl.store(out_ptr, y + z)


@triton.jit
def my_attention(q_ptr, k_ptr, v_ptr, out_ptr, n, D: tl.constexpr):
    lane = tl.arange(0, D)
    q = tl.load(q_ptr + lane)
    m = float("-inf")
    total = 0.0
    mix = tl.zeros([D], tl.float32)
    for t in range(n):
        s = tl.sum(q * tl.load(k_ptr + t * D + lane), 0)
        top = tl.maximum(m, s)
        shrink = tl.exp(m - top)
        p = tl.exp(s - top)
        total = total * shrink + p
        mix = mix * shrink + p * tl.load(v_ptr + t * D + lane)
        m = top
    tl.store(out_ptr + lane, mix / total)


@triton.autotune([triton.Config({"N": 8}), triton.Config({"N": 16})], key=[])
@triton.jit
def tuned(x_ptr, out_ptr, N: tl.constexpr):
    total = tl.sum(tl.load(x_ptr + tl.arange(0, N)), 0)
    tl.store(out_ptr, total)

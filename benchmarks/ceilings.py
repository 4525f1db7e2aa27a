"""Measure a GPU's ceilings: memory, arithmetic, and what starting a kernel costs.

    python benchmarks/ceilings.py [--out FOLDER] [--commit HASH]

The roofs of chapter 11's roofline. Results go to FOLDER/<gpu>/ceilings.json: name, value, unit.
"""

import statistics
import time
from typing import Any

import torch
import triton
import triton.language as tl
from attention import time_us
from rows import begin_run, command_line, expect_gpu, save

MEMORY_BYTES = 4 * 2**30  # far more than any L2 cache
MATRIX = 8192  # rows and columns
WORDS, PARTS = 4096, 8  # words per load of a program, loads
ROUNDS, LANES, PROGRAMS = 8192, 1024, 132 * 32
LAUNCHES = 1000


@triton.jit
def read_kernel(words_ptr, out_ptr, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """Reduce PARTS * WORDS int32 words to the largest."""
    program = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([WORDS], tl.int32)
    for part in tl.static_range(PARTS):
        word = (program * PARTS + part) * WORDS + tl.arange(0, WORDS)
        largest = tl.maximum(largest, tl.load(words_ptr + word))
    tl.store(out_ptr + program, tl.max(largest, 0))


@triton.jit
def multiply_add_kernel(x_ptr, rounds, LANES: tl.constexpr):
    """Multiply and add in float32, on ordinary arithmetic units."""
    x_ptrs = x_ptr + tl.program_id(0) * LANES + tl.arange(0, LANES)
    x = tl.load(x_ptrs)
    for _ in range(rounds):
        x = x * 0.5 + 1.0
    tl.store(x_ptrs, x)


@triton.jit
def empty_kernel(x_ptr):
    pass


def eager_launch_us(x: torch.Tensor) -> float:
    """The host's time per launch of an empty kernel, median of five runs of LAUNCHES."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            empty_kernel[(1,)](x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / LAUNCHES)
    return statistics.median(times[1:])


def measure() -> list[dict[str, Any]]:
    """A row for each ceiling."""
    words = torch.zeros(MEMORY_BYTES // 4, dtype=torch.int32, device="cuda")
    grid = (MEMORY_BYTES // 4 // (WORDS * PARTS),)
    out = torch.empty(grid, dtype=torch.int32, device="cuda")
    read_us = time_us(lambda _: read_kernel[grid](words, out, WORDS, PARTS, num_warps=8), 1, 4)
    half, other_half = words.chunk(2)
    copy_us = time_us(lambda _: other_half.copy_(half), 1, 4)
    a, b = torch.randn(2, MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    matrix_us = time_us(lambda _: torch.mm(a, b, out=product), 1, 8)
    x = torch.ones(PROGRAMS * LANES, device="cuda")
    add_us = time_us(lambda _: multiply_add_kernel[(PROGRAMS,)](x, ROUNDS, LANES), 1, 4)
    empty_us = time_us(lambda _: empty_kernel[(1,)](x), 1, LAUNCHES)
    return [
        {"name": "read", "value": round(MEMORY_BYTES / read_us / 1e3), "unit": "GB/s"},
        {
            "name": "copy, read and write",
            "value": round(MEMORY_BYTES / copy_us / 1e3),
            "unit": "GB/s",
        },
        {
            "name": "bfloat16 matrix product",
            "value": round(2 * MATRIX**3 / matrix_us / 1e6, 1),
            "unit": "TFLOP/s",
        },
        {
            "name": "float32 multiply-add",
            "value": round(2 * ROUNDS * LANES * PROGRAMS / add_us / 1e6, 1),
            "unit": "TFLOP/s",
        },
        {"name": "empty kernel in a graph", "value": round(empty_us, 2), "unit": "us"},
        {"name": "empty kernel, eager", "value": round(eager_launch_us(x), 2), "unit": "us"},
    ]


def main() -> None:
    """Measure and write the results."""
    args = command_line(__doc__).parse_args()
    expect_gpu()
    run = begin_run(args)
    rows = measure()
    for row in rows:
        print(f"{row['name']:26} {row['value']:10,} {row['unit']}")
    print(save("ceilings", rows, run, args.out))


if __name__ == "__main__":
    main()

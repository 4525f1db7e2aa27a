"""Claims on who does what in the article's kernel, tried on our re-creation of it, by_token."""

import inspect
from collections import Counter
from typing import Any

import torch

from pagedlab.kernels.by_block import by_block_kernel
from pagedlab.kernels.by_token import by_token_kernel
from pagedlab.kernels.split_kv import split_kv_kernel
from pagedlab.kernels.write_kv import write_kv_kernel
from pagedlab.ledger.claim import Claim, Evidence, close, mutants, refute_unless
from pagedlab.ledger.scene import Scene, check_answer
from pagedlab.trace import step


def check_grid(grid: Any, device: str) -> Evidence:
    """The grid alone says how many rows are computed; the kernel is told no number of them."""
    scene = Scene(device)
    rows, num_q_heads = scene.q.shape[:2]
    for num_active in (1, rows - 1):
        programs = grid(num_active, num_q_heads, scene.table.num_slots)
        refute_unless(programs[0] <= rows, f"{programs[0]} rows of programs for {num_active} rows")
        out = scene.attend(by_token_kernel, grid=programs)
        expected = scene.expected()[:num_active]
        refute_unless(close(out[:num_active], expected, scene.tolerance), "a row is not computed")
        refute_unless(out[num_active:].isnan().all(), "a row beyond the active ones was written")
    named = inspect.signature(by_token_kernel.fn).parameters
    refute_unless("num_active" not in named, "the kernel takes the number of rows")
    return {"rows": rows, "programs a row": num_q_heads, "arguments that count rows": 0}


STATES = ("cache", "table", "seq_lens", "active_slots")
NEEDED = {"cache_ptr", "table_ptr", "seq_lens_ptr", "active_slots_ptr"}


def check_states(kernel: Any, device: str) -> Evidence:
    """Attention's answer depends on each of the four; and a kernel that appends needs them too."""
    lengths = [5, 9] if device == "cpu" else [40, 300]
    scene, other = Scene(device, lengths), Scene(device, lengths)
    other.cache.buffer.copy_(scene.cache.buffer.flip(0))
    other.cache.buffer.nan_to_num_(0.5)
    other.table.device.copy_(scene.table.device.roll(1, 2))
    other.seq_lens, other.active_slots = scene.seq_lens - 1, scene.active_slots.flip(0)
    before = scene.attend(kernel)
    refute_unless(close(before, scene.expected(), scene.tolerance), "the answer is wrong")
    for name in STATES:
        after = scene.attend(kernel, **{name: getattr(other, name)})
        same = torch.equal(before.nan_to_num(), after.nan_to_num())
        refute_unless(not same, f"another {name} gives the same answer")
    takes = {
        k.fn.__name__: set(inspect.signature(k.fn).parameters) >= NEEDED
        for k in (by_token_kernel, by_block_kernel, split_kv_kernel, write_kv_kernel)
    }
    refute_unless(takes["write_kv_kernel"], "a kernel that appends does without one of the four")
    return {"states the answer depends on": len(STATES), "write_kv_kernel takes all": True}


def check_group(kernel: Any, device: str) -> Evidence:
    """Consecutive q heads share a KV head: / and %, which agree for some heads, are told apart."""
    evidence = check_answer(kernel, device)
    scene = Scene(device)
    num_q_heads, num_kv_heads = scene.q.shape[1], scene.layout.num_kv_heads
    group_size = num_q_heads // num_kv_heads
    differ = sum(head // group_size != head % num_kv_heads for head in range(num_q_heads))
    refute_unless(differ > 0, "the sizes do not tell / from %")
    return {"q heads": num_q_heads, "heads that % would send elsewhere": differ} | evidence


def check_reads(kernel: Any, device: str) -> Evidence:
    """Step all programs of one row and count how often each element of K and V is loaded."""
    scene = Scene("cpu")
    row = 1  # three tokens in a block of four
    grid, length = tuple(scene.q.shape[:2]), int(scene.seq_lens[row])
    loads: Counter[int] = Counter()
    for q_head in range(grid[1]):
        trace = step(kernel, grid, **scene.arguments(), program=(row, q_head))
        accesses = [access for line in trace.steps for access in line.accesses]
        for access in accesses:
            if access.argument == "cache_ptr":
                loads.update(access.offsets.reshape(-1).tolist())
    group_size = grid[1] // scene.layout.num_kv_heads
    elements = 2 * length * scene.layout.kv_dim  # K and V of the row's tokens
    refute_unless(len(loads) == elements, f"{len(loads)} of {elements} elements are read")
    times = sorted(set(loads.values()))
    refute_unless(times == [group_size], f"read {times} times")
    return {"elements of K and V": elements, "loads": loads.total(), "loads of each": group_size}


CLAIMS = (
    Claim(
        "grid",
        "One program per active slot and q head; the argument that says how many slots are active "
        "is never read.",
        "the kernel",
        "holds",
        "the grid says it",
        lambda num_active, num_q_heads, num_slots: (num_active, num_q_heads),
        check_grid,
        {
            "a program row per slot, not per active slot": lambda active, heads, slots: (
                min(slots, active + 1),
                heads,
            ),
            "a program per KV head": lambda active, heads, slots: (active, heads // 2),
        },
    ),
    Claim(
        "four_states",
        "Attention is the only decode kernel that needs cache, block table, lengths and active "
        "slots together.",
        "the kernel",
        "holds only when",
        "K and V are appended from the host; a kernel that appends them needs all four as well",
        by_token_kernel,
        check_states,
        mutants(
            by_token_kernel,
            {
                "the batch row taken for the slot": (
                    "tl.load(active_slots_ptr + active_slot)",
                    "(tl.load(active_slots_ptr + active_slot) * 0 + active_slot)",
                ),
                "a length that is always the same": (
                    "seq_len = tl.where(valid, seq_len, 0)",
                    "seq_len = tl.where(valid, 4, 0)",
                ),
            },
        ),
    ),
    Claim(
        "two_index_spaces",
        "q, output and lengths are indexed by the place in the batch, the block table by the slot.",
        "the kernel",
        "holds",
        "any other pairing gives wrong rows",
        by_token_kernel,
        check_answer,
        mutants(
            by_token_kernel,
            {
                "the table indexed by batch row": (
                    "table_ptr + slot * stride_slot",
                    "table_ptr + active_slot * stride_slot",
                ),
                "the length read at the slot": (
                    "tl.load(seq_lens_ptr + active_slot)",
                    "tl.load(seq_lens_ptr + slot % tl.num_programs(0))",
                ),
            },
        ),
    ),
    Claim(
        "gqa",
        "q head h reads KV head h / 4: four consecutive q heads share one.",
        "the kernel",
        "holds",
        "consecutive heads share",
        by_token_kernel,
        check_group,
        mutants(
            by_token_kernel,
            {"% for /": ("q_head // GROUP_SIZE", "q_head % NUM_KV_HEADS")},
        ),
    ),
    Claim(
        "shared_reads",
        "The q heads of a group share one KV head.",
        "the kernel",
        "silent",
        "each of them loads its K and V again",
        by_token_kernel,
        check_reads,
        mutants(
            by_token_kernel,
            {
                "V taken for K": ("offset + V_OFFSET + lane", "offset + lane"),
                "every block read to its end": (
                    "tl.minimum(seq_len - logical_block * BLOCK_SIZE, BLOCK_SIZE)",
                    "BLOCK_SIZE + 0 * seq_len",
                ),
            },
        ),
    ),
)

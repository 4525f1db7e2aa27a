"""Time what bringing the block table to the GPU costs a decode step.

    python benchmarks/copies.py [--out FOLDER] [--commit HASH]

A step reads the weights of 16 layers of Llama-3.2-1B, one kernel a layer, and ends when the host
has read one number, as it would a token. Before that, one sequence in 16 grows by a block, and the
table goes to the device in one of five ways; the first is not at all. The time is the host's, from
the first copy to the number. Results go to FOLDER/<gpu>/copies.json.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from rows import begin_run, command_line, expect_gpu, save

from pagedlab import BlockTable

NUM_LAYERS = 16
LAYER_BYTES = 121_634_816  # q, k, v, o, gate, up, down in bfloat16
TABLES = ((2, 128), (64, 128), (64, 1024))  # slots, blocks per sequence and layer
STEPS, WARM_UP = 200, 20
WORDS = 4096  # per program

Sync = Callable[[], object]  # brings a table to the device


@triton.jit
def read_kernel(words_ptr, out_ptr, num_words, WORDS: tl.constexpr):
    """Reduce one part of a layer's weights, int32 words, to its largest."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + word, mask=word < num_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.max(words, 0))


class Weights:
    """The weights that a step reads."""

    def __init__(self, layer_bytes: int, device: str) -> None:
        self.words = torch.zeros(NUM_LAYERS, layer_bytes // 4, dtype=torch.int32, device=device)
        self.grid = (triton.cdiv(layer_bytes // 4, WORDS),)
        self.out = torch.zeros(self.grid, dtype=torch.int32, device=device)

    def read(self, layer: int) -> None:
        words = self.words[layer]
        read_kernel[self.grid](words, self.out, len(words), WORDS, num_warps=8)


def ways(table: BlockTable) -> tuple[Sync | None, Sync | None]:
    """What the table's policy does before a step and before each of its layers."""
    if table.sync_policy == "per_layer":
        return None, lambda: table.sync(layer=1)
    return table.sync, None


def pinned_copy(table: BlockTable) -> Sync:
    """The whole table from page-locked memory, which the host need not wait for."""
    host = torch.from_numpy(table.host.copy())
    pinned = host.pin_memory() if table.device.is_cuda else host

    def copy() -> None:
        table.device.copy_(pinned, non_blocking=True)
        table.bytes_copied += pinned.nbytes

    return copy


def grow(table: BlockTable, step: int) -> None:
    """Give a block per layer to every sequence that begins one in this step; one in 16 does."""
    for slot in range(step % 16, table.num_slots, 16):
        logical_block = step // 16 % table.max_blocks_per_seq
        if table.lookup(slot, 0, logical_block) != -1:
            table.release_slot(slot)
        table.assign_layers(slot, logical_block, range(table.num_layers))


def time_step(weights: Weights, before_step: Sync | None, before_layer: Sync | None) -> float:
    """One step, in us."""
    start = time.perf_counter()
    if before_step:
        before_step()
    for layer in range(NUM_LAYERS):
        if before_layer:
            before_layer()
        weights.read(layer)
    weights.out[0].item()
    return (time.perf_counter() - start) * 1e6


def measure(
    device: str,
    layer_bytes: int = LAYER_BYTES,
    tables: tuple[tuple[int, int], ...] = TABLES,
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """A row for each table and way: entries, us (median), bytes_copied per step (mean)."""
    weights, rows = Weights(layer_bytes, device), []
    for num_slots, max_blocks in tables:
        for name, policy in (
            ("no copy", "changed_entries"),
            ("16 pageable copies, one a layer", "per_layer"),
            ("1 pageable copy", "per_step"),
            ("1 pinned copy", "changed_entries"),
            ("changed entries", "changed_entries"),
        ):
            table = BlockTable(num_slots, NUM_LAYERS, max_blocks, device, sync=policy, shared=False)
            before_step, before_layer = ways(table)
            if name == "no copy":
                before_step = None
            elif name == "1 pinned copy":
                before_step = pinned_copy(table)
            times = []
            for step in range(WARM_UP + steps):
                if step == WARM_UP:
                    table.bytes_copied = 0
                grow(table, step)
                times.append(time_step(weights, before_step, before_layer))
            row = {"name": name, "entries": table.host.size}
            row["us"] = round(statistics.median(times[WARM_UP:]), 1)
            row["bytes_copied"] = round(table.bytes_copied / steps)
            rows.append(row)
            print(
                f"{row['entries']:9,} entries  {name:32} {row['us']:8.1f} us"
                f" {row['bytes_copied']:11,} bytes",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure and write the results."""
    args = command_line(__doc__).parse_args()
    expect_gpu()
    run = begin_run(args)
    print(save("copies", measure("cuda"), run, args.out))


if __name__ == "__main__":
    main()

"""The claim on what copying the block table costs: bytes counted, and on a GPU also time."""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from pagedlab.block_table import SYNC_POLICIES, BlockTable
from pagedlab.layout import LLAMA_3_2_1B
from pagedlab.ledger.claim import Claim, Evidence, refute_unless

WEIGHT_BYTES_PER_LAYER = 121_600_000  # of Llama 3.2 1B in bfloat16, read once a token
TOKENS = 32  # two blocks' worth: every 16th needs a block in each layer
REPEATS = 5


def table_of(policy: str, device: str) -> BlockTable:
    m = LLAMA_3_2_1B
    sizes = (m.num_slots, m.num_layers, m.max_blocks_per_seq)
    return BlockTable(*sizes, device, sync=policy, shared=False)


def decode(
    table: BlockTable, weights: torch.Tensor | None = None, sync: bool = True
) -> list[float]:
    """TOKENS tokens of one slot: blocks where one begins, a sync per layer; microseconds each."""
    m, x, micros = LLAMA_3_2_1B, None, []
    if weights is not None:
        x = torch.ones(weights.shape[2], dtype=weights.dtype, device=weights.device)
    for token in range(TOKENS):
        start = time.perf_counter()
        logical_block, token_in_block = divmod(token, m.block_size)
        if token_in_block == 0:
            blocks = range(m.num_layers * logical_block, m.num_layers * (logical_block + 1))
            table.assign_layers(0, logical_block, blocks)
        for layer in range(m.num_layers):
            if sync:
                table.sync(layer)
            if weights is not None and x is not None:
                torch.mv(weights[layer], x)
        if weights is not None:
            torch.cuda.synchronize()
        micros.append((time.perf_counter() - start) * 1e6)
    return micros


def check_copies(policy: str, device: str) -> Evidence:
    """Bytes that each token costs, and that the device's table is right in the end."""
    m = LLAMA_3_2_1B
    table = table_of(policy, device)
    decode(table)
    refute_unless(torch.equal(table.device.cpu(), torch.from_numpy(table.host.copy())), "stale")
    bytes_a_token = table.bytes_copied // TOKENS
    every_layer = m.num_layers * m.table_entries * 4
    refute_unless(bytes_a_token == every_layer, f"{bytes_a_token:,} bytes a token")
    evidence = {"bytes a copy": m.table_entries * 4, "bytes a token": bytes_a_token}
    for other in SYNC_POLICIES:
        table = table_of(other, device)
        decode(table)
        evidence[f"{other}, bytes a token"] = table.bytes_copied // TOKENS
    return evidence


def copies_on_gpu() -> Evidence:
    """Bytes from the profiler's copy records, and the time of a token that reads its weights."""
    columns = 2048
    shape = (LLAMA_3_2_1B.num_layers, WEIGHT_BYTES_PER_LAYER // (2 * columns), columns)
    weights = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    evidence = {"no copy, us a token": micros_a_token(SYNC_POLICIES[0], weights, sync=False)}
    for policy in SYNC_POLICIES:
        evidence[f"{policy}, us a token"] = micros_a_token(policy, weights)
        table = table_of(policy, "cuda")
        copies = profiled_copies(table)
        evidence[f"{policy}, copies recorded"] = len(copies)
        evidence[f"{policy}, bytes recorded"] = sum(copies)
        refute_unless(sum(copies) == table.bytes_copied, f"{policy}: {sum(copies)} bytes recorded")
    return evidence


def micros_a_token(policy: str, weights: torch.Tensor, sync: bool = True) -> float:
    """Median over REPEATS times TOKENS tokens, the first round left out."""
    micros: list[float] = []
    for round_number in range(REPEATS + 1):
        times = decode(table_of(policy, "cuda"), weights, sync)
        micros += times if round_number else []
    return round(statistics.median(micros), 1)


def profiled_copies(table: BlockTable) -> list[int]:
    """Bytes of each host-to-device copy that torch.profiler records while decoding."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        decode(table)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    names = (event for event in events if event.get("name", "").startswith("Memcpy HtoD"))
    return [int(event["args"]["bytes"]) for event in names]


CLAIMS = (
    Claim(
        "copies",
        "The whole table goes to the device after prefill, at every layer of a decode step, and "
        "after a release; at what cost was not measured.",
        "life of a block",
        "silent",
        "sixteen times the table a token, where sixteen entries change every sixteenth token",
        "per_layer",
        check_copies,
        {"one copy a step": "per_step", "changed entries alone": "changed_entries"},
        copies_on_gpu,
        unverified=True,
    ),
)

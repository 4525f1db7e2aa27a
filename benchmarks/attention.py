"""Time one layer of paged decode attention on a GPU: our kernels, others', and a raw read.

    python benchmarks/attention.py [--only 1x2048,8x2048] [--out FOLDER] [--commit HASH]

The chained calls of a CUDA graph are timed, and each call reads another layer, so that no call
finds its blocks in the L2 cache. The raw read looks at every number of the same blocks and does
nothing with it: the floor. Every kernel is called through paged_attention with the step's plan,
which is timed by itself. "grouped" is split_kv with a plan that leaves every sequence whole: the
rung between by_block and split_kv. Each kernel is checked against float64 before, ours with their
output poisoned with NaN. peers.py has those of other projects; one that is not installed is named
and left out. Results go to FOLDER/<gpu>/attention.json: one object per kernel and shape, each with
its provenance.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from peers import PEERS
from rows import begin_run, command_line, expect_gpu, save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagedlab import BlockTable, KVLayout, PagedKVCache, attention_plan, paged_attention
from pagedlab.attention import KERNELS, AttentionPlan
from pagedlab.kernels.plan import Work, device_facts, launch_rule

ROTATED_BYTES = 256 * 2**20  # read before a block is read again: several times the L2 cache
CHAINED_BYTES = 4e9  # read by the calls of one graph, but no more than MAX_CALLS calls
MAX_CALLS = 128
REPLAYS, WARM_UP = 15, 5
RAW_READS = ((2048, 4), (4096, 4), (8192, 8))  # words per program, warps: the best one counts


class Case(NamedTuple):
    """A shape to measure."""

    name: str
    lengths: list[int]  # tokens of each sequence
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


def is_plain(case: Case) -> bool:
    """Whether only batch and context differ from the seed's sizes."""
    return case[2:] == Case("", [])[2:]


def ragged(num_seqs: int, longest: int) -> list[int]:
    return [1 + i * (longest - 1) // (num_seqs - 1) for i in range(num_seqs)]


LADDER = 7  # the first cases are measured with every kernel, the others with split_kv
SWEEP_BATCHES, SWEEP_CONTEXTS = (1, 4, 16, 64, 256), (512, 2048, 8192, 32768)
SWEEP_TOKENS = 2**20  # at most: 2 GiB of keys and values
CASES = [
    Case("1x2048", [2048]),
    Case("1x16384", [16384]),
    Case("8x2048", [2048] * 8),
    Case("32x2048", [2048] * 32),
    Case("64x4096", [4096] * 64),
    Case("256x2048", [2048] * 256),
    Case("256xragged", ragged(256, 2000)),
    Case("1x131072", [131072]),
    Case("4x131072", [131072] * 4),
    Case("512x1024", [1024] * 512),
    Case("12x16384", [16384] * 12),
    Case("40x8192", [8192] * 40),
    Case("72x4096", [4096] * 72),
    Case("140x4096", [4096] * 140),
    Case("30xragged 16384", ragged(30, 16384)),
    Case("1x131072+255x1024", [1024] * 100 + [131072] + [1024] * 155),
    Case("64x4096 head_dim 128", [4096] * 64, head_dim=128),
    Case("16x4096 head_dim 128", [4096] * 16, head_dim=128),
    Case("64x4096 head_dim 128 gqa 1", [4096] * 64, 8, 8, 128),
    Case("64x4096 gqa 1", [4096] * 64, 8, 8),
    Case("64x4096 gqa 3", [4096] * 64, 24, 8),
    Case("64x4096 gqa 8", [4096] * 64, 64, 8),
    Case("64x4096 block 32", [4096] * 64, block_size=32),
    Case("64x4096 block 64", [4096] * 64, block_size=64),
    Case("64x4096 float16", [4096] * 64, dtype=torch.float16),
]
for batch in SWEEP_BATCHES:
    for context in SWEEP_CONTEXTS:
        swept = Case(f"{batch}x{context}", [context] * batch)
        if batch * context <= SWEEP_TOKENS and swept not in CASES:
            CASES.append(swept)


class Setup:
    """Random tensors of a case: blocks of several layers, shuffled, and one query per sequence."""

    def __init__(
        self, case: Case, device: str = "cuda", rotated_bytes: int = ROTATED_BYTES
    ) -> None:
        self.case, self.device = case, torch.device(device)
        layout = KVLayout(case.block_size, case.num_kv_heads, case.head_dim, case.dtype)
        self.blocks_per_layer = sum(map(layout.num_logical_blocks, case.lengths))
        layer_bytes = self.blocks_per_layer * layout.block_bytes
        self.num_layers = min(64, max(2, math.ceil(rotated_bytes / layer_bytes)))
        num_seqs = len(case.lengths)
        generator = torch.Generator(self.device).manual_seed(0)
        num_blocks = self.num_layers * self.blocks_per_layer
        self.cache = PagedKVCache(layout, num_blocks, self.device)
        self.cache.buffer.normal_(generator=generator)
        widest = layout.num_logical_blocks(max(case.lengths))
        self.table = BlockTable(num_seqs, self.num_layers, widest, self.device)
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.block_ids = free.view(self.blocks_per_layer, self.num_layers)
        entry = 0
        for slot, length in enumerate(case.lengths):
            for logical_block in range(layout.num_logical_blocks(length)):
                self.table.assign_layers(slot, logical_block, self.block_ids[entry].tolist())
                entry += 1
        self.table.sync()
        self.block_ids = self.block_ids.t().contiguous().to(self.device, torch.int32)
        self.seq_lens = torch.tensor(case.lengths, dtype=torch.int32, device=self.device)
        self.active_slots = torch.arange(num_seqs, dtype=torch.int32, device=self.device)
        shape = (num_seqs, case.num_q_heads, case.head_dim)
        self.q = torch.randn(shape, generator=generator, device=self.device).to(case.dtype)
        self.kv_bytes = 2 * sum(case.lengths) * layout.kv_dim * layout.dtype.itemsize

    def gather(self, row: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.gather(self.table, row, layer, self.case.lengths[row])

    def exact(self, layer: int) -> torch.Tensor:
        """The answer in float64, [num_seqs, num_q_heads, head_dim]."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=self.device)
        for row in range(len(out)):
            k, v = (x.double().transpose(0, 1) for x in self.gather(row, layer))
            q = self.q[row].double().view(len(k), -1, k.shape[2])  # [kv heads, group, head_dim]
            scores = q @ k.transpose(1, 2) / math.sqrt(k.shape[2])
            out[row] = (scores.softmax(2) @ v).view(out.shape[1:])
        return out


def time_us(call: Callable[[int], Any], num_layers: int, calls: int) -> float:
    """Median time of one call, in us: `calls` of them chained in a CUDA graph, over all layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(min(num_layers, 3)):
            call(layer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % num_layers)
    times = []
    for _ in range(REPLAYS + WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times[WARM_UP:])[REPLAYS // 2]


@triton.jit
def raw_read_kernel(
    words_ptr, block_ids_ptr, out_ptr, BLOCK_WORDS: tl.constexpr, WORDS: tl.constexpr
):
    """Reduce one part of one block, int32 words, to the largest."""
    block = tl.load(block_ids_ptr + tl.program_id(1)).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + block * BLOCK_WORDS + word, mask=word < BLOCK_WORDS, other=0)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr + program, tl.max(words, 0))


def raw_read(setup: Setup, words: int, num_warps: int) -> Callable[[int], None]:
    block_words = setup.cache.layout.block_bytes // 4
    grid = (triton.cdiv(block_words, words), setup.blocks_per_layer)
    out = torch.empty(grid, dtype=torch.int32, device=setup.device)
    all_words = setup.cache.buffer.view(torch.int32)

    def call(layer: int) -> None:
        ids = setup.block_ids[layer]
        raw_read_kernel[grid](all_words, ids, out, block_words, words, num_warps=num_warps)

    return call


Calls = dict[str, Callable[[int], torch.Tensor]]  # by name: takes a layer, returns the output


def whole_plan(setup: Setup) -> AttentionPlan:
    """A plan that splits no sequence and keeps their order: an item for each."""
    rows = torch.arange(len(setup.seq_lens), dtype=torch.int32, device=setup.device)
    items = torch.stack((rows, setup.active_slots, 0 * rows, setup.seq_lens), 1)
    work = Work(items.new_zeros(2), items, items.new_zeros(len(rows), 3), max_parts=1)
    return AttentionPlan(len(rows), None, None, work)


def paged_calls(setup: Setup, kernels: tuple[str, ...]) -> Calls:
    """Our kernels as a step calls them; last the same in place, after the append of its token."""
    out, in_place = torch.empty_like(setup.q), setup.q.clone()
    rows = (setup.table, setup.seq_lens, setup.active_slots)
    plan = attention_plan(setup.seq_lens, setup.active_slots, setup.table, setup.cache)
    kv_shape = (len(setup.q), setup.case.num_kv_heads, setup.case.head_dim)
    new_kv = torch.randn(kv_shape, device=setup.device).to(setup.case.dtype)

    def attend(name: str) -> Callable[[int], torch.Tensor]:
        options = {"out": out, "kernel": name, "plan": plan, "backend": "triton"}
        if name == "grouped":
            options |= {"kernel": "split_kv", "plan": whole_plan(setup)}
        return lambda layer: paged_attention(setup.q, setup.cache, *rows, layer, **options)

    def append_and_attend(layer: int) -> torch.Tensor:
        setup.cache.append(new_kv, new_kv, *rows, layer)
        options = {"out": in_place, "plan": plan, "kernel": "split_kv", "backend": "triton"}
        return paged_attention(in_place, setup.cache, *rows, layer, **options)

    calls = {kernel: attend(kernel) for kernel in kernels}
    return calls | {"append + split_kv in place": append_and_attend}


def sdpa_calls(setup: Setup) -> Calls:
    """torch's attention on keys and values that are contiguous already, and on gathered ones."""
    num_seqs, length = len(setup.q), setup.case.lengths[0]
    q = setup.q[:, :, None]  # [num_seqs, num_q_heads, 1, head_dim]
    shape = (num_seqs, length, setup.case.num_kv_heads, setup.case.head_dim)
    kv_rows = [
        torch.cat((2 * entries, 2 * entries + 1))
        for entries in setup.table.device[:, : setup.num_layers].transpose(0, 1).flatten(1)
    ]

    def gather(layer: int) -> torch.Tensor:
        return setup.cache.rows.index_select(0, kv_rows[layer]).view(2, *shape).transpose(2, 3)

    def attend(kv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], True):
            return scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True)[:, :, 0]

    contiguous = [gather(layer).contiguous() for layer in range(setup.num_layers)]
    return {
        "SDPA, contiguous KV": lambda layer: attend(contiguous[layer]),
        "SDPA, gathered KV": lambda layer: attend(gather(layer)),
    }


def peer_calls(setup: Setup) -> Calls:
    """Kernels of other projects; those that are missing or refuse the case are named."""
    calls = {}
    for name, make_call in PEERS.items():
        try:
            calls[name] = make_call(setup)
        except ImportError:
            print(f"{setup.case.name:28} {name:27} not installed", flush=True)
        except Exception as error:
            report_failure(setup.case, name, error)
    return calls


def report_failure(case: Case, name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{case.name:28} {name:27} failed: {reason[:200]}", flush=True)


def measure(
    setup: Setup, kernels: tuple[str, ...], others: Calls, time: Callable[..., float] = time_us
) -> list[dict[str, Any]]:
    """Check and time kernels on one case: ours by name, and other calls; a row for each."""
    case = setup.case
    exact = setup.exact(0)
    repeats = min(MAX_CALLS, CHAINED_BYTES / setup.kv_bytes) / setup.num_layers
    num_calls = setup.num_layers * max(1, round(repeats))
    raw_read_us = min(time(raw_read(setup, *r), setup.num_layers, num_calls) for r in RAW_READS)

    def make_plan(layer: int) -> None:
        attention_plan(setup.seq_lens, setup.active_slots, setup.table, setup.cache)

    plan_us = time(make_plan, 1, 32)
    rows = []
    for kernel, call in (others | paged_calls(setup, kernels)).items():
        ours = kernel not in others
        try:
            if ours and not kernel.startswith("append"):
                call(0).fill_(math.nan)
            out = call(0).double()
            if kernel.startswith("append"):
                exact = setup.exact(0)  # with the token just written
            error = float((out - exact).norm() / exact.norm())
            slow = kernel in ("by_token", "by_block")  # each layer once
            us = time(call, setup.num_layers, setup.num_layers if slow else num_calls)
        except Exception as failure:
            if ours:
                raise
            report_failure(case, kernel, failure)
            continue
        row: dict[str, Any] = {"kernel": kernel, "shape": case.name, "rel_err": round(error, 6)}
        row |= {"us": round(us, 2), "raw_read_us": round(raw_read_us, 2)}
        if kernel == "split_kv":
            row["plan_us"] = round(plan_us, 2)
            rule = launch_rule(len(setup.q), setup.cache.layout, device_facts(setup.device))
            row["parameters"] = rule._asdict()
        rows.append(row)
        print(
            f"{case.name:28} {kernel:27} {us:9.2f} us {100 * raw_read_us / us:5.1f} % of raw read"
            f" {raw_read_us:7.2f}   rel_err {error:.1e}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure the cases and write the results."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    args = parser.parse_args()
    expect_gpu()
    run = begin_run(args)
    print(run["device"], run["versions"], flush=True)
    rows: list[dict[str, Any]] = []
    for i, case in enumerate(CASES):
        if args.only and case.name not in args.only.split(","):
            continue
        setup, whole_ladder = Setup(case), i < LADDER
        others = peer_calls(setup) if whole_ladder else {}
        if len(set(case.lengths)) == 1 and (whole_ladder or is_plain(case)):
            others |= sdpa_calls(setup)
        kernels = (*KERNELS[:2], "grouped", "split_kv") if whole_ladder else ("split_kv",)
        rows += measure(setup, kernels, others)
        path = save("attention", rows, run, args.out)  # after each case: a run may be cut short
        del setup, others
        torch.cuda.empty_cache()
    print(path)


if __name__ == "__main__":
    main()

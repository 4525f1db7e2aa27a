"""Time the engine on a GPU: steady decode, a load of ragged requests, transformers beside it.

    python benchmarks/engine.py [--only steady,load,texts,transformers] [--out FOLDER] [--commit H]

A model of Llama-3.2-1B's shape with random bfloat16 weights decodes from position 32 to 288 through
Engine.step: scheduling, allocation, table upload, sampling and the read of the tokens are in, text
is not. A rate is the median of several rounds. "replay only" is the same graph without an engine
around it. The load is 512 requests of random lengths through 64 slots, prefill counted. "texts"
checks in float32 that a loaded engine says what each request says alone. Results go to
FOLDER/<gpu>/engine.json, a list of rows; those of parts that --only leaves out stay.
"""

import dataclasses
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rows import begin_run, command_line, expect_gpu, slug
from waste import Load, draw_requests

from pagedlab import Engine, Llama, LlamaConfig
from pagedlab.checkpoint import RopeScaling
from pagedlab.engine import SlotEvent

LLAMA_CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_seq_len=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    tie_word_embeddings=True,
)
BATCHES = (1, 64)
START, STEPS = 32, 256  # the first position, and the steps from there
ROUNDS, SLOW_ROUNDS = 5, 2
NEAR_TIE = 1e-3  # of the two largest logits: below it rounding may choose
Row = dict[str, Any]


def random_llama(config: LlamaConfig, device: str, dtype: torch.dtype) -> Llama:
    """Random weights, drawn where they stay."""
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, device=device)
        weight = torch.empty(shape, device=device, dtype=dtype)
        return weight.normal_(0, 1 / math.sqrt(shape[-1]), generator=generator)

    return Llama(config, read, device=device, dtype=dtype)


def random_ids(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def wait(engine: Engine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()


def steady_rate(
    engine: Engine, rounds: int, start: int = START, steps: int = STEPS, temperature: float = 0
) -> float:
    """Tokens per second while every slot decodes, the median over rounds."""
    batch, rates = engine.table.num_slots, []
    for turn in range(rounds + 1):  # the first warms up
        for slot in range(batch):
            ids = random_ids(engine.model.config.vocab_size, start, seed=turn * batch + slot)
            engine.submit(ids, 1 + steps, temperature=temperature, seed=slot)
        engine.step()  # prefill
        wait(engine)
        begin = time.perf_counter()
        for _ in range(steps):
            assert len(engine.step()) == batch
        rates.append(batch * steps / (time.perf_counter() - begin))
        assert not engine.scheduler.running
    return statistics.median(rates[1:] or rates)


def replay_rate(engine: Engine, rounds: int) -> float:
    """The same steps as replays alone; all blocks are assigned before."""
    batch, rates = engine.table.num_slots, []
    engine.scheduler.ahead = STEPS + 1
    for _ in range(rounds + 1):
        requests = [
            engine.submit(random_ids(engine.model.config.vocab_size, START, seed=slot), STEPS + 8)
            for slot in range(batch)
        ]
        engine.step()
        engine.step()
        graph, _ = engine.graph.graphs[batch]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        end.synchronize()
        rates.append(batch * STEPS / begin.elapsed_time(end) * 1000)
        for request in requests:
            engine.cancel(request)
    engine.scheduler.ahead = 1
    return statistics.median(rates[1:])


def profile(
    engine: Engine, steps: int = 32, temperature: float = 0
) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """CUDA calls that allocate, copy or wait, per step; and kernels with their us per step."""
    batch = engine.table.num_slots
    for slot in range(batch):
        ids = random_ids(engine.model.config.vocab_size, START, seed=slot)
        engine.submit(ids, steps + 16, temperature=temperature, seed=slot)
    for _ in range(8):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as recorded:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.run()
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] += event.device_time
        elif event.name.startswith("cu"):
            calls[event.name] += 1
    calls["cudaDeviceSynchronize"] -= 1  # this function's own
    asked = ("Malloc", "HostAlloc", "Synchronize", "Memcpy", "GraphLaunch", "LaunchKernel")
    per_step = {name: n / steps for name, n in calls.items() if any(a in name for a in asked)}
    return per_step, [(name, us / steps) for name, us in kernels.most_common(14)]


def measure_steady(model: Llama) -> Iterable[Row]:
    """Graphs and eager, greedy and drawn, at each batch size; memory and warm-up of the graphs."""
    most = START + STEPS + 16
    for batch in BATCHES:
        sizes = {"num_slots": batch, "max_seq_len": most}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        engine = Engine(model, graphs=True, **sizes)
        warm_up_s = time.perf_counter() - begin
        steady_rate(engine, rounds=0)
        about: Row = {"warm_up_s": round(warm_up_s, 1)} | memory(engine)
        greedy = steady_rate(engine, ROUNDS)
        yield row("graphs, greedy", batch, greedy) | about
        drawn = steady_rate(engine, ROUNDS, temperature=1.0)
        again = steady_rate(engine, ROUNDS)
        yield row("graphs, greedy, again", batch, again)
        of_greedy = round(2 * drawn / (greedy + again), 3)  # measured before and after
        yield row("graphs, temperature 1", batch, drawn) | {"of_greedy": of_greedy}
        yield row("graphs, replay only", batch, replay_rate(engine, ROUNDS))
        per_step, kernels = profile(engine)
        print("  calls a step:", {name: round(n, 2) for name, n in per_step.items()})
        for name, us in kernels:
            print(f"  {us:9.1f} us a step  {name[:90]}")
        drawn_kernels = dict(profile(engine, temperature=1.0)[1])
        print(f"  {drawn_kernels['score_kernel']:9.1f} us a step  score_kernel, temperature 1")
        yield row("graphs, profiled", batch, greedy) | {"calls_per_step": per_step}
        del engine
        rate = steady_rate(Engine(model, **sizes), SLOW_ROUNDS)
        yield row("eager, greedy", batch, rate)


def memory(engine: Engine) -> Row:
    """Bytes: weights, cache, and the peak of what torch has reserved, over both."""
    model = engine.model
    tensors = [model.embedding, model.head, model.norm]
    tensors += [weight for layer in model.layers for weight in layer]
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    cache = engine.cache.buffer.nbytes
    peak = torch.cuda.max_memory_reserved()
    return {
        "weights_bytes": weights,
        "cache_bytes": cache,
        "peak_bytes": peak,
        "over": round(peak / (weights + cache) - 1, 4),
    }


def play(engine: Engine, load: Load, each_step: Callable[[Engine], None]) -> tuple[float, int]:
    """Seconds and tokens of a load; a first token counts as well."""
    vocab_size = engine.model.config.vocab_size
    requests = [
        engine.submit(random_ids(vocab_size, len(r.prompt), seed=r.id), r.max_new_tokens)
        for r in draw_requests(load)
    ]
    wait(engine)
    begin = time.perf_counter()
    while engine.scheduler.queue or engine.scheduler.running:
        engine.step()
        each_step(engine)
    seconds = time.perf_counter() - begin
    engine.check_integrity()
    assert all(r.finish_reason in ("length", "context") for r in requests)
    return seconds, sum(len(r.tokens) for r in requests)


def measure_load(engine: Engine, load: Load, steady: float) -> Row:
    """Rate of a load, and how it used the blocks, from a second run of the same requests."""
    play(engine, load, lambda engine: None)  # compiles what prefill needs
    seconds, num_tokens = play(engine, load, lambda engine: None)
    block_size, num_layers = engine.cache.layout.block_size, engine.table.num_layers
    in_use, running, wasted = [], [], []
    events: list[Any] = []
    engine.events = engine.scheduler.events = events

    def count(engine: Engine) -> None:
        active = engine.scheduler.running
        in_use.append(1 - engine.pool.num_free / engine.num_blocks)
        running.append(len(active))
        wasted.extend(r.num_blocks * block_size - r.num_cached for r in active)

    play(engine, load, count)
    engine.events = engine.scheduler.events = None
    actions = Counter(e.action for e in events if isinstance(e, SlotEvent))
    cache_tokens = engine.num_blocks // num_layers * block_size
    lengths = [len(r.prompt) + r.max_new_tokens for r in draw_requests(load)]
    rate = num_tokens / seconds
    return row(f"load of {load.num_requests}", engine.table.num_slots, rate) | {
        "context": load.max_seq_len,
        "of_steady": round(rate / steady, 3),
        "num_tokens": num_tokens,
        "prompt_tokens": sum(len(r.prompt) for r in draw_requests(load)),
        "steps": len(running),
        "running": round(statistics.mean(running), 1),
        "blocks_in_use": round(statistics.mean(in_use), 3),
        "wasted_tokens": round(statistics.mean(wasted), 1),  # a sequence, of its own blocks
        "contiguous_running": cache_tokens // load.max_seq_len,  # that fit in the same cache
        "contiguous_wasted_tokens": round(load.max_seq_len - statistics.mean(lengths) / 2, 1),
        "preemptions": actions["preempt"],
    }


def texts_alone(model: Llama, prompts: list[list[int]], num_tokens: int) -> list[tuple]:
    """Each request alone, eager: its tokens, and how far apart its two best logits were."""
    texts = []
    for ids in prompts:
        gaps: list[float] = []
        engine = Engine(WithGaps(model, gaps), num_slots=1, max_seq_len=len(ids) + num_tokens)
        request = engine.submit(ids, num_tokens)
        engine.run()
        texts.append((request.tokens, gaps))
    return texts


class WithGaps:
    """A model that keeps the difference of the two largest logits of each row it computes."""

    def __init__(self, model: Llama, gaps: list[float]) -> None:
        self._model, self._gaps = model, gaps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)
        if name not in ("prefill_batch", "decode"):
            return method

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = method(*args, **kwargs)
            best = logits.topk(2).values
            self._gaps.extend((best[:, 0] - best[:, 1]).tolist())
            return logits

        return call


def check_texts(engine: Engine, prompts: list[list[int]], num_tokens: int) -> Row:
    """Of all requests together, those that part from their text alone, and where.

    Raises:
        SystemExit: one parts where its two best logits were no near-tie.
    """
    requests = [engine.submit(ids, num_tokens) for ids in prompts]
    begin = time.perf_counter()
    engine.run()
    rate = len(prompts) * num_tokens / (time.perf_counter() - begin)
    near_ties = 0
    for request, (text, gaps) in zip(
        requests, texts_alone(engine.model, prompts, num_tokens), strict=True
    ):
        places = range(min(len(text), len(request.tokens)))
        parted = next((i for i in places if text[i] != request.tokens[i]), None)
        if parted is None:
            assert len(text) == len(request.tokens)
            continue
        if gaps[parted] >= NEAR_TIE:
            raise SystemExit(
                f"request {request.id}: token {parted}: expected {text[parted]},"
                f" got {request.tokens[parted]}; the logits differed by {gaps[parted]:.2g}"
            )
        near_ties += 1
    about = {"requests": len(prompts), "near_ties": near_ties, "context": engine.max_seq_len}
    return row("texts", engine.table.num_slots, rate) | about


def measure_texts(model_name: str | None) -> Row:
    """The check in float32 with TF32 off, more requests than slots, few blocks."""
    assert not torch.backends.cuda.matmul.allow_tf32
    if model_name == "random":
        config = dataclasses.replace(LLAMA_CONFIG, num_layers=4, vocab_size=32000)
        model = random_llama(config, "cuda", torch.float32)
    else:
        model = Llama.from_checkpoint(model_name, device="cuda", dtype=torch.float32)
    model.config = dataclasses.replace(model.config, eos_token_ids=())
    prompts = [random_ids(model.config.vocab_size, 5 + 7 * i % 90, seed=i) for i in range(128)]
    num_blocks = 24 * 6 * model.config.num_layers
    engine = Engine(model, 24, num_blocks, max_seq_len=160, graphs=True)
    name = f"texts, {model_name or 'demo model'}, float32"
    return check_texts(engine, prompts, 48) | {"name": name}


def measure_transformers(model: Llama) -> Iterable[Row]:
    """generate() of transformers on the same shape, prefill of 32 tokens included."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    c = model.config
    config = TheirConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_seq_len,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    theirs.generation_config.eos_token_id = None
    kinds = {
        "transformers, dynamic cache": {},
        "transformers, static cache, compiled": {"cache_implementation": "static"},
    }
    for name, options in kinds.items():
        for batch in BATCHES:
            ids = torch.randint(c.vocab_size, (batch, START), device="cuda")
            asked = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
            asked |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
            try:
                rates = []
                for turn in range(2 + SLOW_ROUNDS):  # two warm up
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    out = theirs.generate(ids, **asked, **options)
                    torch.cuda.synchronize()
                    rates.append(batch * STEPS / (time.perf_counter() - begin))
                    assert out.shape[1] == START + STEPS, turn
            except Exception as error:  # a version that cannot: said plainly, the rest goes on
                reason = str(error).strip() or type(error).__name__
                print(f"{name}, batch {batch}: failed: {reason.splitlines()[0]}", flush=True)
                continue
            yield row(name, batch, statistics.median(rates[2:]))
            torch.cuda.empty_cache()


def row(name: str, batch: int, rate: float) -> Row:
    return {
        "name": name,
        "batch": batch,
        "context": START + STEPS,
        "tokens_per_s": round(rate, 1),
        "ms_per_step": round(1000 * batch / rate, 4),
    }


def merge(rows: list[Row], path: Path) -> list[Row]:
    """The rows, and those of a file that they do not replace."""
    kept = json.loads(path.read_text()) if path.is_file() else []
    new = {(row["name"], row["batch"]) for row in rows}
    return [row for row in kept if (row["name"], row["batch"]) not in new] + rows


def main() -> None:
    """Measure the parts asked for and write the results, after each part."""
    parser = command_line(__doc__)
    parts = ("steady", "load", "texts", "transformers")
    parser.add_argument("--only", default=",".join(parts), help="parts, separated by commas")
    parser.add_argument("--model", help="of texts: a folder, a hub id, or random; the demo model")
    args = parser.parse_args()
    expect_gpu()
    asked = args.only.split(",")
    if unknown := set(asked) - set(parts):
        raise SystemExit(f"--only: expected {', '.join(parts)}, got {', '.join(unknown)}")
    run = begin_run(args, graphs=True)
    print(run["device"], run["versions"], flush=True)
    path = args.out / slug(run["device"]) / "engine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rates: dict[str, float] = {}

    def keep(rows: Iterable[Row]) -> None:
        for result in rows:
            rates[f"{result['name']} {result['batch']}"] = result["tokens_per_s"]
            shown = {k: v for k, v in result.items() if k not in ("name", "calls_per_step")}
            print(f"{result['name']:38}", *(f"{k}={v}" for k, v in shown.items()), flush=True)
            path.write_text(json.dumps(merge([result | run], path), indent=1) + "\n")

    model = random_llama(LLAMA_CONFIG, "cuda", torch.bfloat16)
    if "steady" in asked:
        keep(measure_steady(model))
    if "load" in asked:
        load = Load()
        num_blocks = load.cache_tokens // 16 * model.config.num_layers
        sizes = {"num_slots": 64, "num_blocks": num_blocks, "max_seq_len": load.max_seq_len}
        engine = Engine(model, graphs=True, **sizes)
        steady = rates.get("graphs, greedy 64") or steady_rate(engine, 1)
        keep([measure_load(engine, load, steady)])
        del engine
    if "transformers" in asked:
        keep(measure_transformers(model))
    if "texts" in asked:
        del model
        torch.cuda.empty_cache()
        keep([measure_texts(args.model)])


if __name__ == "__main__":
    main()

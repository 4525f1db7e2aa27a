"""Times the engine against transformers' generate on a CPU, and measures the engine's memory.

    python benchmarks/engine_cpu.py [--tokens 64] [--rounds 5] [--threads N] [--out FILE]

Both decode the demo model greedily in float32 from the same prompts, in one process with the same
threads, and take turns; the medians count. No EOS ends a text early, and both texts must be equal.
The peak memory is that of another process, which runs the engine and nothing else. --out writes
the rows as JSON, a list of objects.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pagedlab import Engine, Llama, Tokenizer, checkpoint

PROMPT = "Tell me a long story about a dog and a robot."
BATCHES = (1, 4)

Generate = Callable[[list[list[int]]], list[list[int]]]  # prompts -> answers


def pagedlab_generate(num_tokens: int) -> Generate:
    model = Llama.from_checkpoint(device="cpu")
    model.config = dataclasses.replace(model.config, eos_token_ids=())

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        engine = Engine(model, len(prompts), max_seq_len=len(prompts[0]) + num_tokens)
        requests = [engine.submit(ids, num_tokens) for ids in prompts]
        engine.run()
        return [request.tokens for request in requests]

    return generate


def transformers_generate(num_tokens: int) -> Generate:
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(checkpoint.locate(), dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        options = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return output[:, ids.shape[1] :].tolist()

    return generate


def compare(num_tokens: int, rounds: int) -> list[dict]:
    """A row per batch size and contestant, from rounds in which they take turns."""
    prompt = Tokenizer.from_checkpoint().chat(PROMPT)
    contestants = {
        "pagedlab": pagedlab_generate(num_tokens),
        "transformers": transformers_generate(num_tokens),
    }
    rows = []
    for batch in BATCHES:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(rounds + 1):
            texts = []
            for name in sorted(contestants, reverse=turn % 2 == 1):
                start = time.perf_counter()
                texts.append(contestants[name]([prompt] * batch))
                seconds[name].append(time.perf_counter() - start)
            if texts[0] != texts[1]:
                raise SystemExit(f"batch {batch}: the texts differ:\n{texts[0]}\n{texts[1]}")
        for name, taken in seconds.items():
            rate = batch * num_tokens / statistics.median(taken[1:])  # the first round warms up
            rows.append(
                {
                    "name": name,
                    "batch": batch,
                    "context": len(prompt) + num_tokens,
                    "tokens_per_s": round(rate, 2),
                }
            )
    return rows


def peak_bytes(num_tokens: int) -> int:
    """Peak memory of a process in which only the engine runs."""
    command = [sys.executable, __file__, "--engine-alone", "--tokens", str(num_tokens)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_own_peak(num_tokens: int) -> None:
    prompt = Tokenizer.from_checkpoint().chat(PROMPT)
    pagedlab_generate(num_tokens)([prompt] * max(BATCHES))
    unit = 1 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per text")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--engine-alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.engine_alone:
        print_own_peak(args.tokens)
        return 0
    peak = peak_bytes(args.tokens)
    rows = compare(args.tokens, args.rounds)
    print(f"{args.threads} threads, {args.tokens} tokens a text, median of {args.rounds} rounds")
    print(f"{'':12}  batch  tokens/s")
    for row in rows:
        print(f"{row['name']:12}  {row['batch']:5}  {row['tokens_per_s']:8.2f}")
    print(f"peak memory of the engine alone: {peak / 1e9:.2f} GB")
    rates = {(row["name"], row["batch"]): row["tokens_per_s"] for row in rows}
    ratios = [rates["pagedlab", batch] / rates["transformers", batch] for batch in BATCHES]
    print("pagedlab / transformers: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))
    if args.out:
        about = {"threads": args.threads, "torch": torch.__version__, "engine_peak_bytes": peak}
        args.out.write_text(json.dumps([row | about for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

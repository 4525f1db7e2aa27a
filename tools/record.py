"""Record runs on a GPU for the book: `python tools/record.py decode [FILE]`, or ledger.

The file goes to book/recordings unless another is named. Pages show it where there is no GPU, and
tests/test_recorded_decode.py and test_ledger.py hold it against a run on a CPU.

`ladder`, `roofline`, `copies`, `load` and `waste` measure nothing: they take over what a benchmark
has left in benchmarks/results, with its provenance, so that the book has it where only the package
is installed.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from pagedlab import Engine, Llama, Tokenizer, ledger
from pagedlab.engine import Request
from pagedlab.recordings import PROVENANCE, Recording
from pagedlab.run_recorder import RunRecorder

BOOK = Path(__file__).parent.parent / "book"
RESULTS = BOOK.parent / "benchmarks/results"
BENCHMARK_OF = {
    "ladder": "attention",
    "roofline": "ceilings",
    "copies": "copies",
    "load": "engine",
    "waste": "waste",
}
PROMPTS = (
    "What is the capital of Japan?",
    "What color is the sky?",
    "Name three fruits.",
)
MAX_NEW_TOKENS = 80
NUM_SLOTS = 2
NUM_LOGICAL_BLOCKS = 12  # per layer, for both slots together: the third prompt reuses blocks
RECORDED_LAYER = 1
NUM_TOP_LOGITS = 8


class LogitsKept:
    """A model that keeps the largest logits of each row it computes."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.rows: list[torch.Tensor] = []  # in the order in which a step asks: decodes, prefills

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prefill_batch(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = self._model.prefill_batch(*args, **kwargs)
        self.rows.extend(logits)
        return logits

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = self._model.decode(*args, **kwargs)
        self.rows.extend(logits)
        return logits


def state(engine: Engine) -> dict[str, Any]:
    """The tables and the free list after a step, short enough to keep for every step."""
    running = engine.scheduler.slots
    return {
        "seq_lens": [request.num_cached if request else 0 for request in running],
        "num_free": engine.pool.num_free,
        "next_free": engine.pool.free_blocks[-4:][::-1],
        "free_blocks_sha256": sha256(str(engine.pool.free_blocks)),
        "table_sha256": sha256(str(engine.table.host.tolist())),
    }


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_decode() -> Recording:
    """The demo model answers three prompts in two slots; the third gets a recycled slot."""
    tokenizer = Tokenizer.from_checkpoint()
    model = LogitsKept(Llama.from_checkpoint())
    warm_up(model)
    num_blocks = NUM_LOGICAL_BLOCKS * model.config.num_layers
    engine = Engine(model, num_slots=NUM_SLOTS, num_blocks=num_blocks, max_seq_len=128, events=[])
    requests = [engine.submit(tokenizer.chat(prompt), MAX_NEW_TOKENS) for prompt in PROMPTS]
    recorder = RunRecorder(engine, layer=RECORDED_LAYER)
    states: list[dict[str, Any]] = []
    top_logits: dict[str, list[Any]] = {str(request.id): [] for request in requests}
    model.rows.clear()
    while not recorder.idle:
        recorder.step()
        states.append(state(engine))
        keep_top(model.rows, step_tokens(engine, len(states)), top_logits)
    engine.check_integrity()
    data = recorder.data(tokenizer) | {
        "prompts": PROMPTS,
        "texts": [answer(tokenizer, request) for request in requests],
        "states": states,
        "top_logits": top_logits,
    }
    return Recording("decode", data)


def warm_up(model: LogitsKept) -> None:
    """Compile the kernels, so that the recorded times are those of running them."""
    engine = Engine(model, num_slots=NUM_SLOTS, max_seq_len=128)
    for _ in range(NUM_SLOTS):
        engine.submit([1, 2, 3], max_new_tokens=20)
    engine.run()


def step_tokens(engine: Engine, step: int) -> list[Any]:
    """The token events of one step, in the order of the logits' rows."""
    return [
        event for event in engine.events or () if event.step == step and hasattr(event, "token")
    ]


def keep_top(rows: list[torch.Tensor], events: list[Any], kept: dict[str, list[Any]]) -> None:
    """Move a step's rows of logits into `kept`: per request and token, ids and their logits."""
    for row, event in zip(rows, events, strict=True):
        values, ids = row.float().topk(NUM_TOP_LOGITS)
        logits = [round(value, 3) for value in values.tolist()]
        kept[str(event.request)].append({"ids": ids.tolist(), "logits": logits})
    rows.clear()


def answer(tokenizer: Tokenizer, request: Request) -> str:
    return tokenizer.decode(request.tokens)


def record_ledger() -> Recording:
    """Every claim of the article, and every mutant, examined on the GPU."""
    return ledger.record("cuda")


def ledger_lines(findings: dict[str, Any]) -> list[str]:
    """What does not stand, what was not run, and which mutants passed; then the counts."""
    lines = []
    for id, finding in findings.items():
        if not finding["stands"]:
            lines.append(f"{id}: refuted: {finding['problem']}")
        missing = [v for v in finding["evidence"].values() if str(v).startswith("not run")]
        lines += [f"{id}: {reason}" for reason in missing]
        passing = [name for name, problem in finding["mutants"].items() if not problem]
        lines += [f"{id}: passes with a mistake: {name}" for name in passing]
    num_mutants = sum(len(finding["mutants"]) for finding in findings.values())
    return [*lines, f"{len(findings)} claims, {num_mutants} mutants, {len(lines)} to look at"]


def take_over(kind: str, folder: Path | None = None) -> Recording:
    """The rows that a benchmark left in `folder`, by default the only one that has them.

    Raises:
        ValueError: none or several folders have them, or the rows differ in more than their date.
    """
    name = f"{BENCHMARK_OF[kind]}.json"
    found = [folder / name] if folder else sorted(RESULTS.glob(f"*/{name}"))
    if len(found) != 1 or not found[0].is_file():
        got = ", ".join(path.parent.name for path in found) or "none"
        raise ValueError(f"record: expected one folder of results with {name}, got {got}")
    rows = json.loads(found[0].read_text("utf-8"))
    runs = [{field: row.pop(field) for field in PROVENANCE} for row in rows]
    last = max(runs, key=lambda run: run["date"])  # a benchmark may be run part by part
    if any(run | {"date": last["date"]} != last for run in runs):
        raise ValueError(f"record: expected rows of one machine and commit in {name}, got several")
    return Recording(kind, {"rows": rows}, last)


RECORDERS = {"decode": record_decode, "ledger": record_ledger}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(RECORDERS | BENCHMARK_OF))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--results", type=Path, help="the folder to take a benchmark's rows from")
    arguments = parser.parse_args()
    if arguments.what in BENCHMARK_OF:
        try:
            recording = take_over(arguments.what, arguments.results)
        except ValueError as error:
            sys.exit(str(error))
    elif not torch.cuda.is_available():
        sys.exit("record: expected an NVIDIA GPU, got none")
    else:
        recording = RECORDERS[arguments.what]()
    path = arguments.file or BOOK / "recordings" / f"{arguments.what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    recording.save(path)
    print(f"{path}: {path.stat().st_size:,} bytes. {recording.describe()}")
    for text in recording.data.get("texts", ()):
        print(f"  {text!r}")


if __name__ == "__main__":
    main()

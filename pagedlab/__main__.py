"""python -m pagedlab decode | address | doctor: the model, one address, this machine."""

import argparse
import io
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, NoReturn

import torch

import pagedlab
from pagedlab import checkpoint, demo_model
from pagedlab.attention import BACKENDS, paged_attention
from pagedlab.engine import BlockEvent, Engine, SlotEvent
from pagedlab.layout import DTYPES, LLAMA_3_2_1B, KVLayout
from pagedlab.llama import Llama
from pagedlab.portable import interpreter_fault
from pagedlab.stand_in import has_triton
from pagedlab.tokenizer import Tokenizer

PLACE = ("physical_block", "token", "kv_head", "lane")
NEEDED_FOR = {
    "numpy": "tables",
    "safetensors": "loading weights",
    "tokenizers": "text",
    "jinja2": "chat templates",
    "gguf": "converting the demo model",
    "huggingface-hub": "models by hub id",
    "ipywidgets": "widgets",
    "anywidget": "widgets",
    "plotly": "figures",
}


def note(line: str) -> None:
    """One line for the person at the terminal; stdout stays the answer's."""
    print(f"pagedlab: {line}", file=sys.stderr)


# decode


def decode(args: argparse.Namespace) -> None:
    """Answer the prompts, streaming; several are labelled by their request's number."""
    device = checkpoint.pick_device()
    if args.backend == "triton" and device.type == "cpu" and has_triton():
        note("no CUDA GPU: Triton's interpreter runs the kernels, at seconds per token")
    model = Llama.from_checkpoint(args.model, device=device)
    tokenizer = Tokenizer.from_checkpoint(args.model)
    num_blocks = model.kv_layout().num_blocks(args.cache_mib * 2**20)
    attention = partial(paged_attention, backend=args.backend)
    events: list[NamedTuple] = []
    engine = Engine(model, args.slots, num_blocks, attention=attention, events=events)
    requests = [engine.submit(tokenizer.chat(text), args.max_new_tokens) for text in args.prompts]
    show = partial(print, end="", flush=True, file=io.StringIO() if args.json else None)
    start, answers = time.perf_counter(), []
    for request, prompt in zip(requests, args.prompts, strict=True):
        show(f"[{request.id}] " if len(requests) > 1 else "")
        pieces = []
        for piece in tokenizer.stream(engine.stream(request)):
            show(piece)
            pieces.append(piece)
        show("\n")
        fields = {name: getattr(request, name) for name in ("id", "tokens", "finish_reason")}
        answers.append({"prompt": prompt, "text": "".join(pieces), **fields})
        if request.finish_reason != "eos":
            note(f"request {request.id} ended by {request.finish_reason}")
    if args.json:
        result = {
            "model": args.model or "SmolLM2-135M-Instruct",
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "backend": args.backend,
            "num_blocks": engine.num_blocks,
            "seconds": round(time.perf_counter() - start, 3),
            "requests": answers,
        }
        if args.show_blocks:
            result["events"] = [{"event": type(e).__name__, **e._asdict()} for e in events]
        print(json.dumps(result, indent=2))
    elif args.show_blocks:
        print("\n".join(block_lines(engine, events)))


def block_lines(engine: Engine, events: list[NamedTuple]) -> Iterator[str]:
    """What happened to slots and to the blocks of layer 0, a line per event."""
    block_size, num_layers = engine.cache.layout.block_size, engine.table.num_layers
    yield f"{engine.num_blocks} blocks of {block_size} tokens; layer 0 of {num_layers}:"
    for event in events:
        if isinstance(event, SlotEvent):
            what = f"{event.num_tokens} tokens"
        elif isinstance(event, BlockEvent) and event.layer == 0:
            what = f"logical {event.logical_block} = physical {event.physical_block}"
        else:
            continue
        who = f"step {event.step:4}  slot {event.slot}  request {event.request}"
        yield f"{who}  {event.action:8}  {what}"
    yield f"{engine.pool.num_free} of {engine.num_blocks} blocks are free"


# address


def address(args: argparse.Namespace) -> None:
    """Byte addresses of one K and V element, or the owner of one byte."""
    sizes = args.block_size, args.num_kv_heads, args.head_dim
    layout = KVLayout(*sizes, getattr(torch, args.dtype))
    place = {name: getattr(args, name) for name in PLACE}
    given = [name for name, value in place.items() if value is not None]
    if args.byte is not None and not given:
        result = layout.locate(args.byte)._asdict()
    elif args.byte is None and len(given) == len(PLACE):
        values = tuple(place.values())
        result = {"K": layout.k_address(*values), "V": layout.v_address(*values)}
    else:
        got = given + ["byte"] * (args.byte is not None)
        options = " ".join("--" + name.replace("_", "-") for name in got) or "neither"
        wanted = "--physical-block, --token, --kv-head and --lane, or --byte alone"
        raise ValueError(f"address: expected {wanted}, got {options}")
    print(json.dumps(result) if args.json else "\n".join(f"{k} {v}" for k, v in result.items()))


# doctor


class Finding(NamedTuple):
    """One line of the doctor's report; `advice` is empty where nothing is amiss."""

    name: str
    found: str
    advice: str = ""


def doctor(args: argparse.Namespace) -> None:
    """Versions, hardware, what will run where, and what to do about what won't."""
    findings = list(examine())
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for name, found, advice in findings:
        print(f"{name:{width}}  {found}" + (f"; {advice}" if advice else ""))


def examine() -> Iterator[Finding]:
    """The doctor's findings, one after the other."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding(
        "pagedlab", f"{pagedlab.__version__}, Python {platform.python_version()}, {system}"
    )
    yield Finding("torch", torch.__version__)
    triton = installed("triton")
    triton_advice = "on Linux: pip install triton" if platform.system() == "Linux" else ""
    yield Finding("triton", triton or "not installed", "" if triton else triton_advice)
    for package, needed_for in NEEDED_FOR.items():
        advice = f"for {needed_for}: pip install {package}"
        found = installed(package)
        yield Finding(package, found or "not installed", "" if found else advice)
    yield from examine_device(triton)
    target = demo_model.cache_dir() / "SmolLM2-135M-Instruct"
    ready = demo_model.is_current(target)
    fetched = "not there yet; the first use fetches and converts it (270 MB), once"
    yield Finding("demo model", f"in {target}" if ready else fetched)


def examine_device(triton: str) -> Iterator[Finding]:
    """The device, and where model, attention and kernels will run on it."""
    device = checkpoint.pick_device()
    dtype = str(checkpoint.pick_dtype(device)).removeprefix("torch.")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        yield Finding(
            "GPU", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {memory}, CUDA {torch.version.cuda}"
        )
    else:
        built = "torch is a CPU build" if torch.version.cuda is None else "torch sees no GPU"
        yield Finding("GPU", f"none ({built})", "the book and the demo model run without one")
    yield Finding("model", f"runs on {device.type} in {dtype}")
    where = "triton" if device.type == "cuda" and triton else "torch"
    yield Finding("attention", f"backend auto is {where}")
    if not triton:
        yield Finding("kernels", "do not run without triton", "everything else runs on torch")
    elif device.type == "cuda" and not interpreted:
        old = "Triton may refuse this GPU: then use --backend torch" if gpu.major < 8 else ""
        yield Finding("kernels", f"compiled for sm_{gpu.major}{gpu.minor}", old)
    elif interpreted:
        advice = "slow: for steps and tests"
        if device.type == "cuda":
            advice = "slow; unset TRITON_INTERPRET to use the GPU"
        else:
            advice = interpreter_fault(triton, installed("numpy")) or advice
        yield Finding("kernels", "run in Triton's interpreter, in float32", advice)
    else:
        yield Finding("kernels", "do not run here", "set TRITON_INTERPRET=1 before Python starts")


def installed(package: str) -> str:
    """A package's version, empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """An integer of at least 1, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def make_parser() -> Parser:
    """The three commands and their options."""
    parser = Parser(prog="pagedlab", description="A paged KV cache, from the block to the model.")
    commands = parser.add_subparsers(required=True, metavar="decode | address | doctor")

    def command(run: Any, help_text: str) -> Parser:
        added = commands.add_parser(run.__name__, help=help_text, description=run.__doc__)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    add = command(decode, "answer prompts with a model").add_argument
    add("prompts", nargs="+", metavar="PROMPT")
    add("--model", metavar="PATH|ID", help="a folder or a hub id; by default the demo model")
    add("--slots", type=positive, default=LLAMA_3_2_1B.num_slots, metavar="N")
    add("--cache-mib", type=positive, default=256, metavar="M", help="size of the KV cache")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="tokens per answer")
    add("--backend", choices=BACKENDS, default="auto", help="what computes the attention")
    add("--show-blocks", action="store_true", help="tell who got and gave which block")

    add = command(address, "the bytes of a K and V element, or a byte's owner").add_argument
    for name in (*PLACE, "byte"):
        add("--" + name.replace("_", "-"), type=int, metavar="N")
    for name in ("block_size", "num_kv_heads", "head_dim"):
        default = getattr(LLAMA_3_2_1B, name)
        option = "--" + name.replace("_", "-")
        add(option, type=int, default=default, metavar="N", help=f"by default {default}")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    add("--dtype", choices=names, default=str(LLAMA_3_2_1B.dtype).removeprefix("torch."))

    command(doctor, "what this machine can run, and what to do about the rest")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 after one line on stderr."""
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (ValueError, ImportError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1
        note(" ".join(str(error).split()) or type(error).__name__)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

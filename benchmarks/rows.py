"""Rows of results: JSON lists in results/<device>, each row with its provenance."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from pagedlab.recordings import kernel_hash, provenance

RESULTS = Path(__file__).parent / "results"


def slug(device: str) -> str:
    """A device's folder: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"\W+", "-", device.lower()).strip("-")


def command_line(doc: str) -> argparse.ArgumentParser:
    """The options that every benchmark with results has; doc's first line says what it does."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what to name as the commit, if git is not there")
    return parser


def begin_run(args: argparse.Namespace, *, graphs: bool = False) -> dict[str, Any]:
    """The provenance of this run; graphs: its kernel hash covers what only graphs run, too."""
    run = provenance() | {"kernel_hash": kernel_hash(graphs=graphs)}
    run["commit"] = args.commit or run["commit"]
    return run


def expect_gpu() -> None:
    """Without an NVIDIA GPU say so and end the script, which is no error."""
    if not torch.cuda.is_available():
        print("no NVIDIA GPU: nothing to measure")
        sys.exit(0)


def save(name: str, rows: list[dict[str, Any]], run: dict[str, Any], out: Path = RESULTS) -> Path:
    """Write rows, each with the run's provenance, to out/<device>/<name>.json."""
    folder = out / slug(run["device"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps([row | run for row in rows], indent=1) + "\n")
    return path

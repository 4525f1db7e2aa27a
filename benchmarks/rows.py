"""Rows of results: JSON lists in results/<device>, each row with its provenance."""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def slug(device: str) -> str:
    """A device's folder: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"\W+", "-", device.lower()).strip("-")


def save(name: str, rows: list[dict[str, Any]], run: dict[str, Any], out: Path = RESULTS) -> Path:
    """Write rows, each with the run's provenance, to out/<device>/<name>.json."""
    folder = out / slug(run["device"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps([row | run for row in rows], indent=1) + "\n")
    return path

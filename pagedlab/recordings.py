"""Runs saved as data with their provenance, and the step events they share with live runs."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
PACKAGE = Path(__file__).parent
FIELDS = ("format", "kind", "provenance", "data")
PROVENANCE = ("device", "capability", "date", "commit", "kernel_hash", "versions")
GRAPH_KERNELS = ("choose.py", "decode_ops.py")  # that only Engine(graphs=True) runs
BLOCK_ACTIONS = ("allocate", "release")
SLOT_ACTIONS = ("admit", "preempt", "finish", "cancel")


class RecordingError(ValueError):
    """A recording that is missing, damaged, or in a format that this version does not know."""


@dataclass(frozen=True)
class Recording:
    """What one run produced, and where, when and with which kernels it was made.

    Attributes:
        kind: what `data` holds, e.g. "decode".
        data: JSON.
        provenance: device, capability, date (UTC), commit, kernel_hash, versions.

    >>> Recording("decode", {}, {"kernel_hash": "0" * 16}).outdated
    True
    """

    kind: str
    data: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=lambda: provenance())

    @property
    def outdated(self) -> bool:
        """Whether the kernels have changed since the run."""
        return self.provenance["kernel_hash"] not in (kernel_hash(), kernel_hash(graphs=True))

    @property
    def events(self) -> list[Any]:
        """The run's step events, equal to those that a live engine logs."""
        return decode_events(self.data["events"])

    def describe(self) -> str:
        """One line: which hardware, when, which commit, and whether the kernels changed since."""
        of = self.provenance
        text = f"Recorded on {of['device']}, {of['date'][:10]}, commit {of['commit'][:8]}"
        return text + ("; outdated: the kernels have changed since." if self.outdated else ".")

    def save(self, path: Path | str) -> None:
        """Write the recording, atomically; equal recordings give equal files.

        Raises:
            ValueError: data that is not JSON, or not finite.
        """
        path = Path(path)
        content = dict(zip(FIELDS, (FORMAT, self.kind, self.provenance, self.data), strict=True))
        text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        part = path.with_suffix(".part")
        part.write_text(text + "\n", "utf-8")
        os.replace(part, path)


def load(name: Path | str) -> Recording:
    """Read a recording by name ("decode") from the book's recordings, or by path.

    Raises:
        RecordingError: no such file, not JSON, fields missing or unknown, another format.
    """
    path = find(name)
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path.name}: expected JSON, got {error}") from None
    _expect_fields(path.name, content, FIELDS)
    if content["format"] != FORMAT:
        raise RecordingError(f"{path.name}: expected format {FORMAT}, got {content['format']!r}")
    of = content["provenance"]
    _expect_fields(f"{path.name}: provenance", of, PROVENANCE)
    for name, value in [("kind", content["kind"]), *of.items(), ("data", content["data"])]:
        kind = dict if name in ("versions", "data") else str
        if not isinstance(value, kind):
            got = type(value).__name__
            raise RecordingError(f"{path.name}: {name}: expected {kind.__name__}, got {got}")
    return Recording(content["kind"], content["data"], of)


def find(name: Path | str) -> Path:
    """The file of a recording: a path, or a name in the book's recordings, installed or not.

    Raises:
        RecordingError: there is none.
    """
    folders = (Path("recordings"), Path("book/recordings"), PACKAGE.parent / "book/recordings")
    in_folders = [folder / f"{name}.json" for folder in folders]
    for path in (Path(name), *in_folders, *_installed(f"{name}.json")):
        if path.is_file():
            return path
    raise RecordingError(
        f"recording: expected a file or the name of one in book/recordings, got {str(name)!r}"
    )


def run_or_load(name: str, run: Callable[[], Recording]) -> Recording:
    """A live run where a GPU is, the recording of one elsewhere; `describe()` says which."""
    return run() if torch.cuda.is_available() else load(name)


def provenance() -> dict[str, Any]:
    """Where and with what a run is being made, now."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else "",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "kernel_hash": kernel_hash(),
        "versions": {"python": platform.python_version()} | _versions("torch", "triton", "numpy"),
    }


def kernel_hash(graphs: bool = False) -> str:
    """A hash of pagedlab/kernels, 16 hexadecimal digits.

    Args:
        graphs: whether the run decoded in CUDA graphs; other runs have nothing of GRAPH_KERNELS.
    """
    hashed = sha256()
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        if path.name in GRAPH_KERNELS and not graphs:
            continue
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def encode_events(events: Iterable[Any]) -> list[list[Any]]:
    """Step events as JSON rows: [action, step, request, slot, ...].

    BlockEvent adds layer, logical_block, physical_block; SlotEvent num_tokens; TokenEvent, whose
    action is "token", position and token. Rows pass through unchanged.

    Raises:
        ValueError: something that is no step event, or steps that run backwards.

    >>> from pagedlab.engine import SlotEvent
    >>> encode_events([SlotEvent(step=0, action="admit", request=3, slot=1, num_tokens=17)])
    [['admit', 0, 3, 1, 17]]
    """
    rows = [_row(event) for event in events]
    for before, after in pairwise(rows):
        if after[1] < before[1]:
            raise ValueError(f"events: expected steps in order, got {after[1]} after {before[1]}")
    return rows


def decode_events(rows: Iterable[list[Any]]) -> list[Any]:
    """The engine's named tuples from JSON rows; inverts `encode_events`.

    Raises:
        RecordingError: a row of unknown form.
    """
    from pagedlab.engine import BlockEvent, SlotEvent, TokenEvent

    events: list[Any] = []
    for action, step, *rest in map(_row, rows):
        if action in BLOCK_ACTIONS:
            events.append(BlockEvent(step, action, *rest))
        elif action == "token":
            events.append(TokenEvent(step, *rest))
        else:
            events.append(SlotEvent(step, action, *rest))
    return events


def _row(event: Any) -> list[Any]:
    if hasattr(event, "_asdict"):
        fields = event._asdict()
        row = [fields.pop("action", "token"), *fields.values()]
    else:
        row = list(event) if event and isinstance(event, (list, tuple)) else [event]
    lengths = dict.fromkeys(BLOCK_ACTIONS, 7) | dict.fromkeys(SLOT_ACTIONS, 5) | {"token": 6}
    whole = all(isinstance(value, int) for value in row[1:])
    if lengths.get(str(row[0])) != len(row) or not whole:
        raise RecordingError(f"events: expected a block, slot or token event, got {event!r}")
    return row


def _installed(file_name: str) -> list[Path]:
    try:
        files = distribution("pagedlab").files or []
    except PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == file_name]


def _expect_fields(what: str, content: Any, names: tuple[str, ...]) -> None:
    got = sorted(content) if isinstance(content, dict) else type(content).__name__
    if got != sorted(names):
        raise RecordingError(f"{what}: expected fields {', '.join(sorted(names))}, got {got}")


def _commit() -> str:
    if named := os.environ.get("PAGEDLAB_COMMIT"):  # on a machine that has the files without git
        return named
    command = ["git", "-C", str(PACKAGE), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

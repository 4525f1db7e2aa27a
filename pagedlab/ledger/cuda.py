"""CUDA programs of this folder: compiled with nvcc, run, and watched by compute-sanitizer."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
NOT_RUN = "not run: "  # begins what is said in place of evidence
TOOLKIT = "/usr/local/cuda/bin"  # where the CUDA toolkit's tools are if PATH does not have them


class Hazards(NamedTuple):
    """What racecheck reported: hazards found, its summary line, and the beginning of its text."""

    found: int
    summary: str
    text: str


def missing_tools(*names: str) -> str:
    """Why a CUDA program cannot be built or watched here, or ""."""
    missing = [name for name in names if find_tool(name) is None]
    return f"{NOT_RUN}no {' and no '.join(missing)} here" if missing else ""


def find_tool(name: str) -> str | None:
    """The path of a tool of the CUDA toolkit, or None."""
    return shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + TOOLKIT)


def build(name: str, folder: Path, arch: str = "native") -> Path:
    """Compile `name`.cu of this folder into `folder`, with line information.

    Raises:
        RuntimeError: nvcc's first error.
    """
    program = folder / name
    source = str(FOLDER / f"{name}.cu")
    command = [
        find_tool("nvcc") or "nvcc",
        f"-arch={arch}",
        "-lineinfo",
        "-o",
        str(program),
        source,
    ]
    _run(command, f"{name}.cu")
    return program


def run(program: Path, *arguments: object) -> dict[str, Any]:
    """A program's line of JSON.

    Raises:
        RuntimeError: the program's first line of complaint.
    """
    out = _run([str(program), *map(str, arguments)], program.name)
    return json.loads(out.replace("nan", "NaN"))


def racecheck(program: Path, *arguments: object) -> Hazards:
    """Shared-memory hazards of a program, found by compute-sanitizer.

    Raises:
        RuntimeError: the program failed, or there is no summary.
    """
    sanitizer = find_tool("compute-sanitizer") or "compute-sanitizer"
    command = [sanitizer, "--tool", "racecheck", "--racecheck-report", "analysis"]
    out = _run([*command, str(program), *map(str, arguments)], "racecheck", may_fail=True)
    return parse_racecheck(out)


def parse_racecheck(text: str) -> Hazards:
    """Hazards in racecheck's report.

    >>> parse_racecheck('''========= Warning: Race reported between Read access at f+0x1
    ... =========     and Write access at f+0x2 [126 hazards]
    ... ========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)''')[:2]
    (126, '1 hazard displayed (0 errors, 1 warning)')
    """
    found = re.search(r"RACECHECK SUMMARY: (.*)", text)
    if found is None:
        raise RuntimeError(f"racecheck: expected a summary, got {text.strip()[-200:]!r}")
    counted = [int(n) for n in re.findall(r"\[(\d+) hazards?\]", text)]
    displayed = int(re.match(r"\d+", found[1])[0]) if found[1][0].isdigit() else 0  # type: ignore[index]
    without_folders = re.sub(r"(?:/[^/\s]+)+/", "", text)
    return Hazards(sum(counted) or displayed, found[1].strip(), without_folders[:2000])


def in_folder(name: str) -> "Built":
    """`with in_folder("two_warps") as program:` builds it in a folder that is removed after."""
    return Built(name)


class Built:
    """A program that is there for the length of a with statement."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Path:
        return build(self.name, Path(self.folder.name))

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()


def _run(command: list[str], what: str, may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not may_fail:
        reason = (done.stderr or done.stdout).strip().splitlines() or [f"{done.returncode}"]
        raise RuntimeError(f"{what}: {reason[0]}")
    return done.stdout + (done.stderr if may_fail else "")

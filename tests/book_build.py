"""Copies of this checkout, and builds of the book in an environment that knows only the copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
# What the tests' own process set up, and a fresh shell has not.
DROPPED = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")


def copy_checkout(target: Path) -> Path:
    """Copy what a clone of this checkout would hold, uncommitted edits included, to `target`."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def make_environment(folder: Path, *checkouts: Path) -> tuple[Path, dict[str, str]]:
    """A virtual environment with this one's packages, but pagedlab from `checkouts` or nowhere.

    Returns its Python and the environment variables to run it with.
    """
    if not folder.exists():
        venv.create(folder)
        paths = {"base": str(folder), "platbase": str(folder)}
        packages = Path(sysconfig.get_path("purelib", vars=paths))
        # Added as plain folders: an editable install of pagedlab among the packages stays inactive.
        lines = [*map(str, checkouts), sysconfig.get_path("purelib")]
        (packages / "packages.pth").write_text("\n".join(lines) + "\n")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    variables = {name: value for name, value in os.environ.items() if name not in DROPPED}
    return python, variables | {"NO_COLOR": "1"}


def build_book(book: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `jupyter-book build` on `book` from another directory, as after pip install there."""
    environment = book.parent / f"{book.name}-environment"
    python, variables = make_environment(environment, book)
    return subprocess.run(
        [python, "-c", JUPYTER_BOOK, "build", *options, str(book)],
        cwd=environment,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

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


def copy_checkout(target: Path) -> Path:
    """Copy what a clone of this checkout would hold, uncommitted edits included, to `target`."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def build_book(book: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `jupyter-book build` on `book` from another directory, as after pip install there.

    The environment is one in which requirements.txt was installed from `book`: this one's
    packages, with pagedlab imported from `book`.
    """
    environment = book.parent / f"{book.name}-environment"
    if not environment.exists():
        venv.create(environment)
        paths = {"base": str(environment), "platbase": str(environment)}
        packages = Path(sysconfig.get_path("purelib", vars=paths))
        (packages / "book.pth").write_text(f"{book}\n{sysconfig.get_path('purelib')}\n")
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    bin_folder = environment / ("Scripts" if os.name == "nt" else "bin")
    return subprocess.run(
        [bin_folder / "python", "-c", JUPYTER_BOOK, "build", *options, str(book)],
        cwd=environment,
        env=variables | {"NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

"""The README's commands print what it says, and its Python runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
COMMANDS = re.findall(r"^\$ python (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.MULTILINE)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_readme_shows(command, output):
    run = subprocess.run(
        [sys.executable, *shlex.split(command)], capture_output=True, text=True, check=True
    )
    assert run.stdout == output


def test_the_readme_shows_commands():
    assert len(COMMANDS) == 3


def test_the_python_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["out"].shape == (1, 32, 64)
    names["pool"].check_integrity()
    assert names["pool"].num_free == 32


def test_the_readme_names_every_module_once():
    rows = re.findall(r"^\| (`[\w/, `]+`) \|", README, re.MULTILINE)
    named = [name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    package = ROOT / "pagedlab"
    public = {path.stem for path in package.glob("*.py") if not path.name.startswith("_")}
    public |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert sorted(named) == sorted(public)

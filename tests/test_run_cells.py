"""tools/run_cells.py runs a chapter without Jupyter, and says what fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from book_build import ROOT
from run_cells import cells

SCRIPT = ROOT / "tools/run_cells.py"
NO_WIDGETS = f"""
import importlib.util, runpy, sys
find = importlib.util.find_spec
hidden = ("anywidget", "ipywidgets", "plotly", "traitlets")
importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
IMPORTS = "from pagedlab import KVLayout, AddressCalculator\nimport torch\n"
LAYOUT = "layout = KVLayout(4, 3, 16, torch.float32)\n"


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def chapter(folder: Path, *code: str) -> str:
    path = folder / "01_x.md"
    path.write_text("# X\n\n" + "\n".join(f"```{{code-cell}} ipython3\n{c}\n```\n" for c in code))
    return str(path)


@pytest.mark.parametrize("command", [[str(SCRIPT)], ["-c", NO_WIDGETS]], ids=["all", "no widgets"])
def test_cells_run_in_order_with_and_without_widget_libraries(
    tmp_path: Path, command: list[str]
) -> None:
    names = "import pagedlab, inspect\nassert 'LAYOUT' not in dir()\ndef f():\n    return 1"
    source = (
        "assert inspect.getsource(f).endswith('return 1\\n')\nassert f.__module__ == '__main__'"
    )
    status, said = run(
        *command, chapter(tmp_path, names, source, IMPORTS + LAYOUT + "AddressCalculator(layout)")
    )
    assert (status, "01_x: ok, 3 cells" in said) == (0, True), said
    assert ("not drawn" in said) == (command[0] == "-c")


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("KVLayout(0, 1, 1, torch.float32)", "ValueError: "),
        (LAYOUT + "AddressCalculator(layout, lane=16)", "ValueError: AddressCalculator: lane"),
        (LAYOUT + "AddressCalculator(layout, lane=1.5)", "lane"),
        (LAYOUT + "AddressCalculator(layout, no_such_argument=1)", "no_such_argument"),
        (LAYOUT + "AddressCalculator(layout).view.data = {'x': float('nan')}", "ValueError"),
    ],
)
def test_a_failing_cell_is_shown_with_its_reason(tmp_path: Path, cell: str, reason: str) -> None:
    status, said = run("-c", NO_WIDGETS, chapter(tmp_path, IMPORTS, "'fine'", cell, "never"))
    assert status == 1
    assert "01_x: failed in cell 3:\n" + cell in said
    assert reason in said


@pytest.mark.parametrize("num_chapters", [1, 2])
@pytest.mark.parametrize("command", [[str(SCRIPT)], ["-c", NO_WIDGETS]], ids=["all", "no widgets"])
def test_show_prints_what_each_cell_prints_and_its_value(
    tmp_path: Path, command: list[str], num_chapters: int
) -> None:
    widget = IMPORTS + LAYOUT + "AddressCalculator(layout)"
    path = chapter(tmp_path, "print('said')\n6 * 7", "x = 1", widget, "print('last')\n1 / 0")
    status, said = run(*command, "--show", *[path] * num_chapters)
    shown = [
        *("--- 01_x, cell 1\nsaid\n42", "--- 01_x, cell 2", "--- 01_x, cell 3"),
        *("<AddressCalculator>", "--- 01_x, cell 4\nlast", "01_x: failed in cell 4:\n"),
    ]
    assert status == 1
    assert said.count("\n".join(shown)) == num_chapters, said
    assert "--- 01_x" not in run(*command, path)[1]


def test_show_prints_while_a_cell_runs(tmp_path: Path) -> None:
    status, said = run(str(SCRIPT), "--show", chapter(tmp_path, "print(6)\nimport os\nos._exit(7)"))
    assert (status, said) == (7, "--- 01_x, cell 1\n6\n")


def test_one_failing_chapter_fails_the_run_and_the_others_still_run(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    good = chapter(tmp_path / "good", "1")
    out = tmp_path / "results.json"
    bad = chapter(tmp_path, "1", "print('before')\n1 / 0")
    status, said = run(str(SCRIPT), bad, good, "--out", str(out))
    assert status == 1
    assert "failed in cell 2" in said
    assert "ok, 1 cells" in said
    failed, ran = json.loads(out.read_text())
    assert (failed["ok"], failed["failed_cell"], failed["output"]) == (False, 2, "before\n")
    assert "ZeroDivisionError" in failed["reason"]
    assert (ran["ok"], ran["cells"], ran["left_out"]) == (True, 1, [])


def test_a_chapter_whose_process_dies_has_failed(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    dies = chapter(tmp_path, "import os\nos._exit(7)")
    status, said = run(str(SCRIPT), dies, dies, "--out", str(out))
    assert (status, said.count("01_x: the process ended with status 7")) == (1, 2)
    assert [result["reason"] for result in json.loads(out.read_text())] == ["exit status 7"] * 2


def test_cells_are_those_that_the_book_runs() -> None:
    import jupytext

    for path in sorted((ROOT / "book").glob("[0-9][0-9]_*.md")):
        notebook = jupytext.read(path, fmt="md:myst")
        code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.rstrip("\n") for cell in cells(path)] == code

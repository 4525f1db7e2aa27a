"""Without Triton (macOS, Windows) chapters run: the cells that need a kernel say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from book_build import ROOT

NO_TRITON = "import sys; sys.modules['triton'] = None  # as if it were not installed\n"
KERNEL = """\
@triton.jit
def twice(x_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(x_ptr + lane, 2 * tl.load(x_ptr + lane))
"""


def python(code: str, *arguments: str) -> str:
    """What `code` prints in a process that has no Triton and where a warning is an error."""
    command = [sys.executable, "-W", "error", "-c", NO_TRITON + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


KERNEL_CHAPTERS = (
    "03_writing",
    "04_kernel",
    "05_reduction",
    "06_online_softmax",
    "10_ledger",
    "11_costs",
    "12_museum",
)


@pytest.mark.parametrize("name", KERNEL_CHAPTERS)
def test_a_kernel_chapter_runs_to_its_end(name: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "tools/run_cells.py")
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    code = f"try:\n    {code}\nexcept SystemExit as status:\n    print('status', status.code)\n"
    said = python(code, f"book/{name}.md", "--out", str(out))
    (result,) = json.loads(out.read_text())
    assert result["ok"], said
    assert 1 not in result["left_out"]
    assert 2 <= len(result["left_out"]) <= result["cells"] // 2
    assert f"left out: cells {result['left_out'][0]}, " in said


def test_a_notebook_says_what_it_leaves_out_and_why() -> None:
    cells = [
        "import torch\nfrom pagedlab import show, step, tl, triton",
        f"x = torch.ones(4)\n{KERNEL}\nfloat(x.sum())",
        "y = 1\ntrace = step(twice, (1,), x, 4)\ny = 2",
        "trace.steps",
        "y + 1",
        "no_such_name",
    ]
    said = python(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance(colors='nocolor')\n"
        f"for cell in {cells}:\n"
        "    done = shell.run_cell(cell)\n"
        "    print('->', done.result, done.success)\n"
    )
    assert said.count("this cell needs Triton, which pip has for Linux only") == 1
    assert said.count("this cell needs trace, which a cell above makes with Triton") == 1
    results = [line[3:] for line in said.splitlines() if line.startswith("-> ")]
    assert results == ["None True", "4.0 True", "None True", "None True", "2 True", "None False"]
    assert "name 'no_such_name' is not defined" in said


def test_only_pagedlab_sees_the_stand_in() -> None:
    said = python(
        "import torch\nfrom pagedlab import show, tl, triton\n"
        "from pagedlab.kernels.by_token import by_token_kernel\n"
        "print(show(by_token_kernel).lines[1].strip())\n"
        "print(*[name for name in sys.modules if name[:6] == 'triton' and sys.modules[name]])\n"
        "try:\n    import triton.language\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    first, modules, error = said.splitlines()
    assert first.startswith("def by_token_kernel(")
    assert modules == ""
    assert error


def test_a_launch_a_step_and_a_backend_say_that_there_is_no_triton() -> None:
    needs = "expected Triton, which pip has for Linux, got a machine without it"
    said = python(
        "import torch\n"
        "from pagedlab import BlockTable, KVLayout, PagedKVCache, paged_attention\n"
        "from pagedlab import step, step_launch, tl, triton\n"
        "from pagedlab.kernels.write_kv import write_kv\n"
        f"{KERNEL}"
        "x = torch.ones(1, 1, 16)\n"
        "cache = PagedKVCache(KVLayout(4, 1, 16, torch.float32), 2)\n"
        "table, row = BlockTable(1, 1, 1), torch.zeros(1, dtype=torch.int32)\n"
        "for call in (\n"
        "    lambda: twice[(1,)](x, 16), lambda: step(twice, (1,), x, 16),\n"
        "    lambda: step_launch(write_kv, x, x, cache.buffer, table.device, 0, cache.layout),\n"
        "    lambda: tl.load(x),\n"
        "    lambda: paged_attention(x, cache, table, row, row, 0, backend='triton'),\n"
        "):\n"
        "    try:\n        call()\n    except ValueError as error:\n        print(error)\n"
    )
    places = ["twice", "twice", "write_kv", "triton.language.load", "backend triton"]
    assert said.splitlines() == [f"{place}: {needs}" for place in places]


def test_a_kernel_of_an_exercise_cannot_be_tried() -> None:
    said = python(
        "from pagedlab import tl, triton\nfrom pagedlab.exercises import check\n"
        "@triton.jit\ndef append_token(*pointers):\n    tl.store(pointers, 1)\n"
        "result = check('3.4', append_token)\nprint(result.status, bool(result))\nprint(result)\n"
    )
    assert said.startswith("not tried yet False\n")
    assert "append_token: expected Triton" in said

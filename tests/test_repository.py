"""The repository: what importing costs, what is committed, and how the make targets set up."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from book_build import ROOT, copy_checkout
from packaging.requirements import Requirement

import pagedlab
from pagedlab.demo_model import PACKAGE

# From the address formula to the engine: these are the package's core, and small is a feature.
# show(), in source.py, comes after the engine, as in README's list, and is not counted.
CORE = (
    "layout block_pool block_table kv_cache reference attention trace checkpoint tokenizer "
    "llama sampling scheduler decode_graph engine"
)
# Of these, 378 lines are decode_graph, decode_ops and choose: what CUDA graphs and fusing cost.
MAX_CORE_LINES, MAX_MODULE_LINES = 2870, 250
# What a Colab runtime held in August 2026.
COLAB = {
    "anywidget": "0.9.21",
    "ipywidgets": "7.7.1",
    "numpy": "2.1.3",
    "plotly": "5.24.1",
    "safetensors": "0.8.0",
    "tokenizers": "0.22.2",
    "torch": "2.11.0",
}
HEAVY = ("anywidget", "gguf", "ipywidgets", "plotly", "safetensors", "tokenizers", "transformers")


def tracked_files() -> list[str]:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in run.stdout.splitlines() if (ROOT / name).is_file()]


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter, in which a warning is an error."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.serial
def test_import_costs_at_most_a_second_beyond_torch() -> None:
    code = (
        "import time, torch; start = time.perf_counter(); import pagedlab;"
        "print(time.perf_counter() - start)"
    )
    assert min(float(python(code)) for _ in range(3)) <= 1.0


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, torch; before = set(sys.modules); import pagedlab;"
    loaded = python(code + "print(*{m.split('.')[0] for m in set(sys.modules) - before})").split()
    assert not {*HEAVY, "triton"} & set(loaded)


def test_package_works_without_triton_widgets_and_transformers() -> None:
    hidden = [*HEAVY, "triton", "IPython", "pygments"]
    print_bytes = python(
        f"""
import importlib.abc, sys
import torch  # may import triton itself, but does not need it
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
for name in [m for m in sys.modules if m.split(".")[0] in {hidden}]:
    del sys.modules[name]
from pagedlab import KVLayout, BlockPool, BlockTable, PagedKVCache, paged_attention, show
layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
table, cache = BlockTable(1, 1, 2), PagedKVCache(layout, 8)
table.assign(0, 0, 0, BlockPool(8).allocate(1)[0])
cache.write(torch.ones(3, 2, 16), torch.ones(3, 2, 16), table, 0, 0, 0)
one = torch.tensor([3], dtype=torch.int32)
out = paged_attention(torch.ones(1, 4, 16), cache, table, one, one * 0, 0)
assert out.shape == (1, 4, 16) and (out == 1).all()
print(layout.block_bytes, len(show(KVLayout.k_address).lines) > 3)
"""
    )
    assert print_bytes.split() == ["1024", "True"]


def test_every_public_name_imports() -> None:
    for name in pagedlab.__all__:
        assert getattr(pagedlab, name) is not None


def code_lines(path: Path) -> int:
    """Lines that hold code: not blank, not comment, not docstring."""
    source = path.read_text("utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    layout = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def test_code_lines_leave_out_what_is_not_code(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        '"""Doc\n\nstring."""\n\n# comment\nx = (\n    1\n)  # tail\n\n\ny = """a\nb"""\n'
    )
    assert code_lines(path) == 5


def test_the_core_stays_small() -> None:
    modules = [ROOT / "pagedlab" / f"{name}.py" for name in CORE.split()]
    modules += (ROOT / "pagedlab/kernels").glob("*.py")
    lines = {path.name: code_lines(path) for path in modules if path.exists()}
    assert not {name: n for name, n in lines.items() if n > MAX_MODULE_LINES}
    assert sum(lines.values()) < MAX_CORE_LINES, lines


def test_table_of_contents_names_every_page_and_no_stub() -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    entries = [e["file"] for part in toc["parts"] for e in part["chapters"]]
    pages = {f"{name.removesuffix('.md')}.md" for name in [toc["root"], *entries]}
    assert pages == {name for name in tracked_files() if re.match(r"book/[^/]*\.md$", name)}
    for page in pages:
        words = len((ROOT / page).read_text("utf-8").split())
        is_chapter = re.match(r"book/\d\d_", page)
        assert words > (1000 if is_chapter else 5), page


def test_no_third_party_script_is_committed() -> None:
    for name in tracked_files():
        assert not re.search(r"node_modules|/vendor/|\.min\.|\.map$|\.tgz$|\.whl$", name)
        if name.endswith((".js", ".mjs", ".css")):
            text = (ROOT / name).read_text("utf-8")
            assert not re.search(r"/\*!|@license|sourceMappingURL|copyright", text, re.I), name
            assert max(map(len, text.splitlines())) <= 500, f"{name} looks minified"


def test_no_registry_address_or_path_of_a_machine_is_committed() -> None:
    hosts = r"(pypi|pythonhosted|npmjs|debian)\.(org|com)"
    places = "|".join(["/ro" + "ot/", "/ho" + "me/", "/wo" + "rk/", "/Us" + "ers/", "/t" + "mp/"])
    for name in tracked_files():
        try:
            text = (ROOT / name).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found = re.search(rf"({hosts}|(?<![\w.])({places}))", text)
        assert not found, f"{name}: {found[0] if found else ''}"


def test_committed_files_are_small() -> None:
    big = {name: (ROOT / name).stat().st_size for name in tracked_files()}
    assert not {name: size for name, size in big.items() if size > 1_000_000}


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert "not for Colab" in lines[0]
    return [text for line in lines if (text := line.split("#")[0].strip())]


def test_requirements_are_pinned_to_what_is_tested_here() -> None:
    *pinned, last = requirements()
    assert last == "-e ."
    for requirement in map(Requirement, pinned):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        if requirement.marker is None or requirement.marker.evaluate():
            assert version(requirement.name).split("+")[0] == pin.version, requirement.name
    triton = next(Requirement(line) for line in pinned if line.startswith("triton"))
    assert str(triton.marker) == 'platform_system == "Linux"'


def test_installing_the_package_on_colab_replaces_nothing() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["widgets"]]
    for requirement in map(Requirement, wanted):
        assert all(bound.operator == ">=" for bound in requirement.specifier)
        if requirement.name in COLAB:
            assert requirement.specifier.contains(COLAB[requirement.name]), requirement


def test_setup_installs_the_demo_model_that_the_package_reads() -> None:
    assert f"--no-deps {PACKAGE}\n" in (ROOT / "tools/setup.sh").read_text()


def make(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("target", ["book", "test", "lint", "notebooks", "bench", "record"])
def test_each_target_sets_itself_up_and_only_once(tmp_path: Path, target: str) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    first = make(checkout, "--dry-run", target, "PYTHON=python3.99")
    assert 'sh tools/setup.sh "python3.99" .venv' in first
    ready = checkout / ".venv/.ready"
    ready.parent.mkdir()
    ready.touch()
    assert "setup.sh" not in make(checkout, "--dry-run", target)
    os.utime(checkout / "requirements.txt", (2**32, 2**32))
    assert "setup.sh" in make(checkout, "--dry-run", target)


def test_help_lists_the_targets() -> None:
    listed = re.findall(r"^make (\w+)", make(ROOT, "help"), re.MULTILINE)
    assert listed == ["help", "book", "test", "lint", "notebooks", "bench", "record", "clean"]


@pytest.mark.parametrize("failing", ["", "lint", "test"])
def test_ci_runs_lint_and_test_and_fails_with_either(tmp_path: Path, failing: str) -> None:
    fake = tmp_path / "make"
    fake.write_text(f'#!/bin/sh\necho "made $1"\n[ "$1" != "{failing}" ]\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [ROOT / ".ci/run"], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["made lint", "made test"]
    assert (run.returncode != 0) == bool(failing)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "setup: no 'python-here' here: install Python 3.11 or later"),
        ("case $2 in *exit*) exit 1;; esac; echo 3.9", "setup: expected Python >= 3.11, got 3.9"),
        (
            "case $2 in *ensurepip*) exit 1;; *exit*) exit 0;; esac; echo 3.12",
            "setup: Python's venv module is missing: run 'sudo apt-get install python3.12-venv'",
        ),
    ],
    ids=["no python", "old python", "no venv module"],
)
def test_setup_says_in_one_line_what_is_missing(
    tmp_path: Path, script: str | None, message: str
) -> None:
    if script is not None:
        (tmp_path / "python-here").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python-here").chmod(0o755)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    run = subprocess.run(
        ["sh", str(ROOT / "tools/setup.sh"), "python-here", str(tmp_path / "venv")],
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith(message)

"""The widgets with a live kernel in JupyterLab, and made with the versions that Colab has."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from book_build import ROOT
from conftest import serve
from filelock import FileLock
from nbclient import NotebookClient
from playwright.sync_api import Locator, Page, expect
from widget_pages import (
    STATE_TYPE,
    enter,
    numbers,
    panel,
    prepare,
    shown_stack,
    shown_table,
    value,
    write_executed,
)

from pagedlab import LLAMA_3_2_1B, Engine

pytestmark = pytest.mark.browser

COLAB = (  # what a Colab runtime had in August 2026, and what only ipywidgets 7 needs beside it
    "ipywidgets==7.7.1",
    "plotly==5.24.1",
    "anywidget==0.9.21",
    "numpy==2.1.3",
    "triton==3.6.0",
    "widgetsnbextension==3.6.10",
    "jupyterlab_widgets==1.1.11",
    "ipython_genutils==0.2.0",
    "tenacity==9.1.2",
)
ENGINE = """
import pagedlab
from pagedlab import Engine, Llama, LlamaConfig
config = LlamaConfig(hidden_size=48, intermediate_size=64, num_layers=2, num_q_heads=4,
                     num_kv_heads=2, head_dim=16, vocab_size=50, max_seq_len=64)
engine = Engine(Llama.random(config, seed=3), num_blocks=24, block_size=4, events=[])
for prompt in ([7, 8, 9], [1, 2, 3, 4, 5, 6], [5, 5]):
    request = engine.submit(prompt, 8)
"""
CHART = """
import plotly.graph_objects as go
pagedlab.Chart(go.Figure(go.Bar(y=[1, 2])), alt="two bars", frames={"a": [go.Bar(y=[2, 1])]})
"""
CELLS = (
    f"{ENGINE}\nlive = pagedlab.DecodeExplorer(engine)\nlive",
    "calculator = pagedlab.AddressCalculator(pagedlab.LLAMA_3_2_1B)\ncalculator",
    "calculator.view.lane, calculator.view.byte",
    "calculator.controls['kv_head'].value = 5",
    CHART,
)
BLOCKS = (
    f"{ENGINE}\nfor _ in range(4):\n    engine.step()",
    "table = pagedlab.BlockTableView(engine.table, engine.pool)\ntable",
    "table.view.slot, table.view.layer, table.view.logical_block",
    "table.view.layer = 0",
    "engine.run()\ntimeline = pagedlab.RecyclingTimeline(engine.events, 24)\ntimeline",
    "timeline.view.step, timeline.view.layer",
    "timeline.controls['step'].value = 2",
)
OWN_KERNEL = (
    "import pagedlab, torch, triton, triton.language as tl",
    """
@triton.jit
def double(x_ptr, out_ptr):
    lane = tl.arange(0, 16)
    x = tl.load(x_ptr + lane)
    y = x * 2
    tl.store(out_ptr + lane, y)
""",
    """
trace = pagedlab.step(double, (1,), torch.arange(16.0), torch.empty(16))
pagedlab.KernelStepper(trace)
""",
)
SHOWN = (
    f"{ENGINE}\npagedlab.DecodeExplorer(engine).run()",
    "pagedlab.AddressCalculator(pagedlab.LLAMA_3_2_1B)",
    "pagedlab.BlockTableView(engine.table, engine.pool)",
    "pagedlab.RecyclingTimeline(engine.events, 24)",
    CHART,
)
VERSIONS = """
import anywidget, ipywidgets, numpy, plotly, triton
[f"{it.__name__}=={it.__version__}" for it in (ipywidgets, plotly, anywidget, numpy, triton)]
"""
CHAPTERS = sorted((ROOT / "book").glob("[0-9][0-9]_*.ipynb"))


def notebook(*cells: str) -> nbformat.NotebookNode:
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A JupyterLab server of this environment: its address and its folder."""
    folder, home = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.token": "",
        "ServerApp.root_dir": str(folder),
        "ServerApp.port_retries": 0,
        "LabApp.news_url": "",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    folders = {name: str(home) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "HOME")}
    variables = os.environ | folders | {"PYTHONPATH": str(ROOT)}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api").close()
                break
            except OSError:
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.5)
        yield address, folder
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def open_in_lab(lab: tuple[str, Path], page: Page) -> Callable[..., Locator]:
    """Open a notebook of these cells, in a JupyterLab workspace of its own; returns the cells."""
    address, folder = lab

    def open_cells(*texts: str) -> Locator:
        name = f"notebook{len(list(folder.glob('*.ipynb')))}"
        nbformat.write(notebook(*texts), folder / f"{name}.ipynb")
        page.set_viewport_size({"width": 1280, "height": 2600})
        page.goto(f"{address}/lab/workspaces/{name}/tree/{name}.ipynb")
        cells = page.locator(".jp-CodeCell")
        expect(cells).to_have_count(len(texts), timeout=60_000)
        expect(page.get_by_text("| Idle")).to_be_visible(timeout=60_000)
        return cells

    return open_cells


def run_cell(cell: Locator) -> Locator:
    """Run a cell with the keyboard; returns the widget it shows, or will."""
    cell.locator(".cm-content").click()
    cell.page.keyboard.press("ControlOrMeta+Enter")
    return cell.locator(".pagedlab")


def await_result(cell: Locator, text: str) -> None:
    """Run a cell until it shows this: what a reader does reaches the kernel by messages."""
    shown = ""
    for _ in range(10):
        run_cell(cell)
        cell.page.wait_for_timeout(500)
        shown = cell.locator(".jp-OutputArea-output").inner_text().strip()
        if shown == text:
            return
    pytest.fail(f"the kernel does not see what the reader did: expected {text}, got {shown}")


def test_widgets_in_jupyterlab_follow_kernel_and_reader(
    open_in_lab: Callable[..., Locator], page: Page
) -> None:
    cells = open_in_lab(*CELLS)

    explorer = run_cell(cells.nth(0))
    button = explorer.get_by_role("button", name="Next token")
    expect(button).to_be_visible(timeout=60_000)
    names: dict = {}
    exec(ENGINE, names)
    engine: Engine = names["engine"]
    for step in range(1, 6):
        button.click()
        engine.step()
        expect(explorer.locator(".pl-caption")).to_contain_text(f"Step {step}.")
        expect(explorer.locator(".pl-stack b").first).to_have_text(str(engine.pool.free_blocks[-1]))
        running = engine.scheduler.running[0]
        expect(explorer.locator(".pl-text-head").nth(running.id)).to_contain_text(
            f"slot {running.slot}, {running.num_cached} tokens cached"
        )
        position = running.num_cached - 1
        expect(explorer.locator('[data-value="logical"]')).to_contain_text(f"{position} // 4")
        assert value(explorer, "view").endswith("✓ equal")
    enter(explorer, "step", 2)
    expect(explorer.locator(".pl-caption")).to_contain_text("Step 2.")

    calculator = run_cell(cells.nth(1))
    lane = random.randrange(64)
    enter(calculator, "lane", lane)
    byte = LLAMA_3_2_1B.k_address(3, 1, 0, lane)
    expect(calculator.locator('[data-value="byte"]')).to_have_text(f"K byte {byte:,}")
    await_result(cells.nth(2), f"({lane}, {byte})")
    run_cell(cells.nth(3))
    moved = LLAMA_3_2_1B.k_address(3, 1, 5, lane)
    expect(calculator.locator('[data-value="byte"]')).to_have_text(f"K byte {moved:,}")
    handle = calculator.locator(".noUi-handle").last
    handle.focus()
    page.keyboard.press("ArrowLeft" if lane else "ArrowRight")
    assert handle.get_attribute("aria-label") == "lane"
    other = LLAMA_3_2_1B.k_address(3, 1, 5, lane - 1 if lane else 1)
    expect(calculator.locator('[data-value="byte"]')).to_have_text(f"K byte {other:,}")

    run_cell(cells.nth(4))
    expect(cells.nth(4).locator(".js-plotly-plot .bars")).to_be_visible(timeout=20_000)


def test_block_table_and_timeline_in_jupyterlab_follow_kernel_and_reader(
    open_in_lab: Callable[..., Locator], page: Page
) -> None:
    cells = open_in_lab(*BLOCKS)
    names: dict = {}
    exec(ENGINE, names)
    engine: Engine = names["engine"]
    for _ in range(4):
        engine.step()

    run_cell(cells.nth(0))
    table = run_cell(cells.nth(1))
    caption = table.locator(".pl-caption")
    expect(caption).to_contain_text("block_table[0, 0, 0]", timeout=60_000)
    enter(table, "layer", 1)
    expect(caption).to_contain_text("block_table[0, 1, 0]")
    shown = shown_table(table)
    assert {block for block in shown.values() if block >= 0} == {
        block for block in engine.table.host[:, 1].flat if block >= 0
    }
    for (slot, logical_block), block in shown.items():
        assert block == engine.table.lookup(slot, 1, logical_block)
    assert shown_stack(table) == engine.pool.free_blocks[::-1][:8]
    slot = random.randrange(2)
    block = engine.table.lookup(slot, 1, 1)
    table.get_by_role("button", name=f"slot {slot}, layer 1, logical block 1:").click()
    expect(caption).to_contain_text(f"It holds physical block {block}.")
    expect(table.locator(".pl-pool .pl-here small")).to_have_text(str(block))
    page.keyboard.press("ArrowLeft")
    block = engine.table.lookup(slot, 1, 0)
    expect(table.locator(".pl-pool .pl-lit small")).to_have_text(str(block))
    page.keyboard.press("Enter")
    expect(caption).to_contain_text(f"It holds physical block {block}.")
    await_result(cells.nth(2), f"({slot}, 1, 0)")
    run_cell(cells.nth(3))
    expect(caption).to_contain_text(f"block_table[{slot}, 0, 0]")
    block = engine.table.lookup(slot, 0, 0)
    expect(caption).to_contain_text(f"It holds physical block {block}.")

    free, owned = {4: [*engine.pool.free_blocks]}, {4: engine.table.host.copy()}
    while engine.scheduler.queue or engine.scheduler.running:
        engine.step()
        step = engine.scheduler.step
        free[step], owned[step] = [*engine.pool.free_blocks], engine.table.host.copy()
    timeline = run_cell(cells.nth(4))
    caption = timeline.locator(".pl-caption")
    expect(caption).to_be_visible(timeout=60_000)

    def compare(step: int) -> None:
        expect(caption).to_contain_text(f"Step {step}.")
        assert shown_stack(timeline) == free[step][::-1][:8]
        blocks = timeline.locator(".pl-pool .pl-own small").all_inner_texts()
        assert sorted(map(int, blocks)) == sorted(owned[step][owned[step] >= 0].tolist())

    last = max(free)
    chosen = random.randrange(5, last)
    enter(timeline, "step", chosen)
    compare(chosen)
    timeline.locator(".pl-view").press("ArrowRight")
    compare(chosen + 1)
    enter(timeline, "layer", 1)
    await_result(cells.nth(5), f"({chosen + 1}, 1)")
    timeline.locator(".pl-view").press("End")
    compare(last)
    timeline.locator(".pl-view").press("Home")
    timeline.locator(".widget-play button").first.click()
    expect(caption).to_contain_text("Step 5.", timeout=20_000)
    timeline.locator(".widget-play button").first.click()
    run_cell(cells.nth(6))
    expect(caption).to_contain_text("Step 2.")


def test_the_readers_own_kernel_is_stepped_in_jupyterlab(
    open_in_lab: Callable[..., Locator],
) -> None:
    cells = open_in_lab(*OWN_KERNEL)
    for cell in cells.all():
        stepper = run_cell(cell)
    expect(stepper).to_be_visible(timeout=60_000)
    expect(stepper).to_contain_text("lane = tl.arange(0, 16)")
    enter(stepper, "step", 2)
    expect(stepper).to_contain_text("step 3 of 4")
    expect(stepper.get_by_label("variables")).to_contain_text("y[16] lane 7: 14")


@pytest.fixture(scope="module")
def colab() -> Path:
    """A folder that, first on the path, stands in for Colab's versions; made once per checkout."""
    folder = ROOT / "build" / "colab"
    made = folder / "made"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not made.exists() or made.read_text() != str(COLAB):
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, f"--target={folder}", *COLAB], check=True)
            made.write_text(str(COLAB))
    return folder


@pytest.fixture
def execute(colab: Path, monkeypatch: pytest.MonkeyPatch):
    def run(book: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(colab), str(ROOT))))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        options = {"timeout": 300, "kernel_name": "python3", "store_widget_state": True}
        book.cells.append(nbformat.v4.new_code_cell(VERSIONS))
        NotebookClient(book, resources={"metadata": {"path": str(folder)}}, **options).execute()
        versions = book.cells.pop().outputs[0].data["text/plain"]
        assert eval(versions) == [*COLAB[:5]]
        return book

    return run


def test_widgets_made_with_colabs_versions_work(
    execute, colab: Path, page: Page, tmp_path: Path
) -> None:
    book = execute(notebook(*SHOWN), tmp_path)
    assert "two bars" in book.cells[-1].outputs[0].data["text/html"]
    prepare(tmp_path)
    front_end = colab / "anywidget/nbextension/index.js"
    shutil.copyfile(front_end, tmp_path / "static/vendor/anywidget.js")
    server, url = serve(tmp_path)
    try:
        page.goto(f"{url}/{write_executed(tmp_path, 'colab', book)}")
        names: dict = {}
        exec(ENGINE, names)
        engine: Engine = names["engine"]
        explorer = panel(page)
        for step in range(1, 8):
            engine.step()
            enter(explorer, "step", step)
            expect(explorer.locator(".pl-caption")).to_contain_text(f"Step {step}.")
            top = str(engine.pool.free_blocks[-1])
            expect(explorer.locator(".pl-stack b").first).to_have_text(top)
        calculator = panel(page, 1)
        enter(calculator, "physical block", 65_535)
        enter(calculator, "lane", 63)
        byte = LLAMA_3_2_1B.k_address(65_535, 1, 0, 63)
        expect(calculator.locator('[data-value="byte"]')).to_have_text(f"K byte {byte:,}")
        enter(panel(page, 2), "layer", 1)
        expect(panel(page, 2).locator(".pl-caption")).to_contain_text("block_table[0, 1, 0]")
        panel(page, 3).locator(".widget-play button").first.click()
        expect(panel(page, 3).locator(".pl-caption")).to_contain_text("Step 3.")
        assert numbers(panel(page, 3).locator(".pl-caption").inner_text())[0] == 3
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(it, marks=pytest.mark.xdist_group(it.stem), id=it.stem) for it in CHAPTERS],
)
def test_every_chapter_runs_with_colabs_versions(execute, chapter: Path) -> None:
    book = execute(nbformat.read(chapter, as_version=4), ROOT / "book")
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    widgets = book.metadata.widgets[STATE_TYPE]["state"].values()
    shown = [it["state"]["data"] for it in widgets if "_esm" in it["state"]]
    assert shown
    assert [data["error"] for data in shown if "error" in data] == []

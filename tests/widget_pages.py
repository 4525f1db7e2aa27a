"""Pages with widgets and no kernel, and the ways a reader moves their controls."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from ipywidgets.embed import dependency_state, embed_snippet
from nbformat import NotebookNode
from playwright.sync_api import Locator, Page

from pagedlab import Chart
from pagedlab._sphinx import bring_assets
from pagedlab.widgets.base import Panel

VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
STATE_TYPE = "application/vnd.jupyter.widget-state+json"
STATIC = Path(__file__).parents[1] / "book/_static"
PAGE = """<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>widgets</title><link rel="icon" href="data:,">
<style>html[data-theme="dark"] body { background: #121212; color: #ddd }</style>
<script src="static/vendor/require.js"></script>
<script src="static/widgets-init.js" data-html-manager="vendor/html-manager"></script>
<script src="static/vendor/html-manager/embed-amd.js"></script>
</head>
<body><main><h1>Widgets</h1>%s</main></body>
</html>
"""


def prepare(folder: Path) -> Path:
    """Lay the site's browser assets into `folder`/static."""
    assert bring_assets(STATIC / "vendor"), "the browser assets need npm"
    shutil.copytree(STATIC, folder / "static", dirs_exist_ok=True)
    return folder


def write_page(folder: Path, name: str, *panels: Panel) -> str:
    """A page of these widgets, embedded as in a built chapter; returns its file name."""
    state = dependency_state(panels, drop_defaults=False)
    snippet = embed_snippet(panels, state=state, requirejs=False, embed_url="none")
    snippet = re.sub(r'<script[^>]*src="none"[^>]*></script>', "", snippet)
    (folder / f"{name}.html").write_text(PAGE % snippet)
    return f"{name}.html"


def write_charts(folder: Path, name: str, *charts: Chart) -> str:
    """A page of charts, with plotly loaded as the site loads it; returns its file name."""
    script = '<script src="static/vendor/plotly.min.js"></script>\n'
    head, require, rest = PAGE.partition('<script src="static/vendor/require.js">')
    html = "\n".join(chart._repr_html_() for chart in charts)
    (folder / f"{name}.html").write_text((head + script + require + rest) % html)
    return f"{name}.html"


def write_executed(folder: Path, name: str, notebook: NotebookNode) -> str:
    """The widgets of an executed notebook, as a page without its kernel; returns the file name."""
    views = [
        output.data[VIEW_TYPE]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if VIEW_TYPE in output.get("data", {})
    ]
    state = notebook.metadata.widgets[STATE_TYPE]
    scripts = [f'<script type="{VIEW_TYPE}">{json.dumps(view)}</script>' for view in views]
    text = json.dumps(state).replace("</", "<\\/")
    scripts.append(f'<script type="{STATE_TYPE}">{text}</script>')
    (folder / f"{name}.html").write_text(PAGE % "\n".join(scripts))
    return f"{name}.html"


def panel(page: Page, index: int = 0) -> Locator:
    """The widget at `index` of a page, once it is drawn."""
    found = page.locator(".pagedlab").nth(index)
    found.locator(".pl-view").wait_for()
    return found


def enter(widget: Locator, label: str, value: int) -> None:
    """Type a number into the box, or the slider's readout, with this label; wait for a frame."""
    row = widget.locator(".jupyter-widgets", has=widget.page.get_by_text(label, exact=True)).last
    box = row.locator(".widget-readout, input").first
    box.click()
    box.press("ControlOrMeta+a")
    widget.page.keyboard.type(str(value))
    widget.page.keyboard.press("Enter")
    widget.page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")


def value(widget: Locator, name: str) -> str:
    """What an address pane shows under this name."""
    return widget.locator(f'[data-value="{name}"]').inner_text()


def numbers(text: str) -> list[int]:
    """The integers in a text, thousands separators allowed."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


def shown_table(widget: Locator) -> dict[tuple[int, int], int]:
    """The table's entries by slot and logical block."""
    cells = widget.locator(".pl-table .pl-cell").evaluate_all(
        "all => all.map(it => [it.dataset.slot, it.dataset.logical, it.lastChild.textContent])"
    )
    return {(int(a), int(b)): int(c.replace("−", "-")) for a, b, c in cells}


def shown_stack(widget: Locator) -> list[int]:
    """The free blocks that are listed, the next one first."""
    return [int(text) for text in widget.locator(".pl-stack b").all_inner_texts()]

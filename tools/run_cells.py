"""Run chapters' code cells without Jupyter: `python tools/run_cells.py [CHAPTER.md ...]`.

On a machine with a GPU they run there, as in Colab. Each chapter runs in a process of its own; a
line says its seconds and "ok", or which cell failed, and then the exit status is 1. `--show` prints
what each cell prints and its last value, as it runs. `--out FILE` keeps how it went as JSON, one
entry per chapter. Where the widgets' libraries are missing, stand-ins
take the widgets' arguments and draw nothing; where Triton is, cells that need it are left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import linecache
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).parents[1]
CELL = re.compile(r"^```\{code-cell\}.*\n(?:^:[\w-]+:.*\n)*((?s:.*?))^```$", re.MULTILINE)
WIDGET_LIBRARIES = ("traitlets", "ipywidgets", "anywidget", "plotly")


def cells(chapter: Path) -> list[str]:
    """The code of each cell of a MyST chapter, in order."""
    return CELL.findall(chapter.read_text("utf-8"))


class Trait:
    """A typed attribute of a widget."""

    def __init__(self, kind: type, default: Any) -> None:
        self.kind, self.default = kind, default

    def tag(self, **_: Any) -> Trait:
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, widget: Any, owner: type) -> Any:
        return self if widget is None else vars(widget).get(self.name, self.default)

    def __set__(self, widget: Any, value: Any) -> None:
        if not isinstance(value, self.kind):
            raise TypeError(f"{self.name}: expected {self.kind.__name__}, got {value!r}")
        for base in type(widget).__mro__:
            for method in vars(base).values():
                if getattr(method, "validates", None) == self.name:
                    value = method(widget, {"value": value})
        vars(widget)[self.name] = value


def validate(name: str) -> Callable:
    """Mark a method that checks new values of the trait `name`."""

    def mark(method: Any) -> Any:
        method.validates = name
        return method

    return mark


class Widget:
    """Takes what a widget takes. Its traits are checked, nothing is drawn."""

    def __init__(self, *children: Any, **traits: Any) -> None:
        self.children = children
        for name, value in traits.items():
            setattr(self, name, value)

    def add_class(self, name: str) -> None:
        pass

    def on_msg(self, callback: Callable) -> None:
        pass

    def send(self, content: Any) -> None:
        pass


def stand_in(name: str) -> ModuleType:
    """A module with just what pagedlab's widgets take from the library `name`."""
    module: Any = ModuleType(name)
    if name == "traitlets":
        for trait, kind in {"Bool": bool, "Bytes": bytes, "Int": int, "Unicode": str}.items():
            setattr(module, trait, lambda default, kind=kind: Trait(kind, default))
        module.Dict = lambda: Trait(dict, {})
        module.validate = validate
    elif name == "anywidget":
        module.AnyWidget = Widget
    elif name == "ipywidgets":
        for widget in ("Widget", "VBox", "Box", "IntSlider", "BoundedIntText", "ToggleButtons"):
            setattr(module, widget, Widget)
        module.Play, module.jslink = Widget, lambda one, other: None
    else:
        module = MagicMock(__path__=[])
    return module


def supply_missing() -> list[str]:
    """Put stand-ins where a widget library is not installed; which ones."""
    missing = [name for name in WIDGET_LIBRARIES if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = stand_in(name)
    if "plotly" in missing:
        for name in ("graph_objects", "io", "offline"):
            sys.modules[f"plotly.{name}"] = MagicMock()
    return missing


class Tee(io.StringIO):
    """Keeps what is written to it and, if `show`, prints it at once."""

    def __init__(self, show: bool) -> None:
        super().__init__()
        self.show, self.screen = show, sys.stdout

    def write(self, text: str) -> int:
        if self.show:
            self.screen.write(text)
            self.screen.flush()
        return super().write(text)


def run_cell(code: str, file: str, namespace: dict[str, Any]) -> str | None:
    """Execute a cell; the text that a notebook would show of its last value, a widget's its name.

    Raises:
        ValueError: the last value is a widget that complains about its data.
    """
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)  # Triton reads it
    from pagedlab.stand_in import Guard, has_triton

    tree, last = ast.parse(code, file), None
    if not has_triton():
        tree = Guard().visit(tree)
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    exec(compile(tree, file, "exec"), namespace)
    value = eval(compile(last, file, "eval"), namespace) if last else None
    text = repr(value)
    data = getattr(getattr(value, "view", None), "data", {})
    if "error" in data:
        raise ValueError(f"{type(value).__name__}: {data['error']}")
    if isinstance(value, getattr(sys.modules.get("ipywidgets"), "Widget", ())):
        return f"<{type(value).__name__}>"
    return None if value is None else text


def run_chapter(chapter: Path, show: bool = False) -> dict[str, Any]:
    """Run all cells of one chapter as __main__; how it went, as data."""
    result: dict[str, Any] = {"chapter": chapter.stem, "ok": True, "cells": 0, "left_out": []}
    result["not_drawn"] = supply_missing()
    start, main = time.perf_counter(), ModuleType("__main__")
    sys.modules["__main__"] = main
    for number, code in enumerate(cells(chapter), start=1):
        output = Tee(show)
        if show:
            print(f"--- {chapter.stem}, cell {number}", flush=True)
        try:
            with contextlib.redirect_stdout(output):
                value = run_cell(code, f"<{chapter.stem}, cell {number}>", vars(main))
            if show and value is not None:
                print(value, flush=True)
        except Exception:
            result |= {"ok": False, "failed_cell": number, "code": code}
            result |= {"output": output.getvalue(), "reason": traceback.format_exc()}
            break
        result["cells"] = number
        if "Not run here: " in output.getvalue():
            result["left_out"].append(number)
    import torch

    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def report(result: dict[str, Any]) -> None:
    """Print how a chapter went."""
    chapter = result["chapter"]
    if not result["ok"]:
        print(f"{chapter}: failed in cell {result['failed_cell']}:")
        print(result["code"] + result["output"] + result["reason"], flush=True)
        return
    print(f"{chapter}: ok, {result['cells']} cells, {result['seconds']} s on {result['device']}")
    if result["not_drawn"]:
        print(f"  not drawn: widgets, since {', '.join(result['not_drawn'])} cannot be imported")
    if result["left_out"]:
        print(f"  left out: cells {', '.join(map(str, result['left_out']))}, which need Triton")
    sys.stdout.flush()


def run_in_process(chapter: Path, show: bool) -> dict[str, Any]:
    """run_chapter in a process of its own; one that dies has failed, too."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, str(Path(__file__).resolve()), str(chapter), "--out", str(out)]
        command += ["--show"] if show else []
        status = subprocess.run(command).returncode
        if out.exists():
            return json.loads(out.read_text("utf-8"))[0]
    print(f"{chapter.stem}: the process ended with status {status}", flush=True)
    return {"chapter": chapter.stem, "ok": False, "reason": f"exit status {status}"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run chapters' code cells without Jupyter.")
    parser.add_argument("chapters", nargs="*", type=Path, metavar="CHAPTER.md")
    parser.add_argument(
        "--show", action="store_true", help="print each cell's output and value as it runs"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there as JSON")
    args = parser.parse_args()
    chapters = [chapter.resolve() for chapter in args.chapters]
    if len(chapters) == 1:
        sys.path.insert(0, str(ROOT))
        results = [run_chapter(chapters[0], args.show)]
        report(results[0])
    else:
        chapters = chapters or sorted((ROOT / "book").glob("[0-9][0-9]_*.md"))
        results = [run_in_process(chapter, args.show) for chapter in chapters]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

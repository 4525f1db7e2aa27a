"""What every widget shares: the theme, base.js, and controls linked in the browser."""

import inspect
import re
from collections.abc import Sequence
from functools import cache
from json import dumps
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

FOLDER = Path(__file__).parent


@cache
def css(*names: str) -> str:
    """The theme, then the named style sheets of this folder."""
    return "".join((FOLDER / f"{name}.css").read_text("utf-8") for name in ("theme", *names))


@cache
def esm(view: str, *names: str) -> str:
    """One module of base.js and the named files, whose default export hosts the function `view`.

    A module travels with each widget (a static page has no other way to find it), so the files are
    small, need no bundler, and leave indentation and comments on lines of their own behind.
    """
    text = "\n".join((FOLDER / f"{name}.js").read_text("utf-8") for name in ("base", *names))
    text = re.sub(r"^\s*(//.*|/\*\*(?s:.*?)\*/)\n|^\s+", "", text, flags=re.MULTILINE)
    return f"{text}\nexport default host({view});\n"


class View(anywidget.AnyWidget):
    """The drawing of one widget; it shows `data` and its state traits and computes no results.

    Args:
        data: what the view shows, JSON without NaN or infinity; {"error": text} shows the text.
        name: this widget's prefix in permalinks: `#name.token=17`.
        predict: hide the next value and ask for it.

    Raises:
        ValueError: data is not JSON, or not finite.
    """

    _css = css()
    data = traitlets.Dict().tag(sync=True)
    name = traitlets.Unicode("widget").tag(sync=True)
    predict = traitlets.Bool(False).tag(sync=True)

    @traitlets.validate("data")
    def _finite(self, proposal: dict[str, Any]) -> dict[str, Any]:
        dumps(proposal["value"], allow_nan=False)
        return proposal["value"]


class Message(View):
    """A readable message where a widget would stand."""

    _esm = esm("() => ({})")


class Panel(ipywidgets.VBox):
    """Controls above the view that they move, in one output; linked in the browser, kernel or not.

    Attributes:
        view: the `View`; its traits hold the state, e.g. `panel.view.token = 17`.
        controls: the ipywidgets controls, by the trait they move.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = inspect.signature(cls)  # autodoc would show that of traitlets

    def __init__(self, view: View, controls: dict[str, ipywidgets.Widget] | None = None) -> None:
        self.view = view
        self.controls = controls or {}
        row = ipywidgets.Box(list(self.controls.values()))
        row.add_class("pl-controls")
        super().__init__([row, view] if self.controls else [view])
        self.add_class("pagedlab")


def complain(error: Exception | str) -> View:
    """The view that says what is wrong with the data."""
    return Message(data={"error": str(error)})


def slider(view: View, key: str, stop: int, label: str, *, wide: bool = False) -> ipywidgets.Widget:
    """An integer slider, 0 to stop - 1, on a trait of the view; its readout takes typed numbers."""
    control = ipywidgets.IntSlider(
        value=getattr(view, key),
        min=0,
        max=max(stop - 1, 0),
        description=label,
        style={"description_width": "initial"},
    )
    if wide:
        control.add_class("pl-long")
    ipywidgets.jslink((control, "value"), (view, key))
    return control


def number_box(view: View, key: str, stop: int, label: str) -> ipywidgets.Widget:
    """A box for an integer from 0 to stop - 1, however large, on a trait of the view."""
    control = ipywidgets.BoundedIntText(
        value=getattr(view, key),
        min=0,
        max=stop - 1,
        description=label,
        style={"description_width": "initial"},
    )
    ipywidgets.jslink((control, "value"), (view, key))
    return control


def choice(
    view: View, key: str, options: Sequence[str], label: str, *, button_width: str = "3rem"
) -> ipywidgets.Widget:
    """A few buttons of which one is down; the trait holds its index."""
    control = ipywidgets.ToggleButtons(
        options=list(options),
        index=getattr(view, key),
        description=label,
        style={"description_width": "initial", "button_width": button_width},
    )
    ipywidgets.jslink((control, "index"), (view, key))
    return control


def play(view: View, key: str, stop: int, *, interval: int = 700) -> ipywidgets.Widget:
    """Play, pause and stop over a trait that runs from 0 to stop - 1; interval in milliseconds."""
    control = ipywidgets.Play(
        value=getattr(view, key), min=0, max=max(stop - 1, 0), step=1, interval=interval
    )
    ipywidgets.jslink((control, "value"), (view, key))
    return control

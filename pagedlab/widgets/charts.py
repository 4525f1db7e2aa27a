"""One renderer for the book's plotly charts: the widgets' theme, and frames to step through."""

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs_version

from pagedlab.layout import expect_in_range
from pagedlab.widgets.base import FOLDER, css

# after Okabe and Ito: apart for colour-blind readers, on light and on dark paper
COLOURS = ("#2a8ac4", "#e69f00", "#129b74", "#d55e00", "#cc79a7", "#8a94a3")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
HTML = """<figure class="pagedlab" id="{id}" aria-label="{alt}">
<style>{css}</style>
<div class="plotly-graph-div" role="img" aria-label="{alt}" style="height:{height}px"></div>
{slider}<figcaption class="pl-soft">{alt}</figcaption>
<script type="application/json">{spec}</script>
<script>{script}</script></figure>"""
SLIDER = """<div class="pl-chart-step"><label>{label}
<input type="range" min="0" max="{last}" value="0" data-lm-suppress-shortcuts="true">
</label> <output></output></div>
"""


class Chart:
    """A plotly figure on a static page, in JupyterLab and in Colab, with a text alternative.

    Args:
        figure: its traces and layout; colours, dashes and fonts come from the book's theme.
        alt: what the chart shows, in a sentence; it stands below as the caption.
        frames: what a slider steps through: name -> the traces that replace the figure's.
        step: what the slider chooses, e.g. "tokens".
        height: in pixels.

    Raises:
        ValueError: no text alternative, no traces, a frame with another number of traces.

    >>> import plotly.graph_objects as go
    >>> "one bar" in Chart(go.Figure(go.Bar(y=[1])), alt="one bar")._repr_html_()
    True
    """

    def __init__(
        self,
        figure: go.Figure,
        alt: str,
        *,
        frames: Mapping[str, Sequence[Any]] | None = None,
        step: str = "step",
        height: int = 380,
    ) -> None:
        height = expect_in_range("height", height, start=10)  # plotly's least
        if not isinstance(alt, str) or not alt.strip():
            raise ValueError("alt: expected a sentence that says what the chart shows, got none")
        if not figure.data:
            raise ValueError("figure: expected at least one trace, got none")
        self.alt, self.step, self.height = alt, step, height
        self.figure = go.Figure(figure)
        self.figure.update_layout(
            template="none",
            colorway=COLOURS,
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"family": "inherit", "size": 14},
            margin={"l": 60, "r": 20, "t": 50 if figure.layout.title.text else 20, "b": 50},
            height=height,
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        )
        for axis in (*self.figure.select_xaxes(), *self.figure.select_yaxes()):
            axis.update(automargin=True)
        self.frames = []
        for name, traces in (frames or {}).items():
            if len(traces) != len(figure.data):
                raise ValueError(
                    f"frames[{name!r}]: expected {len(figure.data)} traces, got {len(traces)}"
                )
            self.frames.append(go.Frame(name=name, data=list(traces)))
        for number, trace in enumerate(self.figure.data):
            if (
                trace.type == "scatter"
                and "lines" in (trace.mode or "lines")
                and not trace.line.dash
            ):
                trace.line.dash = DASHES[number % len(DASHES)]

    def _repr_html_(self) -> str:
        spec = pio.to_json(
            {**self.figure.to_plotly_json(), "frames": [it.to_plotly_json() for it in self.frames]},
            validate=False,
        )
        identity = "pl-" + sha256(spec.encode()).hexdigest()[:12]
        script = (FOLDER / "charts.js").read_text("utf-8")
        slider = SLIDER.format(label=escape(self.step), last=len(self.frames) - 1)
        return HTML.format(
            id=identity,
            css=css("charts"),
            alt=escape(self.alt, quote=True),
            height=self.height,
            slider=slider if self.frames else "",
            spec=spec.replace("</", "<\\/"),
            script=script.replace("ID", identity).replace("VERSION", get_plotlyjs_version()),
        )

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/html": self._repr_html_(), "text/plain": self.alt}
        if "COLAB_RELEASE_TAG" not in os.environ:
            # JupyterLab has plotly.js in its own extension and prefers this form
            bundle["application/vnd.plotly.v1+json"] = self._with_slider().to_plotly_json()
        return bundle

    def _with_slider(self) -> go.Figure:
        figure = go.Figure(self.figure, frames=self.frames)
        if self.frames:
            how = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}}
            steps = [
                {"method": "animate", "label": frame.name, "args": [[frame.name], how]}
                for frame in self.frames
            ]
            prefix = {"prefix": f"{self.step} "}
            figure.update_layout(sliders=[{"steps": steps, "currentvalue": prefix}])
        return figure

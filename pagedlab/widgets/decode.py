"""DecodeExplorer: a run's text, table, addresses and free list, stepped together."""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import traitlets

from pagedlab.engine import Engine, Request
from pagedlab.layout import KVLayout
from pagedlab.recordings import Recording, encode_events, load, provenance
from pagedlab.run_recorder import RunRecorder, layout_data
from pagedlab.tokenizer import Tokenizer
from pagedlab.widgets.address import SECTIONS
from pagedlab.widgets.base import Panel, View, choice, complain, css, esm, slider
from pagedlab.widgets.timeline import size_of, step_controls


class DecodeView(View):
    """What DecodeExplorer draws; its integer traits are the state."""

    _esm = esm("DecodeExplorer", "panes", "replay", "decode")
    _css = css("panes")
    raw = traitlets.Bytes(b"").tag(sync=True)
    values = traitlets.Bytes(b"").tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    slot = traitlets.Int(0).tag(sync=True)
    token = traitlets.Int(0).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    section = traitlets.Int(0).tag(sync=True)
    kv_head = traitlets.Int(0).tag(sync=True)
    lane = traitlets.Int(7).tag(sync=True)


class DecodeExplorer(Panel):
    """The text as it is decoded, next to table, addresses and free list; a step moves them all.

    Args:
        source: a Recording, its name or path; an Engine that logs its events, which stays live: its
            "Next token" button steps it as long as its kernel runs; or a list of step events.
        tokenizer: turns an engine's ids into text.
        requests: an engine's requests that are finished already, to show their prompts.
        layer: the layer whose cache bytes an engine's run keeps; elsewhere they are "not recorded".
        layout, num_blocks: needed for a list of events only.
        name: prefix in permalinks, when a page has several.
        predict: start with each step's first new block hidden.
        **state: where to start: step, slot, token, layer, section (0 K, 1 V), kv_head, lane.

    >>> DecodeExplorer("decode", step=3).view.data["origin"].split(",")[0]
    'Recorded on NVIDIA H200'
    """

    def __init__(
        self,
        source: Recording | str | Path | Engine | Iterable[Any],
        *,
        tokenizer: Tokenizer | None = None,
        requests: Iterable[Request] = (),
        layer: int = 0,
        layout: KVLayout | None = None,
        num_blocks: int | None = None,
        name: str = "decode",
        predict: bool = False,
        **state: int,
    ) -> None:
        self.recorder: RunRecorder | None = None
        self.tokenizer = tokenizer
        try:
            if isinstance(source, (str, Path)):
                source = load(source)
            if isinstance(source, Recording):
                data, origin = source.data, source.describe()
            elif isinstance(source, Engine):
                self.recorder = RunRecorder(source, requests, layer)
                data, origin = self.recorder.data(tokenizer), _here()
            else:
                data, origin = _data_of(source, layout, num_blocks), _here()
            traits = _traits(data, origin)
            steps = [row[1] for row in data["events"]]
            if not steps and self.recorder is None:
                raise ValueError("events: expected a run with at least one step, got none")
        except (ValueError, KeyError, TypeError) as error:
            missing = f"recording: expected the field {error}, got none"
            super().__init__(complain(missing if isinstance(error, KeyError) else error))
            return
        self.origin = origin
        first = min(steps, default=0)
        start = {"step": first, "layer": data["layer"]} | state
        start.setdefault("token", _first_token(data["events"], start["step"]))
        view = DecodeView(name=name, predict=predict, **traits, **start)
        controls = step_controls(view, first, max(steps, default=0))
        if data["size"]["num_layers"] > 1:
            controls["layer"] = slider(view, "layer", data["size"]["num_layers"], "layer")
        if data["layout"]["num_kv_heads"] > 1:
            controls["kv_head"] = slider(view, "kv_head", data["layout"]["num_kv_heads"], "kv head")
        controls["lane"] = slider(view, "lane", data["layout"]["head_dim"], "lane")
        controls["section"] = choice(view, "section", SECTIONS, "K or V")
        super().__init__(view, controls)
        if self.recorder is not None:
            view.on_msg(self._on_message)

    def run(self, steps: int | None = None) -> "DecodeExplorer":
        """Step the live engine until it is idle, or `steps` times at most.

        A run to the end is shown from its first step, some steps up to the newest.

        Raises:
            ValueError: there is no live engine.
        """
        if self.recorder is None:
            raise ValueError("run: expected a live engine as source, got a finished run")
        self.recorder.run(steps)
        data = self.recorder.data(self.tokenizer)
        numbers = [row[1] for row in data["events"]] or [0]
        shown = numbers[0] if steps is None else numbers[-1]
        with self.view.hold_sync():
            for key, value in _traits(data, self.origin, bytes(self.recorder.rows.values)).items():
                setattr(self.view, key, value)
        self.view.step = shown
        for key in ("play", "step"):
            self.controls[key].max = numbers[-1]
            self.controls[key].value = shown
        if steps is None:
            self.view.token = _first_token(data["events"], shown)
        self._tell()
        return self

    def _on_message(self, view: View, content: dict[str, str], buffers: list[bytes]) -> None:
        if content.get("do") == "hello":
            self._tell()
        elif content.get("do") == "next token":
            self.run(1)

    def _tell(self) -> None:
        self.view.send({"live": not (self.recorder is None or self.recorder.idle)})


def _first_token(rows: list[list[Any]], step: int) -> int:
    """Position 17, the one the book follows, or the newest that slot 0 has in the cache."""
    cached = [row[4] for row in rows if row[0] == "token" and row[1] <= step and row[3] == 0]
    return min(17, cached[-1] - 1) if cached else 0


def _here() -> str:
    made = provenance()
    return f"Run on {made['device']}, {made['date'][:10]}, commit {made['commit'][:8]}."


def _data_of(events: Any, layout: KVLayout | None, num_blocks: int | None) -> dict[str, Any]:
    if layout is None or num_blocks is None:
        raise ValueError("source: expected layout= and num_blocks= next to a list of events")
    rows = encode_events(events)
    size = size_of(rows, num_blocks) if rows else {}
    return {"layout": layout_data(layout), "size": size, "layer": 0, "events": rows}


def _traits(data: dict[str, Any], origin: str, values: bytes | None = None) -> dict[str, Any]:
    """The view's traits; without `values` the tensor view is taken of the recorded bytes."""
    events = encode_events(data["events"])
    stored = data.get("stored", {"rows": [], "raw": ""})
    raw = base64.b64decode(stored["raw"])
    if values is None and raw:
        dtype = getattr(torch, data["layout"]["dtype"])
        values = torch.frombuffer(bytearray(raw), dtype=dtype).float().numpy().tobytes()
    texts = {
        request: {"prompt": of["prompt"], "tokens": of["tokens"]}
        for request, of in data.get("requests", {}).items()
    }
    return {
        "data": {
            "title": "decode explorer",
            "layout": data["layout"],
            "size": data["size"],
            "events": events,
            "texts": texts,
            "stored": {"rows": stored["rows"]},
            "origin": origin,
        },
        "raw": raw,
        "values": values or b"",
    }

"""KernelStepper: a Triton kernel's source, variables and memory, one statement at a time."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import traitlets

from pagedlab.layout import KVLayout
from pagedlab.trace import Trace
from pagedlab.widgets.base import Panel, View, choice, complain, css, esm, play, slider
from pagedlab.widgets.kernel_data import encode


class KernelView(View):
    """What KernelStepper draws; its integer traits are the state."""

    _esm = esm("KernelStepper", "panes", "kernel_trace", "kernel_panes", "kernel_stepper")
    _css = css("../source", "panes", "kernel_stepper")
    buffer = traitlets.Bytes(b"").tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    token = traitlets.Int(0).tag(sync=True)
    block = traitlets.Int(0).tag(sync=True)
    lane = traitlets.Int(7).tag(sync=True)
    pane = traitlets.Int(0).tag(sync=True)
    unsafe = traitlets.Int(0).tag(sync=True)


class KernelStepper(Panel):
    """A visual debugger: source line, variables and memory side by side, over a recorded trace.

    Every trace shows source, variables and memory. A reduction by halves adds the lanes pane, and
    an online softmax one of its own; both are found by what the kernel assigns.

    Args:
        trace: from `step` or `step_launch`.
        layout: how a KV block lies in memory, to draw the block that is read; by default from the
            kernel's BLOCK_SIZE, NUM_KV_HEADS and HEAD_DIM.
        cache: the argument that holds the KV cache.
        softmax: what a kernel calls the variables of its online softmax, where not score, new_max,
            correction, weight, d and acc, e.g. {"new_max": "m"}.
        name: prefix in permalinks, when a page has several.
        predict: start with what each line computes, or where it reads, hidden.
        **state: where to start: step, token, lane, pane (0 variables, 1 lanes, 2 softmax),
            unsafe (1: softmax without the max).

    >>> import torch
    >>> from pagedlab import KVLayout
    >>> from pagedlab.kernels.write_kv import write_kv
    >>> from pagedlab.trace import step_launch
    >>> layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    >>> k, cache = torch.ones(1, 1, 16), torch.zeros(3 * layout.block_bytes // 4)
    >>> table = torch.tensor([[[2]]], dtype=torch.int32)
    >>> trace = step_launch(write_kv, k, k, cache, table, 0, layout)
    >>> KernelStepper(trace).view.data["title"]
    'write_kv_kernel, step by step'
    """

    def __init__(
        self,
        trace: Trace,
        *,
        layout: KVLayout | None = None,
        cache: str = "cache_ptr",
        softmax: Mapping[str, str] | None = None,
        name: str = "kernel",
        predict: bool = False,
        **state: int,
    ) -> None:
        try:
            data, buffer = encode(trace, layout, cache, softmax or {})
            stops = _stops(data)
            for key, value in state.items():
                if key not in stops:
                    raise ValueError(f"state: expected one of {', '.join(stops)}, got {key}")
                if not 0 <= value < stops[key]:
                    raise ValueError(f"{key}: expected 0 <= {key} < {stops[key]}, got {value}")
        except ValueError as error:
            super().__init__(complain(error))
            return
        if "step" not in state and "token" in state:
            state["step"] = data["tokens"][state["token"]]
        token = max(0, bisect_right(data["tokens"], state.get("step", 0)) - 1)
        block = max(0, bisect_right(data["blocks"], token) - 1)
        lane = min(7, stops["lane"] - 1)
        state = {"lane": lane} | state | {"token": token, "block": block}
        view = KernelView(data=data, buffer=buffer, name=name, predict=predict, **state)
        controls: dict[str, Any] = {
            "play": play(view, "step", stops["step"], interval=500),
            "step": slider(view, "step", stops["step"], "step", wide=True),
        }
        for key in ("block", "token", "lane"):
            if stops[key] > 1:
                label = data["token_is"] if key == "token" else key
                controls[key] = slider(view, key, stops[key], label)
        if stops["pane"] > 1:
            panes = data["panes"]
            controls["pane"] = choice(view, "pane", panes, "show", button_width="auto")
        super().__init__(view, controls)


def _stops(data: dict[str, Any]) -> dict[str, int]:
    return {
        "step": data["num_steps"],
        "token": max(1, len(data["tokens"])),
        "block": max(1, len(data["blocks"])),
        "lane": data["num_lanes"],
        "pane": len(data["panes"]),
        "unsafe": 2,
    }

"""RecyclingTimeline: who owned which block, step after step."""

from collections.abc import Iterable
from typing import Any

import traitlets

from pagedlab.recordings import BLOCK_ACTIONS, encode_events
from pagedlab.widgets.base import Panel, View, complain, css, esm, play, slider


class TimelineView(View):
    """What RecyclingTimeline draws; its integer traits are the state."""

    _esm = esm("RecyclingTimeline", "panes", "replay", "timeline")
    _css = css("panes")
    step = traitlets.Int(0).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)


class RecyclingTimeline(Panel):
    """Blocks as sequences come, grow and finish, and the free list as a stack at the chosen step.

    Args:
        events: step events of a run (`engine.events`, or a recording's).
        num_blocks: blocks of the pool, all free before the first event.
        name: prefix in permalinks, when a page has several.
        predict: start with each step's first new block hidden.
        **state: where to start: step, layer.

    >>> from pagedlab.engine import BlockEvent
    >>> RecyclingTimeline([BlockEvent(0, "allocate", 0, 0, 0, 0, 7)], num_blocks=8).view.step
    0
    """

    def __init__(
        self,
        events: Iterable[Any],
        num_blocks: int,
        *,
        name: str = "timeline",
        predict: bool = False,
        **state: int,
    ) -> None:
        try:
            rows = encode_events(events)
            if not rows:
                raise ValueError("events: expected a run with at least one step, got none")
        except ValueError as error:
            super().__init__(complain(error))
            return
        size = size_of(rows, num_blocks)
        steps = [row[1] for row in rows]
        view = TimelineView(
            data={
                "title": "block timeline",
                "size": size,
                "events": rows,
                "first": min(steps),
            },
            name=name,
            predict=predict,
            **({"step": min(steps)} | state),
        )
        controls = step_controls(view, min(steps), max(steps))
        if size["num_layers"] > 1:
            controls["layer"] = slider(view, "layer", size["num_layers"], "layer")
        super().__init__(view, controls)


def size_of(rows: list[list[Any]], num_blocks: int) -> dict[str, int]:
    """The smallest table that holds the events."""
    owned = [row[3:] for row in rows if row[0] in BLOCK_ACTIONS]
    return {
        "num_slots": 1 + max(row[3] for row in rows),
        "num_layers": 1 + max((row[1] for row in owned), default=0),
        "max_blocks_per_seq": 1 + max((row[2] for row in owned), default=0),
        "num_blocks": num_blocks,
    }


def step_controls(view: View, first: int, last: int) -> dict[str, Any]:
    """Play and a slider over a view's `step`, from first to last."""
    controls = {
        "play": play(view, "step", last + 1),
        "step": slider(view, "step", last + 1, "step", wide=True),
    }
    for control in controls.values():
        control.min = first
    return controls

"""What a trace holds, by what its kernel assigns: a reduction by halves, an online softmax."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pagedlab.trace_recorder import Step

DETAIL = 18  # tokens whose arrays travel with the widget: all of the book's sequence B


def history_of(steps: Sequence[Step]) -> dict[str, list[tuple[int, Any]]]:
    """(step, value) of each assignment, by variable; step -1 for an argument."""
    history: dict[str, list[tuple[int, Any]]] = {}
    for i, step in enumerate(steps):
        for name in step.variables if i == 0 else step.assigned:
            if name != "_":
                at = i if name in step.assigned else -1
                history.setdefault(name, []).append((at, step.variables[name]))
    return history


class Iterations:
    """The tokens (or whole blocks) that an online softmax takes in, one per assigned maximum."""

    def __init__(
        self, steps: Sequence[Step], names: dict[str, str], history: dict[str, list]
    ) -> None:
        numeric = (np.floating, np.ndarray)
        maxima = [i for i, _ in history.get(names["new_max"], ()) if i >= 0]
        at = [i for i in maxima if isinstance(steps[i].variables.get(names["score"]), numeric)]
        self.scores = [np.atleast_1d(steps[i].variables[names["score"]]).ravel() for i in at]
        self.noun = "block" if at and self.scores[0].size > 1 else "token"
        self.starts: list[int] = []
        for before, after in pairwise([-1, *at]):
            lines = [step.line for step in steps[before + 1 : after + 1]]
            self.starts.append(before + 1 + lines.index(min(lines)))
        self.end = len(steps)
        if len(at) > 1:  # the first one starts where its loop does, as most others do
            lines = [steps[start].line for start in self.starts[1:]]
            line = max({*lines}, key=lines.count)
            headers = [i for i in range(at[0]) if steps[i].line == line]
            self.starts[0] = headers[-1] if headers else self.starts[0]
            after = [i for i in range(at[-1], len(steps)) if steps[i].line == line]
            self.end = after[0] if after else self.end
        blocks = [steps[i].variables.get("logical_block") for i in at]
        new = [i for i, block in enumerate(blocks) if i == 0 or block != blocks[i - 1]]
        self.blocks = new if self.noun == "token" and None not in blocks else []
        self.roles = {}
        for role, name in names.items():
            when = [i for i, _ in history.get(name, ())]
            ready = role in ("score", "new_max")
            order = [(bisect_right(when, i) - 1 if ready else bisect_left(when, i)) for i in at]
            stride = order[1] - order[0] if len(order) > 1 else 1
            regular = all(b - a == stride for a, b in pairwise(order))
            if order and regular and order[0] >= 0 and order[-1] < len(when):
                self.roles[role] = [[*history].index(name), order[0], stride]


def find_tree(
    history: dict[str, list[tuple[int, Any]]], steps: Sequence[Step], detail: set[int]
) -> dict[str, Any] | None:
    """A variable that is halved step by step: where each recorded reduction begins."""
    for index, (name, found) in enumerate(history.items()):
        sizes = [np.size(value) if i in detail else 0 for i, value in found]
        lanes = max(sizes)
        levels = lanes.bit_length()
        halves = [lanes >> level for level in range(levels - 1)]  # 64, 32, ..., 2
        starts = [i for i in range(len(sizes)) if sizes[i : i + len(halves)] == halves]
        if lanes < 8 or lanes != 1 << (levels - 1) or not starts:
            continue
        done = found[starts[0] + len(halves) - 1][0]
        after = [n for step in steps[done + 1 :] for n in step.assigned if n in history]
        result = after[0] if after and after[0] != name else None
        return {
            "variable": index,
            "lanes": lanes,
            "levels": len(halves),
            "starts": starts[:DETAIL],
            "result": [*history].index(result) if result else None,
        }
    return None


def plain_softmax(rows: Iterations) -> tuple[float, dict[str, np.ndarray]]:
    """Plain softmax of the same scores; and what becomes of scores x gain without the maximum.

    All in float32. gain makes the largest score about 100, beyond what exp can hold.
    """
    alive = [scores[scores != -np.inf] for scores in rows.scores]
    scores = np.concatenate(alive).astype(np.float32)
    top = float(scores.max()) if scores.size else 0.0
    gain = np.float32(max(1.0, np.ceil(100 / top)) if 0 < top < np.inf else 1.0)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(initial=-np.inf))
        wide = scores * gain
        unsafe = np.exp(wide)
        safe = np.exp(wide - wide.max(initial=-np.inf))
        return float(gain), {
            "scores": scores,
            "plain": weights / weights.sum(),
            "max": scores.max(initial=-np.inf, keepdims=True),
            "total": weights.sum(keepdims=True),
            "wide": wide,
            "exp": unsafe,
            "sum": np.cumsum(unsafe, dtype=np.float32),
            "unsafe": unsafe / unsafe.sum(),
            "safe": safe / safe.sum(),
            "stops": np.cumsum([len(part) for part in alive]),
        }

"""KernelStepper: a Triton kernel's source, variables and memory, one statement at a time."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import traitlets

from pagedlab.layout import KVLayout
from pagedlab.recorder import Pointer, Step
from pagedlab.source import Source
from pagedlab.trace import Trace
from pagedlab.widgets.base import Panel, View, choice, complain, css, esm, play, slider

DETAIL = 16  # tokens whose arrays travel with the widget
MAX_ARRAY = 1024  # elements of one array
MAX_ARRAYS = 16 * 1024  # elements of all values of one array variable
PANES = ("variables", "lanes", "softmax")
SOFTMAX = ("score", "new_max", "correction", "weight", "d", "acc")


class KernelView(View):
    """What KernelStepper draws; its integer traits are the state."""

    _esm = esm("KernelStepper", "panes", "kernel_stepper")
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
        predict: start with each assigned number hidden.
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
            data, buffer = _encode(trace, layout, cache, dict(softmax or {}))
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
            controls["pane"] = choice(view, "pane", data["panes"], "show")
            controls["pane"].style.button_width = "6rem"
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


def _encode(
    trace: Trace, layout: KVLayout | None, cache: str, renamed: dict[str, str]
) -> tuple[dict[str, Any], bytes]:
    """What the view shows, as JSON and one buffer of numbers."""
    if not isinstance(trace, Trace):
        raise ValueError(f"trace: expected a Trace from step(), got {type(trace).__name__}")
    if not trace.steps:
        raise ValueError(f"trace: expected at least one step, got none ({trace.error})")
    if unknown := renamed.keys() - {*SOFTMAX}:
        raise ValueError(f"softmax: expected names of {', '.join(SOFTMAX)}, got {min(unknown)}")
    steps, buffer = trace.steps, _Buffer()
    history = _history(steps)
    rows = _Iterations(steps, {role: renamed.get(role, role) for role in SOFTMAX}, history)
    detail = [*range(rows.starts[DETAIL] if len(rows.starts) > DETAIL else len(steps))]
    detail += range(max(len(detail), rows.end), len(steps))
    variables = [_variable(name, found, {*detail}, buffer) for name, found in history.items()]
    codes, stream, offsets = _statements(steps, [*history])
    tree = _tree(history, steps, {*detail})
    softmax = _softmax(rows, buffer) if rows.scores else None
    last = steps[-1].variables
    sizes = [last.get(name) for name in ("BLOCK_SIZE", "NUM_KV_HEADS", "HEAD_DIM")]
    if layout is not None:
        sizes = [layout.block_size, layout.num_kv_heads, layout.head_dim]
    drawn = cache in trace.shapes and all(isinstance(size, int) for size in sizes)
    data = {
        "title": f"{trace.kernel}, step by step",
        "program": list(trace.program),
        "note": _note(trace),
        "file": trace.source.caption,
        "first_line": trace.source.first_line,
        "lines": _highlight(trace.source),
        "num_steps": len(steps),
        "codes": codes,
        "stream": buffer.add(stream),
        "offsets": buffer.add(offsets),
        "shapes": trace.shapes,
        "variables": variables,
        "layout": _element_layout(*sizes) if drawn else None,
        "cache": cache,
        "tokens": rows.starts,
        "token_is": rows.noun,
        "blocks": rows.blocks,
        "tree": tree,
        "num_lanes": tree["lanes"] if tree else 1,
        "softmax": softmax,
        "panes": [PANES[0]] + [PANES[1]] * bool(tree) + [PANES[2]] * bool(softmax),
        "columns": buffer.columns,
    }
    return data, bytes(buffer.content)


def _note(trace: Trace) -> str:
    notes = [f"The kernel fails at {trace.error}."] if trace.error else []
    if trace.truncated:
        notes.append(f"Stopped after {len(trace.steps):,} steps.")
    if trace.as_float32:
        notes.append(f"Stepped in float32: {', '.join(trace.as_float32)}.")
    return " ".join(notes)


def _element_layout(block_size: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """A block's layout in elements instead of bytes, as the kernel's offsets count."""
    kv_dim = num_kv_heads * head_dim
    return {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "kv_dim": kv_dim,
        "v_offset": block_size * kv_dim,
        "block_bytes": 2 * block_size * kv_dim,
        "itemsize": 1,
    }


def _highlight(source: Source) -> list[list[list[str]]]:
    """The lines as [class, text] pieces."""
    try:
        from pygments.lexers import PythonLexer
        from pygments.token import STANDARD_TYPES
    except ImportError:
        return [[["", line]] for line in source.lines]
    lines: list[list[list[str]]] = [[]]
    for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(source.lines)):
        for i, part in enumerate(text.split("\n")):
            if i:
                lines.append([])
            if part:
                lines[-1].append([STANDARD_TYPES.get(kind, ""), part])
    return lines[: len(source.lines)]


class _Buffer:
    """Columns of numbers in one run of bytes."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.columns: list[list[Any]] = []  # [type, first byte, length]

    def add(self, values: Any) -> int:
        """The index of a new column, of the narrowest type that holds the values exactly."""
        column = np.asarray(values).astype(np.float64).ravel()
        kind = "f8"
        if column.size and column.min() >= 0 and column.max() < 256 and not (column % 1).any():
            kind, column = "u1", column.astype(np.uint8)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                single = column.astype(np.float32)
            if np.array_equal(single, column, equal_nan=True):
                kind, column = "f4", single
        self.content += bytes(-len(self.content) % 8)
        self.columns.append([kind, len(self.content), column.size])
        self.content += column.tobytes()
        return len(self.columns) - 1


def _history(steps: Sequence[Step]) -> dict[str, list[tuple[int, Any]]]:
    """(step, value) of each assignment, by variable; step -1 for an argument."""
    history: dict[str, list[tuple[int, Any]]] = {}
    for i, step in enumerate(steps):
        for name in step.variables if i == 0 else step.assigned:
            if name != "_":
                at = i if name in step.assigned else -1
                history.setdefault(name, []).append((at, step.variables[name]))
    return history


def _variable(
    name: str, found: list[tuple[int, Any]], detail: set[int], buffer: _Buffer
) -> dict[str, Any]:
    """One variable's values, in the order of assignment."""
    values = [value for _, value in found]
    shown: dict[str, Any] = {"name": name, "argument": found[0][0] < 0}
    if all(isinstance(value, Pointer) for value in values):
        ends = [[np.min(value.offsets), np.max(value.offsets)] for value in values]
        return shown | {"kind": "pointer", "into": values[0].argument, "column": buffer.add(ends)}
    if not all(isinstance(value, bool | int | np.generic | np.ndarray) for value in values):
        texts = [str(value) for value in values]
        return shown | {"kind": "text", "texts": texts[:1] if len({*texts}) == 1 else texts}
    shown["bool"] = all(np.asarray(value).dtype == bool for value in values)
    if not any(np.ndim(value) for value in values):
        return shown | {"kind": "number", "column": buffer.add(values)}
    arrays = [(i, np.asarray(v)) for i, (step, v) in enumerate(found) if step < 0 or step in detail]
    largest = max((min(value.size, MAX_ARRAY) for _, value in arrays), default=1)
    kept = arrays[: MAX_ARRAYS // max(largest, 1)]
    numbers = [value.ravel()[:MAX_ARRAY] for _, value in kept]
    return shown | {
        "kind": "array",
        "kept": [[i, list(value.shape)] for i, value in kept],
        "column": buffer.add(np.concatenate([np.empty(0), *numbers])),
        "most": MAX_ARRAY,
    }


def _statements(
    steps: Sequence[Step], names: list[str]
) -> tuple[list[list[Any]], list[int], list[int]]:
    """Distinct statements, which one each step runs, and the first element of each access.

    A statement is [line, last line, indexes of the variables it assigns, accesses]; an access is
    [kind, argument, [[count, stride] of each dimension] or None, live elements, elements].
    """
    index = {name: i for i, name in enumerate(names)}
    codes: dict[str, int] = {}
    statements: list[list[Any]] = []
    stream, offsets = [], []
    for step in steps:
        accesses = []
        for access in step.accesses:
            first, dims = _box(access.offsets, access.mask)
            live = int(access.mask.sum())
            accesses.append([access.kind, access.argument, dims, live, access.mask.size])
            offsets.append(first)
        assigned = [index[name] for name in step.assigned if name in index]
        statement = [step.line, step.last_line, assigned, accesses]
        key = str(statement)
        if key not in codes:
            codes[key] = len(codes)
            statements.append(statement)
        stream.append(codes[key])
    return statements, stream, offsets


def _box(offsets: np.ndarray, mask: np.ndarray) -> tuple[int, list[list[int]] | None]:
    """First live offset and [count, stride] per dimension, where the live ones are such a box."""
    if not mask.any():
        return int(offsets.flat[0]), []
    axes = range(offsets.ndim)
    counts = [int(mask.any(tuple(other for other in axes if other != axis)).sum()) for axis in axes]
    box = tuple(slice(count) for count in counts)
    live, dims = offsets[box], []
    if not mask[box].all() or mask.sum() != live.size:
        return int(offsets[mask].min()), None
    for axis, count in enumerate(counts):
        strides = np.unique(np.diff(live, axis=axis))
        if len(strides) > 1:
            return int(live.min()), None
        if count > 1:
            dims.append([count, int(strides[0])])
    return int(live.flat[0]), dims


class _Iterations:
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


def _softmax(rows: _Iterations, buffer: _Buffer) -> dict[str, Any]:
    """Plain softmax next to the online one, and both without the maximum, all in float32."""
    alive = [scores[scores != -np.inf] for scores in rows.scores]
    scores = np.concatenate(alive).astype(np.float32)
    top = float(scores.max()) if scores.size else 0.0
    gain = np.float32(max(1.0, np.ceil(100 / top)) if 0 < top < np.inf else 1.0)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(initial=-np.inf))
        wide = scores * gain
        unsafe = np.exp(wide)
        safe = np.exp(wide - wide.max(initial=-np.inf))
        columns = {
            "scores": scores,
            "plain": weights / weights.sum(),
            "wide": wide,
            "exp": unsafe,
            "sum": np.cumsum(unsafe, dtype=np.float32),
            "unsafe": unsafe / unsafe.sum(),
            "safe": safe / safe.sum(),
            "stops": np.cumsum([len(part) for part in alive]),
        }
    return {
        "columns": {name: buffer.add(values) for name, values in columns.items()},
        "max": buffer.add([scores.max(initial=-np.inf)]),
        "sum": buffer.add([weights.sum()]),
        "gain": float(gain),
        "roles": rows.roles,
    }


def _tree(
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

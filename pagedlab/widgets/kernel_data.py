"""What KernelStepper shows, from a trace: JSON for the structure, one buffer for the numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedlab.layout import KVLayout
from pagedlab.source import Source
from pagedlab.trace import Trace
from pagedlab.trace_recorder import Pointer, Step
from pagedlab.widgets.kernel_patterns import (
    DETAIL,
    Iterations,
    find_tree,
    history_of,
    plain_softmax,
)

MAX_ARRAY = 1024  # elements of one array
MAX_ARRAYS = 16 * 1024  # elements of all values of one array variable
PANES = ("variables", "lanes", "softmax")
SOFTMAX = ("score", "new_max", "correction", "weight", "d", "acc")


def encode(
    trace: Trace, layout: KVLayout | None, cache: str, renamed: Mapping[str, str]
) -> tuple[dict[str, Any], bytes]:
    """What the view shows: JSON without NaN or infinity, and the columns of numbers it refers to.

    Args:
        trace, layout, cache: as KernelStepper takes them.
        renamed: the kernel's own names of the online softmax's variables.

    Raises:
        ValueError: not a trace, an empty one, or unknown names in `renamed`.
    """
    if not isinstance(trace, Trace):
        raise ValueError(f"trace: expected a Trace from step(), got {type(trace).__name__}")
    if not trace.steps:
        raise ValueError(f"trace: expected at least one step, got none ({trace.error})")
    if unknown := renamed.keys() - {*SOFTMAX}:
        raise ValueError(f"softmax: expected names of {', '.join(SOFTMAX)}, got {min(unknown)}")
    steps, buffer = trace.steps, _Buffer()
    history = history_of(steps)
    rows = Iterations(steps, {role: renamed.get(role, role) for role in SOFTMAX}, history)
    detail = [*range(rows.starts[DETAIL] if len(rows.starts) > DETAIL else len(steps))]
    detail += range(max(len(detail), rows.end), len(steps))
    variables = [_variable(name, found, {*detail}, buffer) for name, found in history.items()]
    codes, stream, offsets = _statements(steps, [*history])
    tree = find_tree(history, steps, {*detail})
    softmax = None
    if rows.scores:
        gain, arrays = plain_softmax(rows)
        columns = {name: buffer.add(values) for name, values in arrays.items()}
        softmax = {"gain": gain, "columns": columns, "roles": rows.roles}
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
        "layout": _element_layout(layout, steps[-1]) if cache in trace.shapes else None,
        "cache": cache,
        "tokens": rows.starts,
        "token_is": rows.noun,
        "blocks": rows.blocks,
        "tree": tree,
        "num_lanes": tree["lanes"] if tree else _num_lanes(variables),
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


def _element_layout(layout: KVLayout | None, last: Step) -> dict[str, int] | None:
    """A block's layout in elements instead of bytes, as the kernel's offsets count."""
    names = ("block_size", "num_kv_heads", "head_dim")
    found = [getattr(layout, name, last.variables.get(name.upper())) for name in names]
    sizes = [size for size in found if isinstance(size, int)]
    if len(sizes) < 3:
        return None
    block_size, num_kv_heads, head_dim = sizes
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
        column: np.ndarray = np.asarray(values).astype(np.float64).ravel()
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


def _num_lanes(variables: list[dict[str, Any]]) -> int:
    """Lanes of a kernel without a reduction: its longest vector that was recorded."""
    shapes = [shape for it in variables for _, shape in it.get("kept", ())]
    return max((min(*shape, MAX_ARRAY) for shape in shapes if len(shape) == 1), default=1)


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

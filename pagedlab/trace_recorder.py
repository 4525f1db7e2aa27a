"""What the debugger writes down while Triton's interpreter runs a kernel."""

import ast
import dataclasses
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from pagedlab.source import Source

TAG_BIT = np.uint64(56)  # a pointer's top byte numbers the argument it came from, from 1
ADDRESS = np.uint64((1 << 56) - 1)
# memory operation of Triton's interpreter -> kind, positions of pointers, mask, stored value
MEMORY_OPS = {
    "create_masked_load": ("load", 0, 1, None),
    "create_masked_store": ("store", 0, 2, 1),
    "create_atomic_rmw": ("atomic", 1, 3, None),
    "create_atomic_cas": ("atomic", 0, None, None),
}
OTHER_AT = 2  # of a masked load: what lanes behind the mask get


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """A pointer or an array of them: `offsets` (int64, elements) from the start of `argument`."""

    argument: str
    offsets: Any


class Access(NamedTuple):
    """A "load", "store" or "atomic": argument, and arrays of one shape.

    offsets: int64, in elements from the argument's first. mask: bool. values: what a load got, a
    store wrote, an atomic found.
    """

    kind: str
    argument: str
    offsets: np.ndarray
    mask: np.ndarray
    values: np.ndarray


class Step(NamedTuple):
    """A statement that ran (`line` to `last_line`), what it assigned, and its memory accesses.

    variables: every variable after it, by name: int, bool, str, None, numpy scalar or array,
    Pointer, or a tuple of these.
    """

    line: int
    last_line: int
    assigned: list[str]
    variables: dict[str, Any]
    accesses: list[Access]


class Truncated(Exception):
    """Raised in the kernel to stop it after max_steps."""


class Recorder:
    """Records one run of `code`, the rewritten kernel, on `tensors`, its arguments by name."""

    def __init__(self, source: Source, code: CodeType, tensors: dict, max_steps: int) -> None:
        self.steps: list[Step] = []
        self.code, self.max_steps = code, max_steps
        self.arguments = list(tensors.items())
        self.bases: list[int] = []
        self.spans = statements(source)
        self.span: tuple = (source.first_line, 0, (), range(0))
        self.live: dict[str, tuple[Any, Any]] = {}
        self.accesses: list[Access] = []

    def event(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        """The trace function: a step ends where the next statement, or the return, begins."""
        if frame.f_code is not self.code:
            return None
        line = frame.f_lineno
        if event == "call":
            for number, (name, _tensor) in enumerate(self.arguments, 1):
                pointer = frame.f_locals[name].handle.data
                self.bases.append(int(pointer[0]))
                pointer |= np.uint64(number) << TAG_BIT
        elif event == "return":
            self.finish(frame, 0)
        elif event == "line" and not self.span[0] < line <= self.span[1]:
            span = self.spans.get(line, (line, line, (), range(0)))
            if span is not self.span or span[0] == span[1]:
                self.finish(frame, line)
                self.span = span
        return self.event

    def finish(self, frame: FrameType, next_line: int) -> None:
        """Close the step that just ran."""
        first, last, names, body = self.span
        if not last:
            return
        if len(self.steps) == self.max_steps:
            raise Truncated
        variables = {name: self.value(name, obj) for name, obj in frame.f_locals.items()}
        leaving = body and next_line not in body  # a loop header that ends its loop assigns nothing
        assigned = [name for name in names if name in variables and not leaving]
        self.steps.append(Step(first, last, assigned, variables, self.accesses))
        self.accesses = []

    def value(self, name: str, obj: Any) -> Any:
        """The variable as data; the same object as in the step before unless it was assigned."""
        if self.live.get(name, (self,))[0] is not obj:
            self.live[name] = (obj, self.convert(name, obj))
        return self.live[name][1]

    def convert(self, name: str, obj: Any) -> Any:
        import triton.language as tl

        if isinstance(obj, tuple | tl.tuple):
            return tuple(self.convert(name, item) for item in obj)
        obj = getattr(obj, "value", obj)  # tl.constexpr
        data = getattr(getattr(obj, "handle", None), "data", None)
        if isinstance(obj, float):
            return np.float64(obj)
        if data is None and hasattr(obj, "handle"):
            return type(obj.handle).__name__  # of tl.make_block_ptr, for instance
        if data is None:
            return obj if obj is None or isinstance(obj, int | str) else str(obj)
        data = np.array(data).reshape([int(size) for size in obj.shape])[()]
        if obj.dtype.is_ptr():
            return Pointer(*self.locate(data, np.True_))
        if obj.dtype.is_floating() and data.dtype.kind != "f":
            raise TypeError(f"{name} is {obj.dtype}, which the interpreter gets wrong: use float32")
        return data

    def locate(self, pointers: np.ndarray, mask: Any, kind: str = "") -> tuple[str, Any]:
        """Which argument all pointers belong to, or "?", and their offsets; checked if `kind`."""
        alive = pointers[mask] if mask.any() else pointers.ravel()[:1]
        tags = {*(alive >> TAG_BIT).ravel().tolist()}
        if len(tags) > 1 or not tags <= {*range(1, len(self.arguments) + 1)}:
            return "?", pointers.astype(np.int64)
        tag = tags.pop() - 1
        name, tensor = self.arguments[tag]
        offsets = ((pointers & ADDRESS).astype(np.int64) - self.bases[tag]) // tensor.itemsize
        low = -tensor.storage_offset()
        high = low + tensor.untyped_storage().nbytes() // tensor.itemsize - 1
        outside = mask & ((offsets < low) | (offsets > high))
        if kind and outside.any():
            raise IndexError(f"{kind} {name}[{offsets[outside][0]}], outside its {low} to {high}")
        return name, offsets

    def watch(self, operation: Callable, kind: str, pointer_at: int, *rest: int | None) -> Callable:
        """A memory operation of the interpreter, checked and recorded; rest as in MEMORY_OPS."""
        mask_at, value_at = rest

        def watched(*args: Any, **kwargs: Any) -> Any:
            handle = args[pointer_at]
            mask = np.ones(handle.data.shape, bool)
            if mask_at is not None:
                mask = np.asarray(getattr(args[mask_at], "data", args[mask_at])).astype(bool)
            where = self.locate(handle.data, mask, kind)
            real = dataclasses.replace(handle, data=handle.data & ADDRESS)
            result = operation(*args[:pointer_at], real, *args[pointer_at + 1 :], **kwargs)
            if kind == "load" and args[OTHER_AT] is None:
                leave_undefined(result.data, mask)
            values = result if value_at is None else args[value_at]
            self.accesses.append(Access(kind, *where, mask, np.array(values.data)))
            return result

        return watched


def leave_undefined(loaded: np.ndarray, mask: np.ndarray) -> None:
    """What a load without `other` gives behind its mask, in place.

    A GPU leaves that open, Triton's interpreter makes it 0. Here it is something that shows in
    whatever is computed with it: NaN, or the integer that is farthest from any index.
    """
    kind = loaded.dtype.kind
    nothing: Any = np.nan if kind == "f" else -1
    if kind == "i":
        nothing = np.iinfo(loaded.dtype).min
    loaded[~np.broadcast_to(mask, loaded.shape)] = np.array(nothing).astype(loaded.dtype)


def statements(source: Source) -> dict[int, tuple]:
    """line -> its statement: first and last line (of a loop: its header), names, loop body."""
    tree = ast.parse("\n".join(source.lines))
    ast.increment_lineno(tree, source.first_line - 1)
    spans: dict[int, tuple] = {}
    for node in ast.walk(tree.body[0]):
        if not isinstance(node, ast.stmt) or node is tree.body[0]:
            continue
        parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        names = [n for p in parts for n in ast.walk(p) if isinstance(n, ast.Name)]
        stored = [n.id for n in names if isinstance(n.ctx, ast.Store)]
        last, body = node.end_lineno or node.lineno, range(0)
        if hasattr(node, "body"):
            last, end = max(part.end_lineno or 0 for part in parts), last
            body = range(last + 1, end + 1) if stored else body
        stored = [*spans.get(node.lineno, (0, 0, []))[2], *stored]  # `a = 1; b = 2` is one step
        span = (node.lineno, last, stored, body)
        spans |= dict.fromkeys(range(node.lineno, last + 1), span)
    return spans

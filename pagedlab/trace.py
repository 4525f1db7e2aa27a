"""A debugger for Triton kernels: one program of a launch, every statement, its variables as data.

`step` runs any kernel (from a file or a notebook cell, with no tracing code in it) in Triton's
interpreter under `sys.settrace`. Chapters 4 to 6 step through the package's own kernels with it.
"""

import base64
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from pagedlab import portable
from pagedlab.source import Source, show
from pagedlab.trace_recorder import MEMORY_OPS, Access, Pointer, Recorder, Step, Truncated


@dataclasses.dataclass(repr=False, eq=False)
class Trace:
    """What `step` recorded.

    shapes: of the tensor arguments. as_float32: those that were stepped in float32. outputs: those
    that the program wrote to, as they are afterwards. truncated: it was stopped after max_steps.
    error: one line if the kernel failed; the last step is then where it did.
    """

    kernel: str
    source: Source
    grid: tuple[int, ...]
    program: tuple[int, ...]
    shapes: dict[str, list[int]]
    as_float32: list[str]
    steps: list[Step] = dataclasses.field(default_factory=list)
    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    truncated: bool = False
    error: str | None = None

    def __repr__(self) -> str:
        ending = self.error or "truncated" * self.truncated or "complete"
        return f"Trace({self.kernel}, program {self.program}: {len(self.steps)} steps, {ending})"

    def at(self, text: str) -> list[Step]:
        """The steps whose source contains `text`, in order."""
        lines, first = self.source.lines, self.source.first_line
        hits = {first + i for i, line in enumerate(lines) if text in line}
        return [step for step in self.steps if hits & {*range(step.line, step.last_line + 1)}]

    def values(self, name: str) -> list[Any]:
        """What was assigned to variable `name`, one entry per assignment."""
        return [step.variables[name] for step in self.steps if name in step.assigned]

    def to_json(self) -> str:
        """The whole trace as JSON text; arrays as base64, so NaN and infinity survive."""
        rows: list[Step] = []
        before: dict[str, Any] = {}
        for step in self.steps:
            new = {k: v for k, v in step.variables.items() if before.get(k, rows) is not v}
            rows.append(step._replace(variables={k: _exact(v) for k, v in new.items()}))
            before = step.variables
        return json.dumps(vars(self) | {"steps": rows}, default=_encode)

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The inverse of to_json."""
        fields = json.loads(text, object_hook=_decode)
        variables: dict[str, Any] = {}
        for i, (first, last, names, new, accesses) in enumerate(fields["steps"]):
            variables = variables | new
            accesses = [Access(*access) for access in accesses]
            fields["steps"][i] = Step(first, last, names, variables, accesses)
        fields["source"] = Source(*fields["source"])
        return cls(**fields)


def step(
    kernel: Any,
    grid: Any,
    *args: Any,
    program: int | tuple[int, ...] = 0,
    max_steps: int = 100_000,
    **kwargs: Any,
) -> Trace:
    """Run one program of `kernel[grid](*args, **kwargs)` and record every statement.

    Tensors are copied to the CPU, aliases kept: the caller's stay as they are. Only this program of
    the grid runs. bfloat16 and float8 tensors are stepped as float32, since the interpreter gets
    them wrong. An access outside its argument ends the trace with an error. Where Triton compiles
    (a GPU machine), all this happens in a process of its own.

    Args:
        kernel: a function under @triton.jit.
        grid: the launch grid: 1 to 3 ints, or a function of the arguments by name.
        program: which program of the grid to run, 1 to 3 ints.
        max_steps: stop there and mark the trace as truncated.

    Raises:
        ValueError: not a Triton kernel, arguments that do not fit, a program outside the grid.
        RuntimeError: an interpreter that fails with this numpy (triton < 3.7, numpy >= 2.4).
    """
    inner, bound, _ = portable.bind(kernel, args, kwargs)
    import triton.language as tl

    dims = _three(grid(bound) if callable(grid) else grid, 1)
    at = _three(program, 0)
    if not all(0 <= index < size for index, size in zip(at, dims, strict=True)):
        raise ValueError(f"program: expected one inside the grid {dims}, got {at}")
    tensors, as_float32 = _copy({k: v for k, v in bound.items() if isinstance(v, torch.Tensor)})
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    trace = Trace(inner.fn.__name__, show(inner), dims, at, shapes, as_float32)
    job = (inner, trace, bound | tensors, max_steps)
    if {type(inner).__name__, type(tl.sum).__name__} == {"InterpretedFunction"}:
        return _record(*job)
    return portable.run_in_process(_record, *job, interpret=True)


def step_launch(
    launcher: Callable, *args: Any, program: int | tuple[int, ...] = 0, **kwargs: Any
) -> Trace:
    """Step the first kernel that `launcher(*args, **kwargs)` launches, in place of the launch.

    >>> import torch
    >>> from pagedlab import KVLayout
    >>> from pagedlab.kernels.write_kv import write_kv
    >>> layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    >>> k, cache = torch.ones(1, 1, 16), torch.zeros(3 * layout.block_bytes // 4)
    >>> table = torch.tensor([[[2]]], dtype=torch.int32)
    >>> trace = step_launch(write_kv, k, k, cache, table, 0, layout)
    >>> [int(block) for block in trace.values("physical_block")]
    [2]

    Raises:
        ValueError: the launcher launched nothing, or as `step`.
    """
    kernel, grid, args, kwargs = portable.capture_launch(launcher, *args, **kwargs)
    return step(kernel, grid, *args, program=program, **kwargs)


def _three(sizes: int | tuple[int, ...], fill: int) -> tuple[int, ...]:
    return (*((sizes,) if isinstance(sizes, int) else sizes), fill, fill)[:3]


def _copy(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Copies on the CPU that share memory where the originals do, narrow floats as float32."""
    right = (torch.float16, torch.float32, torch.float64)
    memory: dict[Any, tuple[torch.dtype, torch.Tensor]] = {}
    copies: dict[str, torch.Tensor] = {}
    as_float32: list[str] = []
    for name, tensor in tensors.items():
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        narrow = dtype.is_floating_point and dtype not in right
        as_float32 += [name] * narrow
        key = storage.data_ptr() or name  # an empty tensor overlaps nothing
        if key not in memory:
            whole = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)
            memory[key] = (dtype, (whole.float() if narrow else whole.clone()).cpu())
        held, copy = memory[key]
        if held != dtype:
            raise ValueError(f"{name}: expected {held} like an argument it overlaps, got {dtype}")
        copies[name] = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copies, as_float32


def _record(kernel: Any, trace: Trace, arguments: dict[str, Any], max_steps: int) -> Trace:
    import triton
    from triton.runtime.interpreter import interpreter_builder as builder

    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    recorder = Recorder(trace.source, kernel.rewrite().__code__, tensors, max_steps)
    trace.steps = recorder.steps
    patches: dict[str, Any] = {
        op: recorder.watch(getattr(builder, op), *where) for op, where in MEMORY_OPS.items()
    }
    patches["set_grid_dim"] = lambda *_: setattr(builder, "grid_dim", trace.grid)
    patches["set_grid_idx"] = lambda *_: setattr(builder, "grid_idx", trace.program)
    tracer = sys.gettrace()
    try:
        with mock.patch.multiple(builder, **patches), np.errstate(all="ignore"):
            sys.settrace(recorder.event)
            kernel[(1,)](**arguments)
    except Exception as failure:
        cause: BaseException = failure
        while cause.__cause__ is not None:
            cause = cause.__cause__
        fault = portable.interpreter_fault(triton.__version__, np.__version__)
        if fault and isinstance(cause, TypeError):  # the kernel may be right
            raise RuntimeError(fault) from None
        trace.truncated = isinstance(cause, Truncated)
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        trace.error = None if trace.truncated else f"line {recorder.span[0]}: {reason}"
    finally:
        sys.settrace(tracer)
    written = {a.argument for step in trace.steps for a in step.accesses if a.kind != "load"}
    trace.outputs = {name: t.numpy().copy() for name, t in tensors.items() if name in written}
    return trace


def _exact(value: Any) -> Any:
    """numpy's float64 is a float to json, which would write its NaN as it is."""
    if isinstance(value, tuple):
        return [_exact(item) for item in value]
    return _encode(value) if isinstance(value, np.float64) else value


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, Pointer):
        return {"$pointer": [value.argument, value.offsets]}
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"$array": [value.dtype.str, value.shape, data]}


def _decode(value: dict[str, Any]) -> Any:
    if "$pointer" in value:
        return Pointer(*value["$pointer"])
    if "$array" in value:
        dtype, shape, data = value["$array"]
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)[()]
    return value

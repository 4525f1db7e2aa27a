"""A Triton kernel in a process of its own, in the other mode (interpreter or compiler).

Triton fixes the mode when a kernel is decorated. So the debugger and the compiler send a kernel's
source to a new process, with the globals its code names: modules, constants, helper kernels. A
kernel from a notebook cell travels like one from a file.
"""

import ast
import importlib
import inspect
import linecache
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from pagedlab.stand_in import Kernel, NeedsTriton, has_triton

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
SERVE = "import triton, sys; from pagedlab import portable; portable._serve(*sys.argv[1:])"


def numbers(version: str) -> tuple[int, ...]:
    """The major and minor number of a version.

    >>> numbers("3.7.1+git")
    (3, 7)
    """
    return tuple(int(part) for part in version.split(".")[:2])


def interpreter_fault(triton: str, numpy: str) -> str:
    """Why that Triton's interpreter fails with that numpy, and the cure; empty if it does not.

    >>> interpreter_fault("3.6.0", "2.5.0")
    "the interpreter of triton 3.6.0 needs numpy < 2.4, got 2.5.0: pip install 'numpy<2.4'"
    >>> interpreter_fault("3.7.1", "2.5.0")
    ''
    """
    if numbers(triton) >= (3, 7) or numbers(numpy) < (2, 4):
        return ""
    wanted = f"the interpreter of triton {triton} needs numpy < 2.4"
    return f"{wanted}, got {numpy}: pip install 'numpy<2.4'"


def bind(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict, dict]:
    """The innermost jit function of `kernel`, its arguments by name, and the launch options.

    Raises:
        ValueError: not a Triton kernel, or the arguments do not fit its parameters.
    """
    inner = kernel  # maybe below @triton.autotune or @triton.heuristics
    while hasattr(inner, "fn") and not inspect.isfunction(inner.fn):
        inner = inner.fn
    if isinstance(inner, Kernel):
        raise NeedsTriton(inner.fn.__name__)
    if type(inner).__name__ not in ("JITFunction", "InterpretedFunction"):
        got = getattr(kernel, "__name__", type(kernel).__name__)
        raise ValueError(f"kernel: expected a function under @triton.jit, got {got}")
    options = {name: kwargs[name] for name in LAUNCH_OPTIONS if name in kwargs}
    named = {name: value for name, value in kwargs.items() if name not in options}
    try:
        bound = inspect.signature(inner.fn).bind(*args, **named)
    except TypeError as problem:
        raise ValueError(f"{inner.fn.__name__}: {problem}") from None
    bound.apply_defaults()
    return inner, bound.arguments, options


def capture_launch(launcher: Callable, *args: Any, **kwargs: Any) -> tuple[Any, Any, tuple, dict]:
    """(kernel, grid, args, kwargs) of the first launch in `launcher(*args, **kwargs)`, not done.

    Raises:
        ValueError: there was none.
    """
    if not has_triton():
        raise NeedsTriton(launcher.__name__)
    from triton.runtime.jit import KernelInterface

    class Launch(BaseException):
        pass

    def capture(kernel: Any, grid: Any) -> Callable:
        def launch(*args: Any, **kwargs: Any) -> None:
            raise Launch(kernel, grid, args, kwargs)

        return launch

    try:
        with mock.patch.object(KernelInterface, "__getitem__", capture):
            launcher(*args, **kwargs)
    except Launch as launch:
        return launch.args  # type: ignore[return-value]
    raise ValueError(f"launcher: expected a kernel launch, {launcher.__name__} made none")


def run_in_process(function: Callable, *args: Any, interpret: bool) -> Any:
    """`function(*args)` in a new process where Triton interprets, or compiles with an empty cache.

    A ValueError raised there is raised here; what is printed there is printed here.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder, "job"), Path(folder, "answer")
        torch.save((function, args), job, pickle_module=sys.modules[__name__])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TRITON_INTERPRET": str(int(interpret)),
            "TRITON_CACHE_DIR": folder,
        }
        command = [sys.executable, "-c", SERVE, str(job), str(answer)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        print(done.stdout, end="")
        if done.returncode:
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise RuntimeError(f"{function.__name__} failed in its own process: {reason}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, ValueError):
        raise result
    return result


def _serve(job: str, answer: str) -> None:
    function, args = torch.load(job, weights_only=False)
    try:
        result = function(*args)
    except ValueError as problem:
        result = problem
    Path(answer).write_bytes(pickle.dumps(result))


class Pickler(pickle.Pickler):
    """Pickles a module by name and a Triton function by source; torch.save expects this name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            return importlib.import_module, (obj.__name__,)
        if type(obj).__name__ not in ("JITFunction", "InterpretedFunction"):
            return NotImplemented
        fn = obj.fn
        if fn.__module__.split(".")[0] == "triton":
            return getattr, (sys.modules[fn.__module__], fn.__name__)
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(tree, first - 1)
        tree.body[0].decorator_list = []  # type: ignore[attr-defined]
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names -= {*fn.__code__.co_varnames, fn.__name__}
        language = sys.modules["triton.language"]  # the interpreter wants it even where unused
        used = {k: v for k, v in fn.__globals__.items() if k in names or v is language}
        used["__name__"] = fn.__module__
        interpreted = getattr(obj, "kwargs", {})
        fixed = getattr(obj, "do_not_specialize", interpreted.get("do_not_specialize"))
        file = fn.__code__.co_filename
        return _rebuild, (fn.__name__, tree, file, linecache.getlines(file), used, fixed)


def _rebuild(
    name: str, tree: ast.Module, file: str, lines: list[str], used: dict[str, Any], fixed: Any
) -> Any:
    import triton

    linecache.cache[file] = (len(lines), None, lines, file)
    exec(compile(tree, file, "exec"), used)
    return triton.jit(used[name], do_not_specialize=fixed)

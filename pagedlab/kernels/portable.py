"""A Triton kernel as bytes, for a process in the other mode (interpreter or compiler).

Triton fixes the mode when a kernel is decorated, so the debugger and the compiler take a kernel to a
process of their own: its source text, and the globals its code names, helpers and constants included.
A kernel defined in a notebook cell travels like one from a file.
"""

import ast
import importlib
import inspect
import io
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


def jit_function(kernel: Any) -> Any:
    """The innermost Triton object of `kernel`: below @triton.autotune and @triton.heuristics.

    Raises:
        ValueError: `kernel` is not a Triton kernel.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    inner = kernel
    while not isinstance(inner, JITFunction | InterpretedFunction):
        if not hasattr(inner, "fn"):
            got = getattr(kernel, "__name__", type(kernel).__name__)
            raise ValueError(f"kernel: expected a function under @triton.jit, got {got}")
        inner = inner.fn
    return inner


def bind(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a launch into the kernel's arguments by name and the launch options (num_warps, ...)."""
    signature = inspect.signature(kernel.fn)
    known = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
    options = {k: v for k, v in kwargs.items() if k in known and k not in signature.parameters}
    try:
        bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in options})
    except TypeError as problem:
        raise ValueError(f"{kernel.fn.__name__}: {problem}") from None
    bound.apply_defaults()
    return bound.arguments, options


def run_in_process(function: Callable, *args: Any, interpret: bool) -> Any:
    """`function(*args)` in a new process whose Triton interprets, or compiles with an empty cache.

    A ValueError raised there is raised here; what the process prints is printed here.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder, "job"), Path(folder, "answer")
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump((function, args))
        job.write_bytes(buffer.getvalue())
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TRITON_INTERPRET": str(int(interpret)),
            "TRITON_CACHE_DIR": folder,
        }
        code = "import triton, sys; from pagedlab.kernels import portable; portable._serve(*sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", code, job, answer], env=env, capture_output=True, text=True
        )
        print(done.stdout, end="")
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise RuntimeError(f"{function.__name__} failed in its own process: {last}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, ValueError):
        raise result
    return result


def _serve(job: str, answer: str) -> None:
    function, args = pickle.loads(Path(job).read_bytes())
    try:
        result = function(*args)
    except ValueError as problem:
        result = problem
    Path(answer).write_bytes(pickle.dumps(result, protocol=5))


class _Pickler(pickle.Pickler):
    """Pickles a module by its name, a Triton function by its source and the globals it uses."""

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
        tree.body[0].decorator_list = []
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names -= {*fn.__code__.co_varnames, fn.__name__}
        used = {name: fn.__globals__[name] for name in sorted(names) if name in fn.__globals__}
        file, fixed = fn.__code__.co_filename, "do_not_specialize"
        options = {fixed: getattr(obj, fixed, None) or getattr(obj, "kwargs", {}).get(fixed)}
        used["__name__"] = fn.__module__
        return _rebuild, (fn.__name__, tree, file, linecache.getlines(file), used, options)


def _rebuild(name: str, tree: ast.Module, file: str, lines: list[str], used: dict, options: dict):
    import triton

    linecache.cache[file] = (len(lines), None, lines, file)
    exec(compile(tree, file, "exec"), used)
    return triton.jit(used[name], **options)

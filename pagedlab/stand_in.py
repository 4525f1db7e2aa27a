"""What stands in for Triton where it is not installed, as on macOS and Windows.

Kernels can be written and shown there, and what would run one says in a line why it does not. In a
notebook a cell that meets this is left out, and so is one that needs what such a cell makes; the
others run. No other package sees the stand-in.
"""

import ast
import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as cached
from functools import update_wrapper
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

KERNELS = "pagedlab.kernels."
REASON = "expected Triton, which pip has for Linux, got a machine without it"


class NeedsTriton(ImportError, ValueError):
    """A kernel cannot run, for there is no Triton."""

    def __init__(self, what: str = "kernel") -> None:
        super().__init__(f"{what}: {REASON}", name="triton")


@cached
def has_triton() -> bool:
    """Whether triton can be imported."""
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False


class Kernel:
    """A function under the stand-in's jit: `fn` is the function, and it cannot be launched."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        update_wrapper(self, fn)

    def __getitem__(self, *_: Any) -> NoReturn:
        raise NeedsTriton(self.fn.__name__)

    __call__ = __getitem__


def jit(fn: Callable | None = None, **options: Any) -> Any:
    """triton.jit, with options or without."""
    return Kernel if fn is None else Kernel(fn)


class Module(ModuleType):
    """A module of the stand-in; what it does not have, only Triton has."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NeedsTriton(f"{self.__name__}.{name}")


MODULES: dict[str, Any] = {name: Module(name) for name in ("triton", "triton.language")}
MODULES["triton"].jit = jit
MODULES["triton"].language = MODULES["triton.language"]
MODULES["triton.language"].constexpr = "constexpr"  # for annotations


class Loader(SourceFileLoader):
    """Executes a kernel's file with the stand-in as its Triton."""

    def exec_module(self, module: ModuleType) -> None:
        before = {name: sys.modules[name] for name in MODULES if name in sys.modules}
        sys.modules.update(MODULES)
        try:
            super().exec_module(module)
        finally:
            for name in MODULES:
                del sys.modules[name]
            sys.modules.update(before)


class Finder(MetaPathFinder):
    """Finds the files of pagedlab/kernels for the Loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith(KERNELS) else None
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(name, spec.origin)
        return spec


class Guard(ast.NodeTransformer):
    """Makes a notebook's cell one that is left out where it must be, with a line that says so.

    >>> namespace = {"stand_in": sys.modules[__name__]}
    >>> for cell in "z = 2; stand_in.jit(len)[1](z); y = 3", "y", "z", "x":
    ...     try:
    ...         exec(compile(Guard().visit(ast.parse(cell)), "a cell", "exec"), namespace)
    ...     except NameError as error:
    ...         print(error)
    Not run here: this cell needs Triton, which pip has for Linux only. ...
    Not run here: this cell needs y, which a cell above makes with Triton. ...
    name 'x' is not defined
    """

    def visit_Module(self, cell: ast.Module) -> ast.Module:
        code = compile(cell, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
        frame: Any = ast.parse(
            "from pagedlab.stand_in import leaving_out as _leaving_out\n"
            f"_shown = None\nwith _leaving_out(globals(), {sorted(made)}): pass\n_shown"
        )
        if cell.body:
            *_, last = frame.body[2].body = cell.body
            if isinstance(last, ast.Expr):  # what a notebook shows
                last = ast.copy_location(
                    ast.Assign([ast.Name("_shown", ast.Store())], last.value), last
                )
                cell.body[-1] = last
        return ast.fix_missing_locations(frame)


missing: set[str] = set()  # what cells that were left out would have made


@contextmanager
def leaving_out(namespace: dict[str, Any], made: list[str]) -> Iterator[None]:
    """Run a cell that makes the names `made`; where it needs Triton, a line says that instead."""
    before = dict(namespace)
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        reason = "Triton, which pip has for Linux only"
    except NameError as error:
        if error.name not in missing:
            raise
        reason = f"{error.name}, which a cell above makes with Triton"
    else:
        missing.difference_update(made)
        return
    print(f"Not run here: this cell needs {reason}. Its output is on the built book's page.")
    for name in made:
        if namespace.get(name) is before.get(name):
            namespace.pop(name, None)
            missing.add(name)


def install() -> None:
    """Let pagedlab's kernels and a notebook's cells do without Triton."""
    sys.meta_path.insert(0, Finder())
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            shell.ast_transformers.append(Guard())

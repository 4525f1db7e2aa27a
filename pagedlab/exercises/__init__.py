"""Checks for the book's exercises: `check("2.3", my_function)` says whether it holds, or where not.

Each chapter's exercises stand in a file of their own, `ch<number>.py`, with a tuple `EXERCISES`; a
new file is found by itself.
"""

import copy
import dataclasses
import html
import importlib.util
import inspect
import itertools
import math
import numbers
import pkgutil
import random
import traceback
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from types import CodeType
from typing import Any, NamedTuple

from pagedlab.stand_in import NeedsTriton

RAISED = "it raised "  # how an answer that is an exception is shown
ENDLESS = 10_000  # items of an answer that are looked at
LONG = 120  # characters of an answer; of a longer one only the place that is wrong is shown


class Confusion(NamedTuple):
    """A plausible wrong answer, and the idea to revisit when a reader's answers equal it."""

    idea: str
    function: Callable


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One exercise of the book.

    Args:
        id: chapter.number, as the page says it.
        title: a few words.
        solution: answers rightly; its parameter names label a failing input.
        cases: takes a random.Random, gives the arguments of every call: boundaries and random ones.
        idea: what to revisit when an answer is wrong in a way that no confusion explains.
        confusions: wrong answers that are recognised.
        call: how to get an answer from what the reader hands in, `call(function, *args)`; an
            exercise on a class or a kernel brings its own, and its names label the input.
    """

    id: str
    title: str
    solution: Callable
    cases: Callable[[random.Random], Iterable[tuple]]
    idea: str
    confusions: tuple[Confusion, ...] = ()
    call: Callable = lambda function, *args: function(*args)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What `check` found; true if the exercise holds. A notebook shows it in colour."""

    id: str
    title: str
    status: str  # "passed", "failed" or "not tried yet"
    details: tuple[tuple[str, str], ...]  # (label, text)

    def __bool__(self) -> bool:
        return self.status == "passed"

    def __repr__(self) -> str:
        lines = [f"Exercise {self.id}, {self.title}: {self.status}"]
        for label, text in self.details:
            lines.append(f"  {label}: " + text.replace("\n", "\n    "))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        mark, colour = {"passed": ("✓", "#009e73"), "failed": ("✗", "#d55e00")}.get(
            self.status, ("·", "#808080")
        )
        rows = "".join(
            f'<div style="margin-top:.3em"><b>{html.escape(label)}:</b> '
            f'<span style="white-space:pre-wrap">{html.escape(text)}</span></div>'
            for label, text in self.details
        )
        return (
            f'<div class="pagedlab-check" style="border-left:4px solid {colour};padding:.4em .8em;'
            f'overflow-wrap:anywhere">{mark} <b>Exercise {self.id}</b>, {html.escape(self.title)}: '
            f"<b>{self.status}</b>{rows}</div>"
        )


def check(id: str, function: Any, *, seed: int | None = None) -> CheckResult:
    """Try a reader's function on boundary cases and on random ones that are new every time.

    Args:
        id: the exercise, for instance "1.2".
        function: the reader's; whatever it does, this call does not raise.
        seed: makes the random cases repeatable.

    Returns:
        CheckResult: with the smallest input that failed, what was expected, what came, and which
            idea to revisit.

    Raises:
        ValueError: no exercise has this id.

    >>> check("1.1", lambda *sizes: 0)
    Exercise 1.1, blocks that fit: failed
      input: cache_bytes = 32
        block_size = 1
        num_kv_heads = 1
        head_dim = 16
        element_bytes = 1
      expected: 1
      got: 0
      revisit: A block holds K and V of block_size tokens; only whole blocks count.
    """
    id = str(id)
    if id not in EXERCISES:
        raise ValueError(f"check: expected one of {', '.join(EXERCISES)}, got {id!r}")
    exercise = EXERCISES[id]
    if not callable(function):
        given = f"a function or class (its name, with no brackets), got {shown(plain(function))}"
        return CheckResult(id, exercise.title, "failed", (("expected", given),))
    if is_stub(function):
        return CheckResult(id, exercise.title, "not tried yet", ())
    cases = sorted(exercise.cases(random.Random(seed)), key=weight)
    expected = [answer(exercise, exercise.solution, case) for case in cases]
    try:
        got = [answer(exercise, function, case) for case in cases]
    except NeedsTriton as error:
        return CheckResult(id, exercise.title, "not tried yet", (("here", str(error)),))
    wrong = [index for index in range(len(cases)) if not agree(expected[index], got[index])]
    if not wrong:
        return CheckResult(id, exercise.title, "passed", (("tried on", f"{len(cases)} cases"),))
    first = wrong[0]
    right, given, where = difference(expected[first], got[first])
    details = (
        ("input", show_arguments(exercise, cases[first])),
        ("expected", show_value(right, LONG) + where),
        ("got", show_value(given, LONG) + where),
        ("revisit", idea_to_revisit(exercise, cases, got, first)),
    )
    return CheckResult(id, exercise.title, "failed", tuple(d for d in details if d[1]))


def answer(exercise: Exercise, function: Callable, case: tuple) -> Any:
    """One answer as plain Python, or as text what the call raised, and the reader's line."""
    try:
        return plain(exercise.call(function, *copy.deepcopy(case)))
    except NeedsTriton:
        raise
    except (Exception, SystemExit) as error:
        wrapped = type(error).__name__ == "InterpreterError"  # by Triton
        raised = error.__cause__ or error if wrapped else error
        files = {code.co_filename for code in codes_of(function)}
        frames = [f for f in traceback.extract_tb(raised.__traceback__) if f.filename in files]
        lines = [f" (line {frame.lineno}: {frame.line})" for frame in frames if frame.line]
        return f"{RAISED}{type(raised).__name__}: {shown(raised, str)}{''.join(lines[-1:])}"


def without_line(value: Any) -> Any:
    """An answer; of one that was raised only what and why, not where."""
    return value.split(" (line ")[0] if was_raised(value) else value


def was_raised(value: Any) -> bool:
    """Whether an answer is what a call raised."""
    return isinstance(value, str) and value.startswith(RAISED)


def codes_of(function: Any) -> list[CodeType]:
    """The code of a function, of a Triton kernel, or of all methods of a class."""
    function = getattr(function, "fn", function)
    functions = vars(function).values() if isinstance(function, type) else [function]
    return [f.__code__ for f in functions if hasattr(f, "__code__")]


def idea_to_revisit(exercise: Exercise, cases: list[tuple], got: list, first: int) -> str:
    for idea, function in exercise.confusions:
        theirs = [without_line(answer(exercise, function, case)) for case in cases]
        if agree(theirs, [without_line(value) for value in got]):
            return idea
    if all(value is None for value in got):
        return "The function always gives None: is a return missing?"
    return "" if was_raised(got[first]) else exercise.idea  # what was raised says more


def plain(value: Any) -> Any:
    """Tensors, arrays, their scalars and whatever has an order as Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView | range):
        return [plain(item) for item in itertools.islice(value, ENDLESS)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def agree(expected: Any, got: Any) -> bool:
    """`same`; an answer that cannot even be compared is none."""
    try:
        return same(expected, got)
    except Exception:
        return False


def same(expected: Any, got: Any) -> bool:
    """Equal in value, numbers of whatever kind; floats up to rounding, one NaN like another."""
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(same(e, g) for e, g in zip(expected, got, strict=True))
        )
    if isinstance(expected, float):
        if not isinstance(got, numbers.Real):
            return False
        close = math.isclose(expected, got, rel_tol=1e-5, abs_tol=1e-6)
        return close or (math.isnan(expected) and math.isnan(got))
    if isinstance(expected, int) and not isinstance(expected, bool):
        return isinstance(got, numbers.Real) and expected == got
    return type(got) is type(expected) and bool(expected == got)


def weight(value: Any) -> float:
    """How large an input is to a reader: the smallest failing one is shown."""
    value = plain(value)
    if isinstance(value, numbers.Real):
        return 0 if math.isnan(value) else abs(float(value))
    if isinstance(value, list):
        return len(value) + sum(weight(item) for item in value)
    if isinstance(value, str | bytes):
        return len(value)
    if dataclasses.is_dataclass(value):
        return sum(weight(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0


def difference(expected: Any, got: Any) -> tuple[Any, Any, str]:
    """Both answers, or if they are long and alike in shape, where they first differ: [place]."""
    where: list[int] = []
    while (
        max(len(show_value(expected)), len(show_value(got))) > LONG
        and isinstance(expected, list)
        and isinstance(got, list)
        and len(expected) == len(got)
    ):
        pairs = enumerate(zip(expected, got, strict=True))
        place, (expected, got) = next((i, pair) for i, pair in pairs if not agree(*pair))
        where.append(place)
    return expected, got, f", at {where}" if where else ""


def show_value(value: Any, longest: int = 3 * LONG) -> str:
    text = shown(rounded(value))
    if was_raised(value):
        return value
    if len(text) <= longest:
        return text
    items = f" ({len(value)} items)" if isinstance(value, list) else ""
    return f"{text[: longest - 30]} ... {text[-30:]}{items}"


def shown(value: Any, how: Callable[[Any], str] = repr) -> str:
    """A value as text, also if the value does not like to be shown."""
    try:
        return how(value)
    except Exception as error:
        return (
            f"a value of type {type(value).__name__} that cannot be shown ({type(error).__name__})"
        )


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def show_arguments(exercise: Exercise, arguments: tuple) -> str:
    _, *names = inspect.signature(exercise.call).parameters
    if names == ["args"]:
        names = list(inspect.signature(exercise.solution).parameters)
    pairs = zip(names, arguments, strict=True)
    return "\n".join(f"{name} = {show_value(plain(argument))}" for name, argument in pairs)


def is_stub(function: Any) -> bool:
    """True while a function's body (a class's, one of its methods') is still `...`."""

    def bare() -> Any: ...

    def described() -> Any:
        """A docstring moves the constant that the code returns."""

    function = getattr(function, "fn", function)  # a Triton kernel keeps its function there
    if isinstance(function, type):
        return any(is_stub(m) for m in vars(function).values() if inspect.isfunction(m))
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_code in (bare.__code__.co_code, described.__code__.co_code)
        and set(code.co_consts) <= {None, function.__doc__}
    )


class _Exercises(Mapping[str, Exercise]):
    """Exercises by id, in the book's order; a chapter's file is imported when it is asked for."""

    def __getitem__(self, id: str) -> Exercise:
        chapter = id.split(".")[0]
        found = {e.id: e for e in self._of(int(chapter))} if chapter.isdecimal() else {}
        return found[id]

    def __iter__(self) -> Iterator[str]:
        names = [module.name.removeprefix("ch") for module in pkgutil.iter_modules(__path__)]
        for chapter in sorted(int(name) for name in names if name.isdecimal()):
            yield from (exercise.id for exercise in self._of(chapter))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @staticmethod
    def _of(chapter: int) -> tuple[Exercise, ...]:
        name = f"{__name__}.ch{chapter}"
        if importlib.util.find_spec(name) is None:
            return ()
        return importlib.import_module(name).EXERCISES


EXERCISES: Mapping[str, Exercise] = _Exercises()

"""One claim of the article: what it says, what we found, and the check that shows it."""

import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import torch

from pagedlab.layout import expect

VERDICTS = ("holds", "holds only when", "wrong", "silent")
KERNELS = ("JITFunction", "InterpretedFunction")  # Triton's two types, compiled and interpreted
Evidence = dict[str, Any]  # what a check measured, by a few words; JSON

_numbers = itertools.count()


class Refuted(Exception):
    """A check found that the part it tried does not do what the verdict says."""


def refute_unless(holds: Any, what: str) -> None:
    """Raise Refuted with one line unless a condition holds."""
    if not holds:
        raise Refuted(what)


@dataclass(frozen=True)
class Claim:
    """A statement of the article, in our words, and how it is tried.

    Attributes:
        id: its name in CLAIMS.
        says: the statement.
        where: the section of the article.
        verdict: "holds", "holds only when" (`found` goes on), "wrong", or "silent": the article
            says nothing of it, and should.
        found: what the check shows, in a few words.
        part: what is tried: a part of the package, or our re-creation of a part of the engine.
        check: takes a part and a device; returns Evidence, raises Refuted.
        mutants: parts with one mistake each, by the mistake; the check must refute them all.
        gpu_check: what only a GPU can show besides; returns Evidence, raises Refuted.
        unverified: whether the article says that it could not try this one.
    """

    id: str
    says: str
    where: str
    verdict: str
    found: str
    part: Any
    check: Callable[[Any, str], Evidence]
    mutants: Mapping[str, Any]
    gpu_check: Callable[[], Evidence] | None = None
    unverified: bool = False

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict: expected one of {', '.join(VERDICTS)}, got {self.verdict}")

    @property
    def check_in_words(self) -> str:
        """What the check does, and what it does besides where a GPU is."""
        words = inspect.getdoc(self.check) or ""
        if self.gpu_check is not None:
            words += f" On a GPU also: {inspect.getdoc(self.gpu_check)}"
        return " ".join(words.split())


@dataclass(frozen=True)
class Finding:
    """What one check found; a notebook shows it as a line.

    Attributes:
        stands: whether the claim's verdict was confirmed.
        evidence: what was measured; empty where it was refuted.
        problem: why it was refuted, one line, or "".
    """

    claim: Claim
    device: str
    stands: bool
    evidence: Evidence = field(default_factory=dict)
    problem: str = ""

    def __bool__(self) -> bool:
        return self.stands

    @property
    def shown(self) -> str:
        """The evidence, or the problem, as text."""
        return show_evidence(self.evidence) if self.stands else self.problem

    def __repr__(self) -> str:
        status = "stands" if self.stands else "refuted"
        return f"{self.claim.id} on {self.device}: {status}. {self.shown}"

    def _repr_html_(self) -> str:
        mark, colour = ("✓", "#009e73") if self.stands else ("✗", "#d55e00")
        return (
            f'<div style="border-left:4px solid {colour};padding:.4em .8em;overflow-wrap:anywhere">'
            f"{mark} {escape(repr(self))}</div>"
        )

    def to_json(self) -> dict[str, Any]:
        """The finding without its claim."""
        return {"stands": self.stands, "evidence": self.evidence, "problem": self.problem}


def examine(claim: Claim, part: Any = None, device: str = "cpu") -> Finding:
    """Run a claim's check on its part, or on the one given; on "cuda" its gpu_check as well.

    A part that raises is refuted by that, unless what it raises is an ImportError.

    Raises:
        ValueError: the part is no kernel, function, ... where the claim's own is one.
    """
    own = part is None
    if not own:
        expect(_kind(part) == _kind(claim.part), "part", _kind(claim.part), repr(part))
    try:
        with np.errstate(all="ignore"):  # a mutant may overflow in the interpreter
            evidence = claim.check(claim.part if own else part, device)
        if own and device == "cuda" and claim.gpu_check is not None:
            evidence = evidence | claim.gpu_check()
    except Refuted as refuted:
        return Finding(claim, device, False, problem=str(refuted))
    except ImportError:
        raise  # no Triton here: nothing was tried
    except (Exception, SystemExit) as error:
        cause = error.__cause__ if type(error).__name__ == "InterpreterError" else None
        reason = str(cause or error).strip().splitlines() or [""]
        line = f"{type(cause or error).__name__}: {reason[0]}"
        return Finding(claim, device, False, problem=line)
    return Finding(claim, device, True, evidence)


def _kind(part: Any) -> str:
    if type(part).__name__ in KERNELS:
        return "a function under @triton.jit"
    return "a function" if callable(part) else f"a {type(part).__name__}"


def show_evidence(evidence: Evidence) -> str:
    """Evidence as a line of text, numbers with thousands separated."""
    parts = []
    for name, value in evidence.items():
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, int):
            text = f"{value:,}"
        elif isinstance(value, float):
            text = f"{value:.2g}" if abs(value) < 1e-3 else f"{value:,.4g}"
        else:
            text = str(value)
        parts.append(f"{name}: {text}")
    return "; ".join(parts)


def mutant(kernel: Any, before: str, after: str) -> Any:
    """A copy of a Triton kernel in which the text `before`, found once, is `after`.

    Raises:
        ValueError: not a Triton kernel, the text is not there exactly once, or nothing changes.

    >>> from pagedlab.kernels.by_token import by_token_kernel
    >>> broken = mutant(by_token_kernel, "q_head // GROUP_SIZE", "q_head % NUM_KV_HEADS")
    >>> "kv_head = q_head % NUM_KV_HEADS" in inspect.getsource(broken.fn)
    True
    """
    import triton  # first of all, so that a machine without it says so

    if type(kernel).__name__ not in KERNELS:
        raise ValueError(f"kernel: expected a function under @triton.jit, got {kernel!r}")
    for name, text in (("before", before), ("after", after)):
        expect(isinstance(text, str), name, "text", repr(text))
    source = inspect.getsource(kernel.fn)
    source = source[source.index("def ") :]
    if source.count(before) != 1:
        raise ValueError(
            f"before: expected text found once, got {before!r} {source.count(before)}x"
        )
    expect(after != before, "after", "another text than before", repr(after))
    source = source.replace(before, after)
    file = f"<mutant {next(_numbers)} of {kernel.fn.__name__}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)
    names = kernel.fn.__globals__ | {"__name__": f"mutants.{kernel.fn.__name__}"}
    try:
        exec(compile(source, file, "exec"), names)
    except SyntaxError as error:
        raise ValueError(f"after: expected Python, got {after!r} ({error.msg})") from None
    fixed = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get(
        "do_not_specialize"
    )
    return triton.jit(names[kernel.fn.__name__], do_not_specialize=fixed)


def mutants(kernel: Any, changes: Mapping[str, tuple[str, str]]) -> Mapping[str, Any]:
    """Mutants of a kernel by name, each made when it is first asked for."""
    return Mutants(kernel, changes)


class Mutants(Mapping[str, Any]):
    """Mutants of one kernel, by the mistake: (text before, text after)."""

    def __init__(self, kernel: Any, changes: Mapping[str, tuple[str, str]]) -> None:
        self.kernel, self.changes = kernel, changes

    def __getitem__(self, name: str) -> Any:
        return mutant(self.kernel, *self.changes[name])

    def __iter__(self) -> Any:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors agree in every element; NaN agrees with nothing."""
    difference = (got.double() - expected.double()).abs()
    return bool((difference <= tolerance * (1 + expected.double().abs())).all())

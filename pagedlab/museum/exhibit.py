"""An exhibit: a broken part, what a visitor sees of it, and the label to turn over (chapter 12)."""

import difflib
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedlab.source import show


@dataclass(frozen=True, eq=False)
class Exhibit:
    """A part with a bug that happened somewhere. The front says what is seen; the back says why.

    Args:
        id: its key in EXHIBITS, words joined by hyphens.
        title: what hangs above it.
        broken: the code with the bug: a function, a class or a Triton kernel.
        real: the sound part that it stands in for.
        run: what a visitor sees, `run(part)` of any such part: a line of text, computed.
        check: a public check, `check(part)`; AssertionError, in one line, says what does not hold.
        look: which tool of the book finds the bug, and at what to point it.
        cause: the back of the label, in one sentence.
        failure: a regular expression for what the check says of the broken part.
        source: where it happened, owner/repository#number.
        fix: (old, new) pieces of the broken code, five changed lines at most.
        install: makes a part out of the code, a kernel's launcher for instance.

    >>> from pagedlab.museum import EXHIBITS
    >>> print(EXHIBITS["full-hit"].diff)
    - return num_known * self.block_size
    + return min(num_known * self.block_size, num_tokens - 1)
    """

    id: str
    title: str
    broken: Any
    real: Any
    run: Callable[[Any], str]
    check: Callable[[Any], None]
    look: str
    cause: str
    failure: str
    source: str
    fix: tuple[tuple[str, str], ...]
    install: Callable[[Any], Any] = lambda code: code

    @property
    def part(self) -> Any:
        """The broken part, ready to be used like the real one."""
        return self.install(self.broken)

    def symptom(self) -> str:
        """What is seen when the broken part runs; computed anew by every call."""
        return self.run(self.part)

    def repaired(self) -> Any:
        """The part with the fix applied to its source.

        Raises:
            ValueError: a piece of the fix does not stand in the source exactly once.
        """
        function = getattr(self.broken, "fn", self.broken)  # a Triton kernel keeps it there
        text = "\n".join(self._lines(repaired=True)) + "\n"
        file = f"<{self.id}, repaired>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)  # Triton reads it
        namespace = dict(vars(inspect.getmodule(function)))
        exec(compile(text, file, "exec"), namespace)
        return self.install(namespace[function.__name__])

    @property
    def diff(self) -> str:
        """The fix as lines with - and +, as little indented as they go."""
        lines = difflib.unified_diff(self._lines(), self._lines(repaired=True), n=0, lineterm="")
        changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        code = textwrap.dedent("\n".join(line[1:] for line in changed)).splitlines()
        return "\n".join(f"{old[0]} {new}" for old, new in zip(changed, code, strict=True))

    def _lines(self, *, repaired: bool = False) -> list[str]:
        text = "\n".join(show(self.broken).lines)
        for old, new in self.fix if repaired else ():
            if text.count(old) != 1:
                raise ValueError(f"{self.id}: expected {old!r} once, got {text.count(old)} times")
            text = text.replace(old, new)
        return text.splitlines()

    @property
    def url(self) -> str:
        """Where it happened; the forge forwards an issue's address to a pull request's."""
        repository, number = self.source.split("#")
        return f"https://github.com/{repository}/issues/{number}"

    def __repr__(self) -> str:
        return f"{self.title}\n  look: {self.look}"

"""Show the source of what the book talks about, highlighted wherever the reader is."""

import inspect
import textwrap
from html import escape
from pathlib import Path
from typing import Any, NamedTuple


class Source(NamedTuple):
    """`lines` of `file` from line `first_line` on; a notebook shows them highlighted."""

    file: str
    first_line: int
    lines: list[str]

    @property
    def caption(self) -> str:
        """Which lines of which file."""
        return f"{self.file}, lines {self.first_line} to {self.first_line + len(self.lines) - 1}"

    def __repr__(self) -> str:
        return "\n".join([f"# {self.caption}", *self.lines])

    def _repr_html_(self) -> str:
        text = "\n".join(self.lines)
        try:
            from pygments import highlight
            from pygments.formatters import HtmlFormatter
            from pygments.lexers import PythonLexer

            code = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True, classprefix="pl-t-"))
        except ImportError:
            code = escape(text)
        style = Path(__file__).with_name("source.css").read_text("utf-8")
        return (
            f'<style>{style}</style><figure class="pl-source"><figcaption>{escape(self.caption)}'
            f'</figcaption><pre tabindex="0"><code>{code}</code></pre></figure>'
        )


def show(obj: Any) -> Source:
    """The source of a function, method, property, class or Triton kernel, as a cell's last value.

    >>> from pagedlab import KVLayout, show
    >>> print(show(KVLayout.kv_dim).lines[1])
    def kv_dim(self) -> int:

    Raises:
        ValueError: it has no Python source.
    """
    defined = obj
    for inner in ("fget", "func", "fn", "fn"):  # properties; kernels, maybe below @triton.autotune
        if not inspect.isclass(defined):
            defined = getattr(defined, inner, defined)
    try:
        lines, first = inspect.getsourcelines(defined)
        path = Path(inspect.getsourcefile(defined) or "")
    except (OSError, TypeError):
        raise ValueError(f"source: expected a function or class, got {obj!r}") from None
    file = defined.__module__.replace(".", "/") + ".py"
    if defined.__module__ == "__main__":
        file = path.name if path.exists() else "notebook cell"
    return Source(file, max(first, 1), textwrap.dedent("".join(lines)).splitlines())

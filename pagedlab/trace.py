"""A debugger for Triton kernels: one program of a launch, every statement, its variables as data.

`step` runs any kernel (from a file or a notebook cell, with no tracing code in it) in Triton's
interpreter under `sys.settrace`. Chapters 4 to 6 step through the package's own kernels with it.
"""

import ast
import base64
import inspect
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedlab.kernels import portable

TAG_BIT = 56  # a pointer's top byte says which argument it came from; the address keeps the rest
ADDRESS = np.uint64((1 << TAG_BIT) - 1)


class Source(NamedTuple):
    """Source text: `lines` of `file` from line `first_line` on."""

    file: str
    first_line: int
    lines: list[str]


class Pointer(NamedTuple):
    """A pointer, or an array of them: `offsets` (int64, elements) from the start of `argument`."""

    argument: str
    offsets: np.ndarray


class Access(NamedTuple):
    """A "load", "store" or "atomic" on one argument.

    offsets (int64, elements from the argument's first), mask (bool) and values have one shape; a
    load's value is what the kernel got, a store's what it wrote, an atomic's what was there before.
    """

    kind: str
    argument: str
    offsets: np.ndarray
    mask: np.ndarray
    values: np.ndarray


class Step(NamedTuple):
    """One statement that ran (`line` to `last_line`): what it assigned, what it read and wrote.

    variables holds every variable after the statement: int, bool, str, None, numpy scalar or array,
    Pointer, or a tuple of these.
    """

    line: int
    last_line: int
    assigned: tuple[str, ...]
    variables: dict[str, Any]
    accesses: tuple[Access, ...]


class Argument(NamedTuple):
    """A tensor argument as it was passed; stepped_as is the dtype it was stepped in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    stepped_as: str


@dataclass
class Trace:
    """What `step` recorded.

    outputs: tensor arguments that the program wrote to, as numpy arrays. truncated: it stopped at
    max_steps. error: one line if the kernel failed; the last step is then where it did.
    """

    kernel: str
    source: Source
    grid: tuple[int, ...]
    program: tuple[int, ...]
    arguments: dict[str, Argument]
    steps: list[Step] = field(default_factory=list)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    truncated: bool = False
    error: str | None = None

    def at(self, text: str) -> list[Step]:
        """The steps whose source contains `text`, in order."""
        first, lines = self.source.first_line, self.source.lines
        return [s for s in self.steps if text in "\n".join(lines[s.line - first : s.last_line - first + 1])]

    def values(self, name: str) -> list[Any]:
        """What was assigned to variable `name`, one entry per assignment."""
        return [s.variables[name] for s in self.steps if name in s.assigned and name in s.variables]

    def to_json(self) -> str:
        """The whole trace as JSON text. Arrays are base64, so NaN and infinity survive."""
        rows, before = [], {}
        for step in self.steps:
            new = {k: v for k, v in step.variables.items() if before.get(k, self) is not v}
            rows.append(_encode((*step[:3], new, step.accesses)))
            before = step.variables
        return json.dumps(vars(self) | {"steps": rows, "outputs": _encode(self.outputs)})

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The inverse of to_json."""

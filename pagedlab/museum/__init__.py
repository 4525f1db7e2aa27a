"""The bug museum: broken kernels, tables and allocators, each a bug that happened (chapter 12).

Each room is a file with a tuple `ROOM`; none is imported before one of its exhibits is asked for.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from pagedlab.museum.exhibit import Exhibit

__all__ = ["EXHIBITS", "Exhibit"]

ROOMS = ("owners", "addresses", "scores", "empties", "positions", "prefixes")


class _Exhibits(Mapping[str, Exhibit]):
    """Exhibits by id, in the order of a walk through the rooms."""

    def __getitem__(self, id: str) -> Exhibit:
        for exhibit in self._walk():
            if exhibit.id == id:
                return exhibit
        raise KeyError(f"id: expected one of {', '.join(self)}, got {id!r}")

    def __iter__(self) -> Iterator[str]:
        return (exhibit.id for exhibit in self._walk())

    def __len__(self) -> int:
        return sum(1 for _ in self._walk())

    @staticmethod
    def _walk() -> Iterator[Exhibit]:
        for room in ROOMS:
            yield from import_module(f"{__name__}.{room}").ROOM


EXHIBITS: Mapping[str, Exhibit] = _Exhibits()

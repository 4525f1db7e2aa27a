"""Two warps of one program that share memory: every order in which their accesses can happen."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

BARRIER = "barrier"
Shared = list[float]
# (which warp, its sum per token, shared memory, the scores it reads) -> what it waits for
Warp = Callable[[int, list[float], Shared, list[float]], Iterator[str]]


def two_barriers(
    warp: int, sums: list[float], shared: Shared, scores: list[float]
) -> Iterator[str]:
    """A warp of the article's reduction: its sum for each token is given, the score is read.

    Between two yields a warp runs alone; "barrier" waits for the other.
    """
    for its_sum in sums:
        shared[warp] = its_sum
        yield BARRIER
        if warp == 0:
            shared[0] = shared[0] + shared[1]
            yield "written"
        yield BARRIER
        scores.append(shared[0])
        yield "read"


def three_barriers(
    warp: int, sums: list[float], shared: Shared, scores: list[float]
) -> Iterator[str]:
    """The same with a barrier between the last read and the next token's first write."""
    for its_sum in sums:
        shared[warp] = its_sum
        yield BARRIER
        if warp == 0:
            shared[0] = shared[0] + shared[1]
            yield "written"
        yield BARRIER
        scores.append(shared[0])
        yield BARRIER


class Order(NamedTuple):
    """One order: which warp moved at each step, and the scores that each of them read."""

    moves: list[int]
    scores: tuple[list[float], list[float]]


def every_order(program: Warp, sums: tuple[list[float], list[float]]) -> list[Order]:
    """Run two warps of a program in every order that the barriers allow.

    Args:
        program: a warp's code as a generator, like `two_barriers`.
        sums: each warp's sum, one per token.

    Raises:
        RuntimeError: both wait, one of them for a warp that has ended.

    >>> orders = every_order(three_barriers, ([1.0, 2.0], [10.0, 20.0]))
    >>> {str(order.scores) for order in orders}
    {'([11.0, 22.0], [11.0, 22.0])'}
    """
    found: list[Order] = []
    unfinished: list[list[int]] = [[]]
    while unfinished:
        moves = unfinished.pop()
        scores, ready = replay(program, sums, moves)
        if not ready:
            found.append(Order(moves, scores))
        unfinished += [[*moves, warp] for warp in ready]
    return found


def replay(
    program: Warp, sums: tuple[list[float], list[float]], moves: list[int]
) -> tuple[tuple[list[float], list[float]], list[int]]:
    """Scores after the given moves, and which warps can move next."""
    shared, scores = [float("nan")] * 2, ([], [])  # type: ignore[var-annotated]
    warps = [program(warp, sums[warp], shared, scores[warp]) for warp in range(2)]
    waiting, ended = [False, False], [False, False]
    for warp in moves:
        step = next(warps[warp], None)
        waiting[warp], ended[warp] = step == BARRIER, step is None
        if all(waiting):
            waiting = [False, False]
    ready = [warp for warp in range(2) if not waiting[warp] and not ended[warp]]
    if not ready and not all(ended):
        raise RuntimeError("warps: expected both at the barrier, got one that has ended")
    return scores, ready

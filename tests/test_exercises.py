"""The exercises: stubs, solutions and wrong answers, on random cases that are new every time."""

import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedlab.exercises import EXERCISES, CheckResult, Exercise, check

torch.set_num_threads(1)

BOOK = Path(__file__).parents[1] / "book"
PAGES = {page.stem: page.read_text() for page in sorted(BOOK.glob("[0-9]*.md"))}
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHECK = re.compile(r'^check\("([\d.]+)", (\w+)\)$', re.MULTILINE)
SOLUTION = re.compile(r"^:::\{solution\}.*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SEEDS = range(15)


def page_of(exercise: Exercise) -> str:
    chapter = int(exercise.id.split(".")[0])
    return next(text for name, text in PAGES.items() if name.startswith(f"{chapter:02}_"))


def imports_of(page: str) -> str:
    """The import lines of a page's first cell, which a reader has run before any exercise."""
    return CELL.search(page)[1]


def run(code: str, name: str) -> object:
    namespace: dict[str, object] = {}
    file = f"<{name} {hash(code)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)  # Triton reads it
    exec(compile(code, file, "exec"), namespace)
    return namespace[name]


def stubs() -> Iterator[tuple[str, str, str, str]]:
    """(exercise id, page, stub cell without its check, name) of every page."""
    for page in PAGES.values():
        for cell in CELL.findall(page):
            if found := CHECK.search(cell):
                yield found[1], page, cell[: found.start()], found[2]


STUBS = list(stubs())
CONFUSIONS = [
    pytest.param(exercise, confusion, id=f"{exercise.id}-{index}")
    for exercise in EXERCISES.values()
    for index, confusion in enumerate(exercise.confusions)
]


def exercise_ids(exercise: Exercise) -> str:
    return exercise.id


def test_every_exercise_is_on_its_page_once_and_in_order():
    assert [id for id, *_ in STUBS] == list(EXERCISES)
    for id, page, *_ in STUBS:
        assert page == page_of(EXERCISES[id])


@pytest.mark.parametrize(("id", "page", "stub", "name"), STUBS, ids=[stub[0] for stub in STUBS])
def test_a_stub_is_not_tried_yet(id, page, stub, name):
    result = check(id, run(imports_of(page) + stub, name))
    assert result.status == "not tried yet"
    assert not result


@pytest.mark.parametrize(("id", "page", "stub", "name"), STUBS, ids=[stub[0] for stub in STUBS])
def test_the_solution_on_the_page_passes(id, page, stub, name):
    after = page[page.index(stub) :]
    solution = run(imports_of(page) + SOLUTION.search(after)[1], name)
    for seed in SEEDS:
        result = check(id, solution, seed=seed)
        assert result.status == "passed", f"seed {seed}: {result}"


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=exercise_ids)
def test_the_package_solution_passes(exercise):
    for seed in SEEDS:
        result = check(exercise.id, exercise.solution, seed=seed)
        assert result.status == "passed", f"seed {seed}: {result}"


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=exercise_ids)
def test_at_least_four_plausible_wrong_answers_are_known(exercise):
    assert len({confusion.idea for confusion in exercise.confusions}) >= 4


@pytest.mark.parametrize(("exercise", "confusion"), CONFUSIONS)
def test_a_wrong_answer_fails_and_is_recognised(exercise, confusion):
    for seed in SEEDS:
        details = failing(exercise, confusion.function, seed)
        assert details["revisit"] == confusion.idea, f"seed {seed}"


WRONG_KERNELS = [
    ("4.4", "range(tl.minimum(rest, BLOCK_SIZE))", "range(BLOCK_SIZE)", "read to its end"),
    ("4.4", "(2 * physical_block + 1)", "(2 * physical_block)", "mean of K"),
    ("4.4", "tl.maximum(seq_len, 1)", "seq_len", "zero by zero"),
    ("4.4", "table_ptr + slot *", "table_ptr + active_slot *", "rows belong to slots"),
    ("5.4", "LANES)\n    q =", "LANES) % HEAD_DIM\n    q =", "q * k, q * q and k * k"),
    ("5.4", "row * HEAD_DIM", "row * LANES", "HEAD_DIM apart"),
    ("5.4", "tl.sqrt(tl.sum(q * q, 0) *", "tl.sqrt(", "q has a length"),
    ("6.4", 'other=float("-inf")', "other=0.0", "masked score of 0"),
    ("6.4", "v = tl.load(v_ptrs, mask=alive[:, None], other=0.0)", "v = tl.load(v_ptrs)", ""),
    ("6.4", "acc * correction +", "acc +", "acc must be corrected"),
    ("6.4", "tl.where(length > 0, d, 1.0)", "d", "zero by zero"),
]


@pytest.mark.parametrize(("id", "right", "wrong", "idea"), WRONG_KERNELS)
def test_a_wrong_kernel_fails_and_is_recognised(id, right, wrong, idea):
    page, stub, name = next(rest for found, *rest in STUBS if found == id)
    solution = SOLUTION.search(page[page.index(stub) :])[1]
    assert solution.count(right) == 1
    result = check(id, run(imports_of(page) + solution.replace(right, wrong), name), seed=1)
    assert result.status == "failed"
    assert idea in dict(result.details)["revisit"], result


@pytest.mark.parametrize(("exercise", "confusion"), CONFUSIONS)
def test_fresh_random_cases_catch_it(exercise, confusion):
    assert check(exercise.id, confusion.function).status == "failed"


def failing(exercise: Exercise, function, seed: int) -> dict[str, str]:
    result = check(exercise.id, function, seed=seed)
    assert result.status == "failed", f"seed {seed}: {result}"
    details = dict(result.details)
    assert details["expected"] != details["got"]
    return details


def test_the_smallest_failing_input_is_shown():
    def wrong_from_ten_blocks_on(*sizes):
        blocks = EXERCISES["1.1"].solution(*sizes)
        return blocks + (blocks >= 10)

    for seed in SEEDS:
        got = int(failing(EXERCISES["1.1"], wrong_from_ten_blocks_on, seed)["got"])
        assert got >= 11
        sizes = re.findall(r"= (\d+)", dict(check("1.1", lambda *_: 0, seed=seed).details)["input"])
        assert [int(size) for size in sizes] == [32, 1, 1, 16, 1]


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=exercise_ids)
def test_no_answer_makes_check_raise(exercise):
    def leaves(*args):
        raise SystemExit

    def breaks(*args):
        return args[0].no_such_name

    def takes_too_few():
        return 1

    def spoils_its_input(*args):
        for argument in args:
            if hasattr(argument, "fill"):
                argument.fill(7)
        return exercise.solution(*args)

    for function in (leaves, breaks, takes_too_few, lambda *args: object(), float, 3, None, [0]):
        result = check(exercise.id, function)
        assert isinstance(result, CheckResult)
        assert result.status in ("failed", "not tried yet")
        assert exercise.id in repr(result)
        assert exercise.id in result._repr_html_()
    check(exercise.id, spoils_its_input)
    assert check(exercise.id, exercise.solution)


def test_an_exception_is_shown_with_its_line():
    def breaks(layout, byte):
        return byte / 0

    got = dict(check("1.3", breaks).details)["got"]
    assert got.startswith("it raised ZeroDivisionError")
    assert "return byte / 0" in got


def test_an_exception_in_the_package_is_shown_with_the_readers_line():
    def breaks(layout, byte):
        return layout.locate(-1)

    assert "return layout.locate(-1))" in dict(check("1.3", breaks).details)["got"]


def test_what_a_reader_wrote_is_escaped():
    def shouts(layout, byte):
        return "<script>"

    assert "<script>" not in check("1.3", shouts)._repr_html_()


def test_a_forgotten_return_is_named():
    def forgets(layout, byte):
        byte // layout.block_bytes

    assert "return" in dict(check("1.3", forgets).details)["revisit"]


def test_lists_tensors_and_tuples_are_the_same_answer():
    def with_tensor(layout, byte):
        section, *numbers = EXERCISES["1.3"].solution(layout, byte)
        return [section, *torch.tensor(numbers)]

    assert check("1.3", with_tensor)


def test_an_unknown_exercise_is_named_in_one_line():
    with pytest.raises(ValueError, match=r"^check: expected one of 1\.1, .*, got '9\.99'$"):
        check("9.99", print)

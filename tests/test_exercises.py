"""The exercises: stubs, solutions and wrong answers, on random cases that are new every time."""

import itertools
import linecache
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedlab.exercises import EXERCISES, CheckResult, Exercise, ch3, ch4, ch10, check
from pagedlab.portable import run_in_process

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
    namespace: dict[str, object] = {"__name__": "__main__"}
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
    ("3.4", "BLOCK_SIZE).to(tl.int64)", "BLOCK_SIZE)", "beyond int32"),
    ("3.4", "tl.maximum(seq_len - 1, 0)", "seq_len", "position is seq_len - 1"),
    ("3.4", "to + BLOCK_SIZE * KV_DIM", "to + KV_DIM", "a whole section after K"),
    ("3.4", " & (seq_len > 0)", "", "no token to write"),
    ("4.4", "logical_block).to(tl.int64)", "logical_block)", "beyond int32"),
    ("4.4", "range(tl.minimum(rest, BLOCK_SIZE))", "range(BLOCK_SIZE)", "read to its end"),
    ("4.4", "(2 * physical_block + 1)", "(2 * physical_block)", "mean of K"),
    ("4.4", "tl.maximum(seq_len, 1)", "seq_len", "zero by zero"),
    ("4.4", "table_ptr + slot *", "table_ptr + active_slot *", "rows belong to slots"),
    ("5.4", "LANES)\n    q =", "LANES) % HEAD_DIM\n    q =", "q * k, q * q and k * k"),
    (
        "5.4",
        "q = tl.load(q_ptr + lane, mask=lane < HEAD_DIM, other=0.0)",
        "q = tl.load(q_ptr + lane, mask=lane < HEAD_DIM)",
        "without `other`",
    ),
    ("5.4", "tl.sum(q * k, 0)", "tl.abs(tl.sum(q * k, 0))", ""),
    ("5.4", "row * HEAD_DIM", "row * LANES", "HEAD_DIM apart"),
    ("5.4", "tl.sqrt(tl.sum(q * q, 0) *", "tl.sqrt(", "q has a length"),
    ("6.4", 'other=float("-inf")', "other=0.0", "masked score of 0"),
    ("6.4", ', other=float("-inf")', "", ""),
    ("6.4", "mask=alive[:, None], other=0.0", "mask=alive[:, None]", ""),
    ("6.4", "v = tl.load(v_ptrs, mask=alive[:, None], other=0.0)", "v = tl.load(v_ptrs)", ""),
    ("6.4", 'running_max, d = float("-inf"), 0.0', "running_max, d = 0.0, 0.0", ""),
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


@pytest.mark.parametrize("id", ["3.4", "4.4", "5.4", "6.4"])
def test_a_kernel_without_its_decorator_is_named(id):
    page, stub, name = next(rest for found, *rest in STUBS if found == id)
    solution = SOLUTION.search(page[page.index(stub) :])[1].replace("@triton.jit\n", "")
    details = dict(check(id, run(imports_of(page) + solution, name)).details)
    assert "@triton.jit is missing" in details["got"]


@pytest.mark.parametrize(("exercise", "confusion"), CONFUSIONS)
def test_fresh_random_cases_catch_it_and_a_failure_is_short_enough_to_read(exercise, confusion):
    result = check(exercise.id, confusion.function)
    assert result.status == "failed"
    lengths = {label: len(text) for label, text in result.details}
    longest = {"input": 500, "expected": 200, "got": 200, "revisit": 150}
    assert {label: n for label, n in lengths.items() if n > longest[label]} == {}


def test_of_a_long_answer_the_first_wrong_place_is_shown():
    def one_wrong(*case):
        means = EXERCISES["4.4"].solution(*case)
        means[0, 2, 3] += 1
        return means

    details = dict(check("4.4", one_wrong, seed=1).details)
    shown = [re.fullmatch(r"([\d.]+), at \[0, 2, 3\]", details[key]) for key in ("expected", "got")]
    right, wrong = (float(match[1]) for match in shown)
    assert wrong - right == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("cast", [".to(tl.int64)", ""])
def test_far_blocks_are_tried_in_a_process_of_its_own_where_kernels_are_compiled(cast):
    page, stub, name = next(rest for id, *rest in STUBS if id == "3.4")
    solution = SOLUTION.search(page[page.index(stub) :])[1].replace(".to(tl.int64)", cast)
    kernel = run(imports_of(page) + solution, name)
    *_, (table, active_slots, seq_lens, layer, layout) = ch3.append_token_cases(random.Random(1))
    k, v = torch.from_numpy(ch3.new_tokens(2, layout))
    blocks = ch4.blocks_of(table)
    cache = torch.zeros(len(blocks) * layout.block_bytes // 4)
    rows = torch.tensor([seq_lens, active_slots], dtype=torch.int32)
    strides = table.shape[1] * table.shape[2], table.shape[2]
    sizes = layout.block_size, layout.kv_dim, layout.head_dim
    args = [k, v, cache, torch.from_numpy(table), *rows, layer, *strides, *sizes]
    job = ch4.launched, kernel, (2, 3), args, 2, blocks
    if not cast:
        with pytest.raises(ValueError, match=r"^a store outside the kernel's arguments$"):
            run_in_process(*job, interpret=True)
        return
    there = run_in_process(*job, interpret=True)
    expected = ch3.append_token(table, active_slots, seq_lens, layer, layout)
    assert ch3.written(there[2].numpy(), blocks) == expected


def merge_by_first(first, second):
    parts = [part for part in (first, second) if part[0] > -math.inf]
    if not parts:
        return -math.inf, [0.0] * len(first[1])
    weights = [math.exp(lse - parts[0][0]) for lse, _ in parts]
    mean = np.average([values for _, values in parts], axis=0, weights=weights)
    return parts[0][0] + math.log(sum(weights)), mean


def merge_in_float32(first, second):
    """Right, in another style."""
    alive = [part for part in (first, second) if part[0] > -math.inf]
    if not alive:
        return -math.inf, torch.zeros(len(first[1]))
    lses = torch.tensor([lse for lse, _ in alive])
    return lses.logsumexp(0), lses.softmax(0) @ torch.tensor([values for _, values in alive])


def owners_by_layer(free_blocks, table, num_blocks):
    places = Counter(free_blocks)
    for layer in range(table.shape[1]):
        places.update({*table[:, layer][table[:, layer] >= 0].tolist()})
    return [block for block in range(num_blocks) if places[block] != 1]


def races(kinds_of):
    def racing(warp_0, warp_1):
        return racing_places_of(warp_0, warp_1, kinds_of)

    return racing


def racing_places_of(warp_0, warp_1, kinds_of):
    found = set()
    for mine, theirs in zip(*map(ch10.stretches, (warp_0, warp_1)), strict=True):
        kinds, others = kinds_of(mine), kinds_of(theirs)
        for place in kinds.keys() & others.keys():
            if "write" in (kinds[place], others[place]):
                found.add(place)
    return sorted(found)


def by_length_and_last_block(ids, known, block_size):
    keys, reused = {(len(text), *text[-block_size:]) for text in known}, 0
    for end in range(block_size, len(ids) + 1, block_size):
        if (end, *ids[end - block_size : end]) not in keys:
            break
        reused = end
    return min(reused, len(ids) - 1)


def right_on_the_diagonal(index):
    return all(index(i, i, i, 5, 7) == 35 * i + 7 * i + i for i in range(5))


def ratio_of_exponentials(running_max, d, acc, scores, values):
    new_max = max(running_max, *scores)
    correction = math.exp(running_max) / math.exp(new_max)
    weights = [math.exp(score) / math.exp(new_max) for score in scores]
    pairs = [(w, value) for w, value in zip(weights, values, strict=True) if w]
    d, acc = d * correction + sum(weights), acc * correction + sum(w * v for w, v in pairs)
    return new_max, d, acc


WRONG_ANSWERS = [
    ("6.2", ratio_of_exponentials),
    ("10.1", races(lambda stretch: {place: kind for kind, place in stretch})),
    ("10.1", races(lambda stretch: {place: kind for kind, place in reversed(stretch)})),
    ("10.3", right_on_the_diagonal),
    ("11.1", lambda lengths, *sizes: EXERCISES["11.1"].solution([*{*lengths}], *sizes)),
    ("12.2", owners_by_layer),
    ("12.2", lambda free, table, n: EXERCISES["12.2"].solution(free, table, n - 1)),
    ("12.3", merge_by_first),
    ("12.5", by_length_and_last_block),
]


@pytest.mark.parametrize(("id", "wrong"), WRONG_ANSWERS)
def test_a_wrong_answer_that_luck_might_pass_fails_for_every_seed(id, wrong):
    assert {check(id, wrong, seed=seed).status for seed in range(20)} == {"failed"}


def test_a_right_answer_in_float32_or_as_a_generator_passes():
    def generated(warp_0, warp_1):
        yield from EXERCISES["10.1"].solution(warp_0, warp_1)

    assert all(check("12.3", merge_in_float32, seed=seed) for seed in range(20))
    assert check("10.1", generated)


class Awkward:
    def __repr__(self):
        raise RuntimeError("no")


def raise_awkwardly(*_):
    class AwkwardError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    raise AwkwardError


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("1.1", lambda *_: 2**100_000),
        ("1.1", lambda *_: Awkward()),
        ("1.1", raise_awkwardly),
        ("1.1", lambda *_: itertools.count()),
        ("11.2", lambda *_: (10**400, "memory")),
    ],
)
def test_check_does_not_raise_whatever_the_answer_is(id, answer):
    result = check(id, answer)
    assert result.status == "failed"
    assert result._repr_html_()
    assert repr(result)


def test_what_is_no_function_and_cannot_be_shown_is_no_function():
    assert "cannot be shown" in dict(check("1.1", Awkward()).details)["expected"]


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


def test_numbers_are_compared_by_value_whatever_their_kind():
    """tensors' sums are floats, and a reader's `[72.0]` is right where `[72]` is expected."""

    def in_torch(products):
        warps = torch.tensor(products).float()
        warps = torch.nn.functional.pad(warps, (0, -len(warps) % 32)).view(-1, 32)
        return warps.sum(1), warps.sum() / len(products) ** 0.5

    assert check("5.3", in_torch).status == "passed"


def test_advice_that_no_rule_chose_is_not_shown_for_what_was_raised():
    result = check("5.3", lambda products: products**0.5)
    assert result.status == "failed"
    assert "TypeError" in dict(result.details)["got"]
    assert "revisit" not in dict(result.details)

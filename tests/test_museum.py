"""The museum: each exhibit fails a check that the real part passes, as its label says."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from myst_parser.mdit_to_docutils.base import default_slugify

from pagedlab import BlockPool, paged_attention, show, step_launch
from pagedlab.exercises import EXERCISES
from pagedlab.museum import EXHIBITS, Exhibit
from pagedlab.museum.checks import check_attention, check_pool, make_batch
from pagedlab.museum.prefix_cache import PrefixCache, Sequence

ROOT = Path(__file__).parents[1]
ROOMS = sorted((ROOT / "pagedlab/museum").glob("*.py"))
each_exhibit = pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=list(EXHIBITS))


def changed_lines(exhibit: Exhibit) -> int:
    signs = [line[0] for line in exhibit.diff.splitlines()]
    return max(signs.count("-"), signs.count("+"))


def test_there_are_enough_exhibits_of_every_kind():
    assert len(EXHIBITS) >= 14
    assert len({exhibit.check for exhibit in EXHIBITS.values()}) >= 8
    assert [exhibit.id for exhibit in EXHIBITS.values()] == list(EXHIBITS)


def test_an_unknown_exhibit_is_named_in_one_line():
    with pytest.raises(KeyError, match=r"id: expected one of two-owners, .*, got 'two_owners'"):
        EXHIBITS["two_owners"]
    assert "two_owners" not in EXHIBITS
    assert EXHIBITS.get(3) is None


@each_exhibit
def test_the_real_part_passes(exhibit):
    exhibit.check(exhibit.real)


@each_exhibit
def test_the_broken_part_fails_as_its_label_says(exhibit):
    with pytest.raises(AssertionError) as failure:
        exhibit.check(exhibit.part)
    assert re.search(exhibit.failure, str(failure.value))
    assert "\n" not in str(failure.value)


@each_exhibit
def test_five_changed_lines_repair_it(exhibit):
    assert 1 <= changed_lines(exhibit) <= 5
    exhibit.check(exhibit.repaired())


@each_exhibit
def test_what_a_visitor_sees_goes_away_with_the_fix(exhibit):
    symptom, sound = exhibit.symptom(), exhibit.run(exhibit.real)
    assert symptom != sound
    assert exhibit.run(exhibit.repaired()) != symptom
    assert symptom == exhibit.symptom()


@each_exhibit
def test_the_front_does_not_tell_what_the_back_does(exhibit):
    assert exhibit.title in repr(exhibit)
    assert exhibit.look in repr(exhibit)
    for back in (exhibit.cause, exhibit.source, exhibit.diff):
        assert back not in repr(exhibit)


@each_exhibit
def test_the_source_is_a_public_thread(exhibit):
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", exhibit.source)
    assert exhibit.url == "https://github.com/" + exhibit.source.replace("#", "/issues/")


@pytest.mark.parametrize("kernel", ["by_token", "by_block", "split_kv"])
def test_each_kernel_of_the_package_passes_the_check_of_attention(kernel):
    check_attention(lambda *batch: paged_attention(*batch, backend="triton", kernel=kernel))


def test_the_checks_do_not_pass_whatever_comes():
    with pytest.raises(AssertionError, match="row of 5 tokens, query head 0, lane 0: expected"):
        check_attention(lambda q, *_: torch.zeros_like(q))

    class Forgetful(BlockPool):
        def release(self, blocks):
            for block in blocks:
                self._owned[block] = 0

    with pytest.raises(AssertionError, match="expected NotAllocated, got no error"):
        check_pool(Forgetful)


def test_a_fix_that_does_not_fit_is_refused():
    exhibit = EXHIBITS["two-owners"]
    with pytest.raises(ValueError, match="two-owners: expected 'no such line' once, got 0 times"):
        Exhibit(**{**vars(exhibit), "fix": (("no such line", ""),)}).repaired()


def test_broken_and_repaired_kernels_can_be_shown_and_stepped():
    exhibit, batch = EXHIBITS["nan-answer"], make_batch([5])
    assert "tl.load(k_ptrs + BLOCK_SIZE * KV_DIM)" in "\n".join(show(exhibit.broken).lines)
    for part, bad in (exhibit.part, True), (exhibit.repaired(), False):
        trace = step_launch(part, *batch, program=(0, 3))
        assert bool(torch.from_numpy(trace.values("acc")[-1]).isnan().any()) == bad
        assert all(weight[1:].max() == 0 for weight in trace.values("weight")[1:])


def test_only_what_is_asked_for_is_imported():
    code = (
        "import sys, pagedlab; from pagedlab import Engine, exercises;"
        "print(*(name for name in sys.modules if 'museum' in name));"
        "from pagedlab.museum import EXHIBITS;"
        "print(*(name for name in sys.modules if 'museum.' in name))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["", "pagedlab.museum.exhibit"]


def test_a_known_prefix_is_found_until_somebody_writes_over_it():
    prefixes, first = PrefixCache(num_blocks=3, block_size=2), Sequence([1, 2, 3, 4, 5])
    assert prefixes.schedule(first) == range(5)
    with pytest.raises(ValueError, match="schedule: expected 1 free blocks, got too few"):
        prefixes.schedule(Sequence([9]))
    prefixes.release(first)
    again, longer = Sequence([1, 2, 3, 4]), Sequence([1, 2, 7])
    assert prefixes.schedule(again) == range(3, 4)
    assert prefixes.schedule(longer) == range(2, 3)
    assert longer.blocks[0] == again.blocks[0]
    prefixes.release(longer)
    assert prefixes.schedule(Sequence([8])) == range(1)
    prefixes.release(again)
    assert prefixes.schedule(Sequence([1, 2, 3, 4])) == range(3, 4)


def test_the_model_says_what_the_page_tells():
    told = {"wide-step": "Saturday", "long-memory": "Monday, ' and'", "two-owners": "B gets [3]"}
    for id, words in told.items():
        assert words in EXHIBITS[id].symptom()


BOOK = ROOT / "book"
MUSEUM = (BOOK / "12_museum.md").read_text("utf-8")
CONFUSIONS = re.findall(r"^\| (\d+) \| (.+) \|$", (BOOK / "teaching.md").read_text("utf-8"), re.M)
CONFUSIONS = [
    (int(number), row.split(" | ")) for number, row in CONFUSIONS if row.count(" | ") == 3
]


@each_exhibit
def test_the_page_shows_each_exhibit_before_its_label_with_the_fix_and_the_source(exhibit):
    front, label = MUSEUM.split(f":::{{admonition}} Behind the label: {exhibit.id}\n", 1)
    label = label.split("\n:::\n", 1)[0]
    assert label.startswith(":class: dropdown\n")
    assert f"[{exhibit.source}]({exhibit.url})" in label
    assert f"```diff\n{exhibit.diff}\n```" in label
    cells = front.count("```{code-cell}")
    assert f'"{exhibit.id}"' in front
    assert cells >= 2
    assert exhibit.url not in front


def test_the_page_has_two_labs_that_are_stepped():
    for lab in "32 bits", "not a number":
        section = MUSEUM.split(f"\n## Lab: {lab}\n")[1].split("\n## ")[0]
        assert re.search(r"^KernelStepper\(", section, re.MULTILINE)


def test_the_table_of_confusions_has_all_of_them():
    assert [number for number, _ in CONFUSIONS] == list(range(1, 26))


@pytest.mark.parametrize("confusion", CONFUSIONS, ids=lambda confusion: confusion[0])
def test_a_confusion_is_met_where_the_table_says(confusion):
    _, (what, sections, exercises, exhibits) = confusion
    assert len(what.split()) >= 4
    links = re.findall(r"\[([^\]]+)\]\((\d\d_\w+)\.md#([\w-]+)\)", sections + exhibits)
    ids = re.findall(r"\{ref\}`(\d+)\.(\d) <ex-(\d+)-(\d)>`", exercises)
    assert links or ids
    for words, page, anchor in links:
        text = (BOOK / f"{page}.md").read_text("utf-8")
        headings = {default_slugify(h): h for h in re.findall(r"^## (.+)$", text, re.MULTILINE)}
        assert anchor in headings, f"{page} has no {anchor}"
        if words.startswith("*"):
            section = text.split(f"\n## {headings[anchor]}\n")[1].split("\n## ")[0]
            assert f"Behind the label: {EXHIBITS[words.strip('*')].id}\n" in section
        else:
            assert words == headings[anchor]
    for chapter, number, *target in ids:
        assert [chapter, number] == target
        assert f"{chapter}.{number}" in EXERCISES
        (page,) = BOOK.glob(f"{int(chapter):02}_*.md")
        assert f":label: ex-{chapter}-{number}\n" in page.read_text("utf-8")


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: path.stem)
def test_a_file_of_the_museum_is_small_and_says_what_it_is(path):
    from test_repository import code_lines

    assert code_lines(path) <= 250
    assert inspect.cleandoc(path.read_text("utf-8").split('"""')[1])

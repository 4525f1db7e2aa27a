"""The chapters keep to what they say: names exist, numbers are computed, links lead somewhere.

`pytest -s tests/test_chapters.py` prints each chapter's words, cells, lines and seconds.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import keyword
import math
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import notebooks
import numpy as np
import pytest
import torch
import yaml
from book_build import ROOT
from run_cells import cells

import pagedlab
from pagedlab.exercises import EXERCISES, Confusion, Exercise

tl = importlib.import_module("triton.language")  # after pagedlab, which sets Triton's mode

BOOK = ROOT / "book"
CHAPTERS = sorted(BOOK.glob("[0-9][0-9]_*.md"))
PAGES = [*CHAPTERS, *(BOOK / f"{name}.md" for name in ("intro", "glossary", "teaching"))]
MIN_WORDS, MAX_WORDS = 1200, 2000
MIN_CELLS, MAX_CELLS, MAX_CELL_LINES, MAX_LINE = 8, 24, 25, 80
# The museum's folded labels are read by whom they concern, and each exhibit wants to be seen.
MAX_LABEL_WORDS, MAX_CELLS_PER_LABEL = 50, 2.2
MAX_SECONDS = 8 * 60  # to build the whole book

# What each chapter develops; README has a line per module.
MODULES = {
    "01_layout": ["layout"],
    "02_block_table": ["block_table"],
    "03_writing": ["kv_cache", "kernels.write_kv"],
    "04_kernel": ["attention", "kernels.by_token", "reference"],
    "05_reduction": ["reference", "kernels.by_token"],
    "06_online_softmax": ["reference", "kernels.by_block"],
    "07_recycling": ["block_pool"],
    "08_real_model": ["checkpoint", "tokenizer", "llama"],
    "09_many_sequences": ["scheduler", "engine"],
    "10_ledger": ["ledger"],
    "11_costs": [
        "kernels.split_kv",
        "kernels.plan",
        "kernels.decode_ops",
        "kernels.choose",
        "decode_graph",
    ],
    "12_museum": ["museum.exhibit", "museum.prefix_cache"],
}
# Public to the package, of no use to a reader; so are functions named expect...
HELPERS = {
    "block_table": {"Staging", "Staging.send"},
    "kv_cache": {"PagedKVCache.gather_blocks"},
    "checkpoint": {"read_json", "Weights.expect_all_read"},
    "llama": {"Layer", "pack", "linear"},
}
KERNEL_CHAPTERS = ("03_writing", "04_kernel", "05_reduction", "06_online_softmax")
SWAP_IN_CHAPTERS = [path for path in CHAPTERS if int(path.name[:2]) <= 7]

# Words in code type that no Python here defines, and whose they are.
FOREIGN_NAMES = {
    "intro": {"book/NN_name.ipynb": "a pattern"},
    "03_writing": {"slot_mapping": "vLLM"},
    "05_reduction": dict.fromkeys(
        [
            "bar.sync",
            "shfl.sync.bfly",
            "st.shared",
            "STS",
            "LDS",
            "dpp",
            "ds_swizzle",
            "ds_bpermute",
        ],
        "instructions",
    ),
    "glossary": {
        "page_size": "FlashInfer",
        "kv_indices": "FlashInfer",
        "kv_indptr": "FlashInfer",
        "kv_last_page_len": "FlashInfer",
        "num_queries_per_kv": "vLLM",
        "query_start_loc": "vLLM",
        "free_block_queue": "vLLM",
        "slot_mapping": "vLLM",
        "block_table": "vLLM",
        "BLOCK_": "a prefix",
    },
    "teaching": dict.fromkeys(
        [
            "make book",
            "make notebooks",
            "python tools/run_cells.py",
            "--out results.json",
            "_build/html",
        ],
        "a shell's",
    ),
    "10_ledger": {"two_warps.cu": "CUDA C++", "python tools/record.py ledger": "a shell's"},
    "08_real_model": {"<|im_start|>": "the demo model's tokens", "<|im_end|>": "the same"},
}
# Numbers that no cell can compute, and where they come from.
QUOTED_NUMBERS = {
    "05_reduction": {"1024": "exercise 5.3: as many warps as one warp can add up, 32 times 32"},
    "intro": {
        "20.4": "Kwon et al. 2023, section 1 and figure 2",
        "38.2": "Kwon et al. 2023, section 1 and figure 2",
        "135": "the demo model's name, SmolLM2-135M",
    },
}

FENCED = re.compile(r"^(`{3,}).*?^\1$", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^:{3,}.*$|^:(?:label|name|class|nonumber|align):.*$", re.MULTILINE)
ALT_TEXT = re.compile(r"^:alt: .*$", re.MULTILINE)
LABEL = re.compile(r"^:::\{admonition\} Behind the label: .*?^:::$", re.DOTALL | re.MULTILINE)
SOLUTION = re.compile(r"^:::\{solution\}.*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r"\{(?P<role>[\w:]+)\}`(?P<text>[^`<]+?)\s*(?:<(?P<target>[^`]*)>)?`")
CODE_SPAN = re.compile(r"(?<![`}])`([^`]+)`")
UNITS = "bytes?|[KMGT]i?B|%|ms|s|tokens?|blocks?|lanes?|layers?|entries|steps?|slots?|heads?"
NUMBER = re.compile(rf"(?<![\w.,/#-])(\d[\d,]*\d|\d)(\.\d+)?(?!\w)(?=(?:[ -](?:{UNITS})\b|[ ]?%)?)")
WITH_UNIT = re.compile(rf"(?:[ -](?:{UNITS})(?!\w)|[ ]?%)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def stem(path: Path) -> str:
    return path.stem


def body(path: Path) -> str:
    """A page without its front matter."""
    text = path.read_text("utf-8")
    return text.split("---\n", 2)[2] if text.startswith("---\n") else text


def prose(path: Path) -> str:
    """What is to be read on a page: no code, no directives, roles as their words."""
    text = DIRECTIVE.sub("", FENCED.sub("", body(path)))
    return ROLE.sub(lambda role: "" if role["role"].startswith("cite") else role["text"], text)


def num_words(label: str) -> int:
    """Words of a label as `prose` counts them."""
    return len(DIRECTIVE.sub("", FENCED.sub("", label)).split())


def solutions(path: Path) -> list[str]:
    return SOLUTION.findall(body(path))


def code_lines(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def literals(path: Path) -> set[str]:
    """The numbers that stand in a page's cells, those in strings included, without underscores."""
    found: set[str] = set()
    for node in ast.walk(ast.parse("\n".join(cells(path)))):
        if isinstance(node, ast.Constant):
            found.update(re.findall(r"\d+(?:\.\d+)?", str(node.value)))
    return found


def unsupported_numbers(text: str, known: set[str]) -> Iterator[str]:
    """Numbers of three digits or with a decimal point or unit that are not among `known`."""
    for match in NUMBER.finditer(CODE_SPAN.sub("", text)):
        number = match[1].replace(",", "") + (match[2] or "")
        after = match.string[match.end() :]
        counts = len(match[1]) >= 3 or match[2] or WITH_UNIT.match(after)
        is_year = re.fullmatch(r"(?:19|20)\d\d", match[1])
        if counts and not is_year and number not in known:
            yield f"{number} in '{match.string[max(0, match.start() - 20) : match.end() + 10]}'"


def identifiers(code: str) -> set[str]:
    """Every name that Python code uses, binds or has in a string that is a name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.update(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"[A-Za-z_]\w*", node.value))
    return names


def package_identifiers() -> set[str]:
    files = (ROOT / "pagedlab").rglob("*.py")
    return set().union(*(identifiers(path.read_text("utf-8")) for path in files))


PACKAGE_NAMES = package_identifiers() | {*dir(builtins), *keyword.kwlist}
MODULE_OF = {"tl": tl, "torch": torch, "math": math, "pagedlab": pagedlab}


def unknown_names(span: str, known: set[str]) -> Iterator[str]:
    """Names in a span of code type that do not exist; what is not Python must be in `known`."""
    if span in known or not re.search(r"[A-Za-z]", span):
        return
    if re.fullmatch(r"[\w/]+\.(py|md|json|safetensors|yml|toml|txt)", span):
        if span.endswith((".py", ".md", ".yml", ".toml", ".txt")):
            places = [ROOT, ROOT / "pagedlab", BOOK]
            if not any((place / span).exists() for place in places):
                yield span
        return
    try:
        tree: Any = ast.parse(span.strip().lstrip("."))
    except SyntaxError:
        words = re.findall(r"[A-Za-z_]\w*", span)
        yield from (word for word in words if word not in known | PACKAGE_NAMES)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in known | PACKAGE_NAMES | set(MODULE_OF):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg not in known | PACKAGE_NAMES:
            yield str(node.arg)
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", None)
            thing = MODULE_OF.get(owner, getattr(pagedlab, str(owner), None))
            exists = node.attr in known | PACKAGE_NAMES
            if owner in MODULE_OF:
                exists = hasattr(thing, node.attr)
            elif inspect.isclass(thing):
                exists = hasattr(thing, node.attr) or f"self.{node.attr} = " in inspect.getsource(
                    thing
                )
            if not exists:
                yield ast.unparse(node)


def public_names(module_name: str) -> set[str]:
    """A module's own functions, kernels and classes, and the classes' own methods."""
    module = importlib.import_module(f"pagedlab.{module_name}")
    names: set[str] = set()
    for name, value in vars(module).items():
        own = getattr(getattr(value, "fn", value), "__module__", None) == module.__name__
        if name.startswith(("_", "expect")) or not own:
            continue
        names.add(name)
        if inspect.isclass(value):
            names |= {
                f"{name}.{member}"
                for member, defined in vars(value).items()
                if not member.startswith("_")
                and (inspect.isroutine(defined) or isinstance(defined, property))
            }
    return names - HELPERS.get(module_name, set())


@pytest.mark.parametrize("path", CHAPTERS, ids=stem)
def test_a_chapter_keeps_its_budget(path: Path) -> None:
    code = cells(path)
    labels = LABEL.findall(body(path))
    words = len(ALT_TEXT.sub("", prose(path)).split()) - sum(map(num_words, labels))
    lines = [len(cell.splitlines()) for cell in code]
    print(f"\n{path.stem}: {words} words, {len(code)} cells, longest {max(lines)} lines")
    assert MIN_WORDS <= words <= MAX_WORDS
    assert MIN_CELLS <= len(code) <= max(MAX_CELLS, MAX_CELLS_PER_LABEL * len(labels))
    assert max(map(num_words, labels), default=0) <= MAX_LABEL_WORDS
    assert max(lines) <= MAX_CELL_LINES
    assert sorted(lines)[len(lines) // 2] <= 12
    assert max(len(line) for cell in code for line in cell.splitlines()) < MAX_LINE


@pytest.mark.parametrize("path", CHAPTERS, ids=stem)
def test_a_chapter_has_every_part(path: Path) -> None:
    text, code = body(path), "\n".join(cells(path))
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"Exercises", "What was measured, and where", "Where we are"} <= set(headings)
    assert headings[-1] == "Where we are"
    assert ":::{figure}" in text
    assert re.search(r"\bshow\(", code)
    assert re.search(r"^ *assert |assert_close\(", code, re.MULTILINE)
    assert re.search(r"^(AddressCalculator|BlockTableView|KernelStepper|\w+Timeline|\w+Explorer)\(",
                     code, re.MULTILINE)  # fmt: skip
    ids = re.findall(r"^:::\{exercise\} (\d+\.\d) · \S.*\n(?::label: ex-\d+-\d\n|:nonumber:\n){2}",
                     text, re.MULTILINE)  # fmt: skip
    assert ids == re.findall(r'^check\("(\d+\.\d)"', code, re.MULTILINE)
    assert len(ids) >= 3
    assert len(solutions(path)) == len(ids)


@pytest.mark.parametrize("path", CHAPTERS, ids=stem)
def test_the_byte_that_the_book_follows_comes_by(path: Path) -> None:
    assert re.search(r"token\s17|99,598|Lane 7 is ours", prose(path))


def test_the_sources_of_each_idea_are_cited() -> None:
    cited = set(re.findall(r"\{cite(?::t)?\}`(\w+)`", "".join(body(path) for path in CHAPTERS)))
    assert {"kwon2023", "dao2022", "milakov2018", "ainslie2023", "harris2007", "su2021"} <= cited


def test_every_term_is_met_in_a_chapter() -> None:
    terms = re.findall(r"^(\w[^\n]*)\n  \S", body(BOOK / "glossary.md"), re.MULTILINE)
    assert len(terms) > 30
    used = {
        (role["target"] or role["text"]).replace("\n", " ")
        for path in CHAPTERS
        for role in ROLE.finditer(body(path))
        if role["role"] == "term"
    }
    assert not set(terms) - used


@pytest.mark.parametrize("path", SWAP_IN_CHAPTERS, ids=stem)
def test_the_real_model_runs_on_the_readers_part(path: Path) -> None:
    section = body(path).split("\n## Put your part in\n")[1].split("\n## ")[0]
    for needed in ("Llama.from_checkpoint(", "Engine(", "assert mine == "):
        assert needed in section or needed in body(path).split("\n## Exercises\n")[0]
    assert "assert mine == " in section


@pytest.mark.parametrize("name", KERNEL_CHAPTERS)
def test_a_kernel_chapter_lets_readers_step_their_own_kernel(name: str) -> None:
    section = body(BOOK / f"{name}.md").split("Step your own kernel\n")[1].split("\n## ")[0]
    assert "@triton.jit" in section
    assert re.search(r"= step\(\n? *\w+, \(", section)
    assert "KernelStepper(trace, name=" in section


def test_the_exercise_that_the_teachers_page_adds_works() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", body(BOOK / "teaching.md"), re.DOTALL | re.M)
    namespace = {"np": np, "Exercise": Exercise, "Confusion": Confusion}
    exec(code, namespace)
    exercise: Any = namespace["EXERCISE"]
    assert len({confusion.idea for confusion in exercise.confusions}) >= 4
    for seed in range(100):
        cases = list(exercise.cases(random.Random(seed)))
        answers = {str([exercise.solution(*case) for case in cases])}
        for confusion in exercise.confusions:
            answers.add(str([confusion.function(*case) for case in cases]))
        assert len(answers) == 1 + len(exercise.confusions), seed


def test_there_are_enough_exercises() -> None:
    long = [s for path in CHAPTERS for s in solutions(path) if code_lines(s) - 1 >= 5]
    print(f"\n{len(EXERCISES)} exercises, {len(long)} whose solution's body has 5 lines or more")
    assert len(EXERCISES) >= 24
    assert len(long) >= 16


@pytest.mark.parametrize("path", PAGES, ids=stem)
def test_names_in_prose_exist(path: Path) -> None:
    code = "\n".join([*cells(path), *solutions(path)])
    known = identifiers(code) | set(FOREIGN_NAMES.get(path.stem, {}))
    spans = CODE_SPAN.findall(prose(path))
    assert not {name: s for s in spans for name in unknown_names(s, known)}


def test_a_name_that_does_not_exist_is_found() -> None:
    spans = {
        "tl.laod": "tl.laod",
        "KVLayout.k_adress": "KVLayout.k_adress",
        "pool.num_fre": "pool.num_fre",
        "no_such_name": "no_such_name",
        "Engine(no_such_size=2)": "no_such_size",
        "no_such_file.py": "no_such_file.py",
        "seq_len % no_such_size": "no_such_size",
    }
    assert {span: next(unknown_names(span, {"pool"}), None) for span in spans} == spans
    for span in (
        "tl.load",
        "KVLayout.k_address",
        "pool.num_free",
        "layout.py",
        "2**31 - 1",
        "// 8",
    ):
        assert not list(unknown_names(span, {"pool"})), span


@pytest.mark.parametrize("path", [*CHAPTERS, BOOK / "intro.md"], ids=stem)
def test_numbers_in_prose_are_computed_or_asserted(path: Path) -> None:
    known = literals(path) | set(QUOTED_NUMBERS.get(path.stem, {}))
    assert not list(unsupported_numbers(prose(path), known))


def test_a_number_that_no_cell_has_is_found() -> None:
    text = "Of 65,536 blocks 4,096 are used, 12.5 of 8 MiB, 50 % in 3 parts, `777`, 2-4, token 17."
    found = [line.split()[0] for line in unsupported_numbers(text, {"65536"})]
    assert found == ["4096", "12.5", "8", "50"]


@pytest.mark.parametrize("name", [path.stem for path in CHAPTERS])
def test_every_public_name_of_its_modules_is_in_the_chapter(name: str) -> None:
    for module in MODULES[name]:
        sharing = [chapter for chapter, modules in MODULES.items() if module in modules]
        text = "".join(body(BOOK / f"{chapter}.md") for chapter in sharing)
        missing = {
            n for n in public_names(module) if not re.search(rf"\b{n.split('.')[-1]}\b", text)
        }
        assert not missing, f"{module}: {missing}"


def test_relative_links_lead_to_files() -> None:
    for page in [*BOOK.glob("*.md"), *ROOT.glob("*.md")]:
        text = FENCED.sub("", page.read_text("utf-8"))
        targets = re.findall(r"^:::\{(?:figure|image)\} (\S+)", text, re.MULTILINE)
        targets += LINK.findall(CODE_SPAN.sub("", ROLE.sub("", text)))
        for role, words, target in ROLE.findall(text):
            if role == "doc":
                targets.append(f"{(target or words).removesuffix('.md')}.md")
        for target in targets:
            outside = re.match(r"https?://|#", target)
            assert outside or (page.parent / target.split("#")[0]).exists(), (page.name, target)


def test_links_of_the_colab_notebooks_lead_to_files() -> None:
    mine = notebooks.Repository("https://github.com/me/mine", "trunk")
    links = []
    for text in notebooks.notebooks(BOOK, mine).values():
        for cell in nbformat.reads(text, as_version=4).cells:
            if cell.cell_type == "markdown":
                links += LINK.findall(CODE_SPAN.sub("", FENCED.sub("", cell.source)))
    inside = [re.fullmatch(rf"{mine.url}/(?:raw|blob)/trunk/(.+)", link) for link in links]
    assert len(list(filter(None, inside))) >= len(CHAPTERS)
    for link, match in zip(links, inside, strict=True):
        assert (ROOT / match[1]).is_file() if match else link.startswith("https://"), link


def test_the_title_page_lists_every_chapter() -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    listed = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    chapters = [name for name in listed if re.search(r"/\d\d_", name)]
    on_title_page = re.findall(r"^- \{doc\}`(\d\d_\w+)`: ", body(BOOK / "intro.md"), re.MULTILINE)
    assert [f"book/{name}.md" for name in on_title_page] == chapters


@pytest.mark.browser
def test_the_book_builds_in_minutes(built_site: Path) -> None:
    """Chapters run one after another, so on two quiet cores the build takes no longer than the
    processor time that it and its kernels use; and that hardly depends on what runs beside it."""
    environment = built_site.parent / ".doctrees/environment.pickle"
    build = built_site.parents[2] / "build.json"
    if not build.exists():
        pytest.skip("--site names a build made elsewhere")
    took = json.loads(build.read_text("utf-8"))
    metadata = pickle.loads(environment.read_bytes()).nb_metadata
    done = {name: data["exec_data"] for name, data in metadata.items() if "exec_data" in data}
    for name, data in sorted(done.items()):
        print(f"\n{name}: {data['runtime']:.0f} s", end="")
    print("\nthe book: {seconds:.0f} s, of the processor {cpu_seconds:.0f} s".format(**took))
    assert {f"book/{path.stem}" for path in CHAPTERS} <= set(done)
    assert took["cpu_seconds"] < MAX_SECONDS

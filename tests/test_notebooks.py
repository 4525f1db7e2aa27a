"""The Colab notebooks follow from the chapters, read well without MyST, and run by themselves."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import nbformat
import notebooks
import pytest
from book_build import ROOT, copy_checkout, make_environment
from notebooks import Converter, Repository
from pybtex.database import BibliographyData, parse_string

from pagedlab._sphinx import PLACEHOLDER_URL

CHAPTERS = sorted((ROOT / "book").glob("[0-9][0-9]_*.md"))
NOWHERE = Repository(PLACEHOLDER_URL, "main")
MINE = Repository("https://github.com/me/mine", "trunk")
BIBLIOGRAPHY = r"""
@article{one, author={de Vries, Anna}, title={T}, year={2020}, doi={10.1/x}}
@article{three, author={L{\'o}pez, B. and Two, C. and Three, D.}, title={T}, year={2021}}
@misc{tool, title={a-tool}, url={https://example.com/tool}}
"""
EXECUTE = """
import nbclient, nbformat, sys
nbclient.NotebookClient(nbformat.read(sys.argv[1], 4), timeout=300).execute()
"""

Convert = Callable[..., str]


@pytest.fixture
def convert() -> Convert:
    def run(text: str, repository: Repository = NOWHERE) -> str:
        converter = Converter("x.md", repository, parse_string(BIBLIOGRAPHY, "bibtex"))
        converter.collect_labels(text)
        return converter.markdown(text)

    return run


def test_no_notebook_is_outdated() -> None:
    assert CHAPTERS
    assert notebooks.outdated(ROOT / "book") == [], "run make notebooks"


def test_an_edited_chapter_makes_its_notebook_outdated(tmp_path: Path) -> None:
    book = tmp_path / "book"
    book.mkdir()
    (tmp_path / "_config.yml").write_text((ROOT / "_config.yml").read_text())
    (book / "references.bib").write_text("")
    chapter, twin = book / "01_a.md", book / "01_a.ipynb"
    chapter.write_text("# A\n\nText.\n")
    assert notebooks.outdated(book) == [twin]
    twin.write_text(notebooks.notebooks(book)[twin])
    assert notebooks.outdated(book) == []
    chapter.write_text("# A\n\nOther text.\n")
    assert notebooks.outdated(book) == [twin]
    chapter.unlink()
    assert notebooks.outdated(book) == [twin]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_and_no_myst(chapter: Path) -> None:
    twin = nbformat.read(chapter.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(twin)
    for cell in twin.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        if cell.cell_type == "markdown":
            assert ":::" not in cell.source
            assert "{code-cell}" not in cell.source
            assert not notebooks.re.search(r"\{[a-z:]+\}`", cell.source)


def test_cell_ids_stay_when_a_cell_is_inserted_before(tmp_path: Path) -> None:
    def ids(text: str) -> list[str]:
        path = tmp_path / "01_a.md"
        path.write_text(text)
        return [c["id"] for c in json.loads(notebooks.notebook(path, NOWHERE, empty))["cells"]]

    empty = BibliographyData()
    code = "```{code-cell} ipython3\n1 + 1\n```\n\n"
    before = ids(f"# A\n\n{code}Between.\n\n{code}")
    after = ids(f"# A\n\n{code}New.\n\n{code}Between.\n\n{code}")
    assert len(set(before)) == len(before)
    assert len(set(after)) == len(after)
    assert set(before) < set(after)


@pytest.mark.parametrize(
    ("myst", "expected"),
    [
        ("{term}`blocks <block>` and {term}`lane`", "blocks and lane"),
        ("`{term}`", "`{term}`"),
        ("{cite}`one,three`", "([de Vries, 2020](https://doi.org/10.1/x); López et al., 2021)"),
        ("{cite:t}`one`", "de Vries ([2020](https://doi.org/10.1/x))"),
        ("{cite}`tool`", "([a-tool](https://example.com/tool))"),
        ("{py:class}`~pagedlab.KVLayout`", "`KVLayout`"),
        ("{math}`x^2` {kbd}`Tab`", "$x^2$ <kbd>Tab</kbd>"),
        (":::{note}\nA\n\nB\n:::", "> **Note**\n>\n> A\n>\n> B"),
        (":::{admonition} Title\nA {term}`x`.\n:::", "> **Title**\n>\n> A x."),
        (
            ":::{hint}\n:class: dropdown\nA\n:::",
            "<details>\n<summary>Hint</summary>\n\nA\n\n</details>",
        ),
        (
            "::::{exercise} E\n:label: e\n:::{tip}\nA\n:::\n::::\n:::{solution} e\nB\n:::",
            "### Exercise: E\n\n> **Tip**\n>\n> A\n"
            "<details>\n<summary>Solution: E</summary>\n\nB\n\n</details>",
        ),
        (
            "See {ref}`f`, {numref}`f`, {ref}`that <f>`.\n:::{figure} _static/a.svg\n:name: f\n"
            ":alt: An a\n\nWords.\n:::",
            "See figure 1, figure 1, that.\n![An a](_static/a.svg)\n\n**Figure 1.** Words.",
        ),
        ("(here)=\n## A heading\n{ref}`here`", "## A heading\nA heading"),
        ("```python\n:::{note}\n{term}`x`\n```", "```python\n:::{note}\n{term}`x`\n```"),
        ("```{code-block} python\n{term}`x`\n```", "```python\n{term}`x`\n```"),
        ("% a comment\nText", "Text"),
    ],
)
def test_myst_becomes_markdown(convert: Convert, myst: str, expected: str) -> None:
    assert convert(myst) == expected


def test_a_real_repository_gives_absolute_addresses(convert: Convert) -> None:
    assert convert("{doc}`words <glossary>`") == "words"
    assert convert("{doc}`words <glossary>`", MINE) == (
        "[words](https://github.com/me/mine/blob/trunk/book/glossary.md)"
    )
    assert convert(":::{image} _static/a.svg\n:alt: A\n:::", MINE) == (
        "![A](https://github.com/me/mine/raw/trunk/book/_static/a.svg)"
    )
    install = "pagedlab[widgets] @ git+https://github.com/me/mine@trunk"
    assert install in MINE.install_cell()
    assert "pip install" in NOWHERE.install_cell()


@pytest.mark.parametrize(
    ("myst", "message"),
    [
        (":::{toctree}\n:::", "x.md: directive {toctree} has no form in a notebook"),
        ("{download}`x`", "x.md: role {download} has no form in a notebook"),
        ("{ref}`nothing`", "x.md: {ref}`nothing` names nothing on its page"),
        (":::{note}\nA", "expected ::: to close a block, got the end of the text"),
    ],
)
def test_myst_without_a_markdown_form_is_refused(convert: Convert, myst: str, message: str) -> None:
    with pytest.raises(ValueError, match=notebooks.re.escape(message)):
        convert(myst)


@pytest.fixture(scope="module")
def bare_clone(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A bare clone of this checkout, uncommitted edits included."""
    folder = tmp_path_factory.mktemp("clone")
    checkout = copy_checkout(folder / "checkout")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all"],
        ["commit", "--quiet", "--message=all"],
        ["clone", "--quiet", "--bare", str(checkout), str(folder / "pagedlab.git")],
    ):
        subprocess.run([*git, *command], cwd=checkout, check=True)
    # pip before 24 takes an address with an empty host for a path
    return Repository(f"file://localhost{folder / 'pagedlab.git'}", "main")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_notebook_installs_pagedlab_and_runs_from_an_empty_folder(
    chapter: Path, bare_clone: Repository, tmp_path: Path
) -> None:
    twin, empty = tmp_path / "twin.ipynb", tmp_path / "empty"
    twin.write_text(notebooks.notebooks(ROOT / "book", bare_clone)[chapter.with_suffix(".ipynb")])
    empty.mkdir()
    python, variables = make_environment(tmp_path / "environment")
    offline = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    missing = subprocess.run([python, "-c", "import pagedlab"], cwd=empty, env=variables)
    assert missing.returncode != 0
    done = subprocess.run(
        [python, "-c", EXECUTE, str(twin)],
        cwd=empty,
        env=variables | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert os.listdir(empty) == []

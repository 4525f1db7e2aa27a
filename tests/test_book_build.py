"""The book builds with `jupyter-book build .` alone, again when it must and only then."""

from __future__ import annotations

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from book_build import ROOT, build_book

from pagedlab import _sphinx

CHAPTER = """\
---
jupytext: {text_representation: {extension: .md, format_name: myst}}
kernelspec: {display_name: Python 3, language: python, name: python3}
---

# Tiny chapter

```{code-cell} ipython3
import os
from pagedlab.part import MARKER
print("marker", MARKER, os.environ["PYTHONPATH"].split(os.pathsep)[0])
```
"""
TOC = """\
format: jb-book
root: book/intro
chapters:
  - file: book/01_tiny.md
"""


@pytest.fixture
def tiny_book(tmp_path: Path) -> Path:
    """A book of one chapter under this book's configuration, with a stand-in for the package."""
    book = tmp_path / "tiny"
    (book / "pagedlab").mkdir(parents=True)
    shutil.copyfile(ROOT / "_config.yml", book / "_config.yml")
    shutil.copyfile(ROOT / "pagedlab/_sphinx.py", book / "pagedlab/_sphinx.py")
    (book / "pagedlab/__init__.py").write_text("")
    (book / "pagedlab/part.py").write_text("MARKER = 'first'\n")
    (book / "_toc.yml").write_text(TOC)
    static = book / "book/_static"
    shutil.copytree(ROOT / "book/_static", static, ignore=shutil.ignore_patterns("vendor"))
    (book / "book/references.bib").write_text("")
    (book / "book/intro.md").write_text("# Tiny book\n\n$x^2$\n")
    (book / "book/01_tiny.md").write_text(CHAPTER)
    (book / "book/01_tiny.ipynb").write_text('{"cells": [], "nbformat": 4, "nbformat_minor": 5}')
    if (ROOT / "book/_static/vendor/versions.json").exists():
        shutil.copytree(ROOT / "book/_static/vendor", static / "vendor")
    return book


def chapter_html(book: Path) -> str:
    return (book / "_build/html/book/01_tiny.html").read_text()


def build(book: Path, *options: str) -> str:
    done = build_book(book, *options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.browser
def test_a_bare_copy_builds_from_another_directory_without_warnings(
    built_site: Path, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("site"):
        pytest.skip("--site names a build made elsewhere")
    log = (built_site.parents[2] / "build.log").read_text()
    assert "WARNING" not in log.replace("[IPKernelApp] WARNING | Kernel is running over TCP", "")
    assert "ERROR" not in log


def test_a_change_of_text_package_or_static_file_is_rebuilt_and_nothing_else(
    tiny_book: Path,
) -> None:
    assert "Executed notebook" in build(tiny_book, "-W", "-n")
    assert f"marker first {tiny_book}" in chapter_html(tiny_book)

    assert "Executed notebook" not in build(tiny_book)

    (tiny_book / "pagedlab/part.py").write_text("MARKER = 'second'\n")
    assert "Executed notebook" in build(tiny_book)
    assert "marker second" in chapter_html(tiny_book)

    chapter = tiny_book / "book/01_tiny.md"
    chapter.write_text(chapter.read_text().replace('"marker"', '"new marker"'))
    assert "Executed notebook" in build(tiny_book)
    assert "new marker second" in chapter_html(tiny_book)

    (tiny_book / "book/_static/extra.css").write_text("p { color: inherit }\n")
    assert "Executed notebook" not in build(tiny_book)
    assert (tiny_book / "_build/html/_static/extra.css").exists()


def test_a_failing_cell_fails_the_plain_build(tiny_book: Path) -> None:
    chapter = tiny_book / "book/01_tiny.md"
    chapter.write_text(chapter.read_text().replace("print(", "raise RuntimeError("))
    done = build_book(tiny_book)
    assert done.returncode != 0
    assert "RuntimeError" in done.stdout


def test_repository_url_alone_brings_the_colab_button(tiny_book: Path) -> None:
    build(tiny_book)
    assert "colab.research.google.com" not in chapter_html(tiny_book)
    assert _sphinx.PLACEHOLDER_URL not in chapter_html(tiny_book)

    config = tiny_book / "_config.yml"
    mine = "https://github.com/me/mine"
    config.write_text(config.read_text().replace(_sphinx.PLACEHOLDER_URL, mine))
    build(tiny_book)
    colab = "https://colab.research.google.com/github/me/mine/blob/main/book/01_tiny.ipynb"
    assert colab in chapter_html(tiny_book)
    assert f'href="{mine}"' in chapter_html(tiny_book)


def test_assets_are_fetched_once_and_again_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = tmp_path / "vendor"
    assert _sphinx.bring_assets(vendor)
    for name in ("require.js", "anywidget.js", "plotly.min.js", "html-manager/embed-amd.js"):
        assert (vendor / name).stat().st_size > 10_000, name
    assert len(list((vendor / "html-manager").glob("*.woff2"))) == 3

    monkeypatch.setattr(_sphinx, "copy_npm_assets", lambda vendor: pytest.fail("fetched again"))
    assert _sphinx.bring_assets(vendor)

    stamp = vendor / "versions.json"
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"plotly": "0.0"}))
    fetched: list[Path] = []
    monkeypatch.setattr(_sphinx, "copy_npm_assets", fetched.append)
    assert _sphinx.bring_assets(vendor)
    assert fetched == [vendor]


def test_of_several_processes_one_brings_the_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def fetch(vendor: Path) -> None:
        fetched.append(vendor)
        time.sleep(0.2)
        (vendor / "require.js").touch()

    monkeypatch.setattr(_sphinx, "copy_npm_assets", fetch)

    def bring(_: int) -> bool:
        return (
            _sphinx.bring_assets(tmp_path / "vendor") and (tmp_path / "vendor/require.js").exists()
        )

    with ThreadPoolExecutor(4) as pool:  # each holds a lock of its own, as processes do
        assert all(pool.map(bring, range(4)))
    assert len(fetched) == 1


def test_npm_of_the_pip_package_serves_where_the_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    version, integrity, _ = _sphinx.NPM_ASSETS["requirejs"]
    with _sphinx.npm_pack("requirejs", version, integrity, tmp_path) as archive:
        assert "package/require.js" in archive.getnames()


def test_an_archive_with_another_hash_is_refused(tmp_path: Path) -> None:
    version, integrity, _ = _sphinx.NPM_ASSETS["requirejs"]
    other = integrity.replace("sha512-D", "sha512-E")
    with pytest.raises(ValueError, match=re.escape(f"expected {other}, got {integrity}")):
        _sphinx.npm_pack("requirejs", version, other, tmp_path)


def test_without_npm_the_pages_use_a_cdn_and_the_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(_sphinx.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_sphinx.logger, "info", lambda text, *values: notices.append(text % values))
    config = SimpleNamespace()
    _sphinx.configure_assets(SimpleNamespace(srcdir=tmp_path), config)
    addresses = [config.mathjax_path, *config.nb_ipywidgets_js]
    assert sum(address.startswith(f"{_sphinx.CDN}/") for address in addresses) == 3
    assert len(notices) == 1
    assert "there is no npm" in notices[0]
    assert _sphinx.CDN in notices[0]

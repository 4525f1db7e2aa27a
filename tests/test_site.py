"""The built site in Chromium: every page loads clean, from disk too, and is accessible."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from book_build import ROOT
from playwright.sync_api import Page

from pagedlab import widgets

pytestmark = pytest.mark.browser

TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
CHAPTERS = [entry["file"] for part in TOC["parts"] for entry in part["chapters"]]
PAGES = [f"{name.removesuffix('.md')}.html" for name in [TOC["root"], *CHAPTERS]]
PAGES += ["genindex.html", "py-modindex.html", "search.html"]
PHONE = {"width": 390, "height": 844}
SERIOUS = ("serious", "critical")


def settle(page: Page, address: str) -> None:
    """Load a page and wait until its widgets and formulas are drawn."""
    page.goto(address, wait_until="networkidle")
    page.wait_for_function(
        """() => {
            const states = document.querySelectorAll(
                'script[type="application/vnd.jupyter.widget-view+json"]');
            const math = document.querySelectorAll('.math');
            return [...states].every(s => s.nextElementSibling || s.previousElementSibling)
                && (!math.length || document.querySelector('mjx-container'));
        }"""
    )


def test_every_built_page_is_tested(built_site: Path) -> None:
    built = {str(path.relative_to(built_site)) for path in built_site.rglob("*.html")}
    assert {name for name in built if "_static" not in name} == {*PAGES, "index.html"}


def test_pages_are_light(built_site: Path) -> None:
    sizes = {name: (built_site / name).stat().st_size for name in PAGES}
    heaviest = max(sizes, key=sizes.__getitem__)
    print(f"heaviest page: {heaviest}, {sizes[heaviest]:,} bytes with its widgets' data")
    assert sizes[heaviest] < 1_500_000


def test_the_api_page_has_every_widget_with_its_arguments(built_site: Path) -> None:
    text = re.sub("<[^>]+>", "", (built_site / "book/api.html").read_text())
    for name in widgets.__all__:
        first = next(iter(inspect.signature(getattr(widgets, name)).parameters))
        assert f"pagedlab.widgets.{name}({first}" in text


@pytest.mark.parametrize("name", [*PAGES, "index.html"])
def test_page_loads_without_errors_or_external_requests(
    page: Page, site_url: str, name: str
) -> None:
    settle(page, f"{site_url}/{name}")
    assert page.locator("h1:visible").count() == 1


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_from_disk(page: Page, built_site: Path, name: str) -> None:
    settle(page, (built_site / name).as_uri())


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_serious_accessibility_violation(
    new_page: Callable[..., Page], site_url: str, name: str, color_scheme: str
) -> None:
    page = new_page(color_scheme=color_scheme, reduced_motion="reduce")
    settle(page, f"{site_url}/{name}")
    assert page.locator("html").get_attribute("data-theme") == color_scheme
    violations = Axe().run(page, options={"preload": False}).response["violations"]
    assert not [
        (violation["id"], node["html"], node["failureSummary"])
        for violation in violations
        if violation["impact"] in SERIOUS
        for node in violation["nodes"]
    ]


def test_a_dark_page_is_printed_light(new_page: Callable[..., Page], site_url: str) -> None:
    page = new_page(color_scheme="dark")
    settle(page, f"{site_url}/book/01_layout.html")
    page.evaluate(
        """() => {
            window.themes = [];
            const note = () => window.themes.push(document.documentElement.dataset.theme);
            for (const event of ['beforeprint', 'afterprint']) addEventListener(event, note);
        }"""
    )
    page.pdf()
    assert page.evaluate("themes") == ["light", "dark"]


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_phone(new_page: Callable[..., Page], site_url: str, name: str) -> None:
    page = new_page(viewport=PHONE, is_mobile=True, has_touch=True)
    settle(page, f"{site_url}/{name}")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]

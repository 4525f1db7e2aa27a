"""Fixtures shared by the tests: a build of the book, a web server for it, and a browser.

`pytest --site _build/html` lets the browser tests use a build that is there already.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from book_build import build_book, copy_checkout
from browser import find_browser
from filelock import FileLock
from hypothesis import settings

if TYPE_CHECKING:  # a GPU machine that runs `-m gpu` needs no browser
    from playwright.sync_api import Browser, Page

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--allow-file-access-from-files",
]

torch.set_num_threads(1)
settings.register_profile("pagedlab", deadline=None, print_blob=True)
settings.load_profile("pagedlab")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", type=Path, help="use this built site, do not build the book")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; keep a file's tests, or all of the site's, together."""
    no_gpu = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        uses_site = "built_site" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("site" if uses_site else item.path.name))


@pytest.fixture(scope="session")
def built_site(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built HTML. The book is built once, in a bare copy; the log is beside it."""
    if given := pytestconfig.getoption("site"):
        return given.resolve()
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    book, log = shared / "book", shared / "build.log"
    site = book / "_build/html"
    with FileLock(shared / "build.lock"):
        if not log.exists():
            copy_checkout(book)
            start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            done = build_book(book)
            wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
            (shared / "build.json").write_text(json.dumps({"seconds": wall, "cpu_seconds": cpu}))
            log.write_text(done.stdout + f"\nexit status {done.returncode}\n")
    if not log.read_text().endswith("\nexit status 0\n"):
        pytest.fail(f"the book does not build:\n{log.read_text()[-4000:]}")
    return site


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(folder: Path) -> tuple[http.server.ThreadingHTTPServer, str]:
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(scope="session")
def site_url(built_site: Path) -> Iterator[str]:
    server, url = serve(built_site)
    yield url
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.fail("no Chromium or Chrome found: run tools/browser.py")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages in contexts of their own (`new_page(viewport=..., color_scheme=...)`).

    Requests that leave this machine are blocked. They, console errors, exceptions and statuses
    from 400 up fail the test when it ends.
    """
    contexts, faults = [], []

    def open_page(**options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        local = ("http://127.0.0.1", "ws://127.0.0.1", "file:", "data:", "blob:")

        def block(route: Any) -> None:
            faults.append(f"external request: {route.request.url}")
            route.abort()

        page.route(lambda url: not url.startswith(local), block)
        page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
        page.on(
            "console",
            lambda message: (
                faults.append(f"console: {message.text}") if message.type == "error" else None
            ),
        )
        page.on(
            "response",
            lambda response: (
                faults.append(f"{response.status} {response.url}")
                if response.status >= 400
                else None
            ),
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults, "\n".join(faults)


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page()

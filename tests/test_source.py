"""show(): the source that runs, readable wherever the reader is."""

import html
import os
import re
import subprocess
import sys

import pytest
import torch
from IPython.core.formatters import DisplayFormatter

import pagedlab
from pagedlab import KVLayout, paged_attention, show
from pagedlab.kernels.by_token import by_token_kernel


def text_of(page: str) -> str:
    """The code in show's HTML, as a reader would copy it."""
    code = re.search(r"<code>(.*)</code>", page, re.DOTALL)[1]
    return html.unescape(re.sub(r"<[^>]+>", "", code)).rstrip("\n")


@pytest.mark.parametrize(
    ("obj", "first", "file"),
    [
        (paged_attention, "def paged_attention(", "pagedlab/attention.py"),
        (KVLayout.k_address, "def k_address(", "pagedlab/layout.py"),
        (KVLayout.kv_dim, "@cached_property", "pagedlab/layout.py"),
        (KVLayout, "@dataclass", "pagedlab/layout.py"),
        (by_token_kernel, "@triton.jit", "pagedlab/kernels/by_token.py"),
    ],
)
def test_functions_methods_classes_and_kernels_show_their_own_lines(obj, first, file):
    shown = show(obj)
    assert shown.file == file
    assert shown.lines[0].startswith(first)
    with open(file) as opened:
        there = opened.read().splitlines()[shown.first_line - 1 :][: len(shown.lines)]
    assert [line.strip() for line in shown.lines] == [line.strip() for line in there]


def test_every_public_function_and_class_can_be_shown():
    missing = []
    for name in pagedlab.__all__:
        obj = getattr(pagedlab, name)
        if not isinstance(obj, KVLayout):
            missing += [name] * (not show(obj).lines)
    assert not missing


def test_html_holds_the_text_and_a_caption_without_links_or_paths():
    shown = show(by_token_kernel)
    page = shown._repr_html_()
    assert text_of(page) == "\n".join(shown.lines)
    assert f"pagedlab/kernels/by_token.py, lines {shown.first_line} to" in page
    assert "<a " not in page
    assert os.path.dirname(pagedlab.__path__[0]) not in page


def test_ipython_shows_html_and_plain_text():
    bundle, _ = DisplayFormatter().format(show(KVLayout.k_address))
    assert {"text/html", "text/plain"} <= bundle.keys()
    assert bundle["text/plain"].splitlines()[1].startswith("def k_address(")


@pytest.mark.parametrize("obj", [3, torch.add, len])
def test_what_has_no_python_source_is_refused(obj):
    with pytest.raises(ValueError, match=r"^source: expected a function or class, got .*$"):
        show(obj)


def test_without_pygments_the_text_is_plain_but_there():
    code = (
        "import sys; sys.modules['pygments'] = None\n"
        "from pagedlab import KVLayout, show\n"
        "print(show(KVLayout)._repr_html_())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert text_of(done.stdout) == "\n".join(show(KVLayout).lines)


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_every_token_is_legible_on_its_paper(new_page, dark):
    """Contrast of each kind of token, from the colours that the browser computed: 4.5 or more."""
    page = new_page()
    theme = "dark" if dark else "light"
    page.set_content(f'<html data-theme="{theme}"><body>{show(by_token_kernel)._repr_html_()}')
    colours = page.evaluate("""() => {
        const rgb = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
        const paper = rgb(getComputedStyle(document.querySelector(".pl-source")).backgroundColor);
        const nodes = [...document.querySelectorAll(".pl-source span, .pl-source figcaption")];
        return [paper, nodes.map((it) => rgb(getComputedStyle(it).color))];
    }""")

    def luminance(rgb):
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper, tokens = colours
    distinct = {tuple(token) for token in tokens}
    assert len(distinct) >= 5
    for token in distinct:
        low, high = sorted([luminance(paper), luminance(token)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (token, paper)

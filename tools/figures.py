"""Draw the figures whose numbers were measured: `python tools/figures.py [--check]`.

waste_measured.svg, on the title page and in README.md, from book/recordings/waste.json. `--check`
only says which are outdated.
"""

import argparse
import re
import sys
from pathlib import Path

from pagedlab import recordings

FIGURES = Path(__file__).parents[1] / "book/_static/figures"
BLOCK_SIZE = 16  # of the paged cache that is drawn
WIDTH, LEFT, BAR, HEIGHT = 400, 10, 380, 34


def style() -> str:
    """The colours and fonts of the book's figures, from one of them."""
    text = (FIGURES / "waste.svg").read_text("utf-8")
    return text[text.index("<style>") : text.index("</defs>") + len("</defs>")]


def waste_measured() -> str:
    """The cache's places that hold tokens, contiguous and paged, while requests wait."""
    rows = {row["block_size"]: row for row in recordings.load("waste").data["rows"]}
    contiguous = next(row for row in rows.values() if row["cache"] == "contiguous")
    parts, said = [], []
    for y, title, row in (
        (20, "Reserved for the longest answer", contiguous),
        (100, f"In blocks of {BLOCK_SIZE} tokens", rows[BLOCK_SIZE]),
    ):
        share, running = f"{row['in_use']:.0%}", f"{row['running']:.0f} sequences at once"
        used = round(BAR * row["in_use"], 1)
        said.append(f"{title}: {share} of the cache hold tokens, {running}")
        parts += [
            f'<text x="{LEFT}" y="{y}" class="b">{title}</text>',
            f'<text x="{LEFT + BAR}" y="{y}" class="s e">{running}</text>',
            f'<rect x="{LEFT}" y="{y + 8}" width="{BAR}" height="{HEIGHT}" class="waste"/>',
            f'<rect x="{LEFT}" y="{y + 8}" width="{used}" height="{HEIGHT}" class="B"/>',
            f'<text x="{LEFT + 8}" y="{y + 30}" class="b on">{share}</text>',
        ]
    note = f"{contiguous['num_requests']} requests, counted; hatched: holds no token"
    parts.append(f'<text x="{LEFT}" y="170" class="s">{note}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 182" width="{WIDTH}"'
            ' height="182" role="img" aria-labelledby="t d">',
            '<title id="t">How much of a KV cache holds tokens</title>',
            f'<desc id="d">{"; ".join(said)}.</desc>',
            style(),
            *parts,
            "</svg>\n",
        ]
    )


DRAWN = {"waste_measured.svg": waste_measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__)[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    outdated = []
    for name, draw in DRAWN.items():
        path, text = FIGURES / name, draw()
        if not path.exists() or path.read_text("utf-8") != text:
            outdated.append(name)
            if not check:
                path.write_text(text, "utf-8")
    print(*outdated or ["figures: nothing to do"], sep="\n")
    sys.exit(1 if check and outdated else 0)


if __name__ == "__main__":
    main()

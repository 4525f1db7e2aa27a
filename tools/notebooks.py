"""Write the Colab notebook of every chapter: book/NN_name.md -> book/NN_name.ipynb.

MyST directives and roles become plain Markdown, the first cell installs pagedlab, outputs are left
out, and a cell keeps its id as long as its text stays. `--check` only says which ones are outdated.
"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import latexcodec  # noqa: F401  (registers the codec ulatex)
import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pybtex.database import BibliographyData, Entry, parse_file

from pagedlab._sphinx import PLACEHOLDER_URL

ROOT = Path(__file__).parents[1]

OPENING = re.compile(r"^(?P<fence>:{3,}|`{3,})\{(?P<name>[\w:-]+)\}[ ]*(?P<title>.*)$")
CODE_FENCE = re.compile(r"^ *(?P<fence>`{3,}|~{3,})(?!\{)")
OPTION = re.compile(r"^:(?P<name>[\w-]+):[ ]*(?P<value>.*)$")
LABEL = re.compile(r"^\((?P<label>[\w-]+)\)=$")
ROLE_OR_CODE = re.compile(r"\{(?P<role>[\w:-]+)\}`(?P<text>[^`]+)`|(?P<ticks>`+)(?!`).+?(?P=ticks)")
WITH_TARGET = re.compile(r"^(?P<text>.*?)\s*<(?P<target>[^<>]+)>$", re.DOTALL)

ADMONITIONS = {"attention", "caution", "danger", "hint", "important", "note", "tip", "warning"}
PYTHON_ROLES = {"attr", "class", "data", "exc", "func", "meth", "mod", "obj"}
PLAIN_ROLES = {"abbr", "dfn", "term"}


@dataclass
class Repository:
    """Where the notebooks find the package, figures and pages."""

    url: str
    branch: str

    @property
    def is_placeholder(self) -> bool:
        return self.url == PLACEHOLDER_URL

    def raw(self, path: str) -> str:
        """Address of a file's bytes; relative to book/ while there is no repository."""
        if self.is_placeholder:
            return path
        return f"{self.url}/raw/{self.branch}/book/{path}"

    def page(self, path: str, text: str) -> str:
        return (
            text if self.is_placeholder else f"[{text}]({self.url}/blob/{self.branch}/book/{path})"
        )

    def install_cell(self) -> str:
        if self.is_placeholder:
            advice = 'in a checkout of the book, run: pip install ".[widgets]"'
            action = f"raise ImportError('pagedlab is missing; {advice}') from None"
        else:
            source = f"pagedlab[widgets] @ git+{self.url}@{self.branch}"
            action = f'%pip install --quiet "{source}"'
        return (
            "# Install pagedlab where it is missing, on Colab for instance\n"
            f"try:\n    import pagedlab\nexcept ImportError:\n    {action}"
        )


@dataclass
class Converter:
    """Turns one chapter's MyST into Markdown; `labels` maps what it has named to readable words."""

    chapter: str
    repository: Repository
    bibliography: BibliographyData
    labels: dict[str, str] = field(default_factory=dict)
    num_figures: int = 0

    def collect_labels(self, text: str) -> None:
        """First pass: a role may refer to what comes later."""
        lines = text.splitlines()
        num_figures = 0
        for number, line in enumerate(lines):
            if match := LABEL.match(line):
                heading = next((x for x in lines[number + 1 :] if x.startswith("#")), "")
                self.labels[match["label"]] = heading.lstrip("# ")
            elif match := OPENING.match(line):
                num_figures += match["name"] == "figure"
                words = f"figure {num_figures}" if match["name"] == "figure" else match["title"]
                for option in map(OPTION.match, lines[number + 1 :]):
                    if option is None:
                        break
                    if option["name"] in ("label", "name"):
                        self.labels[option["value"]] = words

    def markdown(self, text: str) -> str:
        """Convert a cell or a directive's body."""
        lines, out = text.splitlines(), []
        while lines:
            line = lines.pop(0)
            if match := OPENING.match(line):
                body = take_until(lines, match["fence"])
                out.append(self.directive(match["name"], match["title"], body))
            elif match := CODE_FENCE.match(line):
                out += [line, *take_until(lines, match["fence"], keep=True)]
            elif not LABEL.match(line) and not line.startswith("% "):
                out.append(line)
        return self.roles_outside_code("\n".join(out)).strip("\n")

    def directive(self, name: str, title: str, body: list[str]) -> str:
        options: dict[str, str] = {}
        while body and (match := OPTION.match(body[0])):
            options[match["name"]] = match["value"]
            body.pop(0)
        content = self.markdown("\n".join(body))
        if name in ("figure", "image"):
            return self.figure(title, options, content)
        if name == "exercise":
            return f"### Exercise: {title}\n\n{content}"
        if name == "solution":
            return details(f"Solution: {self.labels.get(title, title)}", content)
        if name in ADMONITIONS or name in ("admonition", "dropdown", "seealso"):
            heading = title or {"seealso": "See also"}.get(name, name.capitalize())
            if name == "dropdown" or "dropdown" in options.get("class", ""):
                return details(heading, content)
            return quote(f"**{heading}**\n\n{content}")
        if name in ("margin", "sidebar", "epigraph"):
            return quote(f"**{title}**\n\n{content}" if title else content)
        if name == "table":
            return f"**{title}**\n\n{content}" if title else content
        if name == "math":
            return f"$$\n{content}\n$$"
        if name in ("code-block", "code"):
            return "\n".join([f"```{title}", *body, "```"])
        raise ValueError(f"{self.chapter}: directive {{{name}}} has no form in a notebook")

    def figure(self, path: str, options: dict[str, str], caption: str) -> str:
        image = f"![{options.get('alt', '')}]({self.repository.raw(path)})"
        if not caption:
            return image
        self.num_figures += 1
        return f"{image}\n\n**Figure {self.num_figures}.** {caption}"

    def roles_outside_code(self, text: str) -> str:
        """Convert roles, except in fenced blocks and in code spans."""
        parts = re.split(r"(?ms)(^ *(?:> )*```.*?^ *(?:> )*```$)", text)
        parts[::2] = [ROLE_OR_CODE.sub(self.role, part) for part in parts[::2]]
        return "".join(parts)

    def role(self, match: re.Match[str]) -> str:
        role, content = match["role"], match["text"]
        if role is None:
            return match[0]
        named = WITH_TARGET.match(content)
        text, target = (named["text"], named["target"]) if named else (content, content)
        if role in PLAIN_ROLES:
            return text
        if role.startswith("cite"):
            return self.cite(role, content)
        if role in ("ref", "numref", "eq", "prf:ref"):
            words = text if named else self.labels.get(target)
            if words is None:
                raise ValueError(f"{self.chapter}: {{{role}}}`{content}` names nothing on its page")
            return words
        if role == "doc":
            return self.repository.page(f"{target.removesuffix('.md')}.md", text)
        if role.removeprefix("py:") in PYTHON_ROLES:
            return f"`{text.rpartition('.')[2] if text.startswith('~') else text}`"
        if role in ("math", "code", "kbd", "sub", "sup"):
            return {"math": f"${content}$", "code": f"`{content}`"}.get(
                role, f"<{role}>{content}</{role}>"
            )
        raise ValueError(f"{self.chapter}: role {{{role}}} has no form in a notebook")

    def cite(self, role: str, keys: str) -> str:
        works = []
        for key in keys.split(","):
            entry = self.bibliography.entries[key.strip()]
            who, year = authors(entry), entry.fields.get("year")
            if role == "cite:t":
                works.append(f"{who} ({link(year, entry)})" if year else link(who, entry))
            else:
                works.append(link(f"{who}, {year}" if year else who, entry))
        return ", ".join(works) if role == "cite:t" else f"({'; '.join(works)})"


def take_until(lines: list[str], fence: str, keep: bool = False) -> list[str]:
    """Remove from `lines` what comes before the line that closes `fence`, and that line."""
    taken = []
    while lines:
        line = lines.pop(0)
        mark = line.strip()
        if mark and set(mark) == {fence[0]} and len(mark) >= len(fence):
            return [*taken, line] if keep else taken
        taken.append(line)
    raise ValueError(f"expected {fence} to close a block, got the end of the text")


def details(summary: str, content: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>"


def quote(content: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in content.splitlines())


def authors(entry: Entry) -> str:
    """Kwon et al.; Dao and Gu; a work without authors goes by its title."""
    people = entry.persons.get("author", [])
    names = [" ".join([*person.prelast_names, *person.last_names]) for person in people]
    text = " and ".join(names[:2]) if len(names) < 3 else f"{names[0]} et al."
    return re.sub(r"[{}]", "", codecs.decode(text or entry.fields["title"], "ulatex"))


def link(text: str, entry: Entry) -> str:
    doi, url = entry.fields.get("doi"), entry.fields.get("url")
    address = f"https://doi.org/{doi}" if doi else url
    return f"[{text}]({address})" if address else text


def notebook(path: Path, repository: Repository, bibliography: BibliographyData) -> str:
    """The notebook of one chapter, as the text of its file."""
    text = path.read_text("utf-8")
    converter = Converter(path.name, repository, bibliography)
    converter.collect_labels(text)
    cells = [new_code_cell(repository.install_cell())]
    for cell in jupytext.reads(text, fmt="md:myst").cells:
        if cell.cell_type == "code":
            cells.append(new_code_cell(cell.source, metadata=dict(cell.metadata)))
        else:
            cells.append(new_markdown_cell(converter.markdown(cell.source)))
    seen: set[str] = set()
    for cell in cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        cell.id = next(name for n in range(len(cells)) if (name := f"{digest}-{n}") not in seen)
        seen.add(cell.id)
    metadata: dict[str, Any] = {
        "accelerator": "GPU",
        "colab": {"provenance": []},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return nbformat.writes(new_notebook(cells=cells, metadata=metadata)) + "\n"


def notebooks(book: Path, repository: Repository | None = None) -> dict[Path, str]:
    """Each chapter's notebook: its path -> its text."""
    if repository is None:
        config = yaml.safe_load((book.parent / "_config.yml").read_text("utf-8"))["repository"]
        repository = Repository(config["url"].rstrip("/"), config["branch"])
    bibliography = parse_file(str(book / "references.bib"))
    return {
        path.with_suffix(".ipynb"): notebook(path, repository, bibliography)
        for path in sorted(book.glob("[0-9][0-9]_*.md"))
    }


def outdated(book: Path) -> list[Path]:
    """Notebooks that are missing, differ from their chapter, or have none."""
    wanted = notebooks(book)
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    return stale + sorted(set(book.glob("*.ipynb")) - set(wanted))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if any is outdated"
    )
    if parser.parse_args().check:
        stale = outdated(ROOT / "book")
        for path in stale:
            print(f"{path.relative_to(ROOT)} is outdated: run make notebooks", file=sys.stderr)
        return 1 if stale else 0
    for path, text in notebooks(ROOT / "book").items():
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

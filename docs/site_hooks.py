"""What the site needs beside its pages: files of the repository, lists of options, diagrams, tables for phones."""

from __future__ import annotations

import html
import logging
import re
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
from diagrams import svg_of  # noqa: E402

LOG = logging.getLogger("mkdocs.hooks")
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
LANGUAGES = {".py": "python", ".yaml": "yaml"}
SUPPORT_TABLES = "benchmarks/results/support_cpu2.md"
WIDE_PAGES = ("CONTRIBUTING.md", "scale.md", SUPPORT_TABLES)
"""Their tables need the room of the table of contents."""
SHORT_CELL = 20
"""Characters. A phone shows a table of short cells beside a first column that stays; rows of others become blocks."""


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of ``docs/``: Markdown as a page, sources as a page that shows them."""
    linked = {
        target
        for page in files.documentation_pages()
        for target in OUTSIDE.findall(Path(config.docs_dir, page.src_uri).read_text())
    }
    for target in sorted(linked):
        path = ROOT / target
        if not path.is_file():
            LOG.warning("a page links to %s, which does not exist", target)
            continue
        content = path.read_text()
        if path.suffix in LANGUAGES:
            content = f"# {target}\n\n```{LANGUAGES[path.suffix]}\n{content}```\n"
        options = {"inclusion": InclusionLevel.NOT_IN_NAV}
        is_page = path.suffix in LANGUAGES or path.suffix == ".md"
        shown = File.generated(
            config, _page_of(target), content=content if is_page else path.read_bytes(), **options
        )
        if shown.dest_uri in {file.dest_uri for file in files}:
            LOG.warning("%s would replace %s, a page of docs/", target, shown.dest_uri)
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Draw diagrams, let links lead to those pages, and show the meaning of the options that follow ``Options:``."""
    markdown = _with_diagrams(markdown, page.file.src_uri)
    if page.file.src_uri in WIDE_PAGES:
        page.meta.setdefault("hide", []).append("toc")
    if "/" in page.file.src_uri:
        return markdown.replace("../docs/", "../")  # of a page from a folder beside docs/
    markdown = markdown.replace("](docs/", "](")  # of a page that lies beside docs/
    markdown = OUTSIDE.sub(lambda found: f"]({_page_of(found[1])}", markdown)
    return re.sub(r"^Options: (.*?)\n\n", lambda found: _option_list(found[1]), markdown, flags=re.M | re.S)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Prepare tables for phones; colour the words of the support table, and collapse troubleshooting by kind."""
    content = re.sub(r"<table>.*?</table>", lambda found: _responsive(found[0]), content, flags=re.S)
    if page.file.src_uri == SUPPORT_TABLES:
        content = re.sub(
            r"<td([^>]*)>(passed|agrees|refused|differs|not run|not selected)\b", _coloured, content
        )
    if page.file.src_uri == "troubleshooting.md":
        content = re.sub(r"(<h2 .*?</h2>)(.*?)(?=<h2 |\Z)", _collapsed, content, flags=re.S)
    return content


def on_post_build(config: Any) -> None:
    """Serve the pages as they are written too: ``llms.txt`` lists them."""
    for page in Path(config.docs_dir).glob("*.md"):
        shutil.copy(page, config.site_dir)


def _page_of(target: str) -> str:
    return f"{target}.md" if Path(target).suffix in LANGUAGES else target


def _with_diagrams(markdown: str, page: str) -> str:
    """Replace each block of Mermaid by its picture; one that cannot be drawn is a warning, and stays as it is."""
    numbers = count()

    def drawn(block: re.Match[str]) -> str:
        try:
            return f'<div class="diagram-frame">{svg_of(block[1], next(numbers))}</div>'
        except ValueError as error:
            LOG.warning("%s has a Mermaid block that docs/diagrams.py cannot draw: %s", page, error)
            return block[0]

    return MERMAID.sub(drawn, markdown)


def _option_list(names: str) -> str:
    """Options of the strategy with type and default, as in its signature, and meaning, as its docstring has them."""
    path = ROOT / "lightning_automodel" / "strategy.py"
    strategy = griffe.visit("strategy", filepath=path, code=path.read_text())["AutomodelStrategy"]
    options = strategy["__init__"].parameters
    sections = strategy.docstring.parse("google", warn_missing_types=False, warn_unknown_params=False)
    parsed = [entry for section in sections if section.kind.value == "parameters" for entry in section.value]
    meanings = {entry.name: " ".join(entry.description.split()) for entry in parsed}
    items = []
    for name in re.findall(r"`(\w+)`", names):
        if name not in meanings:
            LOG.warning("the docstring of AutomodelStrategy has no option %s", name)
            continue
        option = options[name]
        items.append(f"- **`{name}`** `{option.annotation}` = `{option.default}`<br>{meanings[name]}")
    return "\n".join(items) + "\n\n"


def _responsive(table: str) -> str:
    """In a container for the stylesheet; in a table of long cells, each but the first knows the title of its column."""
    titles = [html.escape(_text(title)) for title in re.findall(r"<th\b.*?</th>", table, flags=re.S)]
    rows = [
        re.findall(r"<td.*?</td>", row, flags=re.S) for row in re.findall(r"<tr>.*?</tr>", table, flags=re.S)
    ]
    if all(len(_text(cell)) <= SHORT_CELL for row in rows for cell in row[1:]):
        return f'<div class="scrolled-table">{table}</div>'

    def titled(row: re.Match[str]) -> str:
        columns = iter(titles)
        return re.sub(r"<td", lambda _: f'<td data-title="{next(columns)}"', row[0])

    return f'<div class="stacked-table">{re.sub(r"<tr>.*?</tr>", titled, table, flags=re.S)}</div>'


def _text(element: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", element))


def _coloured(found: re.Match[str]) -> str:
    return f'<td{found[1]} class="support-{found[2].replace(" ", "-")}">{found[2]}'


def _collapsed(found: re.Match[str]) -> str:
    """A section below its heading, closed. A link into it opens it, and so does the search."""
    count = f'<span class="kind-count">{found[2].count("<h3 ")} entries</span>'
    return f'<details class="kind"><summary>{found[1]}{count}</summary>{found[2]}</details>'

"""How large the package is, beside its marks: a report for maintainers, which no test depends on.

`python -m tests.house` prints it in a second. `python -m tests.house --spine` also trains on two ranks, and prints
what a micro-batch runs from its loss to its final gradients.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lightning_automodel
from tests.gradients.spine import print_routes
from tests.private_names import private_names_by_file

PACKAGE = Path(lightning_automodel.__file__).parent
ROOT = PACKAGE.parent
LONG_LINE = 110
LONG_FUNCTION = 40
MARKS = {
    "sharding, internals": 22_000,
    "gradients": 15_000,
    "checkpoint, resume, data, launch": 25_500,
    "distributed, failure": 14_500,
    "context_parallel": 5_000,
    "plan": 4_900,
    "callbacks": 13_000,
}
"""Rooms, and the tokens that they should have at most."""
PACKAGE_MARK = 114_000
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def count_tokens(text: str) -> int:
    """Tokens of Python without comments, docstrings, line ends and indentation."""
    docstrings = set(_docstring_lines(ast.parse(text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in docstrings for token in tokens)


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def count_long_functions(tree: ast.Module) -> int:
    """Functions of more than 40 lines of code and comments."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(_code_lines(function) > LONG_FUNCTION for function in functions)


def tokens_by_room() -> Counter[str]:
    """Tokens of every sub-package, and of every module that lies in none."""
    tokens: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        tokens[room] += count_tokens(path.read_text())
    return tokens


def _print_tokens() -> None:
    tokens = tokens_by_room()
    print("tokens    mark")
    for rooms, mark in MARKS.items():
        number = sum(tokens.pop(room) for room in rooms.split(", "))
        print(f"{number:6,}  {mark:6,}  {rooms}")
    for room, number in tokens.most_common():
        print(f"{number:6,}          {room}")
    print(f"{tokens_by_room().total():,} of {PACKAGE_MARK:,} tokens in the package")


def _num_lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def _num_words(folder: Path) -> int:
    return sum(len(path.read_text().split()) for path in folder.rglob("*.md"))


def _print_shape() -> None:
    """What makes code hard to read, and the proportions of package, tests and documentation."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts]
    long_lines = sum(len(line) >= LONG_LINE for text in texts for line in text.splitlines())
    conditional = sum(isinstance(node, ast.IfExp) for tree in trees for node in ast.walk(tree))
    print(f"{_num_lines(PACKAGE):,} lines in the package, of which {long_lines} of 110 characters and more")
    print(f"{sum(map(count_long_functions, trees))} functions of more than {LONG_FUNCTION} lines")
    print(f"{conditional} conditional expressions")
    print(f"{_num_lines(ROOT / 'tests'):,} lines of tests, {_num_words(ROOT / 'docs'):,} words in docs")


def _print_private_names() -> None:
    names = private_names_by_file()
    files = [f"internals/{name}.py" for name in ("lightning", "logged_values", "metrics")]
    of_lightning = set().union(*(names.pop(file) for file in files))
    of_torch = set().union(*names.values())
    print(f"{len(of_torch)} private names of torch, {len(of_lightning)} of Lightning and TorchMetrics")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spine", action="store_true", help="also print what a micro-batch runs")
    arguments = parser.parse_args()
    _print_tokens()
    _print_shape()
    _print_private_names()
    if arguments.spine:
        print_routes()


if __name__ == "__main__":
    main()

"""The package stays as airy as it is: what makes code dense is counted, and may only go down."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_automodel

PACKAGE = Path(lightning_automodel.__file__).parent
LONG_LINE = 110
LONG_FUNCTION = 40
MOST_ARGUMENTS = 6
LIMITS = {
    "tokens": 158_300,
    "lines of 110 characters and more, per thousand": 18,
    "assignments of a tuple to a tuple": 0,
    "conditional expressions": 145,
    "loops over `each`": 0,
    "functions of more than 40 lines": 5,
    "constructors of more than six arguments": 1,
}
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


def count_tuple_assignments(tree: ast.Module) -> int:
    """``a, b = c, d``, but not swaps such as ``a, b = b, a``."""
    number = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                written = {ast.unparse(element) for element in target.elts}
                read = {ast.unparse(element) for element in node.value.elts}
                number += written != read
    return number


def count_loops_over_each(tree: ast.Module) -> int:
    """Loops and comprehensions whose variable is no noun."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension)]
    return sum(
        any(isinstance(name, ast.Name) and name.id == "each" for name in ast.walk(loop.target))
        for loop in loops
    )


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


def count_wide_constructors(tree: ast.Module) -> int:
    """Of classes that take keywords from users, and of those that do not."""
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    return sum(len(init.args.args) + len(init.args.kwonlyargs) > 1 + MOST_ARGUMENTS for init in found)


@functools.cache
def counts() -> dict[str, float]:
    """What is counted, over all files of the package."""
    texts = [path.read_text() for path in sorted(PACKAGE.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    lines = [line for text in texts for line in text.splitlines()]
    return {
        "tokens": sum(map(count_tokens, texts)),
        "lines of 110 characters and more, per thousand": 1000
        * sum(len(line) >= LONG_LINE for line in lines)
        / len(lines),
        "assignments of a tuple to a tuple": sum(map(count_tuple_assignments, trees)),
        "conditional expressions": sum(
            isinstance(node, ast.IfExp) for tree in trees for node in ast.walk(tree)
        ),
        "loops over `each`": sum(map(count_loops_over_each, trees)),
        "functions of more than 40 lines": sum(map(count_long_functions, trees)),
        "constructors of more than six arguments": sum(map(count_wide_constructors, trees)),
    }


@pytest.mark.parametrize("what", LIMITS)
def test_density(what: str) -> None:
    """A limit that is met with room to spare is lowered."""
    assert counts()[what] <= LIMITS[what]


def test_what_is_counted() -> None:
    """Each count finds what it looks for."""
    text = '"""Not counted."""\na, b = c, d  # nor this\na, b = b, a\ne = [each for each in f] if g else h\n'
    tree = ast.parse(text)
    assert count_tokens(text) == 7 + 7 + 13
    assert count_tuple_assignments(tree) == 1
    assert count_loops_over_each(tree) == 1
    assert count_long_functions(ast.parse("def f():\n" + "    pass\n" * LONG_FUNCTION)) == 1
    documented = "def f():\n" + '    """Says\n    what.\n    """\n' + "    pass\n" * (LONG_FUNCTION - 1)
    assert count_long_functions(ast.parse(documented)) == 0
    wide = ast.parse(
        "def __init__(self, a, b, c, d, e, f, *, g): ...\ndef __init__(self, a, b, c, d, e, f): ..."
    )
    assert count_wide_constructors(wide) == 1


if __name__ == "__main__":
    for name, number in counts().items():
        print(f"{number:10,.0f} {name}")

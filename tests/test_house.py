"""The report of `tests/house.py` counts what it says."""

from __future__ import annotations

import ast

from tests.house import LONG_FUNCTION, count_long_functions, count_tokens


def test_tokens() -> None:
    text = '"""Not counted."""\na, b = c, d  # nor this\nif e:\n    f = 1\n'
    assert count_tokens(text) == 7 + 3 + 3


def test_docstrings_do_not_make_a_function_long() -> None:
    body = "    pass\n" * LONG_FUNCTION
    assert count_long_functions(ast.parse(f"def f():\n{body}")) == 1
    body = '    """Says\n    what.\n    """\n' + "    pass\n" * (LONG_FUNCTION - 1)
    assert count_long_functions(ast.parse(f"def f():\n{body}")) == 0

"""How far it is from a loss to its final gradient."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

import pytest

from lightning_automodel import AutomodelStrategy
from lightning_automodel.failure.supervisor import Supervisor
from lightning_automodel.micro_batch import MicroBatches
from tests.gradients.spine import OPTIONS, route
from tests.rank_pool import RankPool

LIMITS = {"sharded": (53, 11, 15), "replicated": (38, 9, 11)}
"""Functions, files, and returns to a file that was left, of all that Python enters of the package."""


def _counts(name: str) -> tuple[tuple[int, int, int], str]:
    found = route(OPTIONS[name])
    return (len(found.functions), len(found.files), found.num_returns), str(found)


@pytest.mark.every_case
@pytest.mark.parametrize("name", OPTIONS)
def test_counts(pool2: RankPool, name: str) -> None:
    """Of a micro-batch that ends its window, between the return of `training_step` and `on_after_backward`."""
    for counts, described in pool2.run(_counts, name):
        assert all(count <= limit for count, limit in zip(counts, LIMITS[name], strict=True)), described


@pytest.mark.parametrize(
    "route",
    [MicroBatches.backward, MicroBatches._finish, AutomodelStrategy.save_checkpoint, Supervisor._leave],
)
def test_routes_read_from_top_to_bottom(route: Callable[..., object]) -> None:
    """A micro-batch, a save, and a rank that fails: at most 60 lines, one context, no function inside."""
    function = ast.parse(textwrap.dedent(inspect.getsource(route))).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno < 60
    assert _depth(function) <= 1
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    assert inner == [function]


def _depth(node: ast.AST) -> int:
    """How many contexts are open at once; one `with` may open several."""
    below = max(map(_depth, ast.iter_child_nodes(node)), default=0)
    return below + (len(node.items) if isinstance(node, ast.With) else 0)

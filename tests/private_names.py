"""Private names of torch and Lightning that the package uses, by file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lightning_automodel

PACKAGE = Path(lightning_automodel.__file__).parent
# Documented in spite of their names (namedtuple, os, sys, torch's foreach functions and modes, the end of
# `val_dataloaders`), or transformers'.
NOT_PRIVATE = re.compile(
    r"_fields|_replace|_exit|_current_frames|_python_dispatch|_foreach_.*|_fused_.*|_no_split_modules|_init_weights|_gradient_checkpointing_func|_attn_implementation|_dataloaders"
)


def _is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name.isidentifier()
        and not NOT_PRIVATE.fullmatch(name)
    )


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package itself defines: functions, classes, variables, and attributes of ``self``."""
    own = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return own


def foreign_names(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of others: imported ones, attributes, and strings that ``getattr`` and the like could take."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_automodel"):
            found |= {name for alias in node.names for name in (*(node.module or "").split("."), alias.name)}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
            found.add(node.value)
    return {name for name in found if _is_private(name)}


def private_names_by_file() -> dict[str, set[str]]:
    """Those of every file of the package that has any; paths are relative to the package."""
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    }
    own = _own_names(list(trees.values()))
    return {file: names for file, tree in trees.items() if (names := foreign_names(tree, own))}

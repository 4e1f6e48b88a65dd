"""Takes nested collections apart into their tensors and the rest, and puts them together again."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

PLACE = "lightning_automodel_place"
"""Only key of a dict that takes a tensor's place in a tree; its value is the tensor's key."""

Path = tuple[str | int, ...]


def take_apart(tree: Any, path: Path = (), elsewhere: Set[str] = frozenset()) -> tuple[Any, dict[Path, Any]]:
    """``tree`` with a place for each tensor, and all leaves by their paths.

    Dicts, and lists and tuples that hold tensors or dicts, are taken apart, like in
    ``torch.distributed.checkpoint``; anything else is a leaf. A tensor's key is its path joined by dots.
    Each key belongs to one leaf, and none is among the keys of tensors ``elsewhere``.
    """
    leaves: dict[Path, Any] = {}
    taken = set(elsewhere)

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            parts = _parts(value)
            return dict_like(value, {key: walk(item, (*path, parts[key])) for key, item in value.items()})
        if _is_taken_apart(value):
            return _list_like(value, [walk(item, (*path, index)) for index, item in enumerate(value)])
        while joined(path) in taken:  # {"a.b": ..., "a": {"b": ...}}
            path = (*path[:-1], f"{path[-1]}'")
        taken.add(joined(path))
        leaves[path] = value
        if isinstance(value, Tensor):
            return {PLACE: joined(path)}
        return value

    return walk(tree, path), leaves


def put_together(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """A copy of ``tree`` with ``tensor(key)`` for each place in it."""
    if isinstance(tree, Mapping):
        if tree.keys() == {PLACE}:
            return tensor(tree[PLACE])
        return dict_like(tree, {key: put_together(item, tensor) for key, item in tree.items()})
    if _is_taken_apart(tree):
        return _list_like(tree, [put_together(item, tensor) for item in tree])
    return tree


def places(tree: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The path and key of each tensor that has a place in ``tree``."""
    if isinstance(tree, Mapping):
        if tree.keys() == {PLACE}:
            yield path, tree[PLACE]
            return
        parts = _parts(tree)
        for key, item in tree.items():
            yield from places(item, (*path, parts[key]))
    elif _is_taken_apart(tree):
        for index, item in enumerate(tree):
            yield from places(item, (*path, index))


def joined(path: Path) -> str:
    """The key of the tensor at ``path``."""
    return ".".join(map(str, path))


def nested(leaves: Mapping[Path, Any]) -> Any:
    """The nested dicts and lists of ``leaves`` by path; keys become strings, numbers are indices of lists."""
    if () in leaves:
        return leaves[()]
    below: dict[Any, dict[Path, Any]] = {}
    for (first, *rest), leaf in leaves.items():
        below.setdefault(first, {})[tuple(rest)] = leaf
    built = {key: nested(leaves_below) for key, leaves_below in below.items()}
    if set(built) == set(range(len(built))) and built:
        return [built[index] for index in range(len(built))]
    return {str(key): item for key, item in built.items()}


def hides_shards(value: Any) -> bool:
    """Whether an object holds sharded tensors; pickling would keep only this rank's part of them."""
    survey = _Survey()
    with contextlib.suppress(Exception):  # saving reports an object that cannot be pickled
        survey.dump(value)
    return survey.has_shards


def _is_taken_apart(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(item, Tensor) or _is_taken_apart(item) for item in value)


def _parts(value: Mapping[Any, Any]) -> dict[Any, str]:
    """The part of a path for each key: strings that differ even if both 1 and "1" are keys."""
    parts: dict[Any, str] = {}
    used: set[str] = set()
    for key in value:
        part = str(key)
        while part in used:
            part += "'"
        used.add(part)
        parts[key] = part
    return parts


def dict_like(value: Any, items: dict[Any, Any]) -> Any:
    """A dict of the class of ``value`` with these ``items``, which have its keys."""
    if type(value) is dict:
        return items
    if not isinstance(value, dict):
        return type(value)(items)
    new = copy.copy(value)  # works for defaultdicts and users' classes too
    new.update(items)
    return new


def _list_like(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    return type(value)(items)


class Nowhere:
    """A file for :class:`pickle.Pickler` that discards what is written."""

    def write(self, content: Any) -> int:
        """Discard ``content``."""
        return len(content)


class _Survey(pickle.Pickler):
    """Looks for sharded tensors."""

    def __init__(self) -> None:
        super().__init__(Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self.has_shards = False

    @override
    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, DTensor):
            self.has_shards = True
        if isinstance(value, Tensor):
            return 0
        return None

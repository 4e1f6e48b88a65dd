"""Nested collections taken apart into their tensors and the rest, and put together again."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

PLACE = "lightning_automodel_place"
"""The only key of a dict that stands in a tree for a tensor; its value is the tensor's key."""

Path = tuple[str | int, ...]


def take_apart(tree: Any, path: Path = (), elsewhere: Set[str] = frozenset()) -> tuple[Any, dict[Path, Any]]:
    """``tree`` with a place for each tensor, and all leaves by their paths.

    Dicts, and lists and tuples that hold tensors or dicts, are taken apart, as ``torch.distributed.checkpoint`` does;
    whatever else is a leaf. Keys of paths, joined by dots, are those of the tensors: each is the path of one leaf, and
    none is among those that tensors ``elsewhere`` have.
    """
    leaves: dict[Path, Any] = {}
    taken = set(elsewhere)

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            parts = _parts(value)
            return dict_like(value, {key: walk(each, (*path, parts[key])) for key, each in value.items()})
        if _is_taken_apart(value):
            return _list_like(value, [walk(each, (*path, index)) for index, each in enumerate(value)])
        while joined(path) in taken:  # {"a.b": ..., "a": {"b": ...}}
            path = (*path[:-1], f"{path[-1]}'")
        taken.add(joined(path))
        leaves[path] = value
        return {PLACE: joined(path)} if isinstance(value, Tensor) else value

    return walk(tree, path), leaves


def put_together(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """A copy of ``tree`` with ``tensor(key)`` for each place in it."""
    if isinstance(tree, Mapping):
        if tree.keys() == {PLACE}:
            return tensor(tree[PLACE])
        return dict_like(tree, {key: put_together(each, tensor) for key, each in tree.items()})
    if _is_taken_apart(tree):
        return _list_like(tree, [put_together(each, tensor) for each in tree])
    return tree


def places(tree: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Path and key of each tensor that has a place in ``tree``."""
    if isinstance(tree, Mapping):
        if tree.keys() == {PLACE}:
            yield path, tree[PLACE]
            return
        parts = _parts(tree)
        for key, each in tree.items():
            yield from places(each, (*path, parts[key]))
    elif _is_taken_apart(tree):
        for index, each in enumerate(tree):
            yield from places(each, (*path, index))


def joined(path: Path) -> str:
    """The key of the tensor at ``path``."""
    return ".".join(map(str, path))


def nested(leaves: Mapping[Path, Any]) -> Any:
    """The dicts and lists of ``leaves`` by path, keys in strings; numbers in a path are places in a list."""
    if () in leaves:
        return leaves[()]
    below: dict[Any, dict[Path, Any]] = {}
    for (first, *rest), leaf in leaves.items():
        below.setdefault(first, {})[tuple(rest)] = leaf
    built = {key: nested(each) for key, each in below.items()}
    if set(built) == set(range(len(built))) and built:
        return [built[index] for index in range(len(built))]
    return {str(key): each for key, each in built.items()}


def hides_shards(value: Any) -> bool:
    """Whether an object holds sharded tensors, of which pickling would keep this rank's part."""
    survey = _Survey()
    with contextlib.suppress(Exception):  # saving says what cannot be pickled
        survey.dump(value)
    return survey.has_shards


def _is_taken_apart(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    is_list = isinstance(value, (list, tuple))
    return is_list and any(isinstance(each, Tensor) or _is_taken_apart(each) for each in value)


def _parts(value: Mapping[Any, Any]) -> dict[Any, str]:
    """Of paths, for each key: strings that differ, also where 1 and "1" are keys."""
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
    """A dict of the class of ``value`` with its keys, and these ``items``."""
    if type(value) is dict:
        return items
    if not isinstance(value, dict):
        return type(value)(items)
    found = copy.copy(value)  # of defaultdicts and users' classes too
    found.update(items)
    return found


def _list_like(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, content: Any) -> int:
        return len(content)


class _Survey(pickle.Pickler):
    """Looks for sharded tensors."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self.has_shards = False

    @override
    def persistent_id(self, value: Any) -> int | None:
        self.has_shards = self.has_shards or isinstance(value, DTensor)
        return 0 if isinstance(value, Tensor) else None

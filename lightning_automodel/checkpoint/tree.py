"""A checkpoint as one tree: Lightning's dict, with an :class:`Entry` for what lies in shards."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.internals.dtensor import plain_access, tree_map_only
from lightning_automodel.sharding.whole_copies import write_part

TreePath = tuple[Any, ...]
PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype)

_KNOWN = {"__get__", "size", "dim", "numel"}
"""Functions of torch that need no values."""


class Entry(Tensor):
    """A tensor of a directory of which shape and dtype are known. What computes with it reads the values.

    Reading is done by this rank alone. Hooks may rename, copy, change and pickle entries like any tensors;
    those that they leave alone are read as shards.

    Attributes:
        key: Its key among the shards.
        value: The whole tensor, once somebody has asked for it, and what was made of it in place.
        reader: Returns its values.
    """

    device = torch.device("cpu")  # of what it reads
    is_meta = False
    refuses_use = False  # a shard that it is used with leaves the call to this class
    key: str
    value: Tensor | None = None
    reader: Callable[["Entry"], Tensor]

    def read(self) -> Tensor:
        """Its values, whole and in host memory, which it keeps."""
        if self.value is None:
            self.value = self.reader(self)
        return self.value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in _KNOWN:
            with plain_access():
                result = function(*args, **(kwargs or {}))
            if not isinstance(result, Tensor):  # .data and .T are of the values
                return result
        args, kwargs = tree_map_only(Entry, Entry.read, (args, kwargs or {}))
        return function(*args, **kwargs)


def mapped(tree: Any, change: Callable[[TreePath, Any], Any], path: TreePath = ()) -> Any:
    """A copy of ``tree`` with ``change(path, leaf)`` for each leaf, in collections of the same classes.

    Collections are dicts, lists and tuples. A named tuple is a leaf.
    """
    if isinstance(tree, dict):
        new = copy.copy(tree)  # keeps a default factory, and the modules' versions of a state dict
        items = {key: mapped(value, change, (*path, key)) for key, value in tree.items()}
        dict.update(new, items)  # a Counter's own would add
        return new
    if type(tree) not in (list, tuple):
        return change(path, tree)
    return type(tree)([mapped(value, change, (*path, index)) for index, value in enumerate(tree)])


def placed(tree: Any, make: Callable[[TreePath, Any], Tensor | None]) -> tuple[Any, dict[str, Tensor]]:
    """A copy of ``tree`` in which ``make(path, leaf)`` takes the place of leaves, unless that is None.

    It holds their values, but of entries that nobody has computed with. Also returned is what is to be read of these:
    what each takes the place of, by its key.
    """
    targets: dict[str, Tensor] = {}

    def place(path: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, Entry) and leaf.value is not None:
            leaf = leaf.value
        into = make(path, leaf)
        if into is None:
            return leaf
        if isinstance(leaf, Entry) and leaf.key not in targets:
            targets[leaf.key] = into
        else:  # values, or an entry under a second name, which reads itself
            write_part(into, leaf)
        return into

    return mapped(tree, place), targets


def moved(tree: Any, device: str | torch.device) -> Any:
    """A copy of ``tree`` with its tensors on ``device``."""
    return mapped(tree, lambda _, leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def mapped_by_key(tree: Any, change: Callable[[str, TreePath, Any], Any]) -> Any:
    """A copy of ``tree`` with ``change(key, path, leaf)`` for each leaf.

    No two leaves have one key, which is the path as text, and which two paths may share.
    """
    used: set[str] = set()

    def change_leaf(path: TreePath, leaf: Any) -> Any:
        key = ".".join(map(str, path))
        while key in used:  # {"a.b": ..., "a": {"b": ...}}
            key += "'"
        used.add(key)
        return change(key, path, leaf)

    return mapped(tree, change_leaf)


def leaves(tree: Any) -> list[tuple[str, TreePath, Any]]:
    """Each leaf of ``tree`` with its key and its path."""
    found: list[tuple[str, TreePath, Any]] = []
    mapped_by_key(tree, lambda *leaf: found.append(leaf))
    return found


def check_pickled(tree: Any) -> None:
    """Raise CheckpointError if a leaf cannot be pickled, or hides shards, of which a part would be saved."""
    for _, path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            continue
        try:
            _WithoutShards(io.BytesIO()).dump(leaf)
        except Exception as error:  # objects can raise anything
            place = "".join(f"[{part!r}]" for part in path)
            raise CheckpointError(f"checkpoint{place} cannot be pickled: {error}") from error


class _WithoutShards(pickle.Pickler):
    """Refuses sharded tensors."""

    @override
    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, DTensor):
            raise CheckpointError(
                "it is an object that holds sharded tensors, of which each rank has a part: keep them in"
                " dicts, lists or tuples, save tensor.full_tensor(), called on every rank, or pass"
                " data_parallel='ddp', under which they are whole"
            )
        if isinstance(value, Tensor):
            return 0  # its values are not pickled
        return None

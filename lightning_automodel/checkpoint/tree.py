"""A checkpoint as one tree: Lightning's dict, with an :class:`Entry` for what lies in shards."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.internals.dtensor import plain_access, tree_map_only

Path = tuple[Any, ...]
PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype)

_KNOWN = {
    "__get__",
    "size",
    "dim",
    "numel",
    "stride",
    "is_floating_point",
    "is_complex",
    "element_size",
    "__len__",
}
"""Functions of torch that need no values."""


class Entry(Tensor):
    """A tensor of a directory of which shape and dtype are known. What computes with it reads the values.

    Reading is done by this rank alone. Hooks may rename, copy, change and pickle entries like any tensors;
    those that they leave alone are read as shards.

    Attributes:
        key: Its key among the shards.
        value: The whole tensor, once somebody has asked for it, and what was made of it in place.
    """

    device = torch.device("cpu")  # of what it reads
    is_meta = False
    refuses_use = False  # a shard that it is used with leaves the call to this class
    key: str
    value: Tensor | None
    _read: Callable[["Entry"], Tensor]

    @classmethod
    def of(cls, meta: Tensor, key: str, read: Callable[["Entry"], Tensor]) -> "Entry":
        """The entry with this ``key``, like a tensor without values; ``read`` returns its values."""
        entry = meta.as_subclass(cls)
        entry.key = key
        entry.value = None
        entry._read = read
        return entry

    def read(self) -> Tensor:
        """Its values, whole and in host memory, which it keeps."""
        if self.value is None:
            self.value = self._read(self)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self.value is None:  # read by itself: what changes this one in place must not change the copy
            meta = torch.empty(self.shape, dtype=self.dtype, device="meta")
            return Entry.of(meta, self.key, self._read)
        return copy.deepcopy(self.value, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


def _is_list(tree: Any) -> bool:
    return type(tree) in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf of nested dicts, lists, tuples and named tuples, with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif _is_list(tree):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def mapped(tree: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy of ``tree`` with ``change(path, leaf)`` for each leaf, in collections of the same classes."""
    if isinstance(tree, dict):
        new = copy.copy(tree)  # keeps a default factory, and the modules' versions of a state dict
        items = {key: mapped(value, change, (*path, key)) for key, value in tree.items()}
        dict.update(new, items)  # a Counter's own would add
        return new
    if _is_list(tree):
        values = [mapped(value, change, (*path, index)) for index, value in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*values)
        return type(tree)(values)
    return change(path, tree)


def keyed_leaves(tree: Any) -> Iterator[tuple[str, Path, Any]]:
    """Each leaf of ``tree`` with its path, and a key that no other has: of the path, which two may share as text."""
    used: set[str] = set()
    for path, leaf in leaves(tree):
        key = ".".join(map(str, path))
        while key in used:  # {"a.b": ..., "a": {"b": ...}}
            key += "'"
        used.add(key)
        yield key, path, leaf


def mapped_tensors(tree: Any, change: Callable[[str, Path, Tensor], Any]) -> Any:
    """A copy of ``tree`` with ``change(key, path, tensor)`` for each tensor."""
    changed = {
        path: change(key, path, leaf) for key, path, leaf in keyed_leaves(tree) if isinstance(leaf, Tensor)
    }
    return mapped(tree, lambda path, leaf: changed.get(path, leaf))


def check_pickled(tree: Any) -> None:
    """Raise CheckpointError if a leaf cannot be pickled, or hides shards, of which a part would be saved."""
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            continue
        place = "".join(f"[{part!r}]" for part in path)
        survey = _Survey()
        try:
            survey.dump(leaf)
        except Exception as error:  # objects can raise anything
            raise CheckpointError(f"checkpoint{place} cannot be pickled: {error}") from error
        if survey.has_shards:
            raise CheckpointError(
                f"checkpoint{place} holds sharded tensors in an object, of which each rank has a"
                " part: keep them in dicts, lists or tuples, save tensor.full_tensor(), called on"
                " every rank, or pass data_parallel='ddp', under which they are whole"
            )


class _Survey(pickle.Pickler):
    """Looks for sharded tensors in what it pickles."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        self.has_shards = False

    @override
    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, DTensor):
            self.has_shards = True
        if isinstance(value, Tensor):
            return 0  # its values are not pickled
        return None

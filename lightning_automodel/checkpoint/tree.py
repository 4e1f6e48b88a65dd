"""A checkpoint as one tree: Lightning's dict, with an :class:`Entry` for what lies in shards, and the model by name."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.internals.dtensor import plain_access, tree_map_only
from lightning_automodel.internals.torch import module_versions, with_module_versions, without_wrappers
from lightning_automodel.sharding.whole_copies import write_part

MODEL = "state_dict"
"""Key of the model's state in a checkpoint."""

OPTIMIZERS = "optimizer_states"
"""Key of the optimizers' states in a checkpoint."""

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


def whole(state: Any, keep: bool) -> Any:
    """``state``, nested collections, with whole tensors on the CPU. A collective if any tensor is sharded.

    It gathers one tensor at a time: besides the shards, a rank holds one whole tensor on its device. A rank
    with ``keep`` also holds the whole state in host memory; the others get no values.
    """

    def gathered(_: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        if not keep:
            return None
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return leaf.cpu()
        return leaf

    return mapped(state, gathered)


def copied(state: Any) -> Any:
    """A copy of ``state`` in host memory that training does not change, pinned for accelerators' tensors.

    torch's ``DefaultStager`` (2.13 to 2.15), which ``async_save`` uses, forgets that a tensor is a conjugate
    or negative view of its storage, cannot copy quantised tensors or tensors without a storage, copies the
    whole storage of a view, and pins memory for CUDA only.
    """

    def copy_of(_: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            # From an accelerator into pinned memory: through pageable memory the host would wait for each tensor.
            return leaf.detach().to("cpu", non_blocking=True, copy=True)
        return copy.deepcopy(leaf)

    copies = mapped(state, copy_of)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return copies


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


# --- The model's part ----------------------------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, Any]:
    """State dict of the model's own tensors, not copies, under names without wrappers.

    CheckpointError if two different entries have the same one.
    """
    state = model.state_dict()
    named = {without_wrappers(name): value for name, value in state.items()}
    if len(named) < len(state):
        raise CheckpointError(
            "two entries of the state have one name without the prefixes of torch.compile and activation"
            " checkpointing: rename one of the modules"
        )
    return with_module_versions(named, module_versions(state))


def under_own_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` for ``model.load_state_dict``: names and modules' versions under the model's names with wrappers."""
    own_names = {without_wrappers(name): name for name in model.state_dict()}
    renamed = {own_names.get(without_wrappers(name), name): value for name, value in state.items()}
    paths = {path: without_wrappers(f"{path}.").removesuffix(".") for path, _ in model.named_modules()}
    versions = module_versions(state)
    own_versions = {path: versions[name] for path, name in paths.items() if name in versions}
    return with_module_versions(renamed, own_versions)

"""A directory's states as Lightning's hooks see them, and the directory with the hooks' edits."""

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.optimizers import Names, by_name, flat, optimizer_key
from lightning_automodel.checkpoint.shard_directory import ShardDirectory
from lightning_automodel.checkpoint.single_file import fill_tree
from lightning_automodel.checkpoint.state_dict import MODEL, OPTIMIZERS, Saved
from lightning_automodel.checkpoint.trees import PLACE, joined, places, put_together, take_apart
from lightning_automodel.internals.torch import without_wrappers


class _Unread:
    """Stands for a value that no hook has read yet; ``tree`` has a place for each tensor in it."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


class LazyDict(dict[Any, Any]):
    """A dict of a directory's states that reads each tensor, whole, when a hook asks for it.

    Reading is not a collective. The dict keeps what was read, since the hook may change it in place; it is
    then loaded instead of the shards.

    Args:
        tree: The dict with a place for each tensor.
        read: Reads the tensor of a place by its key.
    """

    def __init__(self, tree: Mapping[Any, Any], read: Callable[[str], Tensor]) -> None:
        super().__init__({key: _Unread(subtree) for key, subtree in tree.items()})
        self._read = read

    def unread(self) -> dict[Any, Any]:
        """The parts of the tree that no hook has read, by key."""
        stored = {key: super(LazyDict, self).__getitem__(key) for key in self.keys()}
        return {key: value.tree for key, value in stored.items() if isinstance(value, _Unread)}

    @override
    def __getitem__(self, name: Any) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, _Unread):
            tree = value.tree
            if type(tree) is dict and tree.keys() != {PLACE}:
                value = LazyDict(tree, self._read)
            else:
                value = put_together(tree, self._read)
            self[name] = value
        return value

    @override
    def __iter__(self) -> Iterator[Any]:
        # Overridden so that ``dict(state)`` and ``{**state}`` read each value through __getitem__.
        return super().__iter__()

    @override
    def items(self) -> Any:
        return ItemsView(self)

    @override
    def values(self) -> Any:
        return ValuesView(self)

    @override
    def get(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    @override
    def setdefault(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    @override
    def pop(self, name: Any, *default: Any) -> Any:
        if name in self:
            _ = self[name]  # reads the value
        return super().pop(name, *default)

    @override
    def popitem(self) -> tuple[Any, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    @override
    def copy(self) -> dict[Any, Any]:
        return dict(self)

    @override
    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    @override
    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def lazy_model(directory: ShardDirectory) -> LazyDict:
    """``checkpoint["state_dict"]`` of a directory. Not a collective."""
    entries = directory.model
    state = LazyDict({name: {PLACE: f"{MODEL}.{name}"} for name in entries}, directory.read_alone)
    for name, entry in entries.items():
        if entry is None:
            state[name] = directory.read_model_alone(name)
    return state


def lazy_optimizers(directory: ShardDirectory) -> list[dict[str, Any]]:
    """``checkpoint["optimizer_states"]`` of a directory, with parameters by name. Not a collective."""
    return [LazyDict(tree, directory.read_alone) for tree in directory.optimizer_states()]


def _as_tree(value: Any) -> Any:
    """``value`` with places for the tensors that no hook has read."""
    if isinstance(value, LazyDict):
        unread = value.unread()
        return {key: unread[key] if key in unread else _as_tree(value[key]) for key in value}
    if type(value) is dict:
        return {key: _as_tree(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_tree(item) for item in value)
    return value


class EditedDirectory(Saved):
    """A directory with the edits of hooks: the values that they read or set are loaded from memory.

    Args:
        directory: The directory.
        checkpoint: Lightning's checkpoint after the hooks.
        names: Names of each optimizer's parameters by group, for states that number them.
    """

    def __init__(
        self,
        directory: ShardDirectory,
        checkpoint: Mapping[str, Any],
        names: Iterable[Names] = (),
    ) -> None:
        self.path = directory.path
        self.rest = directory.rest
        self.module_versions = directory.module_versions
        self.world_size = directory.world_size
        self._directory = directory
        state = checkpoint[MODEL]
        unread: dict[Any, Any] = {}
        if isinstance(state, LazyDict):
            unread = state.unread()
        self._edited: dict[str, Any] = {
            f"{MODEL}.{without_wrappers(name)}": state[name] for name in state if name not in unread
        }
        self._optimizers = self._edited_optimizers(checkpoint.get(OPTIMIZERS, []), list(names))
        self.entries: dict[str, Tensor | None] = {}
        for name, entry in directory.entries.items():
            if not name.startswith(f"{MODEL}.") or name.removeprefix(f"{MODEL}.") in unread:
                self.entries[name] = entry
        for name, value in self._edited.items():
            self.entries[name] = value if isinstance(value, Tensor) else None

    def _edited_optimizers(self, states: Any, names: Sequence[Names]) -> list[dict[str, Any]]:
        """Trees of the ``states``; their tensors in memory become entries under their paths."""
        if not isinstance(states, list):
            raise CheckpointError("on_load_checkpoint has left no list in checkpoint['optimizer_states']")
        trees: list[dict[str, Any]] = []
        for index, state in enumerate(filter(None, states)):
            tree = _as_tree(state)
            if index < len(names):
                tree = by_name(tree, flat(names[index]))
            elsewhere = {key for _, key in places(tree)}
            tree, leaves = take_apart(tree, (optimizer_key(index),), elsewhere)
            for path, leaf in leaves.items():
                if isinstance(leaf, Tensor):
                    self._edited[joined(path)] = leaf
            trees.append(tree)
        return trees

    @override
    def optimizer_states(self) -> list[dict[str, Any]]:
        return self._optimizers

    @override
    def read_into(self, targets: dict[str, Any]) -> None:
        """See :meth:`.ShardDirectory.read_into`. A collective even if this rank's hooks edited everything."""
        of_model = targets.get(MODEL, {})
        from_memory = {name: value for name, value in of_model.items() if f"{MODEL}.{name}" in self._edited}
        from_shards = {name: value for name, value in of_model.items() if name not in from_memory}
        others = {key: value for key, value in targets.items() if key != MODEL}
        edited = {key: others.pop(key) for key in list(others) if key in self._edited}
        if from_shards:
            others = {MODEL: from_shards, **others}
        self._directory.read_into(others)
        fill_tree(from_memory, self._edited, f"{MODEL}.")
        fill_tree(edited, self._edited)
        of_model.update(from_shards)
        of_model.update(from_memory)

"""The model's state of a directory as Lightning's hooks see it, and what they have edited in it."""

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_automodel.checkpoint.sharded import ShardDirectory
from lightning_automodel.checkpoint.single_file import fill_tree
from lightning_automodel.checkpoint.state_dict import MODEL, Saved
from lightning_automodel.torch_internals import without_wrappers


class _Unread:
    """In place of a tensor that nobody has asked for."""


_UNREAD = _Unread()


class LazyState(dict[str, Any]):
    """``checkpoint["state_dict"]`` of a directory: each tensor is read, whole, when a hook asks for it.

    Reading is not a collective. What was read is kept, since the hook may change it in place: it is then loaded in
    place of the shards.
    """

    def __init__(self, saved: ShardDirectory) -> None:
        super().__init__()
        self._saved = saved
        for name, entry in saved.model.items():
            self[name] = _UNREAD if entry is not None else saved.read_model_alone(name)

    @property
    def unread(self) -> set[str]:
        """Names of the tensors that are as they were saved."""
        return {name for name in self if super(LazyState, self).__getitem__(name) is _UNREAD}

    @override
    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is _UNREAD:
            value = self._saved.read_model_alone(name)
            self[name] = value
        return value

    @override
    def __iter__(self) -> Iterator[str]:
        # As this is overridden, ``dict(state)`` and ``{**state}`` read each value by its name.
        return super().__iter__()

    @override
    def items(self) -> Any:
        return ItemsView(self)

    @override
    def values(self) -> Any:
        return ValuesView(self)

    @override
    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    @override
    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    @override
    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            _ = self[name]  # which reads it
        return super().pop(name, *default)

    @override
    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    @override
    def copy(self) -> dict[str, Any]:
        return dict(self)

    @override
    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    @override
    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class EditedDirectory(Saved):
    """A directory with the state that hooks have made of its model's: what they touched is loaded from memory.

    Args:
        directory: The directory.
        state: ``checkpoint["state_dict"]`` after the hooks.
    """

    def __init__(self, directory: ShardDirectory, state: Mapping[str, Any]) -> None:
        self.path = directory.path
        self.rest = directory.rest
        self.module_versions = directory.module_versions
        self.world_size = directory.world_size
        self._directory = directory
        unread = state.unread if isinstance(state, LazyState) else set()
        edited = {name: state[name] for name in state if name not in unread}
        self._edited = {f"{MODEL}.{without_wrappers(name)}": value for name, value in edited.items()}
        self.entries: dict[str, Tensor | None] = {}
        for name, entry in directory.entries.items():
            if not name.startswith(f"{MODEL}.") or name.removeprefix(f"{MODEL}.") in unread:
                self.entries[name] = entry
        for name, value in self._edited.items():
            self.entries[name] = value if isinstance(value, Tensor) else None

    @override
    def optimizer_states(self) -> list[dict[str, Any]]:
        return self._directory.optimizer_states()

    @override
    def read_into(self, targets: dict[str, Any]) -> None:
        """See :meth:`.ShardDirectory.read_into`. A collective, whatever a rank's hooks have touched."""
        of_model = targets.get(MODEL, {})
        from_memory = {name: value for name, value in of_model.items() if f"{MODEL}.{name}" in self._edited}
        from_shards = {name: value for name, value in of_model.items() if name not in from_memory}
        others = {key: value for key, value in targets.items() if key != MODEL}
        self._directory.read_into({MODEL: from_shards, **others} if from_shards else others)
        fill_tree(from_memory, self._edited, f"{MODEL}.")
        of_model.update(from_shards)
        of_model.update(from_memory)

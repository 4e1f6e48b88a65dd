"""The model's state of a directory as Lightning's hooks see it, and what they have edited in it."""

from collections.abc import Iterator, Mapping, MutableMapping
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


class LazyState(MutableMapping[str, Any], dict[str, Any]):
    """``checkpoint["state_dict"]`` of a directory: each tensor is read, whole, when a hook asks for it.

    It is a dict, since hooks may ask for one. Reading is not a collective. What was read is kept, since the hook may
    change it in place: it is then loaded in place of the shards.
    """

    def __init__(self, saved: ShardDirectory) -> None:
        super().__init__()
        self._saved = saved
        for name, entry in saved.model.items():
            value = _UNREAD if entry is not None else saved.read_model_alone(name)
            dict.__setitem__(self, name, value)

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that are as they were saved."""
        return [name for name in self if dict.__getitem__(self, name) is _UNREAD]

    @override
    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if value is _UNREAD:
            value = self._saved.read_model_alone(name)
            dict.__setitem__(self, name, value)
        return value

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)

    @override
    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)

    @override
    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name)

    @override
    def __iter__(self) -> Iterator[str]:
        # As this is overridden, ``dict(state)`` and ``{**state}`` read each value by its name.
        return dict.__iter__(self)

    @override
    def __len__(self) -> int:
        return dict.__len__(self)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    @override
    def copy(self) -> dict[str, Any]:
        return dict(self)

    @override
    def __or__(self, other: Any) -> Any:
        return dict(self) | dict(other)

    @override
    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

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
        self.world_size = directory.world_size
        self._directory = directory
        unread = set(state.unread) if isinstance(state, LazyState) else set()
        edited = {name: state[name] for name in state if name not in unread}
        self._edited = {f"{MODEL}.{without_wrappers(name)}": value for name, value in edited.items()}
        self.entries: dict[str, Tensor | None] = {}
        for name, entry in directory.entries.items():
            if not name.startswith(f"{MODEL}.") or name.removeprefix(f"{MODEL}.") in unread:
                self.entries[name] = entry
        for name, value in self._edited.items():
            self.entries[name] = value if isinstance(value, Tensor) else None

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

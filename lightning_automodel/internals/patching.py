"""What is replaced on torch's, Lightning's and users' objects: one stack that restores it, and a list of what stays."""

import warnings
from contextlib import ExitStack
from enum import Enum
from typing import Any


class Left(Enum):
    """What a run replaces and does not restore, with the reason. The engines' modules stay sharded after a run."""

    STEPS = (
        "forward and steps of an FSDP2 root, and its hooks: they gather its parameters, which stay sharded"
    )
    NAMES = (
        "__name__ of the class that FSDP2 makes for a root: messages after a run name the user's class too"
    )
    CASTS = (
        "forward of what a LightningModule calls: it casts inputs and outputs, as the units go on to compute"
    )
    LOADING = "load_state_dict hooks of sharded modules: they take this rank's part of a whole tensor"
    PICKLING = "__reduce_ex__ of FSDP2's classes: pickle cannot find these classes, and this says what to do instead"
    DEVICE_MESH = (
        "LightningModule.device_mesh: what is sharded stays on this mesh, as under ModelParallelStrategy"
    )
    CHECKPOINTED = "forward of a recomputed block, which was wrapped again since: it now passes calls on"
    ATTENTION = (
        "'context_parallel' in transformers' AttentionInterface: a copy of the model may still name it"
    )
    LOAD_FROM_CHECKPOINT = (
        "lightning.pytorch.core.saving.pl_load: it reads directories of shards too, without any run"
    )
    FAULTHANDLER = "faulthandler: a crash after the run shows its stack too"


_left: set[Left] = set()  # by this process


def leave(kind: Left) -> None:
    """Note that this process replaces what ``kind`` says, and will not restore it."""
    _left.add(kind)


def what_is_left() -> list[str]:
    """What this process has replaced and will not restore, with the reasons."""
    return [kind.value for kind in Left if kind in _left]


class PatchStack(ExitStack):
    """Replaces attributes of instances, modules or classes, and restores them, last first; also other undoing.

    Lightning and torch lack hooks for some of what the strategy must do. It then patches the instance in
    use, or a class or module where it must see what user code does to any tensor. Everything is restored
    when the run is closed, but for what ``Left`` lists.
    """

    def set(self, target: Any, name: str, value: Any, is_new: bool = False) -> None:
        """Set ``target.name``, and remember the value that the target itself had, if any.

        Raises:
            AttributeError: If there is no such attribute, so that nobody would call ``value``, unless it
                ``is_new``.
        """
        if not is_new and not hasattr(target, name):
            raise AttributeError(
                f"{type(target).__name__} has no attribute {name!r} for lightning_automodel to replace: this"
                f" release of {type(target).__module__.partition('.')[0]} is not supported."
            )
        own = vars(target)
        if name in own:
            self.callback(setattr, target, name, own[name])
        else:
            self.callback(_uncover, target, name)
        setattr(target, name, value)

    def ignore_warnings(self, message: str, category: type[Warning] = Warning) -> None:
        """Ignore warnings whose text begins with ``message``, a regular expression."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message, category)
        added = warnings.filters[0]
        if added not in before:  # else it is the user's own
            self.callback(_remove_filter, added)

    def restore(self) -> None:
        """Undo everything since the last restore. Calling it again changes nothing."""
        self.close()


def _uncover(target: Any, name: str) -> None:
    """Remove an attribute of the target itself, which hides its class's. Other code may have removed it already."""
    if name in vars(target):
        delattr(target, name)


def _remove_filter(added: Any) -> None:
    """Remove an entry of ``warnings.filters``, unless other code has."""
    if added in warnings.filters:
        warnings.filters.remove(added)  # type: ignore[attr-defined]

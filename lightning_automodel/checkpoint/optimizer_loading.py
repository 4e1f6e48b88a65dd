"""Loads the saved state of one optimizer, whose tensors are read as shards where its parameters are sharded."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.layouts import Layouts, laid_out_like, whole
from lightning_automodel.checkpoint.optimizers import (
    NOTES,
    Owners,
    by_name,
    check_groups,
    flat,
    has_groups,
    ids_of,
    new_names,
    renamed,
)
from lightning_automodel.checkpoint.tree import Path, keys_of, leaves, mapped


class OptimizerLoading:
    """Loads one optimizer.

    Args:
        saved: The saved state.
        optimizer: The optimizer.
        owners: The parameters of the model, and the names of those of the optimizer.
        index: Number of the optimizer.
        owned: The names of parameters that are stepped whole, and whether this rank owns them.

    Raises:
        CheckpointError: If the state was saved for another optimizer.

    Attributes:
        state: The state by this run's names, without what other ranks own.
    """

    def __init__(
        self,
        saved: dict[str, Any],
        optimizer: Optimizer,
        owners: Owners,
        index: int,
        owned: Mapping[str, bool],
    ) -> None:
        self._optimizer = optimizer
        self._owners = owners
        self._owned = owned
        self._names = flat(owners.names)
        state = by_name({key: value for key, value in saved.items() if key != NOTES}, self._names)
        notes = saved.get(NOTES, {})
        if "local" in notes.values():
            raise CheckpointError(
                f"optimizer {index} keeps plain tensors of a rank's part of its parameters, which only the"
                " version of lightning_automodel that saved them restores: resume with that version, or load"
                " the weights alone (load_from_checkpoint)"
            )
        # Of leaves, which live as long as the checkpoint: parameters may have other names here.
        keys = keys_of(state, with_values=True)
        self._notes = {id(leaf): notes.get(keys[path]) for path, leaf in leaves(state) if path in keys}
        if has_groups(state):
            groups = state["param_groups"]
            check_groups(optimizer, groups, index)
            names = new_names(
                [list(group["params"]) for group in groups], owners.names, owners.parameters, index
            )
            state = renamed(state, names)
            state["state"] = {
                name: value for name, value in state["state"].items() if owned.get(name) is not False
            }
        self.state = state

    def target(self, layouts: Layouts, path: Path, leaf: Tensor) -> Tensor | None:
        """See :data:`.layouts.Target`."""
        if path[0] == "state" and path[1] in self._owned:
            return whole(leaf)
        note = self._notes.get(id(leaf))
        if note == "sharded":
            return layouts.any_like(leaf)
        if note is None and (owner := self._owners.like(path, leaf)) is not None:
            return laid_out_like(owner, leaf)
        return whole(leaf)

    def load(self, state: dict[str, Any], saved_dtypes: Mapping[str, torch.dtype]) -> None:
        """Load :attr:`state` with values. Not a collective.

        ``saved_dtypes`` are those of parameters in the checkpoint. Where a parameter has another one now,
        torch casts its state to that; elsewhere it stays as it was saved.
        """
        packed = self._optimizer.state_dict()
        if not has_groups(state) or not has_groups(packed):
            numbers = {name: number for number, name in enumerate(self._names)}
            self._optimizer.load_state_dict(renamed(state, numbers))
            return
        groups = zip(packed["param_groups"], state["param_groups"], strict=True)
        numbered = renamed(state, dict(zip(self._names, ids_of(packed), strict=True)))
        # Options that were not saved stay this run's, such as flags that newer releases of torch have added.
        numbered["param_groups"] = [{**own, **saved, "params": own["params"]} for own, saved in groups]
        known = self._owners.parameters
        unchanged = {
            name for name, dtype in saved_dtypes.items() if name in known and known[name].dtype == dtype
        }
        with _uncast(self._optimizer, [name in unchanged for name in self._names]):
            self._optimizer.load_state_dict({**packed, **numbered})


@contextmanager
def _uncast(optimizer: Optimizer, keeps: Collection[bool]) -> Iterator[None]:
    """Keep states as they are where torch's ``load_state_dict`` casts them to their parameter's dtype.

    It makes float32 states of bfloat16 parameters, counters and masks inexact, and loses strings and
    ordered dicts. ``keeps`` has the choice for each parameter of the ``optimizer``, in its order.
    """
    given: list[Mapping[str, Any]] = []

    def put_back(_: Optimizer) -> None:
        (state,) = given
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter, is_kept in zip(ids_of(state), parameters, keeps, strict=True):
            if is_kept and number in state["state"]:
                loaded = dict(leaves(optimizer.state[parameter]))
                saved = mapped(state["state"][number], partial(_as_saved, loaded))
                optimizer.state[parameter].update(saved)

    # The user's hooks come before and after: what they convert stays converted.
    handles = [
        optimizer.register_load_state_dict_pre_hook(lambda _, state: given.append(state)),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_saved(loaded: Mapping[Path, Any], path: Path, saved: Any) -> Any:
    """The value that was ``saved`` for a leaf, on the device of the one that was ``loaded`` for it."""
    value = loaded.get(path, saved)
    if not isinstance(value, Tensor):
        return saved
    # Torch's optimizers have a rule of their own for their steps.
    if not isinstance(saved, Tensor) or saved.dtype == value.dtype or path == ("step",):
        return value
    return saved.to(value.device)

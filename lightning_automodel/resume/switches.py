"""What hooks switch at the start of an epoch, which is not called again where a fit goes on within it."""

from typing import Any

import lightning.pytorch as pl
from torch import nn

Place = tuple[str, Any, str]
"""Its name, who is switched, and the attribute."""

Noted = tuple[list[Place], list[Any]]

_TRAINED = "requires_grad"
_OF_MODULES = ("training", "track_running_stats")


class Switches:
    """Notes and restores which modules train, which parameters are trained, and how many batches make a window.

    Only what was switched since this was made is restored, so that whoever resumes may choose anew.

    Args:
        trainer: Of the fit.
        module: What is trained.
    """

    def __init__(self, trainer: "pl.Trainer", module: nn.Module) -> None:
        self._trainer, self._module = trainer, module
        self._places: list[Place] = []
        self.look_again()
        self._at_first = {name: getattr(owner, switch) for name, owner, switch in self._places}

    def look_again(self) -> None:
        """Look for what the module consists of by now."""
        modules = [
            (f"{name}.{switch}", module, switch)
            for name, module in self._module.named_modules()
            for switch in _OF_MODULES
            if switch in module.__dict__
        ]
        parameters = [
            (f"{name}.{_TRAINED}", parameter, _TRAINED) for name, parameter in self._module.named_parameters()
        ]
        window = ("accumulate_grad_batches", self._trainer, "accumulate_grad_batches")
        self._places = [*modules, *parameters, window]

    def note(self) -> Noted:
        """How all are switched now."""
        return self._places, [getattr(owner, switch) for _, owner, switch in self._places]

    def savable(self, noted: Noted) -> dict[str, Any]:
        """Values by name of what had been switched when ``noted`` was taken."""
        return {
            name: value
            for (name, _, _), value in zip(*noted, strict=True)
            if name in self._at_first and value != self._at_first[name]
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Switch again what :meth:`savable` told."""
        for name, owner, switch in self._places:
            if name in saved:
                setattr(owner, switch, saved[name])

    def restore_what_is_trained(self, saved: dict[str, Any]) -> None:
        """Let parameters be trained again; what is frozen again can wait."""
        self.restore({name: value for name, value in saved.items() if value and name.endswith(f".{_TRAINED}")})

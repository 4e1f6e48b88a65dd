"""Parameters that a module gets after set-up, which no engine knows."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from lightning_automodel.internals import fsdp2_gathers
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack

_NUM_NAMED = 3


class ChangedParameters:
    """Notices parameters that ``module``, which is distributed, gets from now on; torch tells when it registers some.

    The module is walked over only after that. Frozen ones, and those of no optimizer, are nobody's business:
    copies that a callback averages into.
    """

    def __init__(self, module: nn.Module, patches: PatchStack) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._modules = set(map(id, module.modules()))
        self._is_changed = False
        self._added: dict[str, nn.Parameter] = {}
        patches.callback(register_module_parameter_registration_hook(self._note).remove)
        patches.callback(register_module_module_registration_hook(self._note).remove)

    def _note(self, module: nn.Module, name: str, registered: Any) -> None:
        if id(module) in self._modules:
            self._is_changed = True

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise RuntimeError if a trained parameter was added or replaced. Called before each training step."""
        if self._is_changed:
            self._look()
        if self._added:
            trained = {
                id(p)
                for optimizer in optimizers
                for group in optimizer.param_groups
                for p in group["params"]
            }
            added = [name for name, p in self._added.items() if p.requires_grad and id(p) in trained]
            if added:
                raise RuntimeError(
                    f"{_listed(added)}: {len(added)} parameters that the module got after it was"
                    " distributed, so that ranks would train them differently. Make them in __init__ or in"
                    " configure_model(): what joins later can be frozen until then, by"
                    " requires_grad_(False)."
                )

    def _look(self) -> None:
        self._is_changed = False
        self._modules = set(map(id, self._module.modules()))
        gathered = fsdp2_gathers.gathered_parameters(self._module)
        known = {id(p) for p in (*self._parameters.values(), *gathered)}
        named = dict(self._module.named_parameters(remove_duplicate=False))
        unknown = {name: parameter for name, parameter in named.items() if id(parameter) not in known}
        replaced = [
            name for name, new in unknown.items() if name in self._parameters and self._trains(name, new)
        ]
        if replaced:
            raise RuntimeError(
                f"{_listed(replaced)}: {len(replaced)} parameters that were replaced after the module was"
                " distributed: the optimizer and the other ranks do not know the new ones. Write the new"
                " values into the old ones (self.layer.weight.data = values), or replace them in"
                " configure_model()."
            )
        self._added = {
            name: parameter for name, parameter in unknown.items() if name not in self._parameters
        }

    def _trains(self, name: str, new: nn.Parameter) -> bool:
        """Whether replacing a parameter matters: FSDP2 puts its own back, and a trained one is reduced."""
        old = self._parameters[name]
        is_sharded = torch_internals.local_tensor(old) is not old
        return is_sharded or old.requires_grad or new.requires_grad


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NUM_NAMED])

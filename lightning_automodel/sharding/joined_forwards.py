"""Forwards on a rank without data, which other ranks need: experts that it holds are sent tokens in each of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_automodel.data.padding import ModuleState
from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.apply import call_as_step
from lightning_automodel.sharding.gathers import JoinedGathers
from lightning_automodel.sharding.units import has_fsdp_units


class _Call(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class JoinedForwards(JoinedGathers):
    """Records what an evaluation step calls, so that a rank without data can call it again, for the other ranks.

    These are the calls of ``model``'s submodules that communicate: they gather parameters or exchange
    tokens. The steps of a LightningModule, and what they log and count, run for this rank's own data alone.
    The inputs of the last step's calls are kept until the next step.
    """

    def __init__(self, model: nn.Module, units: Sequence[FSDPModule]) -> None:
        super().__init__(units)
        self._model = model
        self._communicating = [part for part in model.modules() if part is not model and _communicates(part)]
        self._calls: list[_Call] = []
        self._depth = 0

    @override
    def start_loop(self) -> None:
        super().start_loop()
        self._calls = []

    @override
    @contextmanager
    def step(self) -> Iterator[None]:
        self._calls = []
        self._depth = 0
        with super().step(), PatchStack() as patches:
            for part in self._communicating:
                # Before FSDP2's own hook, which casts the inputs.
                before = part.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                after = part.register_forward_hook(self._leave, always_call=True)
                patches.callback(before.remove)
                patches.callback(after.remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._depth:
            self._calls.append(_Call(module, args, kwargs))
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    @override
    def join(self) -> None:
        """Take part in a step of other ranks by repeating the calls of this rank's last step. A collective.

        Nothing that they change in buffers, metrics and random states remains.
        """
        self.check_order()
        state = ModuleState(self._model)
        try:
            with isolate_rng():
                call_as_step(self._model, self._call_again)
        finally:
            state.restore()

    def _call_again(self) -> None:
        for call in self._calls:
            call.module(*call.args, **call.kwargs)


def _communicates(module: nn.Module) -> bool:
    holds_experts = any(num_expert_ranks(parameter) > 1 for parameter in module.parameters())
    return holds_experts or has_fsdp_units(module)

"""Which blocks drop their activations after the forward and compute them again in the backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_automodel.sharding.units import WrapPolicy, class_name, outermost_instances, uncompiled, units_of

ActivationCheckpointing = bool | set[type[nn.Module]]

_ATTRIBUTE = "_recomputed_forward"
_SWITCH = ("gradient_checkpointing", "_gradient_checkpointing_func")


class _Checkpoint:
    """Computes something of a module, and again in the backward, with the buffers that it met the first time.

    Running statistics, counters and the like are written by the first computation alone. Which buffers that are is
    learnt as they are written, so that the others are not kept for the backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(part._buffers, name) for part in module.modules() for name in part._buffers]
        # Torch's normalisations write these past the version counter.
        self._statistics = {i for i, (buffers, _) in enumerate(self._slots) if buffers.get("running_mean") is not None}
        self._written: set[int] | None = None

    def __call__(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        met: dict[int, Tensor] | None = None

        def first_or_again(*args: Any, **kwargs: Any) -> Any:
            nonlocal met
            if met is not None:
                with self._standing_in(met):
                    return compute(*args, **kwargs)
            met, before = self._copies(), self._versions()
            output = compute(*args, **kwargs)
            written = self._learn(before)
            met = {index: copy for index, copy in met.items() if index in written}
            return output

        is_traced = torch.compiler.is_compiling()
        return checkpoint(compute if is_traced else first_or_again, *args, use_reentrant=False, **kwargs)

    def _buffers(self) -> dict[int, Tensor]:
        held = ((index, buffers.get(name)) for index, (buffers, name) in enumerate(self._slots))
        return {index: buffer for index, buffer in held if buffer is not None}

    def _copies(self) -> dict[int, Tensor]:
        """Copies of the buffers that are written; of all of them until that is known."""
        wanted = self._written
        return {index: b.clone() for index, b in self._buffers().items() if wanted is None or index in wanted}

    def _versions(self) -> dict[int, tuple[int, int]]:
        """What changes with each buffer that is written in place or replaced; none is written in inference mode."""
        return {i: (id(b), 0 if b.is_inference() else b._version) for i, b in self._buffers().items()}

    def _learn(self, before: dict[int, tuple[int, int]]) -> set[int]:
        changed = {index for index, version in self._versions().items() if before.get(index) != version}
        self._written = changed | self._statistics | (self._written or set())
        return self._written

    @contextmanager
    def _standing_in(self, met: dict[int, Tensor]) -> Iterator[None]:
        """Context of a repetition: it writes copies of the buffers, and finds in them what the first one found."""
        actual = {index: b for index, b in self._buffers().items() if index in (self._written or ())}
        try:
            for index, buffer in actual.items():
                self._put(index, met.get(index, buffer).clone())
            yield
        finally:
            for index, buffer in actual.items():
                self._put(index, buffer)

    def _put(self, index: int, buffer: Tensor) -> None:
        buffers, name = self._slots[index]
        buffers[name] = buffer


class _RecomputedForward:
    """Stands in for the forward of one module, by an object of its own: a deep copy of the module copies it along.

    Hooks of the module, FSDP2's among them, stay outside and do not run again in the backward; names of parameters and
    keys of the state dict stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.is_active = True
        self._module = module
        self._own_forward = module.__dict__.get("forward")
        self._checkpoint = _Checkpoint(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._own_forward or partial(type(self._module).forward, self._module)
        return self._checkpoint(forward, *args, **kwargs) if self.is_active else forward(*args, **kwargs)

    def put_back(self) -> None:
        """Let the module compute as before; the object stays where somebody has wrapped it since."""
        self.is_active = False
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"], self._module.__dict__[_ATTRIBUTE]
            if self._own_forward is not None:
                self._module.__dict__["forward"] = self._own_forward


class RecomputedBlocks:
    """The modules of a fit whose activations are computed again in the backward, from the inputs that they keep.

    Args:
        model: The LightningModule, sharded or not.
        choice: True for the modules that are FSDP units, or would be under FSDP2; or classes whose outermost instances
            are meant.
        policy: Which modules become FSDP units.
        root_is_model: As for :func:`~lightning_automodel.sharding.plan_sharding`.

    Raises:
        ValueError: If that is no module at all, or one that would not recompute in the mode that it is in.
    """

    def __init__(
        self, model: nn.Module, choice: ActivationCheckpointing, policy: WrapPolicy, root_is_model: bool
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        blocks: list[nn.Module] = []
        if choice is not False:
            blocks = units_of(model, policy, root_is_model) if choice is True else outermost_instances(model, choice)
            if not blocks:
                raise ValueError(_nothing_to_checkpoint(model, choice))
        names = {id(module): name for name, module in model.named_modules()}
        self.names = [f"{names[id(block)]} ({class_name(block)})" for block in blocks]
        layers = [uncompiled(block) for block in blocks]
        for layer, name in zip(layers, self.names, strict=True):
            if _has_switch(layer):
                _refuse_evaluation_mode(layer, name)
        self._undo = [
            _switch_on(layer) if _has_switch(layer) else _wrap(block)
            for block, layer in zip(blocks, layers, strict=True)
        ]

    def undo(self) -> None:
        """Let every module compute as before."""
        for undo in self._undo:
            undo()
        self._undo = []


def _wrap(block: nn.Module) -> Callable[[], None]:
    recomputed = block.__dict__.get(_ATTRIBUTE)
    if recomputed is None:
        recomputed = block.__dict__[_ATTRIBUTE] = _RecomputedForward(block)
        block.forward = recomputed
    recomputed.is_active = True
    return recomputed.put_back


def _has_switch(block: nn.Module) -> bool:
    """Whether this is a layer of Hugging Face's, which knows better: it must not fill its cache a second time."""
    return isinstance(getattr(type(block), "gradient_checkpointing", None), bool)


def _refuse_evaluation_mode(block: nn.Module, name: str) -> None:
    if not block.training:
        raise ValueError(
            f"activation_checkpointing has no effect on {name}: layers of transformers recompute in training mode only,"
            " and from_pretrained() leaves them in evaluation mode. Call .train() on the model before trainer.fit."
        )


def _switch_on(block: nn.Module) -> Callable[[], None]:
    if block.gradient_checkpointing:
        return lambda: None
    before = {name: block.__dict__[name] for name in _SWITCH if name in block.__dict__}
    for name, value in zip(_SWITCH, (True, _Checkpoint(block)), strict=True):
        block.__dict__[name] = value

    def switch_off() -> None:
        for name in _SWITCH:
            block.__dict__.pop(name, None)
        block.__dict__.update(before)

    return switch_off


def _nothing_to_checkpoint(model: nn.Module, choice: ActivationCheckpointing) -> str:
    classes = ", ".join(sorted({class_name(module) for module in model.modules() if module is not model}))
    if choice is True:
        looked_for = "finds no repeated blocks in"
    else:
        assert not isinstance(choice, bool)
        wanted = ", ".join(sorted(entry.__name__ for entry in choice)) or "no class"
        looked_for = f"names {wanted}, of which there is no instance in"
    return f"activation_checkpointing {looked_for} {class_name(model)}; pass a set of classes that are: {classes}."

"""Which blocks drop their activations after the forward and compute them again in the backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_automodel.sharding import WrapPolicy, class_name, outermost_instances, uncompiled, units_of

ActivationCheckpointing = bool | set[type[nn.Module]]

_ATTRIBUTE = "_recomputed_forward"
_checkpoint = partial(checkpoint, use_reentrant=False)


class _RecomputedForward:
    """Stands in for the forward of one module, by an object of its own: a deep copy of the module copies it along.

    Hooks of the module, FSDP2's among them, stay outside and do not run again in the backward; names of parameters and
    keys of the state dict stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.is_active = True
        self._module = module
        self._own_forward = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._own_forward or partial(type(self._module).forward, self._module)
        return _checkpoint(forward, *args, **kwargs) if self.is_active else forward(*args, **kwargs)

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
        for block, name in zip(blocks, self.names, strict=True):
            layer = uncompiled(block)
            self._undo.append(_switch_on(layer, name) if _has_switch(layer) else _wrap(block))

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


def _switch_on(block: nn.Module, name: str) -> Callable[[], None]:
    if not block.training:
        raise ValueError(
            f"activation_checkpointing has no effect on {name}: layers of transformers recompute in training mode only,"
            " and from_pretrained() leaves them in evaluation mode. Call .train() on the model before trainer.fit."
        )
    if block.gradient_checkpointing:
        return lambda: None
    block.gradient_checkpointing, block._gradient_checkpointing_func = True, _checkpoint  # type: ignore[assignment]
    return partial(setattr, block, "gradient_checkpointing", False)


def _nothing_to_checkpoint(model: nn.Module, choice: ActivationCheckpointing) -> str:
    classes = ", ".join(sorted({class_name(module) for module in model.modules() if module is not model}))
    if choice is True:
        looked_for = "finds no repeated blocks in"
    else:
        assert not isinstance(choice, bool)
        wanted = ", ".join(sorted(entry.__name__ for entry in choice)) or "no class"
        looked_for = f"names {wanted}, of which there is no instance in"
    return f"activation_checkpointing {looked_for} {class_name(model)}; pass a set of classes that are: {classes}."

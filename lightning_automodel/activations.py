"""Which blocks drop their activations after the forward and compute them again in the backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_automodel.sharding import WrapPolicy, class_name, outermost_instances, uncompiled, units_of

ActivationCheckpointing = bool | set[type[nn.Module]]

_ATTRIBUTE = "_recomputed_forward"
_SWITCH = ("gradient_checkpointing", "_gradient_checkpointing_func")


class _Checkpoint:
    """Computes something of a module, and again in the backward, with the buffers that it met the first time.

    Running statistics, counters and the like are written by the first computation alone. Which buffers that are is
    learnt as they are written, so that the others are not kept for the backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: set[str] | None = None

    def __call__(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        met: dict[str, Tensor] | None = None

        def first_or_again(*args: Any, **kwargs: Any) -> Any:
            nonlocal met
            if met is not None:
                with self._standing_in(met):
                    return compute(*args, **kwargs)
            met = self._copies()
            with self._learning():
                output = compute(*args, **kwargs)
            met = {name: copy for name, copy in met.items() if name in self._known}
            return output

        is_traced = torch.compiler.is_compiling()
        return checkpoint(compute if is_traced else first_or_again, *args, use_reentrant=False, **kwargs)

    def _statistics(self) -> Iterator[str]:
        """Buffers of torch's normalisations, which write running statistics past the version counter."""
        for prefix, module in self._module.named_modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                yield from (name for name, _ in module.named_buffers(prefix, recurse=False))

    @property
    def _known(self) -> set[str]:
        return self._written or set()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._module.named_buffers(remove_duplicate=False)

    def _copies(self) -> dict[str, Tensor]:
        """Copies of the buffers that are written; of all of them until that is known."""
        return {name: b.clone() for name, b in self._buffers() if self._written is None or name in self._written}

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Context of a first computation: notes which buffers it writes or replaces."""
        before = {name: (id(buffer), _version(buffer)) for name, buffer in self._buffers()}
        yield
        after = {name: (id(buffer), _version(buffer)) for name, buffer in self._buffers()}
        written = {name for name, seen in after.items() if before.get(name) != seen}
        self._written = self._known | written | set(self._statistics())

    @contextmanager
    def _standing_in(self, met: dict[str, Tensor]) -> Iterator[None]:
        """Context of a repetition: it writes copies of the buffers, and finds in them what the first one found."""
        actual = {name: buffer for name, buffer in self._buffers() if name in self._known}
        try:
            for name, buffer in actual.items():
                self._put(name, met.get(name, buffer).clone())
            yield
        finally:
            for name, buffer in actual.items():
                self._put(name, buffer)

    def _put(self, name: str, buffer: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        self._module.get_submodule(owner)._buffers[attribute] = buffer


def _version(buffer: Tensor) -> int:
    """Moves with every in-place write; tensors that were made for inference cannot be written while training."""
    return 0 if buffer.is_inference() else buffer._version


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

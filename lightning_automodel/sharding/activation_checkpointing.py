"""Activation checkpointing: blocks drop their activations after the forward and recompute them in the backward."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import compile_in_place, is_compiled, uncompiled
from lightning_automodel.sharding.containers import Contents, containers_in
from lightning_automodel.sharding.units import (
    WrapPolicy,
    class_name,
    described,
    has_forward,
    matches,
    outermost,
    plan_sharding,
)

ActivationCheckpointing = bool | set[type[nn.Module]] | Literal["selective", "offload"] | Callable[..., Any]

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

CHANGES_WHAT_IT_READS_AGAIN = (
    "A block has changed a list, dict, set or dataclass that it was given, and would find it changed when it is"
    " recomputed (activation_checkpointing). Let it return what is new, or leave it out of what is recomputed."
)
"""Why a block that is recomputed must not write to what it was given."""

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def _selective() -> Any:
    """Contexts that save the results of attention and of every second matrix product, as torchtitan does."""
    matmuls: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            matmuls[context.is_recompute] += 1
        # Which operator computes attention depends on the device and the inputs.
        is_second = op in _MATMULS and matmuls[context.is_recompute] % 2 == 1
        if is_second or "scaled_dot_product" in str(op):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_STATES = {
    *(int, float, type(None)),
    *(torch.Generator, random.Random, np.random.Generator, np.random.RandomState),
}
"""Classes of attributes that a forward may change: counters, which may not have begun, and generators."""


@dataclass
class _BlockState:
    """What a block's forward may depend on, and change, besides parameters and torch's own random numbers."""

    modules: list[nn.Module]
    buffers: list[dict[str, Tensor | None]]  # of each
    attributes: list[dict[str, Any]]  # of each, its counters and generators
    of_python: Any
    of_numpy: Any

    @classmethod
    def of(cls, block: nn.Module) -> "_BlockState":
        """The present one, made of the block's own tensors and generators."""
        modules = list(block.modules())
        buffers = [dict(module._buffers) for module in modules]
        attributes = []
        for own in map(vars, modules):
            attributes.append({name: value for name, value in own.items() if type(value) in _STATES})
        return cls(modules, buffers, attributes, random.getstate(), np.random.get_state())

    def copied(self) -> "_BlockState":
        """One that no forward changes."""
        return replace(self, buffers=deepcopy(self.buffers), attributes=deepcopy(self.attributes))

    def restore(self) -> None:
        """Make it the present one, of modules that the block had then."""
        for module, buffers, attributes in zip(self.modules, self.buffers, self.attributes, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            own = vars(module)
            for name in [name for name in own if type(own[name]) in _STATES and name not in attributes]:
                del own[name]  # it came later
            own.update(attributes)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


class _Checkpoint:
    """Calls a function under activation checkpointing; its recomputation begins in the state that the forward found.

    Otherwise running statistics would be updated twice, and a power iteration, a counter or a generator of the block's
    own would give other values the second time. With ``offloads``, positional tensor arguments wait in host memory for
    the backward.
    """

    is_on = True  # until the run ends, which it may survive

    def __init__(self, module: nn.Module, kwargs: dict[str, Any], offloads: bool) -> None:
        self._offloads = offloads
        self._kwargs = kwargs
        self._module = module

    def __call__(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        block = self._module
        found: list[_BlockState] = []

        def first_or_again(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a block without buffers
                return compute(*args, **kwargs)
            current = _BlockState.of(block)
            if not found:
                found.append(current.copied())
                contents = Contents(containers_in((args, *kwargs.values())))
                output = compute(*args, **kwargs)
                if contents.has_changed(but_by_appending=True):
                    raise RuntimeError(f"{class_name(block)}: {CHANGES_WHAT_IT_READS_AGAIN}")
                return output
            try:
                found[0].copied().restore()
                return compute(*args, **kwargs)
            finally:
                current.restore()

        run = _checkpoint_eagerly if any(module._buffers for module in block.modules()) else checkpoint
        # Only the inputs are offloaded: inside, the saved-tensor hooks of `checkpoint` replace these.
        with offloaded_activations() if self._offloads else nullcontext():
            return run(first_or_again, *args, use_reentrant=False, **self._kwargs, **kwargs)


# A graph of both forwards would recompute from buffers that the first one has written. The forward itself is
# compiled.
_checkpoint_eagerly = torch.compiler.disable(checkpoint, recursive=False)


def checkpoint_blocks(
    model: nn.Module,
    choice: ActivationCheckpointing,
    policy: WrapPolicy,
    root_is_model: bool,
    patches: PatchStack,
) -> list[str]:
    """Let the blocks that the option ``activation_checkpointing``, which is ``choice``, means recompute; return names.

    Raises ValueError if no module is chosen, or one that cannot recompute.
    """
    if choice is False:
        return []
    kwargs: dict[str, Any] = {}
    if choice == "selective":
        kwargs["context_fn"] = _selective
    elif callable(choice):
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, choice)
    if isinstance(choice, (set, frozenset)):
        # Modules without parameters may recompute too.
        blocks = outermost(model.children(), lambda module: has_forward(module) and matches(module, choice))
    else:
        blocks = plan_sharding(model, policy, root_is_model).units
    names = _names(model, blocks, f"activation_checkpointing={choice!r}")
    for block, name in zip(blocks, names, strict=True):
        layer = uncompiled(block)
        if choice == "selective" and any(isinstance(each, _RECURRENT) for each in layer.modules()):
            raise ValueError(
                f"activation_checkpointing='selective' of {name}, which has recurrent layers: these write to"
                " products that would be saved, and gradients would be wrong. Pass True, or classes of other blocks."
            )
        checkpointed = _Checkpoint(layer, kwargs, choice == "offload")
        patches.callback(setattr, checkpointed, "is_on", False)
        # A Hugging Face layer has a switch: its own checkpointing keeps the cache from being filled twice.
        if not isinstance(getattr(type(layer), "gradient_checkpointing", None), bool):
            before = vars(block).get("forward")
            # The forward alone: the block's hooks do not run again. No closure, which deep copies would share.
            block.forward = partial(checkpointed, block.forward)
            patches.callback(_unwrap, block, block.forward, before)
        elif not layer.training:
            raise ValueError(
                f"activation_checkpointing has no effect on {name}: layers of transformers recompute in training"
                " mode only, and from_pretrained() leaves them in evaluation mode. Call .train() on the model"
                " before trainer.fit."
            )
        elif not layer.gradient_checkpointing:
            patches.set(layer, "gradient_checkpointing", True)
            patches.set(layer, "_gradient_checkpointing_func", checkpointed, is_new=True)
    return names


def _names(model: nn.Module, blocks: list[nn.Module], option: str) -> list[str]:
    """Names and classes of ``blocks``. ValueError if an ``option`` has found none."""
    if not blocks:
        raise ValueError(
            f"{option} finds no blocks in {class_name(model)}: pass auto_wrap_policy with classes of modules"
            " that it has, or for activation_checkpointing a set of them."
        )
    return described(model, blocks)


def _unwrap(block: nn.Module, wrapped: Callable[..., Any], forward: Callable[..., Any] | None) -> None:
    """Give ``block`` back its ``forward``, None if that is its class's, unless it was wrapped again (by casts)."""
    if vars(block).get("forward") is not wrapped:
        return
    del block.forward
    if forward is not None:
        block.forward = forward


def offloaded_activations() -> saved_tensors_hooks:
    """A context: what autograd saves in it waits in pinned host memory. All stays where it is without accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return save_on_cpu()
    return save_on_cpu(pin_memory=True, device_type=accelerator.type)


def compile_blocks(
    module: nn.Module,
    asked: bool | dict[str, Any],
    policy: WrapPolicy,
    is_automatic: bool,
    patches: PatchStack,
) -> list[str]:
    """Compile the blocks that ``compile``, which is ``asked``, means, unless they are; return their names."""
    if asked is False:
        return []
    blocks = plan_sharding(module, policy, is_automatic).units
    names = _names(module, blocks, f"compile={asked!r}")
    for block in blocks:
        if not is_compiled(block):
            compile_in_place(block, patches, **(asked if isinstance(asked, dict) else {}))
    return names

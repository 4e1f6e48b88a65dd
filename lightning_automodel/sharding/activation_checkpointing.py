"""Activation checkpointing: blocks drop their activations after the forward and recompute them in the backward."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import compile_in_place, is_compiled, uncompiled, version
from lightning_automodel.sharding.units import WrapPolicy, class_name, instances_below, told, units_of

ActivationCheckpointing = bool | set[type[nn.Module]] | Literal["selective", "offload"] | Callable[..., Any]

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def _selective() -> Any:
    """Contexts that save the results of attention and of every second matrix product, as torchtitan does."""
    matmuls: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            matmuls[context.is_recompute] += 1
        # Which operator computes attention depends on the device and the inputs.
        is_kept = "scaled_dot_product" in str(op) or (
            op in _MATMULS and matmuls[context.is_recompute] % 2 == 1
        )
        if is_kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Checkpoint:
    """Calls a function under activation checkpointing while it ``is_on``. An object, since deep copies share closures.

    With ``offloads``, positional tensor arguments wait in host memory for the backward.
    """

    is_on = False

    def __init__(
        self, module: nn.Module, name: str, contexts: Callable[[], Any] | None, offloads: bool
    ) -> None:
        self._module = module
        self._name = name
        self._kwargs: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        self._offloads = offloads

    def __call__(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        before = self._buffers()
        # Only the inputs are offloaded: inside, the saved-tensor hooks of `checkpoint` replace these.
        with offloaded_activations() if self._offloads else nullcontext():
            output = checkpoint(compute, *args, use_reentrant=False, **self._kwargs, **kwargs)
        if before:
            self._refuse_writes(before)
        return output

    def _buffers(self) -> dict[str, tuple[Tensor, int]]:
        buffers = dict(self._module.named_buffers())
        return {name: (buffer, version(buffer)) for name, buffer in buffers.items()}

    def _refuse_writes(self, before: dict[str, tuple[Tensor, int]]) -> None:
        """Raise RuntimeError if the forward has written buffers: it would write them again in the backward."""
        for name, (buffer, count) in self._buffers().items():
            earlier, earlier_count = before.get(name, (buffer, count))
            # One of another size is a cache that has grown, of values that come out the same again.
            is_replaced = buffer is not earlier and buffer.shape == earlier.shape
            if is_replaced or count != earlier_count:
                raise RuntimeError(
                    f"The forward of {self._name} writes its buffer {name}, as running statistics are. Its"
                    " recomputation in the backward would write it a second time, and compute with other"
                    " values: leave such modules out of activation_checkpointing, by a set of the classes"
                    " that recompute, or call .eval() on what is not to follow the data."
                )


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
    contexts: Callable[[], Any] | None = None
    if choice == "selective":
        contexts = _selective
    elif callable(choice):
        contexts = partial(create_selective_checkpoint_contexts, choice)
    blocks = _chosen_blocks(model, choice, policy, root_is_model)
    names = told(model, blocks)
    for block, name in zip(blocks, names, strict=True):
        _check(block, name, choice)
    for block, name in zip(blocks, names, strict=True):
        checkpointed = _Checkpoint(uncompiled(block), name, contexts, choice == "offload")
        _let_recompute(block, checkpointed, patches)
    return names


def _chosen_blocks(
    model: nn.Module, choice: ActivationCheckpointing, policy: WrapPolicy, root_is_model: bool
) -> list[nn.Module]:
    """The modules that recompute: instances of the classes in ``choice``, or the units. ValueError without any."""
    if isinstance(choice, (set, frozenset)):
        blocks = instances_below(model, choice)
    else:
        blocks = units_of(model, policy, root_is_model)
    if not blocks:
        raise ValueError(
            f"activation_checkpointing={choice!r} finds no blocks in {class_name(model)}: pass a set of"
            " classes of modules that it has."
        )
    return blocks


def _let_recompute(block: nn.Module, checkpointed: _Checkpoint, patches: PatchStack) -> None:
    """Run ``block`` through ``checkpointed`` from now on, a Hugging Face layer by its own switch."""
    layer = uncompiled(block)
    if not _has_switch(layer):
        patches.callback(_unwrap, block, vars(block).get("forward"), checkpointed)
        block.forward = partial(checkpointed, block.forward)  # its hooks do not run again
    elif not layer.gradient_checkpointing:
        patches.set(layer, "gradient_checkpointing", True)
        patches.set(layer, "_gradient_checkpointing_func", checkpointed, is_new=True)
    patches.set(checkpointed, "is_on", True)


def _unwrap(block: nn.Module, forward: Callable[..., Any] | None, checkpointed: _Checkpoint) -> None:
    """Give ``block`` back its ``forward``, None if that is its class's, unless what replaces it was wrapped since."""
    if getattr(block.forward, "func", None) is not checkpointed:
        return  # it passes calls on
    del block.forward
    if forward is not None:
        block.forward = forward


def _check(block: nn.Module, name: str, choice: ActivationCheckpointing) -> None:
    layer = uncompiled(block)
    if _has_switch(layer) and not layer.training:
        raise ValueError(
            f"activation_checkpointing has no effect on {name}: layers of transformers recompute in training"
            " mode only, and from_pretrained() leaves them in evaluation mode. Call .train() on the model"
            " before trainer.fit."
        )
    if choice == "offload" and is_compiled(block):
        raise ValueError(
            f"activation_checkpointing='offload' does not work with {name}, which is compiled: torch would"
            " not compile it. Compile other modules, or pass activation_checkpointing=True."
        )


def _has_switch(block: nn.Module) -> bool:
    """Whether this is a Hugging Face layer: its own checkpointing keeps the cache from being filled twice."""
    return isinstance(getattr(type(block), "gradient_checkpointing", None), bool)


def _to_host(tensor: Tensor) -> tuple[Tensor, torch.device]:
    """What is kept of a tensor that autograd saves, and its device. Parameters and DTensors stay, and all on a CPU."""
    device = tensor.device
    if type(tensor) is not Tensor or device.type == "cpu" or tensor.layout != torch.strided:
        return tensor, device
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True), device


def _to_device(kept: tuple[Tensor, torch.device]) -> Tensor:
    tensor, device = kept
    return tensor.to(device, non_blocking=True)


def offloaded_activations() -> saved_tensors_hooks:
    """A context: what autograd saves in it waits in pinned host memory.

    As ``torch.autograd.graph.save_on_cpu``, which waits for each copy on devices other than CUDA, and takes
    DTensors too. Copies run on the stream that computes.
    """
    return saved_tensors_hooks(_to_host, _to_device)


def compile_blocks(
    module: nn.Module,
    asked: bool | dict[str, Any],
    policy: WrapPolicy,
    is_automatic: bool,
    patches: PatchStack,
) -> list[str]:
    """Compile the blocks that ``compile``, which is ``asked``, means; return their names."""
    if asked is False:
        return []
    blocks = units_of(module, policy, is_automatic)
    if not blocks:
        raise ValueError(
            f"compile={asked!r} finds no repeated blocks in {class_name(module)}: pass auto_wrap_policy with"
            " the classes to compile, or compile parts of the model yourself."
        )
    chosen = [block for block in blocks if not is_compiled(block)]
    for block in chosen:
        compile_in_place(block, patches, **(asked if isinstance(asked, dict) else {}))
    return told(module, chosen)

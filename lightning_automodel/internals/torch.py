"""Private names of torch that the package uses, each with its reason.

Those of FSDP2 and of process groups stand in the files beside this one.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from lightning_automodel.internals.patching import PatchStack, overwrite

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemWriter as FsspecWriter
else:
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter
    except ModuleNotFoundError:  # private before torch 2.15
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # noqa: F401

RESET_PARAMETERS = "_reset_parameters"
"""How torch's attention and transformer modules initialise themselves."""


EXTRA_STATE = "_extra_state"
"""How the name of what ``get_extra_state`` returns ends in a state dict."""


F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """``torch.compiler.disable``, which is public but not annotated: decorated functions would lose their types."""
    return cast(F, torch.compiler.disable(function))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has hooks that see, and may change, gradients that pass through it."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The dictionary of a module's own buffers, in which ones that are None are too."""
    buffers: dict[str, Any] = module._buffers
    return buffers


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers at or below ``module`` that its state dict has, by their paths."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, owner in module.named_modules()
        for name, buffer in buffers_of(owner).items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary of a module's own parameters, whose entries sharding replaces."""
    parameters: dict[str, nn.Parameter | None] = module._parameters
    return parameters


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers at or below ``module``, each once."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def is_read_by_torch() -> bool:
    """Whether this thread runs a backward or its callbacks, or traces a graph: torch then reads tensors as they are."""
    return torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling()


class Reached(list[nn.Parameter]):
    """Leaves in which backwards have accumulated gradients, each as often as that."""

    def __init__(self) -> None:
        super().__init__()
        # One hook for all, a method in C: it runs for each parameter in each backward.
        self._hook = self.append
        self._handles: list[RemovableHandle] = []

    def watch(self, leaf: nn.Parameter) -> None:
        """Append ``leaf`` whenever a backward has reached it. It must be trainable, at the moment."""
        self._handles.append(leaf.register_post_accumulate_grad_hook(self._hook))

    def close(self) -> None:
        """Watch no leaf any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def has_post_accumulate_hook(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` has a hook of the user that runs after its gradient is accumulated."""
    hooks: Any = parameter._post_accumulate_grad_hooks or {}
    return not all(isinstance(getattr(hook, "__self__", None), Reached) for hook in hooks.values())


def is_called_from(module: ModuleType) -> bool:
    """Whether a function of a Python ``module`` runs, and has called what runs now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    return frame is not None


def iterate_anew(loader: Any) -> None:
    """Let a loader use the sampler that it has now: persistent workers, if it has any, keep that of their start."""
    if isinstance(loader, DataLoader):
        loader._iterator = None


def register_first_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """``optimizer.register_step_post_hook``, ahead of the hooks that are registered already."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """The hooks of the optimizer's steps, in the order in which they run."""
    before = optimizer._optimizer_step_pre_hooks.values()
    return [*before, *optimizer._optimizer_step_post_hooks.values()]


def defined_in(hook: Any, *packages: str) -> bool:
    """Whether a hook or method is of one of these packages, though it may carry the name of what it wraps."""
    for wrapped in ("hook", "func", "__func__"):  # as modules keep some; of a partial; of a method
        hook = getattr(hook, wrapped, hook)
    homes = [str(getattr(hook, "__module__", "")), str(getattr(hook, "__globals__", {}).get("__name__", ""))]
    return any(f"{home}.".startswith(f"{package}.") for home in homes for package in packages)


_COMPILED = "_orig_mod"


def without_wrappers(name: str) -> str:
    """A parameter's name without the prefixes of ``torch.compile`` and activation checkpointing."""
    return name.replace(f"{_COMPILED}.", "").replace("_checkpoint_wrapped_module.", "")


def copy_tensors(original: nn.Module, into: nn.Module, memo: dict[int, Any]) -> None:
    """Give the empty module ``into`` a copy of the parameters and buffers that ``original`` itself has."""
    into._parameters = copy.deepcopy(original._parameters, memo)
    into._buffers = copy.deepcopy(original._buffers, memo)
    into._non_persistent_buffers_set = set(original._non_persistent_buffers_set)


def module_versions(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What torch notes of each module in a state dict, above all its ``_version``, by its name without wrappers.

    A module that was changed since an older version converts what it is given; without a version, each time.
    """
    noted = getattr(state, "_metadata", None) or {}
    # A wrapper and what it wraps have one name: the latter comes later, and stays.
    return {
        without_wrappers(f"{path}.").removesuffix("."): dict(placements)
        for path, placements in noted.items()
    }


def with_module_versions(state: Mapping[str, Any], versions: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """``state`` in a dict that notes ``versions``, by names of modules, as :func:`module_versions` returns them."""
    found = nn.Module().state_dict()
    found.update(state)
    overwrite(found, "_metadata", OrderedDict(versions))
    return found


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wraps, else ``module``."""
    return getattr(module, _COMPILED, module)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps ``module``, or ``module.compile()`` was called."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def compile_in_place(module: nn.Module, patches: PatchStack, **kwargs: Any) -> None:
    """``module.compile(**kwargs)``, until ``patches`` are restored; torch itself cannot undo it."""
    patches.set(module, "_compiled_call_impl", None)
    module.compile(**kwargs)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor unchanged. Not recorded by autograd."""
    return getattr(tensor, "_local_tensor", tensor)  # cheaper than `to_local()`


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor other memory for this rank's part. Not counted as a write."""
    overwrite(tensor, "_local_tensor", local)


def has_hooks(tensor: Tensor) -> bool:
    """Whether ``tensor.register_hook`` has registered any for other code."""
    hooks: Any = tensor._backward_hooks or {}
    return not all(defined_in(hook, "lightning_automodel") for hook in hooks.values())


version: Callable[[Tensor], int] = attrgetter("_version")
"""Autograd's version counter of a tensor: every in-place write but through ``.data`` counts."""


writes: Callable[[Tensor], tuple[int, int]] = attrgetter("_version", "alias._version")
"""The version counters of a tensor and of its ``alias``."""


def patch_unscaling(
    scaler: GradScaler,
    is_checked: dict[Optimizer, bool],
    unscale: Callable[[Optimizer], Tensor],
    patches: PatchStack,
) -> None:
    """Make ``scaler.unscale_`` call ``unscale``, unless it has looked for overflow of these gradients already.

    That returns [] 1.0 for an overflow, else 0.0. ``is_checked``, updated here, has the optimizers whose gradients
    are unscaled, with whether overflow was looked for since.
    """

    @torch.no_grad()
    def unscale_once(optimizer: Optimizer) -> None:
        # Unlike torch's, it may be called again before the next update(), which an abandoned step never
        # reaches.
        state = scaler._per_optimizer_states[id(optimizer)]
        # The scaler drops this state whenever any optimizer steps.
        if is_checked.get(optimizer) and state["found_inf_per_device"]:
            return
        found = unscale(optimizer)
        state["found_inf_per_device"] = {found.device: found}
        state["stage"] = OptState.UNSCALED
        is_checked[optimizer] = True

    patches.set(scaler, "unscale_", unscale_once)


def graph_nodes(output: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph that a backward of ``output`` may reach, each once."""
    pending: list[Any] = [output.grad_fn]
    seen: set[Any] = {None}  # for inputs without a gradient
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [parent for parent, _ in node.next_functions]


def saved(node: Any, name: str) -> Any:
    """What a node of the autograd graph has saved for its backward under ``name``; None if nothing."""
    return getattr(node, f"_saved_{name}", None)


_queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback


def when_backward_ends(output: Tensor, function: Callable[[], None]) -> None:
    """Let autograd call ``function`` when a backward of ``output`` has ended, before it returns.

    If backwards are nested, the one of ``output`` counts. FSDP2 and DDP reduce the last gradients in callbacks
    too, which they queue later: so a callback queues ``function``.
    """
    output.register_hook(lambda _: _queue_callback(partial(_queue_callback, function)))


def check_ddp_backward_is_complete(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError unless the last synchronised backward has reduced every bucket."""
    ddp._check_reducer_finalized()

"""Compares, at the first step of each kind, what a model computes on slices of sequences and on whole ones."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.attention import Slices
from lightning_automodel.data.padding import ModuleState
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.internals import logged_values
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.units import class_name

Outputs = dict[tuple[nn.Module, int], Tensor]
"""Tensors that modules have returned, by module and number, in the order in which modules have ended."""

_CHUNK = 4  # compared positions of a chunk, at most; each rank has two chunks


class FirstStepCheck:
    """Calls the modules that a step has called once more, on the first positions of its batch: in slices and whole.

    It is the one check of context parallelism: what differs is refused, and so is what cannot be compared.
    The outputs of all submodules are compared, so that one bad layer among many is found and named: in the
    outermost output alone it can be as small as rounding (measured in benchmarks/results). The check leaves no
    trace: nothing is differentiated or compiled, and random states, modes, buffers and metrics are restored.
    """

    def __init__(self, module: pl.LightningModule, plugin: Precision, step: str, slices: Slices) -> None:
        self._module = module
        self._plugin = plugin
        self._step = step
        self._slices = slices
        self.calls: list[tuple[nn.Module, Any, Any]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the step: remembers the outermost calls of modules, the LightningModule among them.

        The step is not compiled, since torch would trace the hooks that watch it.
        """
        original = getattr(self._module, self._step)
        depth = 0

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal depth
            # Not what a backward within the step recomputes.
            if depth == 0 and attention.current() is self._slices:
                self.calls.append((module, args, kwargs))
            depth += 1

        def after(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        def step(*args: Any, **kwargs: Any) -> Any:
            # Not registered earlier: DDP's forward calls the LightningModule, which only then runs its step.
            with _hooked(self._module, after, before):
                return original(*args, **kwargs)

        with PatchStack() as patches, torch.compiler.set_stance("force_eager"):
            patches.set(self._module, self._step, step)
            yield

    def check(self, group: dist.ProcessGroup | None) -> None:
        """Compare the modules that the step has called.

        A collective over ``group``, in which all context peers are; None: over all ranks, whose units are
        gathered together. RuntimeError on every rank of it if an output differs on any of them by more than
        rounding, or if attention of the step was not compared.
        """
        slices = self._slices
        first = FirstPositions(slices)
        names = {submodule: name for name, submodule in self._module.named_modules()}
        calls = [call for call in self.calls if any(map(first.is_slice, tensors_in(call[1:])))]
        called = gather_objects([names[module] for module, *_ in calls], group)
        found: list[str] = []
        if all(modules == called[0] for modules in called):
            for module, *arguments in calls:
                for submodule, error in self._differences(module, arguments, first):
                    name = f"{names[submodule]} ({class_name(submodule)})".strip()
                    found.append(
                        f"{name} gives something else on slices of sequences than on whole ones: off by"
                        f" {error:.2g} of its size on the first {first.length} positions of the first batch."
                        " In it, or just before, positions are mixed, or normalised over, within this rank's"
                        " slice alone, or counted from its start: attend by"
                        " lightning_automodel.context_parallel_attention(query, key, value), and take"
                        " positions from batch['position_ids']. (Or it draws random numbers in evaluation"
                        " mode too, so that it cannot be compared.)"
                    )
        if not (found or 0 < slices.num_calls <= first.sliced.num_calls):
            found.append(
                f"{class_name(self._module)}.{self._step} attends by something else than"
                " lightning_automodel.context_parallel_attention, or outside of modules that are called with"
                " slices of the batch [b, s], or hidden states [b, s, ...], on all ranks alike: its layers in"
                " slices could not be compared with whole sequences."
                f" {slices.num_calls} calls of attention crossed the {dist.get_world_size(slices.group)}"
                f" context-parallel ranks, and {first.sliced.num_calls} were compared. Call one module, as in"
                " self.model(**batch), and attend by context_parallel_attention(query, key, value) in it."
            )
        for messages in gather_objects(found[:1], group):
            for message in messages:
                raise RuntimeError(message)

    def _differences(
        self, module: nn.Module, arguments: list[Any], first: "FirstPositions"
    ) -> Iterator[tuple[nn.Module, float]]:
        """Modules whose output in slices is off by more than rounding, in order, with its relative error.

        A collective of the context peers.
        """
        arguments = apply_to_collection(arguments, Tensor, first.gather, allow_frozen=True)
        whole = self._outputs(module, arguments, first.whole)
        arguments = apply_to_collection(arguments, Tensor, first.cut, allow_frozen=True)
        in_slices = self._outputs(module, arguments, first.sliced)
        is_wide = torch.get_float32_matmul_precision() == "highest"
        epsilon = 0.0 if is_wide else torch.finfo(torch.bfloat16).eps
        for (submodule, number), output in whole.items():
            # A wide output may come from narrower ones.
            epsilon = max(epsilon, torch.finfo(output.dtype).eps)
            expected = first.cut(output)
            # What the called module returns without positions, as a pooled [b, d], must be that of the whole.
            is_compared = expected is not output or (submodule is module and output.ndim > 1)
            # Experts of a mixture may get no token of a slice, and so end less often.
            own = in_slices.get((submodule, number), output)
            if is_compared and own.shape == expected.shape:
                error = float(_error(own.double(), expected.double()))
                if error > math.sqrt(epsilon) / 2:
                    yield submodule, error

    def _outputs(self, module: nn.Module, arguments: Any, slices: Slices) -> Outputs:
        """The floating-point tensors that ``module`` and its submodules return on the first positions."""
        found: Outputs = {}
        numbers = Counter[nn.Module]()

        def note(submodule: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for tensor in filter(torch.is_floating_point, tensors_in(output)):
                numbers[submodule] += 1
                # A copy, as operations in place may follow.
                found[submodule, numbers[submodule]] = torch_internals.local_tensor(tensor).clone()

        with self._without_effect(), attention.computing_on(slices), _hooked(module, note):
            module(*arguments[0], **arguments[1])
        return found

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Context of calls that leave modes, lists, buffers, metrics, logs and random states as they were."""
        with (
            PatchStack() as patches,
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            self._plugin.train_step_context(),
            isolate_rng(),
        ):
            patches.callback(ModuleState(self._module).restore)
            for submodule in self._module.modules():
                # A norm with running statistics takes those of its slice in training alone.
                if getattr(submodule, "running_mean", None) is None:
                    patches.set(submodule, "training", False)
                for value in vars(submodule).values():
                    if isinstance(value, list):  # as user hooks fill
                        patches.callback(value.__setitem__, slice(None), list(value))
            for results in logged_values.results_of(self._module.trainer):
                patches.set(results, "log", lambda *_, **__: None)
            yield


class FirstPositions:
    """The first positions of a batch, of which each rank has a slice.

    Attributes:
        length: How many there are.
        sliced: How ranks share them.
        whole: The same where this rank holds all of them.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        chunk = min(_CHUNK, slices.chunk)
        self.length = 2 * dist.get_world_size(slices.group) * chunk
        length = min(self.length, slices.length)
        self.sliced = replace(slices, chunk=chunk, length=length, num_calls=0)
        self.whole = replace(self.sliced, group=None, chunks=(0, 1), chunk=self.length // 2)

    def is_slice(self, tensor: Tensor) -> bool:
        """Whether a tensor [b, s, ...] has the positions of a slice."""
        return not isinstance(tensor, DTensor) and tensor.shape[:2] == self._slices.shape

    def gather(self, tensor: Tensor) -> Tensor:
        """A slice [b, s, ...] of each rank to the first positions [b, length, ...]. A collective."""
        if not self.is_slice(tensor):
            return tensor
        whole = attention.whole(tensor.reshape(*self._slices.shape, -1), self._slices)[:, : self.length]
        # Contiguous, as models may call view() on it.
        return whole.reshape(-1, self.length, *tensor.shape[2:]).contiguous()

    def cut(self, tensor: Tensor) -> Tensor:
        """[b, length, ...] to this rank's [b, s, ...]; a tensor of another length is returned unchanged."""
        if tensor.ndim < 2 or tensor.shape[1] != self.length:
            return tensor
        return tensor[:, self.sliced.own_positions(tensor.device)]


@contextmanager
def _hooked(
    module: nn.Module, after: Callable[..., None], before: Callable[..., None] | None = None
) -> Iterator[None]:
    """Context in which all modules at or below ``module`` have these forward hooks, but for metrics."""
    with ExitStack() as hooks:
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                continue
            if before is not None:
                hooks.enter_context(submodule.register_forward_pre_hook(before, with_kwargs=True))
            # Always: recomputation in a backward stops modules by an exception.
            hooks.enter_context(submodule.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield


def _error(own: Tensor, expected: Tensor) -> Tensor:
    """[] relative error of an output [b, s, ...]: the largest that a quarter of the positions of a row reach.

    A few positions may be off by more: rounding may make a router choose another expert there.
    """
    difference, size = (
        tensor.reshape(*own.shape[:2], -1).norm(dim=-1) for tensor in (own - expected, expected)
    )
    share = difference / (size + size.median()).clamp(min=torch.finfo(size.dtype).tiny)
    return share.quantile(0.75, dim=1, interpolation="higher").max()

"""Compares, at the first step, what a model computes on slices of sequences and on whole ones."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding import context_parallel
from lightning_automodel.sharding.apply import call_as_step
from lightning_automodel.sharding.context_parallel import Slices
from lightning_automodel.sharding.units import class_name

_CHUNK = 4  # compared positions of a chunk, at most; each rank has two chunks
_MATMUL_EPSILON = {"highest": 0.0, "high": torch.finfo(torch.float16).eps, "medium": torch.finfo(torch.bfloat16).eps}

Key = tuple[str, int, int]
"""Identifies an output: the module's name, the number of its call, the index among the tensors that it returned."""


@dataclass
class _Call:
    """The arguments of a module's first call, and how often attention crossed ranks in all of its calls."""

    arguments: tuple[Any, Any]
    num_attended: int = 0


class _Beginning:
    """The first positions of a batch, sliced across ranks in the same way as the batch.

    Args:
        slices: How the batch is sliced.
        shape: [b, s] of this rank's slice of the batch.

    Attributes:
        length: The number of first positions.
        sliced: How these positions are sliced across ranks.
        whole: The same positions, all on this rank.
    """

    def __init__(self, slices: Slices, shape: torch.Size) -> None:
        self._slices, self._shape = slices, shape
        chunk = min(_CHUNK, slices.chunk)
        self.length = 2 * slices.num_ranks * chunk
        self.sliced = replace(
            slices,
            chunk=chunk,
            length=min(self.length, slices.length),
            documents=None if slices.documents is None else slices.documents[:, : self.length],
            masks={},
        )
        self.whole = replace(self.sliced, group=None, chunks=(0, 1), chunk=self.length // 2, masks={})

    def covers(self, arguments: Any) -> bool:
        """Whether a module was called with slices, and with no other tensor that has the length of a sequence."""
        tensors: list[Tensor] = []
        apply_to_collection(arguments, Tensor, tensors.append, allow_frozen=True)
        others = [tensor for tensor in tensors if not self._is_slice(tensor)]
        lengths = {self._shape[-1], self._shape[-1] * self._slices.num_ranks, self._slices.length, self.length}
        return len(others) < len(tensors) and not any(lengths.intersection(tensor.shape[1:]) for tensor in others)

    def _is_slice(self, tensor: Tensor) -> bool:
        # A floating-point [b, s] may as well be [b, features].
        is_known = not isinstance(tensor, DTensor) and (tensor.ndim > 2 or not tensor.is_floating_point())
        return is_known and tensor.shape[:2] == self._shape

    def gather(self, tensor: Tensor) -> Tensor:
        """[b, s, ...] of each rank to [b, length, ...]; non-slices are returned unchanged. A collective."""
        if not self._is_slice(tensor):
            return tensor
        numbers = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        whole = context_parallel.whole(numbers.reshape(*self._shape, -1), self._slices)[:, : self.length]
        # Contiguous, as models may call view() on it.
        return whole.reshape(-1, self.length, *tensor.shape[2:]).to(tensor.dtype).contiguous()

    def cut(self, tensor: Tensor) -> Tensor:
        """[b, length, ...] to this rank's [b, s, ...]; a tensor of another length is returned unchanged."""
        if tensor.ndim < 2 or tensor.shape[1] != self.length:
            return tensor
        chunks = tensor.split(self.sliced.chunk, dim=1)
        return torch.cat([chunks[index] for index in self.sliced.chunks], dim=1)


class FirstStepCheck:
    """Calls the modules that a step has called once more, on the first positions of its batch: in slices and whole.

    The outputs of all submodules are compared, so that one bad layer among many is found and named. The check leaves no
    trace: no gradients are computed, and random states, modes, buffers and metrics are restored. Nothing is compiled.

    Args:
        module: The LightningModule.
        plugin: The Trainer's precision plugin.

    Attributes:
        is_paused: Whether calls are ignored, since the backward recomputes activations.
    """

    def __init__(self, module: pl.LightningModule, plugin: Precision) -> None:
        self._module, self._plugin = module, plugin
        self._calls: dict[nn.Module, _Call] = {}
        self._draws = False
        self.is_paused = False

    @contextmanager
    def recording(self, slices: Slices) -> Iterator[None]:
        """Context of ``training_step``: remembers the outermost calls of modules, the LightningModule among them."""
        running: list[int] = []  # how often attention had crossed ranks when each call began

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.is_paused:
                running.append(slices.num_calls)
                if len(running) == 1:
                    self._calls.setdefault(module, _Call((args, kwargs)))

        def after(module: nn.Module, *_: Any) -> None:
            if not self.is_paused:
                num_calls = running.pop()
                if not running:
                    self._calls[module].num_attended += slices.num_calls - num_calls

        original = self._module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            # Not registered earlier: DDP's forward calls the LightningModule, which only then runs its step.
            hooks: list[Any] = []
            for each in dict.fromkeys(_uncompiled(self._module)):
                hooks.append(each.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(each.register_forward_hook(after, always_call=True))
            try:
                return original(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()

        patches = PatchStack()
        patches.set(self._module, "training_step", training_step)
        try:
            yield
        finally:
            patches.restore()

    def check(self, slices: Slices, shape: torch.Size) -> str | None:
        """Compare the modules that the step has called. A collective over all ranks, after the step.

        Args:
            slices: How the step's batch is sliced.
            shape: [b, s] of this rank's slice.

        Returns:
            A warning for the user, if some attention could not be compared.

        Raises:
            RuntimeError: On every rank, if an output differs on any of them by more than rounding.
        """
        beginning = _Beginning(slices, shape)
        names = {each: name for name, each in self._module.named_modules()}
        calls = {names[each]: (each, call) for each, call in self._calls.items() if beginning.covers(call.arguments)}
        self._calls = {}
        # Ranks may have called different modules, or some with arguments that cannot be sliced.
        told = from_all(list(calls))
        common = [name for name in told[0] if all(name in others for others in told)]
        found: list[tuple[int, int, str, float]] = []
        for index, name in enumerate(common):
            each, call = calls[name]
            differing = self._first_difference(each, call.arguments, beginning)
            if differing is not None:
                order, submodule, error = differing
                found.append((index, order, f"{name}.{submodule}".strip("."), error))
        all_found = [each for told in from_all(found) for each in told]
        if any(from_all(self._draws)):
            return self._advice("draws random numbers in evaluation mode too, which differ from slice to slice")
        if all_found:
            *_, name, error = min(all_found)
            named = f"{name} ({class_name(self._module.get_submodule(name))})".strip()
            raise RuntimeError(
                f"{named} gives something else on slices of sequences than on whole ones: off by {error:.2g} of its"
                f" size on the first {beginning.length} positions of the first batch. In it, or just before, positions"
                " are mixed within this rank's slice alone, or counted from its start: attend by"
                " lightning_automodel.context_parallel_attention(query, key, value), and take positions from"
                " batch['position_ids']."
            )
        outside = slices.num_calls - sum(calls[name][1].num_attended for name in common)
        if outside:
            return self._advice(
                f"attends {outside} of {slices.num_calls} times outside of modules that are called with slices of the"
                " batch [b, s], or hidden states [b, s, ...], and nothing else of their length"
            )
        return None

    def _first_difference(
        self, module: nn.Module, arguments: Any, beginning: _Beginning
    ) -> tuple[int, str, float] | None:
        """Find the first module, in the order in which they return, with another output in slices.

        A collective over the ranks that share the batch.

        Returns:
            How many outputs before it agree, its name below ``module``, and its relative error; None if all agree.
        """
        whole: Any = apply_to_collection(arguments, Tensor, beginning.gather, allow_frozen=True)
        sliced: Any = apply_to_collection(whole, Tensor, beginning.cut, allow_frozen=True)
        in_slices: dict[Key, Tensor] = {}
        epsilon = _MATMUL_EPSILON[torch.get_float32_matmul_precision()]
        compared: list[tuple[str, Tensor, float]] = []

        def remember(key: Key, output: Tensor) -> None:
            in_slices[key] = output.clone()  # operations in place may follow

        def compare(key: Key, output: Tensor) -> None:
            nonlocal epsilon
            epsilon = max(epsilon, torch.finfo(output.dtype).eps)  # a wide output may come from narrower ones
            own, expected = in_slices.get(key), beginning.cut(output)
            if own is not None and expected is not output and own.shape == expected.shape:
                compared.append((key[0], _error(own.double(), expected.double()), math.sqrt(epsilon) / 2))

        for slices, (args, kwargs), note in ((beginning.sliced, sliced, remember), (beginning.whole, whole, compare)):
            with self._without_effect(module), context_parallel.computing_on(slices), _each_output(module, note):
                try:
                    call_as_step(self._module, partial(module, *args, **kwargs))
                except Exception as exception:
                    exception.add_note(
                        f"{class_name(module)} was called on {beginning.length} positions of the first batch by"
                        " AutomodelStrategy, which compares slices of sequences with whole ones."
                    )
                    raise
        errors = torch.stack([error for _, error, _ in compared]).tolist() if compared else []
        for order, ((name, _, tolerance), share) in enumerate(zip(compared, errors, strict=True)):
            if share > tolerance:
                return order, name, share
        return None

    def _advice(self, reason: str) -> str:
        return (
            f"{class_name(self._module)}.training_step {reason}: its layers in slices were not compared with whole"
            " sequences. To have them compared, call one module, as in self.model(**batch)."
        )

    def _random_states(self) -> list[Tensor]:
        device = self._module.device
        modules: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device.type)]
        return [each.get_rng_state() for each in modules]

    @contextmanager
    def _without_effect(self, called: nn.Module) -> Iterator[None]:
        """Context of calls that leave modes, buffers, metrics, logs and random states as they were."""
        modes = [(each, each.training) for each in called.modules()]
        metrics = [(each, lightning_internals.metric_state(each)) for each, _ in modes if isinstance(each, Metric)]
        buffers = [(each, name, buffer) for each, _ in modes for name, buffer in each.named_buffers(recurse=False)]
        # The calls get copies: the backward that is still to come may need the originals unchanged.
        for each, name, buffer in buffers:
            setattr(each, name, buffer.clone())
        called.eval()
        patches = PatchStack()
        patches.set(self._module, "log", lambda *_, **__: None)
        try:
            eagerly = torch.compiler.set_stance("force_eager")
            with torch.no_grad(), eagerly, self._plugin.train_step_context(), isolate_rng():
                states = self._random_states()
                yield
                self._draws |= not all(map(torch.equal, states, self._random_states()))
        finally:
            patches.restore()
            for each, is_training in modes:
                each.training = is_training
            for each, name, buffer in buffers:
                setattr(each, name, buffer)
            for metric, state in metrics:
                lightning_internals.set_metric_state(metric, state)


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The picklable value of each rank of the group, or of all ranks. A collective over them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that may get hooks, which excludes compiled ones: ``torch.compile`` would trace the hooks."""
    is_wrapper = torch_internals.uncompiled(module) is not module
    if is_wrapper or not (torch_internals.is_compiled(module) or isinstance(module, Metric)):
        yield module
        for child in () if is_wrapper else module.children():
            yield from _uncompiled(child)


@contextmanager
def _each_output(module: nn.Module, note: Callable[[Key, Tensor], None]) -> Iterator[None]:
    """Context of a call, in which ``note`` gets all floating-point tensors that modules return."""
    num_calls: Counter[str] = Counter()

    def after(name: str, _: nn.Module, args: Any, output: Any) -> None:
        num_calls[name] += 1
        tensors: list[Tensor] = []
        apply_to_collection(output, Tensor, tensors.append, allow_frozen=True)
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point():
                note((name, num_calls[name], index), torch_internals.local_tensor(tensor))

    hooks = [each.register_forward_hook(partial(after, name)) for name, each in module.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _error(own: Tensor, expected: Tensor) -> Tensor:
    """[] relative error of an output [b, s, ...]: the largest that a quarter of the positions of a row reach.

    A few positions may be off by more: rounding may make a router choose another expert there.
    """
    difference, size = (
        each.flatten(1).unflatten(1, (own.shape[1], -1)).norm(dim=-1) for each in (own - expected, expected)
    )
    share = difference / (size + size.median()).clamp(min=torch.finfo(size.dtype).tiny)
    return share.topk(math.ceil(share.shape[1] / 4), dim=1).values[:, -1].max()

"""Records each rank's accumulation windows, so that one process can compute them again."""

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel.callbacks.exactness import module_copy
from lightning_automodel.callbacks.exactness.results import described
from lightning_automodel.callbacks.running_strategy import automodel, context_of, weighting_of
from lightning_automodel.gradients.token_loss import has_count
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.resume.rng import global_states

Fingerprints = dict[str, tuple[tuple[int, ...], int]]
"""By parameter name, the shape of this rank's part and a number that depends on all bits of the part."""
Replicas = dict[tuple[str, tuple[int, ...]], int]
"""The same numbers by the parameter's name and the coordinates of the part that this rank holds."""
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class RecordedMicroBatch:
    """One call of ``training_step`` on one rank: its arguments, random states and results."""

    arguments: tuple[Any, ...]  # the batch, on the host, and its index if the step takes it
    random: dict[str, Any]
    generators: list[Tensor]
    numbers: dict[tuple[str, str], int | float]
    loss: float | None = None  # None if the step returned None
    returned_count: float | None = None  # under context parallelism the count of this rank's slice


@dataclass
class RecordedWindow:
    """The micro-batches of one optimizer step on one rank, without padding batches."""

    data_rank: int  # the same on ranks that share their data
    tensors: dict[tuple[str, str], Tensor | None]  # buffers and other tensors before the first micro-batch
    micro_batches: list[RecordedMicroBatch] = field(default_factory=list)
    problem: str | None = None  # why it cannot be replayed


class Recorder:
    """Records this rank's windows, from the first ``training_step`` after an optimizer step to the next step.

    Args:
        trainer: The Trainer. Its strategy's ``training_step`` is wrapped until ``patches`` are restored.
        module: The module that is trained, sharded or not.
        patches: The stack of patches for the wrapper.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, patches: PatchStack) -> None:
        self.trainer = trainer
        self.module = module
        self._training_step = trainer.strategy.training_step
        patches.set(trainer.strategy, "training_step", self._recorded)
        self.clear()

    def clear(self) -> None:
        """Begin a new window with the next training step."""
        self.window: RecordedWindow | None = None
        # This rank's part of the weights before the window; weights that are whole, on rank 0 alone:
        # None elsewhere.
        self.weights: dict[str, Tensor | None] = {}
        self.before: Fingerprints = {}  # before the window
        self._after: Fingerprints = {}  # after the newest step
        self.trainable: dict[str, bool] = {}
        self.training: dict[str, bool] = {}

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        """``strategy.training_step``. Recording begins in it, when the engine has prepared weights and buffers."""
        called = self.module.training_step
        context = context_of(self.trainer)
        weighting = weighting_of(self.trainer)

        def training_step(*step_args: Any, **step_kwargs: Any) -> Any:
            if context is None or weighting is None:
                self._begin(step_args)
                return called(*step_args, **step_kwargs)
            self._begin((context.slices.complete(args[0]), *args[1:]))
            output = called(*step_args, **step_kwargs)
            # The count of this rank's slice.
            self._newest.returned_count = float(weighting.count(step_args[0], output))
            return output

        with PatchStack() as patches:
            patches.set(self.module, "training_step", training_step)
            output = self._training_step(*args, **kwargs)
        self._end(output)
        return output

    @property
    def _newest(self) -> RecordedMicroBatch:
        assert self.window is not None
        return self.window.micro_batches[-1]

    def _begin(self, args: tuple[Any, ...]) -> None:
        now = fingerprints(self.module)
        window = self.window = self.window or self._begin_window(now)
        if _changed(self._after, now):
            window.problem = (
                "a hook changes weights between the micro-batches of a window, where one process with one"
                " batch would call it once"
            )
        try:
            arguments = move_data_to_device(copy.deepcopy(args), "cpu")
        except Exception as error:
            window.problem = f"the batch cannot be copied ({described(error)})"
            arguments = ()
        window.micro_batches.append(
            RecordedMicroBatch(
                arguments,
                global_states(self.trainer.strategy.root_device),
                [generator.get_state() for generator in module_copy.generators_of(self.module)],
                module_copy.numbers_of(self.module),
            )
        )

    def _begin_window(self, before: Fingerprints) -> RecordedWindow:
        keeps_whole = self.trainer.is_global_zero
        sampler = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        tensors = {
            key: None if tensor is None else whole_on_host(tensor)
            for key, tensor in module_copy.tensors_of(self.module).items()
        }
        self.before = before
        self.weights = {
            name: parameter.detach().clone() if keeps_whole or isinstance(parameter, DTensor) else None
            for name, parameter in self.module.named_parameters()
        }
        self.trainable = {
            name: parameter.requires_grad for name, parameter in self.module.named_parameters()
        }
        self.training = {name: submodule.training for name, submodule in self.module.named_modules()}
        return RecordedWindow(sampler.get("rank", self.trainer.global_rank), tensors)

    def _end(self, output: Any) -> None:
        if self.window is None:
            return
        strategy = automodel(self.trainer)
        if strategy is not None and strategy.is_filler:
            self.window.micro_batches.pop()
        else:
            record = self._newest
            record.loss = loss_of(output)
            if has_count(output) and record.returned_count is None:
                record.returned_count = float(output["num_label_tokens"])
        self._after = fingerprints(self.module)

    def written(self) -> set[str]:
        """Parameters whose values on this rank have changed since the window began."""
        return _changed(self.before, fingerprints(self.module))

    def replicas(self) -> Replicas:
        """Numbers of the weights before the window. They must be equal on ranks that hold the same part."""
        parameters = dict(self.module.named_parameters())
        known = self.before.items()
        return {(name, _part(parameters[name])): value for name, (_, value) in known if name in parameters}


def loss_of(output: Any) -> float | None:
    """The loss that ``training_step`` returned, alone or under "loss"; None if there is none. Reads the device."""
    if hasattr(output, "get"):
        output = output.get("loss")
    if output is None:
        return None
    return float(output.detach())


def fingerprints(module: nn.Module) -> Fingerprints:
    """Fingerprints of this rank's parameters, which must be sharded or whole. Reads the device; no collective."""
    parts = {}
    for name, parameter in module.named_parameters():
        part = torch_internals.local_tensor(parameter.detach())
        if type(part) is not Tensor:  # such as quantised weights, whose subclass has its own layout of bits
            continue
        part = part.reshape(-1)
        if part.is_complex():
            part = torch.view_as_real(part).reshape(-1)
        # FSDP2 frees the memory of gathered parameters, not the tensors.
        if part.untyped_storage().size() or not part.numel():
            # While FSDP2 has gathered a parameter, it is not a DTensor, and the part is the whole.
            parts[name] = (
                tuple(torch_internals.local_tensor(parameter).shape),
                part.view(_SAME_SIZE[part.element_size()]).sum(dtype=torch.int64),
            )
    if not parts:
        return {}
    numbers = torch.stack([number.cpu() for _, number in parts.values()]).tolist()
    return {name: (shape, number) for (name, (shape, _)), number in zip(parts.items(), numbers, strict=True)}


def _changed(before: Fingerprints, after: Fingerprints) -> set[str]:
    """Parameters of the same shape in both with different values."""
    names = before.keys() & after.keys()
    return {name for name in names if before[name] != after[name] and before[name][0] == after[name][0]}


def _part(parameter: Tensor) -> tuple[int, ...]:
    """The part of a parameter that this rank holds: its coordinates in the mesh dimensions that shard it."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinates: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    placed = zip(coordinates, parameter.placements, strict=False)
    return tuple(index for index, placement in placed if not isinstance(placement, Replicate))


def whole_on_host(tensor: Tensor) -> Tensor:
    """The whole of ``tensor``: a detached, dense copy in host memory. A collective for a ``DTensor``."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.to("cpu", copy=True)


def whole(tensors: Mapping[str, Tensor | None], keeps: bool) -> dict[str, Any]:
    """Whole tensors in host memory, if this rank ``keeps`` them. A collective for sharded tensors."""
    kept: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        if keeps or isinstance(tensor, DTensor):
            if tensor is None:
                on_host = None
            else:
                on_host = whole_on_host(tensor)
            if keeps:
                kept[name] = on_host
    return kept


def unequal(by_rank: list[Replicas]) -> list[str]:
    """Parameters of which ranks hold different values for the same part."""
    values: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for replicas in by_rank:
        for key, value in replicas.items():
            values.setdefault(key, set()).add(value)
    return sorted({name for (name, _), distinct in values.items() if len(distinct) > 1})


def gathered_on_first(window: RecordedWindow | None, world_size: int) -> list[RecordedWindow] | None:
    """The windows of all ranks that have one, on rank 0; None on the others. A collective over the world."""
    if not dist.is_initialized() or world_size == 1:
        if window is None:
            return []
        return [window]
    try:
        sent = pickle.dumps(window)
    except Exception as error:  # the other ranks wait in the collective below: join it with the reason
        sent = pickle.dumps(
            RecordedWindow(0, {}, problem=f"the batch cannot be pickled ({described(error)})")
        )
    received: list[Any] | None = [None] * world_size if dist.get_rank() == 0 else None
    dist.gather_object(sent, received, dst=0)
    if received is None:
        return None
    windows = map(pickle.loads, received)
    return [window for window in windows if window is not None]

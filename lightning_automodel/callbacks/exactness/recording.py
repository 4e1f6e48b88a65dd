"""What each rank remembers of an accumulation window, so that one process can compute it again."""

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
from lightning_automodel.callbacks.running_strategy import automodel, current_run
from lightning_automodel.gradients.token_loss import has_count
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.resume.rng import global_states

Fingerprints = dict[str, tuple[tuple[int, ...], int]]
"""Of this rank's part of each parameter, by name: its shape, and a number that depends on all of its bits."""
Replicas = dict[tuple[str, tuple[int, ...]], int]
"""The same numbers, by a parameter's name and the part of it that this rank holds."""
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class MicroBatch:
    """One call of ``training_step`` on one rank: what it was given, and what it returned."""

    arguments: tuple[Any, ...]  # the batch, on the host, and its index if the step takes it
    random: dict[str, Any]
    generators: list[Tensor]
    numbers: dict[tuple[str, str], int | float]
    loss: float | None = None  # None: the step returned None
    returned_count: float | None = None  # also that of a slice, under context parallelism


@dataclass
class Window:
    """The micro-batches of one optimizer step on one rank, without padding batches."""

    data_rank: int  # the same on ranks that share their data
    tensors: dict[tuple[str, str], Tensor | None]  # buffers and the like before the first of them
    micro_batches: list[MicroBatch] = field(default_factory=list)
    problem: str | None = None  # why it cannot be replayed


class Recorder:
    """Records this rank's windows, from the first ``training_step`` after an optimizer step to the next step.

    Args:
        trainer: Its strategy's ``training_step`` is wrapped until ``patches`` are restored.
        module: The module that is trained, sharded or not.
        patches: Where the wrapper is noted.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, patches: PatchStack) -> None:
        self.trainer, self.module = trainer, module
        self._training_step = trainer.strategy.training_step
        patches.set(trainer.strategy, "training_step", self._recorded)
        self.clear()

    def clear(self) -> None:
        """Begin a new window with the next training step."""
        self.window: Window | None = None
        self.weights: dict[str, Tensor] = {}  # this rank's part, before the window; of whole ones only on rank 0
        self.before: Fingerprints = {}  # the window
        self._after: Fingerprints = {}  # the newest step
        self.trainable: dict[str, bool] = {}
        self.training: dict[str, bool] = {}

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        """``strategy.training_step``. The record begins within, when the engine has made weights and buffers ready."""
        called, run = self.module.training_step, current_run(self.trainer)
        context = None if run is None else run.micro_batches.context

        def training_step(*step_args: Any, **step_kwargs: Any) -> Any:
            if run is None or context is None:
                self._begin(step_args)
                return called(*step_args, **step_kwargs)
            self._begin((context.slices.slice(args[0], cuts=False), *args[1:]))
            output = called(*step_args, **step_kwargs)
            count = run.windows.weighting.count(step_args[0], output)  # of this rank's slice
            self._newest.returned_count = float(count)
            return output

        with PatchStack() as patches:
            patches.set(self.module, "training_step", training_step)
            output = self._training_step(*args, **kwargs)
        self._end(output)
        return output

    @property
    def _newest(self) -> MicroBatch:
        assert self.window is not None
        return self.window.micro_batches[-1]

    def _begin(self, args: tuple[Any, ...]) -> None:
        now = fingerprints(self.module)
        window = self.window = self.window or self._begin_window(now)
        if any(now[name] != after for name, after in self._after.items() if _has_shape(now, name, after)):
            window.problem = (
                "a hook changes weights between the micro-batches of a window, where one process with one batch would"
                " call it once"
            )
        try:
            arguments = move_data_to_device(copy.deepcopy(args), "cpu")
        except Exception as error:
            window.problem = f"the batch cannot be copied ({described(error)})"
            arguments = ()
        window.micro_batches.append(
            MicroBatch(
                arguments,
                global_states(self.trainer.strategy.root_device),
                [generator.get_state() for generator in module_copy.generators_of(self.module)],
                module_copy.numbers_of(self.module),
            )
        )

    def _begin_window(self, before: Fingerprints) -> Window:
        keeps_whole = self.trainer.is_global_zero
        sampler = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        tensors = {
            key: None if tensor is None else whole_on_host(tensor)
            for key, tensor in module_copy.tensors_of(self.module).items()
        }
        self.before = before
        self.weights = {
            name: parameter.detach().clone()
            for name, parameter in self.module.named_parameters()
            if keeps_whole or isinstance(parameter, DTensor)
        }
        self.trainable = {name: parameter.requires_grad for name, parameter in self.module.named_parameters()}
        self.training = {name: each.training for name, each in self.module.named_modules()}
        return Window(sampler.get("rank", self.trainer.global_rank), tensors)

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
        """Parameters whose values on this rank are not those before the window."""
        now = fingerprints(self.module)
        return {name for name, before in self.before.items() if _has_shape(now, name, before) and now[name] != before}

    def replicas(self) -> Replicas:
        """Of the weights before the window. Ranks that hold the same part must have the same number."""
        parameters = dict(self.module.named_parameters())
        return {(n, _part(parameters[n])): value for n, (_, value) in self.before.items() if n in parameters}


def loss_of(output: Any) -> float | None:
    """The loss that ``training_step`` returned, alone or under "loss"; None if there is none. Reads the device."""
    loss = output.get("loss") if hasattr(output, "get") else output
    return None if loss is None else float(loss.detach())


def fingerprints(module: nn.Module) -> Fingerprints:
    """Fingerprints of this rank's parameters, which must be sharded or whole. Reads the device; no collective."""
    parts = {}
    for name, parameter in module.named_parameters():
        part = torch_internals.local_tensor(parameter.detach())
        if type(part) is not Tensor:  # such as weights that are codes, whose bits are their own
            continue
        part = part.reshape(-1)
        part = torch.view_as_real(part).reshape(-1) if part.is_complex() else part
        # FSDP2 frees the memory of gathered parameters, not the tensors.
        if part.untyped_storage().size() or not part.numel():
            # While FSDP2 has gathered it, a parameter is no DTensor, and its part is all of it.
            parts[name] = (
                tuple(torch_internals.local_tensor(parameter).shape),
                part.view(_SAME_SIZE[part.element_size()]).sum(dtype=torch.int64),
            )
    numbers = torch.stack([number.cpu() for _, number in parts.values()]).tolist() if parts else []
    return {name: (shape, number) for (name, (shape, _)), number in zip(parts.items(), numbers, strict=True)}


def _has_shape(fingerprints: Fingerprints, name: str, other: tuple[tuple[int, ...], int]) -> bool:
    return name in fingerprints and fingerprints[name][0] == other[0]


def _part(parameter: Tensor) -> tuple[int, ...]:
    """Which part of a parameter this rank holds: its coordinates in the dimensions of the mesh that shard it."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinates: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    placed = zip(coordinates, parameter.placements, strict=False)
    return tuple(index for index, placement in placed if not isinstance(placement, Replicate))


def whole_on_host(tensor: Tensor) -> Tensor:
    """All of ``tensor``, detached, dense, and a copy in the host's memory. A collective for a ``DTensor``."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.to("cpu", copy=True)


def whole(tensors: Mapping[str, Tensor | None], keeps: bool) -> dict[str, Any]:
    """Tensors whole and on the host, where this rank ``keeps`` them. A collective for those that are sharded."""
    found: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        if keeps or isinstance(tensor, DTensor):
            on_host = None if tensor is None else whole_on_host(tensor)
            if keeps:
                found[name] = on_host
    return found


def unequal(by_rank: list[Replicas]) -> list[str]:
    """Parameters of which ranks that should hold the same part hold another one."""
    values: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for found in by_rank:
        for key, value in found.items():
            values.setdefault(key, set()).add(value)
    return sorted({name for (name, _), distinct in values.items() if len(distinct) > 1})


def gathered_on_first(window: Window | None, world_size: int) -> list[Window] | None:
    """The windows of all ranks that have one, on rank 0; None on the others. A collective over the world."""
    if not dist.is_initialized() or world_size == 1:
        return [] if window is None else [window]
    try:
        sent = pickle.dumps(window)
    except Exception as error:  # before the collective, which the others have joined
        sent = pickle.dumps(Window(0, {}, problem=f"the batch cannot be pickled ({described(error)})"))
    received: list[Any] | None = [None] * world_size if dist.get_rank() == 0 else None
    dist.gather_object(sent, received, dst=0)
    if received is None:
        return None
    return [each for each in map(pickle.loads, received) if each is not None]

"""Computes the micro-batches of a step again, in the run itself: all ranks compute the same one together.

Every rank computes the same micro-batch, so that the mean over ranks, if an engine takes it, is its
gradient: FSDP2 takes it after every backward outside of a window, DDP after none but its own.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.callbacks.exactness.counting import Told
from lightning_automodel.callbacks.exactness.moment import leaving_no_trace
from lightning_automodel.callbacks.exactness.words import described, listed
from lightning_automodel.callbacks.running_strategy import automodel, context_of, options_of, run_of
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank, group_size
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.token_loss import TokenWeighting
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack

T = TypeVar("T")
Gradients = dict[str, Tensor]
"""This rank's parts of gradients by parameter, in host memory; those of parameters without one are missing."""

_SAMPLED = 1_000  # entries of this rank's part of each parameter, by which micro-batches are told apart
_TIME_FOR_ALL = timedelta(minutes=30)
_TIME_AFTER_ERROR = timedelta(seconds=20)


class ReplayError(RuntimeError):
    """Why the replay has ended, in words. Raised on all ranks."""


@dataclass
class MicroBatch:
    """One training step of this rank: its whole batch and the moment before it, and what is known of its weight."""

    pickled: bytes  # empty if that is not possible
    loss: float
    told: Told


@dataclass(frozen=True)
class Turn:
    """A micro-batch that all ranks compute: the rank that has it, as which of its own, and what is known of it."""

    source: int
    index: int
    count: float  # of all slices
    own_count: float  # of this rank's slice
    loss: float  # of the rank that has computed the slice which this rank has

    @staticmethod
    def all_of(told: Sequence[tuple[int, list[tuple[float, float]]]], num_slices: int) -> list["Turn"]:
        """The micro-batches of all ranks, by what each has ``told``: which data it has, and counts and losses."""
        peers: dict[int, list[int]] = {}
        for rank, (data, _) in enumerate(told):
            peers.setdefault(data, []).append(rank)
        position = peers[told[group_rank()][0]].index(group_rank())
        turns = []
        for _, ranks in sorted(peers.items()):
            for index, parts in enumerate(zip(*(told[rank][1] for rank in ranks), strict=True)):
                count = sum(of_slice for of_slice, _ in parts) * num_slices / len(parts)
                turns.append(Turn(ranks[0], index, count, *parts[position]))
        return turns


@dataclass
class Replayed:
    """Gradients of one batch, what each micro-batch adds to sampled entries of them, and its loss on this rank."""

    gradients: Gradients
    parts: Tensor  # [k, m]
    losses: list[float]


class LockStep:
    """Replays windows on all ranks together: every public method but ``gradients`` is a collective over the world.

    Where parameters are sharded, a step of the replay communicates. A rank whose step raises alone waits for
    the others as long as ``_TIME_AFTER_ERROR``, and then raises: they may wait for it within the step, as they
    would in the run.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, weighting: TokenWeighting) -> None:
        self._trainer = trainer
        self._module = module
        self._weighting = weighting
        self._device = trainer.strategy.root_device
        self._context = context_of(trainer)
        run = run_of(trainer)
        self._engine = None if run is None else run.engine
        self.num_slices = options_of(trainer).get("context_parallel_size", 1)
        self.parameters = dict(module.named_parameters())
        self.trained = self.parameters
        self._own: Sequence[MicroBatch] = ()
        self._hooks: dict[str, list[Callable[[Tensor], Tensor | None]]] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether an engine takes part in the replay's backwards."""
        return any(isinstance(parameter, DTensor) for parameter in self.trained.values())

    def gradients(self) -> Gradients:
        """What ``.grad`` holds. Not a collective."""
        with plain_access():
            graded = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            return {name: local_part(gradient).to("cpu", copy=True) for name, gradient in graded.items()}

    @contextmanager
    def apart(self, own: Sequence[MicroBatch], optimizer: Optimizer) -> Iterator[None]:
        """Context of replays of windows of which this rank has its ``own``; all that a step may change is put back."""
        self._own = own
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad and id(p) in optimized}
        self._weights = {name: local_part(p).to("cpu", copy=True) for name, p in self.parameters.items()}
        loggers = self._trainer.loggers
        with (
            leaving_no_trace(self._module, self._device) as self._missing,
            PatchStack() as patches,
            torch.enable_grad(),
        ):
            for name in ("log", "log_dict"):
                patches.set(self._module, name, lambda *_, **__: None)
            patches.callback(setattr, self._trainer, "loggers", loggers)
            self._trainer.loggers = [DummyLogger() for _ in loggers]
            self._hooks = {
                name: torch_internals.take_hooks(parameter, patches)
                for name, parameter in self.trained.items()
                if not isinstance(parameter, DTensor)
            }
            for parameter in self.parameters.values():
                patches.callback(setattr, parameter, "grad", parameter.grad)
            patches.callback(self.restore_weights)
            yield

    @torch.no_grad()
    def restore_weights(self) -> bool:
        """Write back the weights. Returns whether any had changed. Not a collective."""
        has_changed = False
        for name, parameter in self.parameters.items():
            part = local_part(parameter)
            before = self._weights[name].to(part.device)
            if not torch.allclose(part, before, rtol=0, atol=0, equal_nan=True):
                part.copy_(before)
                has_changed = True
        return has_changed

    def together(self, function: Callable[[], T]) -> T:
        """What ``function`` returns. ReplayError on all ranks if it raises on any."""
        problem = None
        try:
            result = function()
        except Exception as error:
            problem = f"the replay has raised {described(error)}"
            if self._missing:
                problem += (
                    f". It lacks {listed(self._missing)}: what is drawn from iterators cannot be put back"
                )
        if self.is_sharded:
            patience = _TIME_FOR_ALL if problem is None else _TIME_AFTER_ERROR
            try:
                collectives.named_barrier("ExactnessCheck", patience)
            except RuntimeError as error:
                if problem is None:
                    raise
                raise RuntimeError(
                    f"ExactnessCheck: {problem}, on this rank alone and within a forward that the others are"
                    " still in. Remove the check, or the cause."
                ) from error
        first = next(filter(None, collectives.gather_objects(problem)), None)
        if first is not None:
            raise ReplayError(first)
        return result

    # --- One micro-batch --------------------------------------------------------------------------------------

    @contextmanager
    def taking_turn(self, turn: Turn, turns: Sequence[Turn]) -> Iterator[tuple[Tensor, float]]:
        """Context of a micro-batch's forward, and of its backward.

        Yields [] this rank's part of its share in the loss of one batch, and its own loss.
        """
        sent = b""
        if turn.source == group_rank():
            sent = self._own[turn.index].pickled
        received = collectives.broadcast_object(sent, turn.source)
        if not received:
            raise ReplayError("a batch cannot be pickled, for other ranks")
        with self._replaying() if self._engine is None else self._engine.replaying():
            yield self.together(lambda: self._forward(turn, turns, received))

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """As that of our engines, under another strategy: forwards alone leave parameters gathered."""
        try:
            yield
        finally:
            for submodule in self._module.modules():
                if isinstance(submodule, FSDPModule):
                    submodule.reshard()

    def _forward(self, turn: Turn, turns: Sequence[Turn], received: bytes) -> tuple[Tensor, float]:
        arguments, before = pickle.loads(received)
        before.restore(self._module, self._device)
        batch, *rest = move_data_to_device(arguments, self._device)
        if self._context is not None:
            batch = self._context.slice(batch)
        attention = nullcontext() if self._context is None else self._context.step("training_step")
        with self._trainer.precision_plugin.train_step_context(), attention:
            output = self._module.training_step(batch, *rest)
        loss = loss_of(output)
        aux = None
        if automodel(self._trainer) is not None:
            aux = self._weighting.aux_loss(output, is_counted_ahead=True)
        total = max(sum(other.count for other in turns), 1e-30)
        objective = self._weighting.objective(loss, turn.own_count, aux_loss=aux) / total
        if aux is not None:
            objective = objective + aux / len(turns)
        return objective * self.num_slices, float(loss.detach())

    # --- One batch --------------------------------------------------------------------------------------------

    def one_batch(self, turns: Sequence[Turn], scale: float = 1.0, reverse: bool = False) -> Replayed:
        """Compute the gradients of all micro-batches as one batch, from losses times ``scale``."""
        for parameter in self.parameters.values():
            parameter.grad = None
        scale *= loss_scale(self._trainer)
        losses = [0.0] * len(turns)
        parts = [torch.zeros(0)] * len(turns)
        total = self._sampled()
        for number in sorted(range(len(turns)), reverse=reverse):
            with self.taking_turn(turns[number], turns) as (objective, losses[number]):
                self.together((objective * scale).backward)  # no window is open
            before = total
            total = self._sampled()
            parts[number] = (total - before) / scale
        self._complete(scale)
        return Replayed(self.gradients(), torch.stack(parts, dim=1), losses)

    @torch.no_grad()
    def _complete(self, scale: float) -> None:
        """Make of what the backwards have left the gradients of one batch, which hooks of plain parameters see once."""
        plain = [self.trained[name] for name in self._hooks if self.trained[name].grad is not None]
        if self._context is not None and plain:
            rescale_clip.average_gradients_(plain, self._context.group)
        rescale_clip.share_experts_gradients_(list(self.trained.values()))
        for name, parameter in self.trained.items():
            if parameter.grad is None:
                continue
            parameter.grad.div_(scale)
            for hook in self._hooks.get(name, ()):
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed

    # --- Comparing --------------------------------------------------------------------------------------------

    def _sampled(self) -> Tensor:
        with plain_access():
            return self.sample({name: p.grad for name, p in self.trained.items() if p.grad is not None})

    def sample(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """[k] entries of this rank's parts of gradients, in float64 on the host; 0 for missing ones. No collective."""
        parts = [torch.zeros(0, dtype=torch.float64)]
        for name, parameter in self.trained.items():
            local = local_part(gradients.get(name, parameter)).reshape(-1)
            taken = local[:: max(1, local.numel() // _SAMPLED)].double().cpu()
            parts.append(taken * (name in gradients))
        return torch.cat(parts)

    def norms(self, first: Gradients, second: Gradients | None = None) -> dict[str, float]:
        """2-norms by parameter, of one gradient or of the differences between two."""
        zero = torch.zeros((), dtype=torch.float64)
        squares = []
        for name, parameter in self.trained.items():
            difference = first.get(name, zero).double() - (second or {}).get(name, zero).double()
            squares.append(float(difference.square().sum()) / _num_copies(parameter))
        roots = self._sum(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()
        return dict(zip(self.trained, roots, strict=True))

    def products(self, columns: Tensor) -> Tensor:
        """[c, c] inner products of [k, c] columns, each of which all ranks hold parts of."""
        return self._sum(columns.mT @ columns)

    @staticmethod
    def _sum(values: Tensor) -> Tensor:
        return torch.stack(collectives.gather_objects(values)).sum(dim=0)


def loss_of(output: Any) -> Tensor:
    """[] the loss in what ``training_step`` has returned."""
    if isinstance(output, Mapping):
        loss: Tensor = output["loss"]
        return loss
    found: Tensor = output
    return found


def loss_scale(trainer: pl.Trainer) -> float:
    """What a gradient scaler multiplies losses by at the moment."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale())


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, dense, sharing memory if it is."""
    with plain_access():
        local = torch_internals.local_tensor(tensor.detach())
    if local.is_sparse:
        return local.to_dense()
    return local


def _num_copies(parameter: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return group_size()
    placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return group_size() // math.prod(size for placement, size in placed if not placement.is_replicate())

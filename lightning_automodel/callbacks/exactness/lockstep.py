"""Computes the micro-batches of a window again, in the run itself: all ranks compute the same one together.

Every rank computes the same micro-batch, so that the mean over ranks, if an engine takes it, is its
gradient: FSDP2 takes it after every backward outside of a window, DDP after none but its own.

Under manual optimization a step runs to its end, but of its backwards only the micro-batch's own is computed,
and where an optimizer would step, the weights are written that it had left in the run.
"""

import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.counting import Counting, MicroBatch
from lightning_automodel.callbacks.exactness.moment import leaving_no_trace
from lightning_automodel.callbacks.exactness.parts import (
    Parts,
    gradients_of,
    local_part,
    loss_of,
    loss_scale,
    weights_of,
)
from lightning_automodel.callbacks.exactness.recording import RecordedWindow, Recorder
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_rank, group_size
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.internals.patching import PatchStack

_SAMPLED = 1_000  # entries of each parameter, by which micro-batches are told apart
_TIME_FOR_ALL = timedelta(minutes=30)
_TIME_AFTER_ERROR = timedelta(seconds=20)


class ReplayError(RuntimeError):
    """Why a window cannot be judged, in words. Raised on all ranks."""


def agree(problem: str | None) -> None:
    """ReplayError on all ranks with the ``problem`` of the first that has one. A collective over the world."""
    found = next(filter(None, collectives.gather_objects(problem)), None)
    if found is not None:
        raise ReplayError(found)


@dataclass
class Computed:
    """What a micro-batch has given: this rank's part of its share in the loss of one batch, and its own loss."""

    share: float
    loss: float
    gradients: Parts


class LockStep:
    """Replays a window on all ranks together.

    Collectives over the world are ``together``, ``compute``, ``one_batch``, ``sample`` and ``norms`` alone.

    Where parameters are sharded, a step of the replay communicates. A rank whose step raises alone waits for
    the others as long as ``_TIME_AFTER_ERROR``, and then raises: they may wait for it within the step, as they
    would in the run.

    Attributes:
        module: Whose steps are computed again.
        recorder: Has the weights of the window's steps, under manual optimization.
        recorded: This rank's part of the window.
        parameters: By name.
        weights: Those of the moment.
        is_sharded: Whether an engine takes part in the replay's backwards.
        is_counted: Whether the counts of all micro-batches are known.
        turns: The window's micro-batches, of all ranks.
    """

    def __init__(
        self, trainer: pl.Trainer, counting: Counting, recorder: Recorder, recorded: RecordedWindow
    ) -> None:
        self.recorder = recorder
        self.recorded = recorded
        self.module: pl.LightningModule = trainer.lightning_module
        self.parameters = recorder.parameters
        self.weights = weights_of(self.parameters)
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters.values())
        self._trainer = trainer
        self._weighting = counting.weighting
        self._device = trainer.strategy.root_device
        self._optimizers: list[Any] = []  # those of the Trainer, and what the module gets of them
        self._missing: list[str] = []  # what cannot be put back after a replay
        self._run = run_of(trainer)
        self._context = None if self._run is None else self._run.micro_batches.context
        self._num_slices = 1 if self._context is None else self._context.group.size()
        sampler = trainer.distributed_sampler_kwargs or {}
        number = sampler.get("rank", trainer.global_rank)  # of the rank's data
        by_rank = collectives.gather_objects((number, recorded.micro_batches))
        self.is_counted = counting.settle([each for _, records in by_rank for each in records])
        self.turns = self._arrange(by_rank)

    def _arrange(self, by_rank: Sequence[tuple[int, list[MicroBatch]]]) -> list[MicroBatch]:
        """Order the micro-batches of all ranks by the number of each one's data, and note which rank has each.

        Of slices, those of this rank's place.
        """
        ranks = sorted(range(len(by_rank)), key=lambda rank: by_rank[rank][0])
        num_peers = len(ranks) // len({data for data, _ in by_rank})
        position = ranks.index(group_rank()) % num_peers
        turns = []
        for first in range(0, len(ranks), num_peers):
            records = [by_rank[rank][1] for rank in ranks[first : first + num_peers]]
            for slices in zip(*records, strict=True):
                turn = slices[position]
                turn.source = ranks[first]
                turn.whole_count = sum(each.count for each in slices) * self._num_slices / num_peers
                turns.append(turn)
        return turns

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context of replays, which puts all back that a step may change."""
        module = self.module
        strategy = self._trainer.strategy

        def nothing(*_: Any, **__: Any) -> None:
            """In here: a function of a file would be state of the module, which it had not before the step."""

        wrapped = module.optimizers()
        self._optimizers = [
            *(wrapped if isinstance(wrapped, list) else [wrapped]),
            *self._trainer.optimizers,
        ]
        with (
            leaving_no_trace(module, self._device) as self._missing,
            PatchStack() as patches,
            torch.enable_grad(),
        ):
            for owner, name in (
                *((module, name) for name in ("log", "log_dict", "zero_grad", "clip_gradients")),
                *((optimizer, "zero_grad") for optimizer in self._optimizers),
                *((config.scheduler, "step") for config in self._trainer.lr_scheduler_configs),
            ):
                patches.set(owner, name, nothing)
            # Of AutomodelStrategy.
            patches.set(strategy, "clip_gradients", nothing, is_new=True)
            patches.set(strategy, "block_backward_sync", nullcontext, is_new=True)
            for parameter in self.parameters.values():
                patches.callback(setattr, parameter, "grad", parameter.grad)
            patches.callback(self.write, self.weights)
            yield

    @torch.no_grad()
    def write(self, weights: Parts) -> bool:
        """Write weights, and free what was gathered of them. Returns whether any have changed."""
        has_changed = False
        for name, parameter in self.parameters.items():
            part = local_part(parameter)
            wanted = weights[name].to(part.device)
            if not torch.equal(part, wanted):
                part.copy_(wanted)
                has_changed = True
        if self._run is not None:
            self._run.engine.stepped()
            return has_changed
        for submodule in self.module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()
        return has_changed

    def together(self, function: Callable[[], None]) -> None:
        """Call ``function``. ReplayError on all ranks if it raises on any."""
        problem = None
        try:
            function()
        except ReplayError:
            raise  # of a call within this one
        except Exception as error:
            problem = f"the replay has raised {type(error).__name__}: {error}"
            if self._missing:
                problem += f". It lacks {list_first(self._missing, 4)}: what is drawn from iterators cannot be put back"
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
        agree(problem)

    # --- One micro-batch --------------------------------------------------------------------------------------

    def compute(self, turn: MicroBatch, weights: Sequence[Parts], scale: float | None = None) -> Computed:
        """Compute a micro-batch's forward, and the backward of its share times ``scale`` if there is one.

        ``weights`` are written before its training step, and in place of each step of an optimizer in it.
        """
        received = collectives.broadcast_object(self.recorder.batches.get(turn.step), turn.source)
        if not received:
            raise ReplayError("a batch cannot be pickled, for other ranks")
        written = iter(weights)
        numbers = itertools.count(1)
        found: list[Computed] = []

        def backward(loss: Tensor, output: Any) -> None:
            if next(numbers) != turn.backward:
                return
            share = self._share(loss, output, turn)
            self._clear_gradients()
            if scale is not None:
                self.together(lambda: None)  # no rank has raised before its backward
                self._differentiate(share * scale)
            found.append(Computed(float(share.detach()), float(loss.detach()), self._gradients()))

        def step(closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> None:
            if closure is not None:
                closure()
            self.write(next(written))

        def run_step() -> None:
            self.write(next(written))
            self._clear_gradients()
            output = self._training_step(received)
            if self.module.automatic_optimization:
                backward(loss_of(output), output)
            if not found:
                raise RuntimeError(f"training_step has not called manual_backward {turn.backward} times")

        with PatchStack() as patches:
            patches.set(
                self._trainer.strategy, "backward", lambda loss, *_, **kwargs: backward(loss, kwargs)
            )
            for optimizer in self._optimizers:
                patches.set(optimizer, "step", step)
            # A step that raises leaves optimizers toggled, and what was gathered for it would toggle them again.
            for parameter in self.parameters.values():
                patches.callback(parameter.requires_grad_, parameter.requires_grad)
            if self._run is not None:
                patches.callback(setattr, self._run.windows, "toggled", None)
                patches.callback(self._run.engine.release)
                patches.enter_context(self._run.engine.replaying())
            self.together(run_step)
        return found[0]

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _training_step(self, received: bytes) -> Any:
        arguments, before = pickle.loads(received)
        before.restore(self.module, self._device)
        batch, *rest = move_data_to_device(arguments, self._device)
        if self._context is not None:
            batch = self._context.slice(batch)
        attention = nullcontext() if self._context is None else self._context.step("training_step")
        with self._trainer.precision_plugin.train_step_context(), attention:
            return self.module.training_step(batch, *rest)

    def _share(self, loss: Tensor, output: Any, turn: MicroBatch) -> Tensor:
        """[] the share of a ``loss`` [] in that of one batch."""
        aux = None
        if self._run is not None:
            aux = self._weighting.aux_loss(output, is_counted_ahead=True)
        total = max(sum(other.whole_count for other in self.turns), 1e-30)
        share = self._weighting.objective(loss, turn.count, aux_loss=aux) / total
        if aux is not None:
            share = share + aux / len(self.turns)
        return share * self._num_slices

    def _differentiate(self, objective: Tensor) -> None:
        """Put the gradients of ``objective`` [] into ``.grad``. No window is open."""
        if not getattr(self._trainer.strategy.model, "find_unused_parameters", False):
            objective.backward()
            return
        # DDP would take what it sees in a backward for used in the run's next one.
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(objective, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def _gradients(self) -> Parts:
        """The gradients in ``.grad``, averaged where no engine does it."""
        graded = [p for p in self.parameters.values() if p.grad is not None]
        plain = [p for p in graded if not isinstance(p, DTensor)]
        if self._context is not None and plain:
            rescale_clip.average_gradients_(plain, self._context.group)
        rescale_clip.share_experts_gradients_(graded)
        return gradients_of(self.parameters)

    # --- One batch --------------------------------------------------------------------------------------------

    def one_batch(
        self, turns: Sequence[MicroBatch], scale: float = 1.0
    ) -> tuple[Parts, list[Tensor], list[float]]:
        """Compute the gradients of all micro-batches as one batch, in this order, from losses times ``scale``.

        Returns these, [k] what each micro-batch adds to sampled entries of them, and its loss on this rank.
        """
        scale *= loss_scale(self._trainer)
        losses = []
        samples = []
        total: Parts = {}
        for turn in turns:
            weights = self.recorder.weights.get(turn.step, [self.weights])
            computed = self.compute(turn, weights, scale)
            losses.append(computed.loss)
            samples.append(self.sample(computed.gradients) / scale)
            for name, gradient in computed.gradients.items():
                total[name] = gradient + total.get(name, 0)
        return {name: gradient / scale for name, gradient in total.items()}, samples, losses

    # --- Comparing --------------------------------------------------------------------------------------------

    def sample(self, gradients: Parts) -> Tensor:
        """[k] entries of gradients, of all ranks, in float64; 0 for missing ones. A collective over the world."""
        found = []
        for name, weights in self.weights.items():
            part = gradients.get(name, torch.zeros_like(weights)).reshape(-1)
            found.append(part[:: max(1, part.numel() * group_size() // _SAMPLED)].double())
        return torch.cat(collectives.gather_objects(torch.cat(found)))

    def norms(self, first: Parts, second: Parts | None = None) -> dict[str, float]:
        """2-norms by parameter, of one gradient or of the differences between two."""
        zero = torch.zeros((), dtype=torch.float64)
        squares = []
        for name, parameter in self.parameters.items():
            difference = first.get(name, zero).double() - (second or {}).get(name, zero).double()
            squares.append(float(difference.square().sum()) / _num_copies(parameter))
        of_all = torch.tensor(collectives.gather_objects(squares), dtype=torch.float64)
        return dict(zip(self.parameters, of_all.sum(dim=0).sqrt().tolist(), strict=True))


def _num_copies(parameter: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return group_size()
    placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return group_size() // math.prod(size for placement, size in placed if not placement.is_replicate())

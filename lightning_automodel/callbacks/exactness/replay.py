"""Computes a recorded window again in the run: all ranks compute the same micro-batch together, one after the other.

Then the mean over ranks, if an engine takes it, is its gradient: FSDP2 takes it after every backward outside of a
window, DDP after none but its own.

For each micro-batch its training step runs once more, and stands for the run's:

======================================  ===============================================================
of the step                             in the replay
======================================  ===============================================================
batch, random states, state of modules  those of the rank that has recorded it, on all ranks
weights                                 those before the step
backwards                               the micro-batch's own alone, of its share of one batch's loss
steps of optimizers                     the weights that they have left in the run (manual optimization)
logging, zeroing, clipping, schedulers  nothing
======================================  ===============================================================
"""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_automodel.callbacks.exactness.counting import MicroBatch
from lightning_automodel.callbacks.exactness.module_state import starting_from
from lightning_automodel.callbacks.exactness.recording import (
    Parts,
    RecordedStep,
    RecordedWindow,
    Recorder,
    copies_of,
    local_part,
)
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank, group_size
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.token_loss import loss_of
from lightning_automodel.internals.patching import PatchStack

_SAMPLED = 1_000
"""Entries of each parameter, by which micro-batches are told apart."""
_TIME_FOR_ALL = timedelta(minutes=30)
_TIME_AFTER_ERROR = timedelta(seconds=20)


class ReplayError(RuntimeError):
    """Why a window cannot be judged, in words. Raised on all ranks."""


def agree(problem: str) -> None:
    """ReplayError on all ranks with the ``problem`` of the first that has one. A collective over the world."""
    for found in filter(None, collectives.gather_objects(problem)):
        raise ReplayError(found)


@dataclass
class Computed:
    """What the replay of a micro-batch has computed.

    Attributes:
        loss: Of its training step.
        share: What it adds to the loss of one batch; of a slice, this rank's part of that.
        gradients: This rank's parts of the gradients of the share times a scale; none without a scale.
    """

    loss: float
    share: float
    gradients: Parts


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Replay:
    """The replay of a window. Its constructor and its public methods are collectives over the world.

    Where parameters are sharded, a step of the replay communicates. A rank whose step raises alone waits for
    the others as long as ``_TIME_AFTER_ERROR``, and then raises: they may wait for it within the step, as they
    would in the run.

    While a micro-batch is computed:

    =====================  ===================================================
    ``_micro_batch``       which one it is
    ``_scale``             what its loss is multiplied by; None for no backward
    ``_weights_to_write``  those before its step and after each optimizer step
    ``_backwards_left``    how many its step has until its own, and that one
    ``_computed``          set by its own backward
    =====================  ===================================================

    Attributes:
        recorder: Of the training.
        window: This rank's part of the window.
        gradients: This rank's parts of those of the run.
        weights: This rank's parts of the weights at the window's end.
        micro_batches: Those of all ranks; of slices, those of this rank's place.
        repeats_batches: Whether all ranks had the same batches, and should have had different ones.
    """

    def __init__(self, recorder: Recorder, window: RecordedWindow) -> None:
        self.recorder = recorder
        self.window = window
        self.gradients = window.gradients or {}
        self.weights = copies_of(recorder.parameters)
        sampler = recorder.trainer.distributed_sampler_kwargs or {}
        # Ranks with the same data have one number: they hold slices of its batches, or the same ones.
        data = sampler.get("rank", recorder.trainer.global_rank)
        gathered = collectives.gather_objects((data, window.micro_batches))
        recorder.counting.settle([each for _, of_rank in gathered for each in of_rank])
        ranks_by_data: dict[int, list[int]] = {}
        for rank, (number, _) in enumerate(gathered):
            ranks_by_data.setdefault(number, []).append(rank)
        place = ranks_by_data[data].index(group_rank())
        self.micro_batches: list[MicroBatch] = []
        for ranks in ranks_by_data.values():
            for slices in zip(*(gathered[rank][1] for rank in ranks), strict=True):
                own = slices[place]
                own.source = ranks[0]
                own.whole_count = sum(each.count for each in slices) / len(slices)
                self.micro_batches.append(own)
        checksums = {tuple(each.checksum for each in of_rank) for _, of_rank in gathered}
        is_known = all(of_rank and all(of_rank) for of_rank in checksums)
        self.repeats_batches = is_known and len(checksums) == 1 < len(ranks_by_data)

    def one_batch(self, order: Sequence[MicroBatch], scale: float = 1.0) -> tuple[Parts, list[Tensor]]:
        """Compute the gradients of micro-batches as one batch, in this order, from losses times ``scale``.

        Returns these, and [k] what each micro-batch adds to sampled entries of them. ReplayError if any of them does
        not repeat what it did in the run.
        """
        scale *= self.recorder.loss_scale()
        tolerance = 1e-2 if self.recorder.is_half else 1e-5
        problem = ""
        total: Parts = {}
        samples = []
        for each in order:
            computed = self._compute(each, self.weights, scale)
            if abs(each.loss - computed.loss) > tolerance * abs(each.loss):
                problem = (
                    f"losses differ in the replay, such as {each.loss:.6g} in the run and {computed.loss:.6g} in the"
                    " replay: training_step is not repeatable, depends on the rank or on other ranks, or keeps a"
                    " state that is no attribute of a module"
                )
            samples.append(self.sample(computed.gradients) / scale)
            for name, gradient in computed.gradients.items():
                total[name] = gradient + total.get(name, 0)
        if self.write(self.weights) and self.recorder.is_automatic:
            problem = "training_step writes weights, which a micro-batch would find as another wrote them"
        agree(problem)
        return {name: gradient / scale for name, gradient in total.items()}, samples

    def sample(self, gradients: Parts) -> Tensor:
        """[k] entries of gradients, of all ranks, in float64; 0 for missing ones."""
        entries = []
        for name, weights in self.weights.items():
            part = gradients.get(name, torch.zeros_like(weights)).flatten()
            entries.append(part[:: max(1, part.numel() * group_size() // _SAMPLED)].double())
        return torch.cat(collectives.gather_objects(torch.cat(entries)))

    def loss_at(self, weights: Parts) -> float:
        """The loss of one batch at other weights, by forwards alone, under automatic optimization."""
        shares = [self._compute(each, weights).share for each in self.micro_batches]
        finite = filter(math.isfinite, shares)  # a slice without label tokens has no loss
        return sum(collectives.gather_objects(sum(finite))) / group_size()

    def _compute(self, micro_batch: MicroBatch, weights: Parts, scale: float | None = None) -> Computed:
        """Run a micro-batch's step, from these weights if optimization is automatic; a backward if there is a scale."""
        step = self.recorder.steps.get(micro_batch.step, RecordedStep(checksum=0))
        inputs = collectives.broadcast_object(step.inputs, micro_batch.source)
        if not inputs:
            raise ReplayError("a batch cannot be pickled, for other ranks")
        self._micro_batch = micro_batch
        self._backwards_left = micro_batch.backward
        self._weights_to_write = iter(step.weights or [weights])
        self._scale = scale
        problem = ""
        with self._leaving_no_trace(), torch.set_grad_enabled(scale is not None):
            try:
                self._run_step(*pickle.loads(inputs))
            except ReplayError:
                raise
            except Exception as error:
                problem = (
                    "without iterators that modules hold, which cannot be put back, the replay has raised"
                    f" {type(error).__name__}: {error}"
                )
            self._meet(problem)
        return self._computed

    def _meet(self, problem: str = "") -> None:
        """Meet the other ranks. ReplayError on all if any of them has a problem."""
        if self.recorder.is_sharded:
            try:
                collectives.named_barrier("ExactnessCheck", _TIME_AFTER_ERROR if problem else _TIME_FOR_ALL)
            except RuntimeError as error:
                if not problem:
                    raise
                raise RuntimeError(
                    f"ExactnessCheck: {problem}, on this rank alone and within a forward that the others are"
                    " still in. Remove the check, or the cause."
                ) from error
        agree(problem)

    @contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Context of a training step, which replaces what it calls, and puts all back but weights."""
        trainer = self.recorder.trainer
        module = self.recorder.module
        run = self.recorder.run
        wrapped = module.optimizers()
        optimizers = [*(wrapped if isinstance(wrapped, list) else [wrapped]), *trainer.optimizers]
        with PatchStack() as patches:
            for parameter in self.recorder.parameters.values():
                patches.callback(setattr, parameter, "grad", parameter.grad)
                # A step that raises leaves optimizers toggled, and what it has gathered would toggle them again.
                patches.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.grad = None
            for name in ("log", "log_dict", "zero_grad", "clip_gradients"):
                patches.set(module, name, _nothing)
            for optimizer in optimizers:
                patches.set(optimizer, "zero_grad", _nothing)
                patches.set(optimizer, "step", self._step)
            for config in trainer.lr_scheduler_configs:
                patches.set(config.scheduler, "step", _nothing)
            patches.set(trainer.strategy, "backward", self._backward)
            if run is not None:
                patches.set(trainer.strategy, "clip_gradients", _nothing)
                patches.set(trainer.strategy, "block_backward_sync", nullcontext)
                patches.set(run.windows, "toggled", None)
                patches.enter_context(run.engine.replaying())
            yield

    @torch.no_grad()
    def write(self, weights: Parts) -> bool:
        """Write weights, and free what was gathered of them. Returns whether any have changed. Not a collective."""
        has_changed = False
        for name, parameter in self.recorder.parameters.items():
            part = local_part(parameter)
            wanted = weights[name].to(part)
            if not torch.equal(part, wanted):
                part.copy_(wanted)
                has_changed = True
        if self.recorder.run is None:
            rescale_clip.list_parameters(self.recorder.module)  # which are the shards afterwards
        else:
            self.recorder.run.engine.release()
        return has_changed

    # --- Within a training step -----------------------------------------------------------------------------------

    def _run_step(self, arguments: Any, snapshot: bytes) -> None:
        recorder = self.recorder
        module = recorder.module
        self._write_next_weights()
        arguments = move_data_to_device(arguments, recorder.device)
        attention: AbstractContextManager[None] = nullcontext()
        if recorder.run is not None:
            arguments, attention = recorder.run.micro_batches.sliced(arguments, "training_step")
        with starting_from(snapshot, module, recorder.device):
            with recorder.trainer.precision_plugin.train_step_context(), attention:
                output = module.training_step(*arguments)
            if recorder.is_automatic:
                self._differentiate(loss_of(output), output)
            elif self._backwards_left > 0:
                raise RuntimeError(
                    f"training_step has not called manual_backward {self._micro_batch.backward} times"
                )

    def _step(self, closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> None:
        """In place of an optimizer's step within the training step: write what it has left in the run."""
        if closure is not None:
            closure()
        self._write_next_weights()

    def _write_next_weights(self) -> None:
        weights = next(self._weights_to_write, None)
        if weights is None:
            raise RuntimeError(
                "training_step has stepped optimizers more often than in the run: let steps depend on the batch and"
                " on attributes of modules alone, and set automatic_optimization=False if it steps any by itself"
            )
        self.write(weights)

    def _backward(self, loss: Tensor, *_: Any, **kwargs: Any) -> None:
        """In place of the strategy's backward: the micro-batch's own is computed alone."""
        self._backwards_left -= 1
        if not self._backwards_left:
            self._differentiate(loss, kwargs)

    def _differentiate(self, loss: Tensor, output: Any) -> None:
        """Compute the gradients of the micro-batch, whose ``loss`` [] and ``output`` its step has returned."""
        recorder = self.recorder
        parameters = list(recorder.parameters.values())
        share = self._share(loss, output)
        if self._scale is not None:
            self._meet()  # no rank has raised before its backward
            for parameter in parameters:
                parameter.grad = None
            self._run_backward(share * self._scale)
            if recorder.context is not None:  # no engine averages these
                rescale_clip.average_gradients_(list(recorder.plain.values()), recorder.context.group)
            rescale_clip.share_experts_gradients_(parameters)
        self._computed = Computed(loss.item(), share.item(), recorder.gradients())

    def _share(self, loss: Tensor, output: Any) -> Tensor:
        """[] what the micro-batch adds to the loss of one batch."""
        weighting = self.recorder.counting.weighting
        aux = weighting.aux_loss(output, is_counted_ahead=True) if self.recorder.run else None
        total = max(sum(each.whole_count for each in self.micro_batches), 1e-30)
        share = weighting.objective(loss, self._micro_batch.count, aux_loss=aux) / total
        if aux is not None:
            share = share + aux / len(self.micro_batches)
        return share

    def _run_backward(self, objective: Tensor) -> None:
        """Put the gradients of ``objective`` [] into ``.grad``. No window is open."""
        if not getattr(self.recorder.trainer.strategy.model, "find_unused_parameters", False):
            objective.backward()
            return
        # DDP would take what it sees in a backward for used in the run's next one.
        trained = [parameter for parameter in self.recorder.parameters.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(objective, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

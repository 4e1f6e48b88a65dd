"""Computes the micro-batches of recorded windows again in the run: all ranks compute the same one together.

Then the mean over ranks, if an engine takes it, is its gradient: FSDP2 takes it after every backward outside of a
window, DDP after none but its own.

Under manual optimization a step runs to its end, but of its backwards only the micro-batch's own is computed,
and where an optimizer would step, the weights are written that it had left in the run.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_automodel.callbacks.exactness.counting import MicroBatch
from lightning_automodel.callbacks.exactness.moment import leaving_no_trace, restore
from lightning_automodel.callbacks.exactness.recording import (
    Parts,
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

_CHANGE = 2e-4  # of the loss, that a step along the gradients aims at
_MOVE = 1e-2  # of the entries of a parameter without a gradient
_SAMPLED = 1_000  # entries of each parameter, by which micro-batches are told apart
_TIME_FOR_ALL = timedelta(minutes=30)
_TIME_AFTER_ERROR = timedelta(seconds=20)


class ReplayError(RuntimeError):
    """Why a window cannot be judged, in words. Raised on all ranks."""


def agree(problem: str) -> None:
    """ReplayError on all ranks with the ``problem`` of the first that has one. A collective over the world."""
    for found in filter(None, collectives.gather_objects(problem)):
        raise ReplayError(found)


class LockStep(Recorder):
    """Replays windows that it has recorded, one after the other, on all ranks together.

    Its public methods are collectives over the world, but for those of a recorder, ``apart`` and ``write``.

    Where parameters are sharded, a step of the replay communicates. A rank whose step raises alone waits for
    the others as long as ``_TIME_AFTER_ERROR``, and then raises: they may wait for it within the step, as they
    would in the run.

    ==================  ======================================================  ===============================
    set by              state                                                   until
    ==================  ======================================================  ===============================
    :meth:`take`        the attributes below                                    the next :meth:`take`
    :meth:`apart`       the module's own state is aside; what would step, log,  its end
                        or zero gradients is replaced
    :meth:`compute`     ``_turn``, ``_scale``, the weights that are still to    the next :meth:`compute`
                        be written, and the backwards that are still to come
    ``_backward``       ``_computed``, by the micro-batch's own backward alone  the next :meth:`compute`
    ==================  ======================================================  ===============================

    Attributes:
        window: This rank's part of the window that is replayed.
        weights: This rank's parts of the weights at that moment.
        is_counted: Whether the counts of all micro-batches in the window are known.
        turns: The window's micro-batches, of all ranks; of slices, those of this rank's place.
        repeats_batches: Whether all ranks had the same batches in it, and should have had different ones.
    """

    def take(self, window: RecordedWindow) -> None:
        """Replay this window from now on."""
        self.window = window
        self.weights = copies_of(self.parameters)
        sampler = self.trainer.distributed_sampler_kwargs or {}
        # Ranks with the same data have one number: they hold slices of its batches, or the same ones.
        data = sampler.get("rank", self.trainer.global_rank)
        gathered = collectives.gather_objects((data, window.micro_batches))
        numbers = [number for number, _ in gathered]
        place = numbers[: group_rank()].count(data)
        self.is_counted = self.counting.settle([each for _, of_rank in gathered for each in of_rank])
        checksums = {tuple(each.checksum for each in of_rank) for _, of_rank in gathered}
        is_known = all(of_rank and all(of_rank) for of_rank in checksums)
        self.repeats_batches = is_known and len(checksums) == 1 < len(set(numbers))
        self.turns: list[MicroBatch] = []
        for number in dict.fromkeys(numbers):
            of_ranks = [of_rank for other, of_rank in gathered if other == number]
            for slices in zip(*of_ranks, strict=True):
                turn = slices[place]
                turn.source = numbers.index(number)
                turn.whole_count = sum(each.count for each in slices) / len(slices)
                self.turns.append(turn)

    def unequal(self) -> str:
        """The first plain parameter of which ranks hold different values, with its sums; empty if there is none."""
        sums = {
            f"the sum of {name}": f"{float(p.detach().double().sum())}" for name, p in self.plain.items()
        }
        return collectives.disagreement(sums)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context of replays, which puts all back that a step may change."""
        module = self.module
        strategy = self.trainer.strategy
        wrapped = module.optimizers()
        optimizers = [*(wrapped if isinstance(wrapped, list) else [wrapped]), *self.trainer.optimizers]
        with leaving_no_trace(module, self.device), PatchStack() as patches, torch.enable_grad():
            for parameter in self.parameters.values():
                patches.callback(setattr, parameter, "grad", parameter.grad)
            patches.callback(self.write, self.weights)
            for owner, name in (
                *((module, name) for name in ("log", "log_dict", "zero_grad", "clip_gradients")),
                *((optimizer, "zero_grad") for optimizer in optimizers),
                *((config.scheduler, "step") for config in self.trainer.lr_scheduler_configs),
                (strategy, "clip_gradients"),  # of AutomodelStrategy, as is the last one
            ):
                # No function of a file, which would be state of the module.
                patches.set(owner, name, lambda *_, **__: None, is_new=True)
            for optimizer in optimizers:
                patches.set(optimizer, "step", self._step)
            patches.set(strategy, "backward", lambda loss, *_, **kwargs: self._backward(loss, kwargs))
            patches.set(strategy, "block_backward_sync", nullcontext, is_new=True)
            yield

    @torch.no_grad()
    def write(self, weights: Parts) -> bool:
        """Write weights, and free what was gathered of them. Returns whether any have changed."""
        has_changed = False
        for name, parameter in self.parameters.items():
            part = local_part(parameter)
            wanted = weights[name].to(part)
            if not torch.equal(part, wanted):
                part.copy_(wanted)
                has_changed = True
        if self.run is None:
            rescale_clip.list_parameters(self.module)  # which are the shards afterwards
        else:
            self.run.engine.release()
        return has_changed

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Context of what all ranks do. ReplayError on all at its end if any has raised in it."""
        problem = ""
        try:
            yield
        except ReplayError:
            raise  # of a context within this one
        except Exception as error:
            problem = (
                "without iterators that modules hold, which cannot be put back, the replay has raised"
                f" {type(error).__name__}: {error}"
            )
        if self.is_sharded:
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

    # --- One micro-batch --------------------------------------------------------------------------------------

    def compute(self, turn: MicroBatch, weights: Sequence[Parts], scale: float | None = None) -> Parts:
        """Run a micro-batch's forward, and the backward of its share times ``scale`` if there is one.

        ``weights`` are written before its training step, and in place of each step of an optimizer in it. Returns
        this rank's parts of the gradients.
        """
        received = collectives.broadcast_object(self.batches.get(turn.step), turn.source)
        if not received:
            raise ReplayError("a batch cannot be pickled, for other ranks")
        self._turn = turn
        self._scale = scale
        self._weights_to_write = iter(weights)
        self._backwards_left = turn.backward
        with PatchStack() as patches:
            # A step that raises leaves optimizers toggled, and what a step has gathered would toggle them again.
            for parameter in self.parameters.values():
                patches.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.grad = None
            if self.run is not None:
                patches.set(self.run.windows, "toggled", None)
                patches.enter_context(self.run.engine.replaying())
            patches.enter_context(self._together())
            self._step()
            output = self._training_step(received)
            if self.is_automatic:
                self._backward(loss_of(output), output)
            if self._backwards_left > 0:
                raise RuntimeError(f"training_step has not called manual_backward {turn.backward} times")
        return self._computed

    def _step(self, closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> None:
        """Write the next of the recorded weights: before a training step, and where an optimizer would step in it."""
        if closure is not None:
            closure()
        weights = next(self._weights_to_write, None)
        if weights is None:
            raise RuntimeError(
                "training_step has stepped optimizers more often than in the run: let steps depend on the batch and"
                " on attributes of modules alone, and set automatic_optimization=False if it steps any by itself"
            )
        self.write(weights)

    def _backward(self, loss: Tensor, output: Any) -> None:
        """In place of the strategy's backward: the micro-batch's own is computed alone."""
        self._backwards_left -= 1
        if self._backwards_left:
            return
        weighting = self.counting.weighting
        aux = weighting.aux_loss(output, is_counted_ahead=True) if self.run else None
        total = max(sum(turn.whole_count for turn in self.turns), 1e-30)
        share = weighting.objective(loss, self._turn.count, aux_loss=aux) / total  # [] of one batch's loss
        if aux is not None:
            share = share + aux / len(self.turns)
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._scale is not None:
            with self._together():
                pass  # no rank has raised before its backward
            self._differentiate(share * self._scale)
        self._turn.replayed_loss = float(loss.detach())
        self._turn.share = float(share.detach())
        if self.context is not None:  # no engine averages these
            rescale_clip.average_gradients_(list(self.plain.values()), self.context.group)
        rescale_clip.share_experts_gradients_(list(self.parameters.values()))
        self._computed = self._held_gradients()

    def _training_step(self, received: bytes) -> Any:
        arguments, moment = pickle.loads(received)
        restore(moment, self.module, self.device)
        arguments = move_data_to_device(arguments, self.device)
        attention: AbstractContextManager[None] = nullcontext()
        if self.run is not None:
            arguments, attention = self.run.micro_batches.sliced(arguments, "training_step")
        with self.trainer.precision_plugin.train_step_context(), attention:
            return self.module.training_step(*arguments)

    def _differentiate(self, objective: Tensor) -> None:
        """Put the gradients of ``objective`` [] into ``.grad``. No window is open."""
        if not getattr(self.trainer.strategy.model, "find_unused_parameters", False):
            objective.backward()
            return
        # DDP would take what it sees in a backward for used in the run's next one.
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(objective, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    # --- One batch --------------------------------------------------------------------------------------------

    def one_batch(self, turns: Sequence[MicroBatch], scale: float = 1.0) -> tuple[Parts, list[Tensor]]:
        """Compute the gradients of all micro-batches as one batch, in this order, from losses times ``scale``.

        Returns these, and [k] what each micro-batch adds to sampled entries of them.
        """
        scale *= self._loss_scale()
        samples = []
        total: Parts = {}
        for turn in turns:
            gradients = self.compute(turn, self.step_weights.get(turn.step, [self.weights]), scale)
            samples.append(self.sample(gradients) / scale)
            for name, gradient in gradients.items():
                total[name] = gradient + total.get(name, 0)
        return {name: gradient / scale for name, gradient in total.items()}, samples

    # --- Comparing --------------------------------------------------------------------------------------------

    def sample(self, gradients: Parts) -> Tensor:
        """[k] entries of gradients, of all ranks, in float64; 0 for missing ones."""
        found = []
        for name, weights in self.weights.items():
            part = gradients.get(name, torch.zeros_like(weights)).flatten()
            found.append(part[:: max(1, part.numel() * group_size() // _SAMPLED)].double())
        return torch.cat(collectives.gather_objects(torch.cat(found)))

    def norms(self, first: Parts, second: Parts) -> Tensor:
        """[p] 2-norms by parameter of the differences between two gradients, in float64."""
        zero = torch.zeros(())
        squares = []
        for name in self.parameters:
            difference = first.get(name, zero).double() - second.get(name, zero).double()
            squares.append(float(difference.square().sum()))
        held = [weights.numel() for weights in self.weights.values()]
        by_rank = torch.tensor(collectives.gather_objects([squares, held]), dtype=torch.float64)
        of_all, held_by_all = by_rank.sum(dim=0)
        return (of_all * self.numel / held_by_all.clamp(min=1)).sqrt()  # what several ranks hold counts once

    @torch.no_grad()
    def slope_along(self, run: Parts) -> float:
        """The slope of the loss along the gradients, relative to what they promise: 1, unless they lack a part.

        Parameters without a gradient, or with zeros, move at random: they promise that the loss does not change.
        Called within :meth:`apart`.
        """
        norms = self.norms(run, {})
        promised = float(norms.square().sum())
        size = _CHANGE * abs(self._loss(self.weights)) / promised
        along = dict(run)
        for (name, parameter), norm in zip(self.parameters.items(), norms, strict=True):
            if norm == 0 and parameter.requires_grad:
                generator = torch.Generator().manual_seed(0)  # the same on all ranks
                along[name] = _MOVE / size * torch.randn(self.weights[name].shape, generator=generator)

        ahead, behind = (
            self._loss({name: weight + step * along.get(name, 0) for name, weight in self.weights.items()})
            for step in (size, -size)
        )
        return (ahead - behind) / (2 * size * promised)

    def _loss(self, weights: Parts) -> float:
        """The loss of one batch."""
        for turn in self.turns:
            self.compute(turn, [weights])
        # A slice without label tokens has no loss.
        finite = filter(math.isfinite, [turn.share for turn in self.turns])
        return sum(collectives.gather_objects(sum(finite))) / group_size()

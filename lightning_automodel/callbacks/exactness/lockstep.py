"""Records windows of a run, and computes their micro-batches again in it: all ranks compute the same one together.

Every rank computes the same micro-batch, so that the mean over ranks, if an engine takes it, is its
gradient: FSDP2 takes it after every backward outside of a window, DDP after none but its own.

Under manual optimization a step runs to its end, but of its backwards only the micro-batch's own is computed,
and where an optimizer would step, the weights are written that it had left in the run.
"""

import functools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.counting import Counting, MicroBatch
from lightning_automodel.callbacks.exactness.moment import leaving_no_trace, moment_of, restore
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.process_group import group_rank, group_size
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.engine import when_backward_ends
from lightning_automodel.gradients.loss_graph import averaged_parts
from lightning_automodel.gradients.window_records import BackwardPass, Window
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack

_CHANGE = 2e-4  # of the loss, that a step along the gradients aims at
_MOVE = 1e-2  # of the entries of a parameter without a gradient
_SAMPLED = 1_000  # entries of each parameter, by which micro-batches are told apart
_TIME_FOR_ALL = timedelta(minutes=30)
_TIME_AFTER_ERROR = timedelta(seconds=20)

Parts = dict[str, Tensor]
"""This rank's parts of weights or gradients by parameter, in host memory; without those that have no gradient."""


def copies_of(tensors: Mapping[str, Tensor]) -> Parts:
    """Copies of them."""
    return {name: local_part(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, dense, sharing memory if it is."""
    with plain_access():
        local = torch_internals.local_tensor(tensor.detach())
    if local.is_sparse:
        return local.to_dense()
    return local


def loss_of(output: Any) -> Tensor:
    """[] the loss in what ``training_step`` has returned."""
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


class ReplayError(RuntimeError):
    """Why a window cannot be judged, in words. Raised on all ranks."""


def agree(problem: str) -> None:
    """ReplayError on all ranks with the ``problem`` of the first that has one. A collective over the world."""
    for found in filter(None, collectives.gather_objects(problem)):
        raise ReplayError(found)


@dataclass
class Computed:
    """What a micro-batch has given: this rank's part of its share in the loss of one batch, and its own loss."""

    share: float
    loss: float
    gradients: Parts


@dataclass
class RecordedWindow:
    """A window: this rank's micro-batches, and the gradients that it has added to ``older`` ones.

    ``gradients`` are None as long as no backward has ended it.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    older: Parts = field(default_factory=dict)
    gradients: Parts | None = None


class Recorder:
    """Records windows, under manual optimization with the weights of each step, until ``patches`` are restored.

    Attributes:
        trainer: Of the run.
        module: Whose steps are recorded.
        is_automatic: Whether the Trainer runs backwards and optimizers.
        run: What AutomodelStrategy owns; None under another strategy.
        context: What slices batches under context parallelism.
        device: Of this rank.
        counting: What counts micro-batches.
        parameters: By name; shards, also where the module shows gathered ones.
        numel: [p] entries of each parameter, of all ranks.
        is_sharded: Whether an engine takes part in backwards.
        windows: Those that have begun; under another strategy by None.
        batches: By training step, its whole batch and the moment before it, pickled, where that is possible.
        step_weights: By training step of manual optimization, those before it and after each step of an optimizer in
            it.
    """

    def __init__(self, trainer: pl.Trainer, counting: Counting, patches: PatchStack) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.is_automatic = self.module.automatic_optimization
        self.run = run_of(trainer)
        self.context = None if self.run is None else self.run.micro_batches.context
        self.device = trainer.strategy.root_device
        self.parameters = dict(self.module.named_parameters())
        self.numel = torch.tensor([parameter.numel() for parameter in self.parameters.values()])
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters.values())
        self.counting = counting
        self._patches = patches
        self._num_steps = 0

    def start(self) -> None:
        """Record from the next training step on."""
        self.windows: dict[Window | None, RecordedWindow] = {}
        self.batches: dict[int, bytes] = {}
        self.step_weights: dict[int, list[Parts]] = {}
        training_step = self.module.training_step
        backward = self.trainer.strategy.backward

        @functools.wraps(training_step)
        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            self._before_step(*args, **kwargs)
            output = training_step(*args, **kwargs)
            if self.is_automatic and output is not None:
                self._before_backward(loss_of(output), output)
            return output

        def recorded_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self._before_backward(loss, kwargs)
            backward(loss, *args, **kwargs)

        # The engine calls this one when it has prepared weights and buffers.
        self._patches.set(self.module, "training_step", recorded_step)
        if self.run is not None:
            self._patches.set(self.run.windows, "on_backward", self._after_backward)
        if self.is_automatic:
            return
        self._patches.set(self.trainer.strategy, "backward", recorded_backward)
        for optimizer in self.trainer.optimizers:
            self._patches.callback(optimizer.register_step_post_hook(self._note_weights).remove)

    def _before_step(self, batch: Any, *rest: Any) -> None:
        self._batch = batch
        self._num_steps += 1
        self._num_backwards = 0
        moment = moment_of(self.module, self.device)
        arguments = (batch if self.context is None else self.context.whole, *rest)
        with suppress(Exception):  # such as a lock in the batch
            self.batches[self._num_steps] = pickle.dumps((move_data_to_device(arguments, "cpu"), moment))
        if not self.is_automatic:
            self.step_weights[self._num_steps] = []
            self._note_weights()

    def _note_weights(self, *_: Any) -> None:
        self.step_weights[self._num_steps].append(copies_of(self.parameters))

    def _before_backward(self, loss: Tensor, output: Any) -> None:
        """``loss`` [] comes next; ``output`` may hold its count."""
        self._num_backwards += 1
        count = self.counting.count(self.module, self._batch, output, loss)
        value = float(loss.detach())
        self._newest = MicroBatch(self._num_steps, self._num_backwards, value, count, averaged_parts(loss))
        if self.run is not None or not loss.requires_grad:
            return
        # Under another strategy: note what ``.grad`` holds before a window and after its backwards.
        window = self.windows.setdefault(None, RecordedWindow())

        def note_older(_: Tensor) -> None:
            window.older = self._held_gradients()

        if not window.micro_batches:
            loss.register_hook(note_older)
        window.micro_batches.append(self._newest)
        when_backward_ends(loss, functools.partial(self._finish, window))

    def _after_backward(self, backward: BackwardPass) -> None:
        """``.grad`` holds the part of its window alone, which is final if that ends."""
        window = self.windows.setdefault(backward.window, RecordedWindow())
        if not backward.is_padding:
            window.micro_batches.append(self._newest)
        if backward.ends:
            self._finish(window)

    def _finish(self, window: RecordedWindow) -> None:
        """Keep what ``.grad`` holds in addition to older gradients, without the scale of a scaler."""
        scale = self._loss_scale() if self.run is None else 1.0
        window.gradients = {
            name: (gradient - window.older.get(name, 0)) / scale
            for name, gradient in self._held_gradients().items()
        }

    def _held_gradients(self) -> Parts:
        """What ``.grad`` holds of parameters that require gradients."""
        with plain_access():
            graded = {
                n: p.grad for n, p in self.parameters.items() if p.requires_grad and p.grad is not None
            }
            return copies_of(graded)

    def _loss_scale(self) -> float:
        """What a gradient scaler multiplies losses by at the moment."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())


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
        unequal: Plain parameters of which ranks hold different values.
    """

    def take(self, window: RecordedWindow) -> None:
        """Replay this window from now on."""
        self.window = window
        self.weights = copies_of(self.parameters)
        sampler = self.trainer.distributed_sampler_kwargs or {}
        number = sampler.get("rank", self.trainer.global_rank)  # of the rank's data
        sums = {
            name: float(parameter.detach().double().sum().nan_to_num())
            for name, parameter in self.parameters.items()
            if not isinstance(parameter, DTensor)
        }
        gathered = collectives.gather_objects((number, window.micro_batches, sums))
        numbers, by_rank, sums_by_rank = zip(*gathered, strict=True)
        self.is_counted = self.counting.settle([each for of_rank in by_rank for each in of_rank])
        self.unequal = [name for name in sums if len({of_rank[name] for of_rank in sums_by_rank}) > 1]
        self.turns: list[MicroBatch] = []
        for data in dict.fromkeys(numbers):
            of_peers = [of_rank for other, of_rank in zip(numbers, by_rank, strict=True) if other == data]
            for slices in zip(*of_peers, strict=True):
                turn = slices[numbers[: group_rank()].count(number)]
                turn.source = numbers.index(data)
                turn.whole_count = sum(each.count for each in slices) / len(slices)
                self.turns.append(turn)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context of replays, which puts all back that a step may change."""
        module = self.module
        strategy = self.trainer.strategy

        def nothing(*_: Any, **__: Any) -> None:
            """In here: a function of a file would be state of the module, which it had not before the step."""

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
                patches.set(owner, name, nothing, is_new=True)
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
            self.run.engine.stepped()
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
            patience = _TIME_AFTER_ERROR if problem else _TIME_FOR_ALL
            try:
                collectives.named_barrier("ExactnessCheck", patience)
            except RuntimeError as error:
                if not problem:
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
        received = collectives.broadcast_object(self.batches.get(turn.step), turn.source)
        if not received:
            raise ReplayError("a batch cannot be pickled, for other ranks")
        self._turn = turn
        self._scale = scale
        self._written = iter(weights)
        self._backwards_left = turn.backward
        with PatchStack() as patches:
            # A step that raises leaves optimizers toggled, and what a step has gathered would toggle them again.
            for parameter in self.parameters.values():
                patches.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.grad = None
            if self.run is not None:
                patches.set(self.run.windows, "toggled", None)
                patches.callback(self.run.engine.release)
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
        """In place of an optimizer's step."""
        if closure is not None:
            closure()
        weights = next(self._written, None)
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
        aux = None
        if self.run is not None:
            aux = weighting.aux_loss(output, is_counted_ahead=True)
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
        self._computed = Computed(float(share.detach()), float(loss.detach()), self._gradients())

    def _training_step(self, received: bytes) -> Any:
        arguments, moment = pickle.loads(received)
        restore(moment, self.module, self.device)
        batch, *rest = move_data_to_device(arguments, self.device)
        if self.context is not None:
            batch = self.context.slice(batch)
        attention = nullcontext() if self.context is None else self.context.step("training_step")
        with self.trainer.precision_plugin.train_step_context(), attention:
            return self.module.training_step(batch, *rest)

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

    @torch.no_grad()
    def _gradients(self) -> Parts:
        """The gradients in ``.grad``, averaged where no engine does it."""
        parameters = list(self.parameters.values())
        if self.context is not None:
            plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
            rescale_clip.average_gradients_(plain, self.context.group)
        rescale_clip.share_experts_gradients_(parameters)
        return self._held_gradients()

    # --- One batch --------------------------------------------------------------------------------------------

    def one_batch(self, turns: Sequence[MicroBatch], scale: float = 1.0) -> tuple[Parts, list[Tensor]]:
        """Compute the gradients of all micro-batches as one batch, in this order, from losses times ``scale``.

        Returns these, and [k] what each micro-batch adds to sampled entries of them.
        """
        scale *= self._loss_scale()
        samples = []
        total: Parts = {}
        for turn in turns:
            computed = self.compute(turn, self.step_weights.get(turn.step, [self.weights]), scale)
            turn.replayed_loss = computed.loss
            samples.append(self.sample(computed.gradients) / scale)
            for name, gradient in computed.gradients.items():
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
        shares = [self.compute(turn, [weights]).share for turn in self.turns]
        finite = filter(math.isfinite, shares)  # a slice without label tokens has no loss
        return sum(collectives.gather_objects(sum(finite))) / group_size()

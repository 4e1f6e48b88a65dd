"""Records windows of a run: their micro-batches, and their gradients when these are final."""

import functools
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_automodel.callbacks.exactness.counting import Counting
from lightning_automodel.callbacks.exactness.lockstep import (
    LockStep,
    MicroBatch,
    RecordedWeights,
    loss_of,
    loss_scale,
)
from lightning_automodel.callbacks.exactness.moment import Moment
from lightning_automodel.callbacks.running_strategy import automodel, run_of
from lightning_automodel.gradients.window import BackwardPass, Window
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack


@dataclass(eq=False)
class RecordedWindow:
    """A window: this rank's micro-batches, and the gradients that it has added to older ones.

    ``gradients`` are None as long as no backward has ended it, and ``trained`` names the parameters of
    optimizers that required gradients then.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    older: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] | None = None
    trained: set[str] = field(default_factory=set)


class Recorder:
    """Records windows, under manual optimization with the weights of each step, until ``patches`` are restored."""

    def __init__(
        self, trainer: pl.Trainer, counting: Counting, lockstep: LockStep, patches: PatchStack
    ) -> None:
        self.finished: list[RecordedWindow] = []
        self.weights: RecordedWeights = {}
        self._trainer = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        self._strategy = automodel(trainer)
        self._counting = counting
        self._lockstep = lockstep
        self._patches = patches
        self._unfinished: dict[Window | None, RecordedWindow] = {}
        self._newest: MicroBatch | None = None
        self._num_steps = 0
        self._num_backwards = 0

    def start(self) -> None:
        """Record from the next training step on."""
        self.finished = []
        self.weights = {}
        self._unfinished = {}
        # The engine calls this one when it has prepared weights and buffers.
        self._patches.set(self._module, "training_step", self._recording(self._module.training_step))
        run = run_of(self._trainer)
        if run is not None:
            run.windows.on_backward = self._after_backward
            self._patches.callback(setattr, run.windows, "on_backward", None)
        if self._module.automatic_optimization:
            return
        strategy = self._trainer.strategy
        self._patches.set(strategy, "backward", self._noting_loss(strategy.backward))
        for optimizer in self._trainer.optimizers:  # whose steps Lightning's wrappers call
            self._patches.set(optimizer, "step", self._noting_weights(optimizer.step))

    def _recording(self, called: Callable[..., Any]) -> Callable[..., Any]:
        context = self._lockstep.context

        @functools.wraps(called)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            before = Moment.of(self._module, self._trainer.strategy.root_device)
            self._batch = args[0]
            batch = args[0] if context is None else context.whole
            self._pickled = b""
            with suppress(Exception):  # such as a lock in the batch
                self._pickled = pickle.dumps((move_data_to_device((batch, *args[1:]), "cpu"), before))
            self._num_steps += 1
            self._num_backwards = 0
            if not self._module.automatic_optimization:
                self.weights[self._num_steps] = []
                self._note_weights()
            output = called(*args, **kwargs)
            if self._module.automatic_optimization and output is not None:
                self._before_backward(loss_of(output), output)
            return output

        return training_step

    def _noting_loss(self, called: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._num_backwards += 1
            self._before_backward(loss, kwargs)
            return called(loss, *args, **kwargs)

        return backward

    def _noting_weights(self, called: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            output = called(*args, **kwargs)
            self._note_weights()
            return output

        return step

    def _note_weights(self) -> None:
        self.weights[self._num_steps].append(self._lockstep.weights())

    def _before_backward(self, loss: Tensor, output: Any) -> None:
        """``loss`` [] comes next; ``output`` may hold its count."""
        if self._strategy is not None and self._strategy.is_filler:
            return
        told = self._counting.look(self._module, self._batch, output, loss, self._num_backwards)
        value = float(loss.detach())
        self._newest = MicroBatch(self._pickled, value, told, self._num_steps, self._num_backwards)
        if self._strategy is None and loss.requires_grad:
            self._watch_backward(loss, self._newest)

    def _after_backward(self, backward: BackwardPass) -> None:
        """``.grad`` holds the part of its window alone, which is final if that ends."""
        recorded = self._unfinished.setdefault(backward.window, RecordedWindow())
        if self._newest is not None:
            recorded.micro_batches.append(self._newest)
        self._newest = None
        if backward.ends:
            self._finish(recorded)

    def _watch_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Under another strategy: note what ``.grad`` holds before a window and after its backwards."""
        recorded = self._unfinished.setdefault(None, RecordedWindow())

        def note_older(_: Tensor) -> None:
            recorded.older = self._lockstep.gradients()

        if not recorded.micro_batches:
            loss.register_hook(note_older)
        recorded.micro_batches.append(micro_batch)
        torch_internals.when_backward_ends(loss, functools.partial(self._finish, recorded))

    def _finish(self, recorded: RecordedWindow) -> None:
        """Keep what ``.grad`` holds in addition to older gradients, without the scale of a scaler."""
        recorded.gradients = self._lockstep.gradients()
        scale = 1.0 if self._strategy is not None else loss_scale(self._trainer)
        for name, gradient in recorded.gradients.items():
            if name in recorded.older:
                gradient.sub_(recorded.older[name])
            gradient.div_(scale)
        recorded.trained = self._lockstep.requiring_gradients()
        if recorded not in self.finished:
            self.finished.append(recorded)

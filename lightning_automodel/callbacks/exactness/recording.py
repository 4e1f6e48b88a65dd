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

from lightning_automodel.callbacks.exactness.counting import Counting, MicroBatch
from lightning_automodel.callbacks.exactness.moment import Moment
from lightning_automodel.callbacks.exactness.parts import (
    Parts,
    gradients_of,
    loss_of,
    loss_scale,
    weights_of,
)
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.gradients.engine import when_backward_ends
from lightning_automodel.gradients.loss_graph import averaged_parts
from lightning_automodel.gradients.window import BackwardPass, Window
from lightning_automodel.internals.patching import PatchStack


@dataclass(eq=False)
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
        parameters: By name; shards, also where the module shows gathered ones.
        finished: The windows that have ended.
        batches: By training step, its whole batch and the moment before it, pickled, where that is possible.
        weights: By training step of manual optimization, those before it and after each step of an optimizer in it.
    """

    def __init__(self, trainer: pl.Trainer, counting: Counting, patches: PatchStack) -> None:
        self.parameters = dict(trainer.lightning_module.named_parameters())
        self.finished: list[RecordedWindow] = []
        self.batches: dict[int, bytes] = {}
        self.weights: dict[int, list[Parts]] = {}
        self._trainer = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        self._run = run_of(trainer)
        self._counting = counting
        self._patches = patches
        self._unfinished: dict[Window | None, RecordedWindow] = {}
        self._num_steps = 0

    def start(self) -> None:
        """Record from the next training step on."""
        self.finished = []
        self.batches = {}
        self.weights = {}
        self._unfinished = {}
        is_automatic = self._module.automatic_optimization

        def after_step(output: Any) -> None:
            if is_automatic and output is not None:
                self._before_backward(loss_of(output), output)

        def before_manual_backward(loss: Tensor, *_: Any, **kwargs: Any) -> None:
            self._before_backward(loss, kwargs)

        # The engine calls this one when it has prepared weights and buffers.
        self._watch(self._module, "training_step", self._before_step, after_step)
        if self._run is not None:
            self._run.windows.on_backward = self._after_backward
            self._patches.callback(setattr, self._run.windows, "on_backward", None)
        if is_automatic:
            return
        self._watch(self._trainer.strategy, "backward", before_manual_backward)
        for optimizer in self._trainer.optimizers:  # whose steps Lightning's wrappers call
            self._watch(optimizer, "step", after=self._note_weights)

    def _watch(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] = lambda *_, **__: None,
        after: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Call ``before`` with the arguments of a method, and ``after`` with what it has returned."""
        called = getattr(owner, name)

        @functools.wraps(called)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            output = called(*args, **kwargs)
            after(output)
            return output

        self._patches.set(owner, name, watched)

    def _before_step(self, batch: Any, *rest: Any) -> None:
        context = None if self._run is None else self._run.micro_batches.context
        self._batch = batch
        moment = Moment.of(self._module, self._trainer.strategy.root_device)
        arguments = (batch if context is None else context.whole, *rest)
        self._num_steps += 1
        with suppress(Exception):  # such as a lock in the batch
            self.batches[self._num_steps] = pickle.dumps((move_data_to_device(arguments, "cpu"), moment))
        self._num_backwards = 0
        if not self._module.automatic_optimization:
            self.weights[self._num_steps] = []
            self._note_weights()

    def _note_weights(self, _: Any = None) -> None:
        self.weights[self._num_steps].append(weights_of(self.parameters))

    def _before_backward(self, loss: Tensor, output: Any) -> None:
        """``loss`` [] comes next; ``output`` may hold its count."""
        self._num_backwards += 1
        count = self._counting.count(self._module, self._batch, output, loss)
        value = float(loss.detach())
        self._newest = MicroBatch(self._num_steps, self._num_backwards, value, count, averaged_parts(loss))
        if self._run is None and loss.requires_grad:
            self._watch_backward(loss)

    def _after_backward(self, backward: BackwardPass) -> None:
        """``.grad`` holds the part of its window alone, which is final if that ends."""
        recorded = self._unfinished.setdefault(backward.window, RecordedWindow())
        if not backward.is_padding:
            recorded.micro_batches.append(self._newest)
        if backward.ends:
            self._finish(recorded, 1.0)

    def _watch_backward(self, loss: Tensor) -> None:
        """Under another strategy: note what ``.grad`` holds before a window and after its backwards."""
        recorded = self._unfinished.setdefault(None, RecordedWindow())

        def note_older(_: Tensor) -> None:
            recorded.older = gradients_of(self.parameters)

        if not recorded.micro_batches:
            loss.register_hook(note_older)
        recorded.micro_batches.append(self._newest)
        scale = loss_scale(self._trainer)
        when_backward_ends(loss, functools.partial(self._finish, recorded, scale))

    def _finish(self, recorded: RecordedWindow, scale: float) -> None:
        """Keep what ``.grad`` holds in addition to older gradients, without the ``scale`` of a scaler."""
        recorded.gradients = gradients_of(self.parameters)
        for name, gradient in recorded.gradients.items():
            if name in recorded.older:
                gradient.sub_(recorded.older[name])
            gradient.div_(scale)
        if recorded not in self.finished:
            self.finished.append(recorded)

"""Records windows of a run: micro-batches, what each step depends on, and the gradients that they have left."""

import functools
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.counting import Counting, MicroBatch
from lightning_automodel.callbacks.exactness.moment import moment_of
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.data.tensors import checksum
from lightning_automodel.gradients.engine import when_backward_ends
from lightning_automodel.gradients.loss_graph import averaged_parts
from lightning_automodel.gradients.token_loss import loss_of
from lightning_automodel.gradients.window_records import BackwardPass, Window
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack

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
        plain: Those of them that each rank holds whole.
        numel: [p] entries of each parameter, of all ranks.
        is_sharded: Whether an engine takes part in backwards.
        windows: Those that have begun; under another strategy by None.
        batches: By training step, its whole batch and the moment before it, pickled, where that is possible.
        step_weights: By step of manual optimization, those before it and after each optimizer step in it.
    """

    def __init__(self, trainer: pl.Trainer, counting: Counting, patches: PatchStack) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.is_automatic = self.module.automatic_optimization
        self.run = run_of(trainer)
        self.context = self.run.micro_batches.context if self.run else None
        self.device = trainer.strategy.root_device
        self.parameters = dict(self.module.named_parameters())
        self.numel = torch.tensor([parameter.numel() for parameter in self.parameters.values()])
        self.plain = {n: p for n, p in self.parameters.items() if not isinstance(p, DTensor)}
        self.is_sharded = len(self.plain) < len(self.parameters)
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
        self._checksum = checksum(batch)
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
        count = self.counting.count(self._batch, output, loss)
        value = float(loss.detach())
        parts = averaged_parts(loss)
        self._newest = MicroBatch(self._num_steps, self._num_backwards, value, count, parts, self._checksum)
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

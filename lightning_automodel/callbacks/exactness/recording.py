"""Records windows of a run, whatever its strategy, until the patches of the training are restored.

==========================================  ==========================================================
when                                        what is recorded
==========================================  ==========================================================
a training step begins                      a :class:`RecordedStep`: what it can be replayed from
its loss is known                           a :class:`MicroBatch`: the loss, its count and its parts
a backward has ended                        in a :class:`RecordedWindow`: the gradients that it has so far
an optimizer steps in manual optimization   in the step: the weights that it has left
==========================================  ==========================================================
"""

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
from lightning_automodel.callbacks.exactness.module_state import snapshot_of
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.data.tensors import checksum
from lightning_automodel.gradients.loss_graph import averaged_parts
from lightning_automodel.gradients.token_loss import loss_of
from lightning_automodel.gradients.window_records import BackwardPass, Window
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack

_HALF_EPSILON = 1e-4
"""A dtype with a larger epsilon is in half precision."""
Parts = dict[str, Tensor]
"""This rank's parts of weights or gradients by parameter, in host memory; without those that have no gradient."""


def copies_of(tensors: Mapping[str, Tensor]) -> Parts:
    """Copies of this rank's parts of them."""
    return {name: local_part(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, dense, sharing memory if it is."""
    with plain_access():
        local = torch_internals.local_tensor(tensor.detach())
    if local.is_sparse:
        return local.to_dense()
    return local


@dataclass
class RecordedStep:
    """A training step of this rank.

    Attributes:
        checksum: Of its batch.
        inputs: Its arguments with the whole batch, and the snapshot before it, pickled; None where that is impossible.
        weights: Under manual optimization, those before it and after each optimizer step in it.
        num_backwards: How many it had until now.
    """

    checksum: int
    inputs: bytes | None = None
    weights: list[Parts] = field(default_factory=list)
    num_backwards: int = 0


@dataclass
class RecordedWindow:
    """A window: this rank's micro-batches, and the gradients that they have added to what stood in ``.grad``.

    ``gradients`` are None as long as no backward has ended it.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    gradients: Parts | None = None


class Recorder:
    """What is known of a training, and the record of its newest windows.

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
        is_sharded: Whether an engine takes part in backwards.
        epsilon: That of the gradients' dtype, or of the half precision that they are computed in.
        is_half: Whether that is half precision.
        windows: Those that have begun; under another strategy by None.
        steps: By number.
    """

    def __init__(self, trainer: pl.Trainer, counting: Counting, patches: PatchStack) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.is_automatic = self.module.automatic_optimization
        self.run = run_of(trainer)
        self.context = self.run.micro_batches.context if self.run else None
        self.device = trainer.strategy.root_device
        self.parameters = dict(self.module.named_parameters())
        self.plain = {n: p for n, p in self.parameters.items() if not isinstance(p, DTensor)}
        self.is_sharded = len(self.plain) < len(self.parameters)
        dtypes = {parameter.dtype for parameter in self.parameters.values() if parameter.requires_grad}
        if "16" in str(trainer.precision_plugin.precision):
            dtypes.add(torch.bfloat16)
        self.epsilon = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        self.is_half = self.epsilon > _HALF_EPSILON
        self.counting = counting
        self._patches = patches

    def start(self) -> None:
        """Record from the next training step on, and forget what is recorded."""
        self.windows: dict[Window | None, RecordedWindow] = {}
        self.steps: dict[int, RecordedStep] = {}
        self._older: Parts = {}
        training_step = self.module.training_step
        backward = self.trainer.strategy.backward

        @functools.wraps(training_step)
        def recorded_step(*args: Any) -> Any:
            self._begin_step(*args)
            output = training_step(*args)
            if self.is_automatic and output is not None:
                self._note_loss(loss_of(output), output)
            return output

        def recorded_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self._note_loss(loss, kwargs)
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

    def _begin_step(self, batch: Any, *rest: Any) -> None:
        self._batch = batch
        self._step = self.steps[len(self.steps)] = RecordedStep(checksum(batch))
        snapshot = snapshot_of(self.module, self.device)
        arguments = (batch if self.context is None else self.context.whole, *rest)
        with suppress(Exception):  # such as a lock in the batch
            self._step.inputs = pickle.dumps((move_data_to_device(arguments, "cpu"), snapshot))
        if not self.is_automatic:
            self._note_weights()

    def _note_weights(self, *_: Any) -> None:
        self._step.weights.append(copies_of(self.parameters))

    def _note_loss(self, loss: Tensor, output: Any) -> None:
        """``loss`` [] is backpropagated next; ``output`` may hold its count."""
        self._step.num_backwards += 1
        self._newest = MicroBatch(
            step=len(self.steps) - 1,
            backward=self._step.num_backwards,
            loss=float(loss.detach()),
            count=self.counting.count(self._batch, output, loss),
            parts=averaged_parts(loss),
            checksum=self._step.checksum,
        )
        if self.run is None and loss.requires_grad:
            self._follow(loss)

    # --- Where a window's gradients come from ---------------------------------------------------------------------

    def _after_backward(self, backward: BackwardPass) -> None:
        """Under AutomodelStrategy ``.grad`` holds those of the window alone, which are final if it ends."""
        window = self.windows.setdefault(backward.window, RecordedWindow())
        if not backward.is_padding:
            window.micro_batches.append(self._newest)
        if backward.ends:
            window.gradients = self.gradients()

    def _follow(self, loss: Tensor) -> None:
        """Under another strategy each backward may be a window's last, and ``.grad`` hold older gradients."""
        window = self.windows.setdefault(None, RecordedWindow())
        if not window.micro_batches:
            loss.register_hook(self._note_older)
        window.micro_batches.append(self._newest)
        torch_internals.when_backward_ends(loss, self._subtract_older)

    def _note_older(self, _: Tensor) -> None:
        self._older = self.gradients()

    def _subtract_older(self) -> None:
        scale = self.loss_scale()
        self.windows[None].gradients = {
            name: (gradient - self._older.get(name, 0)) / scale
            for name, gradient in self.gradients().items()
        }

    def gradients(self) -> Parts:
        """Copies of what ``.grad`` holds of parameters that require gradients."""
        with plain_access():
            graded = {
                n: p.grad for n, p in self.parameters.items() if p.requires_grad and p.grad is not None
            }
            return copies_of(graded)

    def loss_scale(self) -> float:
        """What a gradient scaler multiplies losses by at the moment."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

"""Accumulation windows: gradients are kept aside until they are final, and then written to ``.grad``.

==================================  =========================  =======================================  ==============
where training is                   ``.grad`` holds            gradients of open windows are            another
                                                                                                        backward
==================================  =========================  =======================================  ==============
no window is open                   what its user left there   -                                        is noted
in a backward of the strategy       those of open windows      there, and in FSDP2; what stood there    joins it
                                                               is set aside
a window is open, no backward runs  what stood there before    kept here, and in FSDP2                  is refused
a window's last backward returns    the sum of both, final     those of other open windows: kept here   is refused
==================================  =========================  =======================================  ==============

A backward goes from one row to the next by :meth:`GradientWindows.set_aside` and
:meth:`GradientWindows.put_back`. After an exception in it, and where all is zeroed or a run ends, no window is
open.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.engine import Engine
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.rank_agreement import DIFFERENT_WRITES, Position, RankAgreement
from lightning_automodel.gradients.token_loss import (
    Count,
    StepReport,
    TokenWeighting,
    WindowTotals,
    wide_dtype,
)
from lightning_automodel.gradients.window_records import BackwardPass, Window
from lightning_automodel.internals.dtensor import GRAD, REQUIRES_GRAD

ZEROED_IN_BACKWARD = (
    "zero_grad() was called within a backward of the strategy, by a hook of autograd or in"
    " LightningModule.backward. Gradients of the accumulation window would be lost, while its label tokens"
    " stay counted. Zero gradients before the backward, for example in on_before_backward, or after it, in"
    " on_after_backward. To step and zero in hooks of parameters, pass count_window_ahead=True."
)
"""Why a window is not dropped while its backward runs."""

PLAIN_BACKWARD = (
    "A plain loss.backward() in the middle of an accumulation window, whose gradients it would join. For the"
    " gradient of inputs or activations, call torch.autograd.grad(loss, inputs), which leaves nothing"
    " behind. For a loss that trains, call self.manual_backward(loss), or end the window first, by a"
    " manual_backward outside of `optimizer.toggle_model(sync_grad=False)`; under automatic optimization,"
    " return the sum of the losses."
)
"""Why a backward that is not the strategy's is refused while a window is open."""


class GradientWindows:
    """The open windows of a fit, and the totals of those that have ended since the last step.

    Each toggled optimizer has its own window, so that those of a GAN can accumulate side by side. Without
    toggling there is one window.

    Attributes:
        parameters: The distributed model's. Between a forward and its backward ``module.parameters()`` are the
            gathered ones.
        weighting: How micro-batches are counted and weighed.
        scaling: What a gradient scaler, and the range of half precision, multiply by.
        engine: Reduces gradients, and knows which backward of the strategy runs.
        mesh: The run's mesh.
        device: The device of this rank's sums and gradients.
        divisor: D, by which the engine's averages divide.
        optimizers: The run's optimizers: windows without toggling end with a step of all of these.
        toggled: The optimizer whose window the next backwards belong to; None: the window of all optimizers.
        open_windows: By toggled optimizer.
        last_step: The report on the last step; once a window has ended, on the next step as far as it is known.
        last_loss: [] the mean loss of the last window (a step may consist of several); None in the first one of this
            run, which may have got ``last_step`` from a checkpoint.
        since_step: By optimizer, the [3] totals of the windows since its previous step.
        measured: The optimizers whose norm was reported since their previous step.
        agreement: Sums up what ranks have in a window, and compares where they end it.
        num_resets: How often an optimizer stepped, or gradients were zeroed.
        unsynchronised: Parameters that may have gradients of a plain backward, which the engine does not average.
        on_step: Called after each step, and where a gradient scaler has skipped one.
        on_backward: Called with each backward after it has run, while ``.grad`` holds the gradients of open windows
            alone, without older ones.
    """

    def __init__(
        self,
        engine: Engine,
        weighting: TokenWeighting,
        scaling: LossScaling,
        placement: Placement,
        parameters: list[nn.Parameter],
    ) -> None:
        self.weighting = weighting
        self.scaling = scaling
        self.mesh = placement.mesh
        self.device = placement.device
        self.divisor = placement.mesh.sizes.divisor
        self.parameters = parameters
        self.optimizers: list[Optimizer] = []
        self.toggled: Optimizer | None = None
        self.open_windows: dict[Optimizer | None, Window] = {}
        self.last_step: StepReport | None = None
        self.last_loss: Tensor | None = None
        self.since_step: dict[Optimizer, Tensor] = {}
        self.measured: set[Optimizer] = set()
        self.num_resets = 0
        self.unsynchronised: set[nn.Parameter] = set()
        self.on_step: Callable[[], None] | None = None
        self.on_backward: Callable[[BackwardPass], None] | None = None
        self.engine = engine
        # Lists in the order of the parameters: hashing these would be a good part of what a micro-batch costs.
        self._is_trainable: list[bool] = []
        self._trainable: set[nn.Parameter] = set()  # those of which it is true
        self._nothing: list[Tensor | None] = [None] * len(parameters)
        self._kept = self._nothing  # gradients of open windows, between backwards
        self.agreement = RankAgreement(placement)

    @property
    def is_first(self) -> bool:
        """Whether no window of this run has ended yet."""
        return self.last_loss is None

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that open windows hold for these parameters, which have been zeroed.

        Windows that have ended still count in the report on the next step: its gradients may be made of
        theirs, which the user has noted before (SAM, gradient surgery).

        Raises RuntimeError within a backward that has gradients already, unless its window was counted ahead.
        """
        self.num_resets += 1
        dropped = set(parameters)
        self.check_foreign()
        self.unsynchronised -= dropped
        windows = self.open_windows.values()
        backward = self.engine.backward
        if backward is not None:
            # It may have no gradients yet, or those of a window that was counted ahead, which are final.
            used_before = any(not window.used.isdisjoint(dropped) for window in windows)
            if backward.window.ahead is None and (used_before or self.engine.reached):
                raise RuntimeError(ZEROED_IN_BACKWARD)
            elsewhere = backward.older_gradients
        elif all(window.owned.isdisjoint(dropped) for window in windows):
            return
        else:
            for window in windows:
                window.used -= dropped
            # If all of a window's parameters are dropped, so is the window, with its count.
            self.open_windows = {window.key: window for window in windows if not window.owned <= dropped}
            if not self.open_windows:
                self._discard_all()
                return
            elsewhere = self._kept
        for index, parameter in enumerate(self.parameters):
            if parameter in dropped:
                elsewhere[index] = None
        self.engine.discard(dropped)

    def check_foreign(self) -> None:
        """Raise RuntimeError if a backward that is not the strategy's has reached parameters while a window is open."""
        engine = self.engine
        if engine.backward is not None or not engine.reached:
            return
        if self.open_windows:
            raise RuntimeError(PLAIN_BACKWARD)
        if engine.group is not None:  # FSDP2 averages the gradients of its shards in any backward
            self.unsynchronised.update(leaf for leaf in engine.reached if not hasattr(leaf, "shard"))
        engine.reached.clear()

    def check_writes(self) -> None:
        """Raise RuntimeError, on every rank, if ranks have written differently since a window ended. A collective.

        Reads the device.
        """
        dtype = wide_dtype(self.device)
        number = torch.as_tensor(self.engine.written.take(), dtype=dtype, device=self.device)
        if self.divisor > 1 and not self.agreement.has_written_alike(number):
            raise RuntimeError(DIFFERENT_WRITES)

    def reset(self) -> None:
        """Drop all windows and their gradients: a run begins or ends, or something has failed."""
        self.open_windows = {}
        self.toggled = None
        self.since_step.clear()
        self.measured.clear()
        self.agreement.clear()
        self._discard_all()

    def _discard_all(self) -> None:
        """Drop what is held for windows, of which none is open any more, and no backward runs."""
        self._kept = self._nothing
        self.engine.backward = None
        self.engine.reached.clear()
        self.engine.discard()

    def stepped(self, optimizer: Optimizer) -> None:
        """Start a new report: the optimizer has stepped, or a gradient scaler has skipped its step."""
        self.num_resets += 1
        if self.engine.backward is None:  # which a hook may step in, and which needs the old weights
            self.engine.release()
        self.since_step.pop(optimizer, None)
        self.measured.discard(optimizer)
        self.scaling.stepped(optimizer)
        if self.on_step is not None:
            self.on_step()

    def report_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Put the [] norm of an optimizer's final gradients into the report, if it is the first since its step."""
        if optimizer in self.since_step and optimizer not in self.measured and self.last_step is not None:
            self.measured.add(optimizer)
            self.last_step = replace(self.last_step, grad_norm=norm)

    # --- The steps of one backward, in the order of `MicroBatches.backward` -------------------------------------------

    def open(self, count: Count, divided_by: int, ahead: WindowTotals | None) -> Window:
        """The window that the next backward adds to: the toggled optimizer's, else the open one, or a new one of all.

        ``count`` are the label tokens of the backward, ``divided_by`` about as many backwards as the window
        will have, ``ahead`` its totals if it is counted ahead. A collective once in a run in float16. Raises
        RuntimeError if several are open and none is toggled, or if two windows would hold the same parameter.
        """
        key = self.toggled
        window = self.open_windows.get(key)
        if key is None and self.open_windows:
            if len(self.open_windows) > 1:
                raise RuntimeError(
                    f"{len(self.open_windows)} accumulation windows are open"
                    f" ({', '.join(type(key).__name__ for key in self.open_windows)}), and this backward"
                    " belongs to none of them: run it inside `with optimizer.toggle_model():` of the"
                    " optimizer whose window it ends."
                )
            (window,) = self.open_windows.values()
            window.optimizers = self.optimizers
        if window is None:
            window = self._begin(key, count * divided_by)
        window.ahead = ahead
        return window

    def _begin(self, key: Optimizer | None, expected: Count) -> Window:
        """Open a window. Raises RuntimeError if it would hold parameters of an open one."""
        optimizers = self.optimizers if key is None else [key]
        sums = torch.zeros(2, dtype=wide_dtype(self.device), device=self.device)
        window = Window(key, optimizers, self.scaling.start_window(expected), sums)
        for other in self.open_windows.values():
            if shared := window.owned & other.owned:
                raise RuntimeError(
                    f"{len(shared)} parameters of {type(key).__name__} belong to the open"
                    f" accumulation window of {', '.join(type(o).__name__ for o in other.optimizers)}. End"
                    " that window first, by a backward outside of toggle_model(sync_grad=False), or zero its"
                    " gradients."
                )
        self.open_windows[key] = window
        return window

    def weigh(self, window: Window, token_losses: Tensor, aux_loss: Tensor | None) -> Tensor:
        """[] what to backpropagate for the sum of token losses of a micro-batch.

        If the window was counted ahead, this is D / N times the sum, plus this rank's share of ``aux_loss`` [].
        """
        objective = token_losses
        if (ahead := window.ahead) is not None:
            # `gradient_factor` on the host, where counts were checked. Without label tokens, gradients are exactly 0.
            factor = self.divisor / ahead.num_label_tokens if ahead.num_label_tokens else 0.0
            objective = token_losses * factor
            if aux_loss is not None:
                objective = objective + aux_loss * (self.divisor / ahead.num_micro_batches)
        if window.scale is not None:
            objective = objective * window.scale.to(objective.device)
        return objective

    def set_aside(self, window: Window, ends: bool, is_padding: bool) -> BackwardPass:
        """A backward of ``window`` comes next: let ``.grad`` hold the gradients of open windows alone.

        A reduction for one window also reduces what another has accumulated, which is harmless since
        reductions are linear. ``ends``: the window ends with this backward, and the gradients of all trained
        parameters that no other open window owns become final.
        """
        trained_before: set[nn.Parameter] = set()
        owned_elsewhere: set[nn.Parameter] = set()
        for open_window in self.open_windows.values():
            trained_before |= open_window.trained
            if open_window is not window:
                owned_elsewhere |= open_window.owned
        is_trainable = list(map(REQUIRES_GRAD.__get__, self.parameters))
        if is_trainable != self._is_trainable:
            self._is_trainable = is_trainable
            self._trainable = set(compress(self.parameters, is_trainable))
            self.engine.track(self._trainable)
        trainable = self._trainable
        window.trained |= trainable
        final: list[nn.Parameter] = []
        if ends:
            ended = (trained_before | trainable) - owned_elsewhere
            final = [parameter for parameter in self.parameters if parameter in ended]
        older = list(map(GRAD.__get__, self.parameters))
        if self.engine.reuses_gradients:
            older = [None if gradient is None else gradient.clone() for gradient in older]
        frozen = trained_before - trainable
        backward = BackwardPass(window, ends, is_padding, final, owned_elsewhere, frozen, older)
        self.engine.backward = backward
        self._write_grads(self._kept)
        return backward

    def _write_grads(self, gradients: list[Tensor | None]) -> None:
        """Let ``.grad`` of each parameter hold its one of ``gradients``."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            GRAD.__set__(parameter, gradient)

    def finish(self, backward: BackwardPass, own: Position) -> None:
        """Make the gradients of ``backward.final`` those of the window's mean, without older ones, and end the window.

        A collective over the data-parallel group. ``own`` is where this rank ends the window.

        Raises:
            RuntimeError: If ranks end the window in different positions, or this rank has run another number
                of micro-batches than it has counted ahead.
        """
        window = backward.window
        written = self.engine.written.take()
        totals, unused = self.agreement.sum_over_ranks(window, own, written, backward.zero_filled)
        for parameter in unused:
            GRAD.__set__(parameter, None)
        if (ahead := window.ahead) is None:
            factor = rescale_clip.gradient_factor(totals[0], self.divisor)
        else:
            factor = torch.ones_like(totals[0])  # `weigh` has multiplied the losses by it
            if window.num_micro_batches != ahead.own_micro_batches:
                raise RuntimeError(
                    f"A window was counted ahead as {ahead.own_micro_batches} micro-batches of this rank, and"
                    f" ends after {window.num_micro_batches} backward(s), so that its gradients are divided"
                    " by another number of label tokens than they hold. With count_window_ahead=True,"
                    " training_step must return a loss for each batch, and neither accumulate_grad_batches"
                    " nor gradients may change in mid-window."
                )
        if window.scale is not None:
            factor = factor / window.scale
        rescale_clip.scale_gradients_(backward.final, factor)
        self._close(window, totals)

    def put_back(self, backward: BackwardPass) -> None:
        """End a backward: add final gradients to older ones, keep the others for their windows, put ``.grad`` back."""
        older = backward.older_gradients
        parts = list(map(GRAD.__get__, self.parameters))
        self._write_grads(older)
        self._kept = parts
        self.engine.backward = None
        self.engine.reached.clear()
        if not backward.ends:
            return
        for index, (parameter, part, before) in enumerate(zip(self.parameters, parts, older, strict=True)):
            if part is None or parameter in backward.owned_elsewhere:
                continue
            parts[index] = None
            if before is None:
                GRAD.__set__(parameter, part)
            else:
                before.add_(part)  # in place, as autograd accumulates: the user may hold this tensor

    def _close(self, window: Window, totals: Tensor) -> None:
        """End a window, and report on the next step, so far.

        ``totals`` [3] are its label tokens, sum of losses and micro-batches, over all ranks.
        """
        del self.open_windows[window.key]
        if window.scale is not None:
            self.scaling.window_ended(window.optimizers, totals[0])
        self.measured.difference_update(window.optimizers)
        for optimizer in window.optimizers:
            self.since_step[optimizer] = self.since_step.get(optimizer, 0) + totals
        self.last_loss = totals[1] / totals[0]
        if window.optimizers:
            totals = self.since_step[window.optimizers[0]]
        count, loss, num_micro_batches = totals
        mean = loss / count
        if not self.weighting.per_token_loss:  # each micro-batch has counted as 1
            count = torch.zeros_like(count)
        self.last_step = StepReport(mean, count, num_micro_batches.long(), grad_norm=None)

    def abandon(self, error: BaseException) -> None:
        """After an ``error`` in a backward: put ``.grad`` back, unless that has ended, and drop all windows."""
        if self.engine.backward is not None:
            self._write_grads(self.engine.backward.older_gradients)
        try:
            self.reset()
            self.engine.recover()
        except Exception as later:
            # A device that has failed raises in each later call: the first error is the cause.
            error.add_note(f"Dropping the window raised {type(later).__name__} too.")

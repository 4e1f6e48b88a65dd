"""Accumulation windows: gradients are kept aside until they are final, and then written to ``.grad``.

===================================  =============================  =======================================
where training is                    ``.grad`` holds                gradients of open windows are
===================================  =============================  =======================================
no window is open                    what its user left there       -
in a backward of the strategy        those of open windows          there, and in FSDP2; what stood there is
                                                                    set aside
a window is open, no backward runs   what stood there before it     kept here, and in FSDP2
a window's last backward returns     the sum of both, final         those of other open windows: kept here
===================================  =============================  =======================================

A backward goes from one row to the next by :meth:`GradientWindows.start` and
:meth:`GradientWindows.put_back`. After an exception in it, and where all is zeroed or a run ends, no window is
open.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.engine import SECOND_BACKWARD, Engine
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.token_loss import (
    Count,
    StepReport,
    TokenWeighting,
    WindowTotals,
    wide_dtype,
)
from lightning_automodel.gradients.window import NUMBERS, Window
from lightning_automodel.internals.dtensor import GRAD

OneOptimizer = Optimizer | LightningOptimizer

ZEROED_IN_BACKWARD = (
    "zero_grad() was called within a backward of the strategy, by a hook of autograd or in"
    " LightningModule.backward. Gradients of the accumulation window would be lost, while its label tokens"
    " stay counted. Zero gradients before the backward, for example in on_before_backward, or after it, in"
    " on_after_backward. To step and zero in hooks of parameters, pass count_window_ahead=True."
)
"""Why a window is not dropped while its backward runs."""

DIFFERENT_UNITS = (
    "Ranks have used different FSDP units in the forwards of one accumulation window, so one rank gets the"
    " parameters or gradients of another layer than it asks for. Layers that are dropped at random, or experts"
    " that only some ranks need, must not be FSDP units of their own: pass auto_wrap_policy=set(), which makes one"
    " unit of the model, or the classes of modules that contain them. Or pass data_parallel='ddp' with"
    " ddp_kwargs={'find_unused_parameters': True}."
)
"""What ranks must do that use different units in one forward."""

DIFFERENT_BATCHES = (
    "A hook, a step or a data set has raised StopIteration on some ranks, which Lightning takes for the end of the"
    " data; or on_train_batch_start has returned -1 there; or they have left batches out. Begin an iterator anew"
    " where it ends, and end an epoch early on all ranks."
)
"""What ranks must do that have come to different batches."""

_FACTOR = 648_053
"""Makes one number of several, below `NUMBERS`: few epochs and tens of thousands of batches give different ones."""


def unwrap(optimizer: OneOptimizer) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    if isinstance(optimizer, LightningOptimizer):
        return optimizer.optimizer
    return optimizer


def optimizer_parameters(optimizer: OneOptimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [parameter for group in unwrap(optimizer).param_groups for parameter in group["params"]]


class GradientWindows:
    """The open windows of a fit, and the totals of those that have ended since the last step.

    Each toggled optimizer has its own window, so that those of a GAN can accumulate side by side. Without
    toggling there is one window.

    Attributes:
        parameters: Of the sharded model. Between a forward and its backward ``module.parameters()`` are the gathered
            ones.
        weighting: How micro-batches are counted and weighed.
        scaling: What a gradient scaler, and the range of half precision, multiply by.
        mesh: Of the run.
        device: Of this rank's sums and gradients.
        divisor: D, by which the engine's averages divide.
        optimizers: Those of the run: windows without toggling end with a step of all of these.
        toggled: Whose window the next backwards belong to; None: to that of all optimizers.
        unfinished: The open windows, by toggled optimizer.
        last_step: The report on the last step, or on the one that comes next, so far.
        since_step: By optimizer, the [3] totals of the windows since its previous step.
        measured: The optimizers whose norm was reported since their previous step.
        num_resets: How often an optimizer stepped, or gradients were zeroed.
        on_step: Called after each step.
        on_backward: Called with its window after each backward, while ``.grad`` holds that window's gradients, and
            nothing older.
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
        self.unfinished: dict[Optimizer | None, Window] = {}
        self.last_step: StepReport | None = None
        self.since_step: dict[Optimizer, Tensor] = {}
        self.measured: set[Optimizer] = set()
        self.num_resets = 0
        self.on_step: Callable[[], None] | None = None
        self.on_backward: Callable[[Window], None] | None = None
        self._engine = engine
        # By parameter, in their order: hashing parameters would be a good part of what a micro-batch costs.
        self._nothing: list[Tensor | None] = [None] * len(parameters)
        self._kept = self._nothing  # gradients of open windows, between backwards
        self._set_aside = self._nothing  # what `.grad` held before the backward that runs
        self._group = placement.mesh.group
        self._host_group = placement.host_group  # has all ranks, and none of their devices
        self._sums_uses_on_host = placement.device.type != "cpu" and self.divisor > 1
        # Of windows on an accelerator that were not compared between ranks yet: this rank's batch, the sums of
        # positions, and when these are there.
        self._unchecked: deque[tuple[tuple[int, int], Tensor, torch.Event]] = deque()

    @property
    def in_backward(self) -> bool:
        """Whether a backward of the strategy runs, until its gradients stand in ``.grad``."""
        return self._engine.window is not None

    def unsynchronised(self) -> set[nn.Parameter]:
        """Parameters that may have gradients of a plain ``loss.backward()``, which the engine has not averaged."""
        self._engine.check_foreign()
        return {
            parameter for parameter in self._engine.unsynchronised if GRAD.__get__(parameter) is not None
        }

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that open windows hold for these parameters, which have been zeroed.

        Windows that have ended still count in the report on the next step: its gradients may be made of
        theirs, which the user has noted before (SAM, gradient surgery).

        Raises RuntimeError within a backward that has gradients already, unless its window was counted ahead.
        """
        self.num_resets += 1
        dropped = set(parameters)
        self._engine.check_foreign()
        self._engine.unsynchronised -= dropped
        if self._engine.window is not None:
            self._drop_within_backward(self._engine.window, dropped)
            return
        if all(window.owned.isdisjoint(dropped) for window in self.unfinished.values()):
            return
        for window in self.unfinished.values():
            window.used -= dropped
        # If all of a window's parameters are dropped, so is the window, with its count.
        self.unfinished = {
            key: window for key, window in self.unfinished.items() if not window.owned <= dropped
        }
        if not self.unfinished:
            self._forget()
            return
        self._kept = self._without(dropped, self._kept)
        self._engine.discard(dropped)

    def _drop_within_backward(self, running: Window, dropped: set[nn.Parameter]) -> None:
        """Drop what stood in ``.grad`` before a backward that has no gradients yet, or whose gradients are final."""
        used_before = any(not window.used.isdisjoint(dropped) for window in self.unfinished.values())
        if running.ahead is None and (used_before or self._engine.reached):
            raise RuntimeError(ZEROED_IN_BACKWARD)
        self._set_aside = self._without(dropped, self._set_aside)
        self._engine.discard(dropped)

    def _without(self, dropped: set[nn.Parameter], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """``gradients`` of all parameters, but none of these."""
        pairs = zip(self.parameters, gradients, strict=True)
        return [None if parameter in dropped else gradient for parameter, gradient in pairs]

    def reset(self) -> None:
        """Drop all windows and their gradients: a run begins or ends, or something has failed."""
        self.unfinished = {}
        self.toggled = None
        self.since_step.clear()
        self.measured.clear()
        self._unchecked.clear()
        self._forget()

    def _forget(self) -> None:
        """Drop what is held for windows, of which none is open any more."""
        self._kept = self._nothing
        self._engine.reached.clear()
        self._engine.refusal = None
        self._engine.discard()

    def stepped(self, optimizer: Optimizer) -> None:
        """Start a new report: the optimizer has stepped, or a gradient scaler has skipped its step."""
        self.num_resets += 1
        self._engine.stepped()
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

    def open(self, expected: Count, ahead: WindowTotals | None) -> Window:
        """Return the window that the next backward adds to: the toggled optimizer's, else the open or a new one of all.

        ``expected`` are about as many label tokens as the window will have, ``ahead`` its totals if it is
        counted ahead. A collective once in a run in float16. Raises RuntimeError if several are open and
        none is toggled, or if two windows would hold the same parameter.
        """
        key = self.toggled
        window = self.unfinished.get(key)
        if key is None and self.unfinished:
            if len(self.unfinished) > 1:
                raise RuntimeError(
                    f"{len(self.unfinished)} accumulation windows are open"
                    f" ({', '.join(type(key).__name__ for key in self.unfinished)}), and this backward"
                    " belongs to none of them: run it inside `with optimizer.toggle_model():` of the"
                    " optimizer whose window it ends."
                )
            (window,) = self.unfinished.values()
            window.optimizers = self.optimizers
        if window is None:
            window = self._begin(key, expected)
        window.ahead = ahead
        return window

    def _begin(self, key: Optimizer | None, expected: Count) -> Window:
        """Open a window. Raises RuntimeError if it would hold parameters of an open one."""
        if key is None:
            optimizers = self.optimizers
        else:
            optimizers = [key]
        sums = torch.zeros(3, dtype=wide_dtype(self.device), device=self.device)
        window = Window(key, optimizers, self.scaling.start_window(expected), sums)
        for other in self.unfinished.values():
            if shared := window.owned & other.owned:
                raise RuntimeError(
                    f"{len(shared)} parameters of {type(key).__name__} belong to the open"
                    f" accumulation window of {', '.join(type(o).__name__ for o in other.optimizers)}. End"
                    " that window first, by a backward outside of toggle_model(sync_grad=False), or zero its"
                    " gradients."
                )
        self.unfinished[key] = window
        return window

    def weigh(self, window: Window, token_losses: Tensor, aux_loss: Tensor | None) -> Tensor:
        """[] what to backpropagate for the sum of token losses of a micro-batch.

        If the window was counted ahead, that is D / N of it and this rank's share of ``aux_loss`` [].
        """
        objective = token_losses
        if (ahead := window.ahead) is not None:
            # Without label tokens, gradients are exactly zero.
            factor = self.divisor / ahead.num_label_tokens if ahead.num_label_tokens else 0.0
            objective = token_losses * factor
            if aux_loss is not None:
                objective = objective + aux_loss * (self.divisor / ahead.num_micro_batches)
        if window.scale is not None:
            objective = objective * window.scale.to(objective.device)
        return objective

    def start(self, window: Window, sums: Tensor | None, ends: bool) -> None:
        """A backward of ``window`` comes next: let ``.grad`` hold the gradients of open windows alone.

        A reduction for one window also reduces what another has accumulated, which is harmless since
        reductions are linear. ``sums`` [3] are those of its micro-batch, see :func:`sums_of`; None for a
        padding batch. ``ends``: the window ends with this backward, and the gradients of all parameters
        that no other open window owns become final.
        """
        window.ends = ends
        window.is_padding = sums is None
        if sums is not None:
            window.sums += sums.to(self.device)
            window.num_micro_batches += 1
        others = [other for other in self.unfinished.values() if other is not window]
        trainable = {parameter for parameter in self.parameters if parameter.requires_grad}
        window.frozen = window.trained.union(*(other.trained for other in others)) - trainable
        window.trained |= trainable
        window.final = []
        if ends:
            owned_elsewhere = {parameter for other in others for parameter in other.owned}
            window.final = [p for p in self.parameters if p not in owned_elsewhere]
        held = list(map(GRAD.__get__, self.parameters))
        self._set_aside = held
        if self._engine.reuses_gradients:
            self._set_aside = [None if gradient is None else gradient.clone() for gradient in held]
        self._engine.window = window  # from here on, an exception puts back what is set aside
        self._show(self._kept, held)
        self._kept = self._nothing

    def _show(self, gradients: list[Tensor | None], held: list[Tensor | None]) -> None:
        """Let ``.grad`` of the parameters hold these ``gradients`` in place of those ``held``."""
        for parameter, before, after in zip(self.parameters, held, gradients, strict=True):
            if before is not after:
                GRAD.__set__(parameter, after)

    def sum_over_ranks(self, window: Window, batch: tuple[int, int]) -> Tensor:
        """[3] the window's sums over all ranks; drops the gradients of parameters that no rank has used in it.

        One all-reduce of three numbers, two by which ranks tell whether they have used the same units in the
        same ``batch`` (an epoch, and the index in it), and one for each parameter that may have a zero
        gradient in place of none. A rank that has not used some of these must know on the host whether
        another rank has: where this occurs in a run's first window, later ones sum these numbers on the host,
        which no device keeps waiting. Else that rank reads them.

        Raises RuntimeError, on every rank, if ranks have used different units or are in different batches;
        on an accelerator in a later window, so that no host waits.
        """
        uses = [parameter in window.used for parameter in window.zero_filled]
        position = window.order
        for number in batch:
            position = (position * _FACTOR + number) % NUMBERS
        own = torch.tensor([position, position**2, *uses], dtype=window.sums.dtype)
        totals, told, group = self._sum(window.sums, own, sums_uses=bool(uses))
        if self.mesh.sizes.context > 1:
            totals[2] /= self.mesh.sizes.context  # context-parallel ranks share each micro-batch
        if told.device.type == "cpu":
            if _differ(told, group):
                by_rank = gather_objects((window.order, *batch), group)
                raise _different_windows(
                    dict(zip(dist.get_process_group_ranks(group), by_rank, strict=True))
                )
        elif self.divisor > 1:
            self._check_earlier_windows(batch, told[:2])
        if told.device.type == "cpu" or not all(uses):
            for parameter, num_users in zip(window.zero_filled, told[2:].tolist(), strict=True):
                if num_users == 0:
                    GRAD.__set__(parameter, None)
        return totals

    def _sum(self, sums: Tensor, told: Tensor, sums_uses: bool) -> tuple[Tensor, Tensor, dist.ProcessGroup]:
        """A window's [3] ``sums`` over all ranks, those of what each rank has ``told``, and the group that told it."""
        group = self._group
        if self._sums_uses_on_host and sums_uses:
            # From the second window on, only if in the first some rank had not used all parameters.
            dist.all_reduce(sums, group=group)
            dist.all_reduce(told, group=self._host_group)
            self._sums_uses_on_host = bool(told[2:].min() < self._host_group.size())
            return sums, told, self._host_group
        both = torch.cat([sums, rescale_clip.moved(told, self.device)])
        if self.divisor > 1:
            dist.all_reduce(both, group=group)
        return both[:3], both[3:], group

    def _check_earlier_windows(self, batch: tuple[int, int], sums: Tensor) -> None:
        """Note this window's ``batch`` and sums; check earlier windows, as far as the device has come. No wait."""
        on_host = sums.to("cpu", non_blocking=True)
        self._unchecked.append((batch, on_host, torch.accelerator.current_stream().record_event()))
        self.check_windows(waits=False)

    def check_windows(self, waits: bool = True) -> None:
        """Raise RuntimeError if ranks differed in windows that were not checked yet. Not a collective.

        Waits for the device; or else checks as far as that has come.
        """
        while self._unchecked and (waits or self._unchecked[0][2].query()):
            (epoch, index), earlier, event = self._unchecked.popleft()
            if waits:
                event.synchronize()
            if _differ(earlier, self._group):
                raise RuntimeError(
                    f"Ranks have ended one accumulation window in different batches, this rank in batch {index} of"
                    f" epoch {epoch}, or have used different FSDP units in it. {DIFFERENT_BATCHES} If the batches"
                    f" are the same: {DIFFERENT_UNITS}"
                )

    def denominator(self, window: Window, totals: Tensor) -> Tensor | None:
        """[] the N that final gradients are divided by; None if the losses were, since it was counted ahead.

        Raises RuntimeError if this rank has run another number of micro-batches than it has counted ahead.
        """
        ahead = window.ahead
        if ahead is None:
            return totals[0]
        if window.num_micro_batches != ahead.own_micro_batches:
            raise RuntimeError(
                f"A window was counted ahead as {ahead.own_micro_batches} micro-batches of this rank, and"
                f" ends after {window.num_micro_batches} backward(s), so that its gradients are divided by"
                " another number of label tokens than they hold. With count_window_ahead=True, training_step"
                " must return a loss for each batch, and neither accumulate_grad_batches nor gradients may"
                " change in mid-window."
            )
        return None

    def put_back(self, window: Window) -> None:
        """Add final gradients to older ones; keep the others for their windows, and put ``.grad`` back."""
        older = self._set_aside
        parts = list(map(GRAD.__get__, self.parameters))
        self._show(older, parts)
        self._set_aside = self._nothing
        self._engine.window = None
        self._engine.refusal = SECOND_BACKWARD
        final = set(window.final)
        for index, (parameter, part, before) in enumerate(zip(self.parameters, parts, older, strict=True)):
            if part is None or parameter not in final:
                continue
            parts[index] = None
            if before is None:
                GRAD.__set__(parameter, part)
            elif before.is_sparse or part.is_sparse:
                GRAD.__set__(parameter, before + part)
            else:
                before.add_(part)  # in place, as autograd accumulates: the user may hold this tensor
        self._kept = parts

    def close(self, window: Window, totals: Tensor) -> None:
        """End a window with these [3] ``totals`` over all ranks, and report on the next step, so far."""
        del self.unfinished[window.key]
        if window.scale is not None:
            self.scaling.window_ended(window.optimizers, totals[0])
        self.measured.difference_update(window.optimizers)
        for optimizer in window.optimizers:
            before = self.since_step.get(optimizer)
            self.since_step[optimizer] = totals if before is None else before + totals
        if window.optimizers:
            totals = self.since_step[window.optimizers[0]]
        self.last_step = self.weighting.report(totals)

    def abandon(self, error: BaseException) -> None:
        """After an ``error`` in a backward: put ``.grad`` back as it was, unless it is final, and drop all windows."""
        if self.in_backward:
            self._show(self._set_aside, list(map(GRAD.__get__, self.parameters)))
        self._set_aside = self._nothing
        try:
            self.reset()
            self._engine.recover()
        except Exception as later:
            # A device that has failed raises in each later call: the first error is the cause.
            error.add_note(f"Dropping the window raised {type(later).__name__} too.")
        finally:
            self._engine.window = None


def _differ(sums: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the number of a rank differs, by the sums of all of them, and of their squares. Reads the device."""
    total, squares = (int(number) for number in sums[:2].tolist())
    return total**2 != squares * group.size()


def _different_windows(by_rank: Mapping[int, tuple[int, int, int]]) -> RuntimeError:
    """The error for ranks with another order of units, epoch or batch; those in other batches use other units too."""
    first, (_, epoch, batch) = next(iter(by_rank.items()))
    for rank, (_, *others) in by_rank.items():
        if others != [epoch, batch]:
            return RuntimeError(
                f"Ranks have ended one accumulation window in different batches: rank {first} in batch {batch} of"
                f" epoch {epoch}, rank {rank} in batch {others[1]} of epoch {others[0]}. {DIFFERENT_BATCHES}"
            )
    return RuntimeError(DIFFERENT_UNITS)

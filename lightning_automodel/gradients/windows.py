"""Accumulation windows: gradients are kept aside until they are final, and then written to ``.grad``."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.engine import NUMBERS, SECOND_BACKWARD, Engine, Window
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.token_loss import (
    Count,
    StepReport,
    TokenWeighting,
    WindowTotals,
    wide_dtype,
)
from lightning_automodel.internals.dtensor import GRAD

OneOptimizer = Optimizer | LightningOptimizer

DIFFERENT_UNITS = (
    "so one rank gets the parameters or gradients of another layer than it asks for. Layers that are dropped"
    " at random, or experts that only some ranks need, must not be FSDP units of their own: pass"
    " auto_wrap_policy=set(), which makes one unit of the model, or the classes of modules that contain"
    " them. Or pass data_parallel='ddp' with ddp_kwargs={'find_unused_parameters': True}."
)
"""What ranks must do that use different units in one forward."""

DIFFERENT_BATCHES = (
    "A hook, a step or a data set has raised StopIteration on some ranks, which Lightning takes for the end of the"
    " data; or on_train_batch_start has returned -1 there; or they have left batches out. Begin an iterator anew"
    " where it ends, and end an epoch early on all ranks."
)
"""What ranks must do that have come to different batches."""


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

    Between the backwards of a window, ``.grad`` is what it was before the window, usually None. The window's
    gradients are kept here (and inside FSDP2 while a reduction is deferred), so that nobody takes a sum over
    tokens for a gradient. When the window's last backward returns, they are rescaled and added to ``.grad``.

    Each toggled optimizer has its own window, so that those of a GAN can accumulate side by side. Without
    toggling there is one window. ``parameters`` are those of the sharded model: between a forward and its
    backward ``module.parameters()`` are the gathered ones. ``host_group`` has all ranks, and none of their
    devices.
    """

    def __init__(
        self,
        engine: Engine,
        weighting: TokenWeighting,
        scaling: LossScaling,
        placement: Placement,
        parameters: list[nn.Parameter],
    ) -> None:
        self.last_step: StepReport | None = None
        # The [3] totals of the windows since its previous step.
        self.since_step: dict[Optimizer, Tensor] = {}
        self.measured: set[Optimizer] = set()  # since their previous step
        self.weighting = weighting
        self.scaling = scaling
        self.mesh = placement.mesh
        self.divisor = placement.mesh.sizes.divisor
        self.parameters = parameters
        self._engine = engine
        self.device = placement.device
        self._group = placement.mesh.group
        self.unfinished: dict[Optimizer | None, Window] = {}  # the windows that have begun and not ended
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._set_aside: dict[nn.Parameter, Tensor] = {}  # what `.grad` held before the backward that runs
        self.optimizers: list[Optimizer] = []
        self.toggled: Optimizer | None = None
        self._host_group = placement.host_group
        self._agrees_on_host = placement.device.type != "cpu" and self.divisor > 1
        # On an accelerator, what windows have told, until it is read: this rank's numbers, their sums, and when
        # these are there.
        self._told: deque[tuple[list[int], Tensor, torch.Event]] = deque()
        self.num_resets = 0  # how often an optimizer stepped, or gradients were zeroed
        self.on_step: Callable[[], None] | None = None  # called after each step
        # Called when `.grad` holds a window's final gradients, and nothing older.
        self.on_final: Callable[[], None] | None = None

    @property
    def unsynchronised(self) -> set[nn.Parameter]:
        """Parameters that may have gradients of a plain ``loss.backward()``, which the engine has not averaged."""
        self._engine.check_foreign()
        return {
            parameter for parameter in self._engine.unsynchronised if GRAD.__get__(parameter) is not None
        }

    @property
    def in_backward(self) -> bool:
        """Whether a backward of the strategy runs, until its gradients stand in ``.grad``."""
        return self._engine.window is not None

    def use_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Let windows without toggling end with a step of all of these."""
        self.optimizers = optimizers

    def toggle(self, optimizer: Optimizer | None) -> None:
        """Let the next backwards belong to the window of ``optimizer``; None: to that of all of them."""
        self.toggled = optimizer

    def restore_report(self, report: StepReport) -> None:
        """Go on with the report on the last step before a resumed run."""
        self.last_step = report

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that open windows hold for these parameters, which have been zeroed."""
        self.num_resets += 1
        dropped = set(parameters)
        self._engine.check_foreign()
        self._engine.unsynchronised -= dropped
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
        for parameter in dropped:
            self._accumulated.pop(parameter, None)
        self._engine.discard(dropped)

    def reset(self) -> None:
        """Drop all windows and their gradients: a run begins or ends, or something has failed."""
        self.unfinished = {}
        self.toggled = None
        self.since_step.clear()
        self.measured.clear()
        self._told.clear()
        self._forget()

    def _forget(self) -> None:
        """Drop what is held for windows, of which none is open any more."""
        self._accumulated.clear()
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
            window = next(iter(self.unfinished.values()))
            window.optimizers = self.optimizers
        if window is None:
            window = self._begin(key, expected)
        window.ahead = ahead
        return window

    def _begin(self, key: Optimizer | None, expected: Count) -> Window:
        """Open a window."""
        sums = torch.zeros(3, dtype=wide_dtype(self.device), device=self.device)
        if key is None:
            optimizers = self.optimizers
        else:
            optimizers = [key]
        window = Window(key, optimizers, self.scaling.start_window(expected), sums)
        self._check_owners(window)
        self.unfinished[key] = window
        return window

    def _check_owners(self, window: Window) -> None:
        """Raise RuntimeError if a new window would hold parameters of an open one."""
        for other in self.unfinished.values():
            if shared := window.owned & other.owned:
                raise RuntimeError(
                    f"{len(shared)} parameters of {type(window.key).__name__} belong to the open"
                    f" accumulation window of {', '.join(type(o).__name__ for o in other.optimizers)}. End"
                    " that window first, by a backward outside of toggle_model(sync_grad=False), or zero its"
                    " gradients."
                )

    def weigh(self, window: Window, token_losses: Tensor, aux_loss: Tensor | None) -> Tensor:
        """[] what to backpropagate for the sum of token losses of a micro-batch.

        If the window was counted ahead, that is D / N of it and this rank's share of ``aux_loss`` [].
        """
        ahead = window.ahead
        objective = token_losses
        if ahead is not None:
            if self.weighting.per_token_loss:
                denominator = ahead.num_label_tokens
            else:
                denominator = ahead.num_micro_batches
            objective = token_losses * (self.divisor / denominator if denominator else 0.0)
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
        window.frozen = set()
        window.final = []
        trained = set()
        owned_elsewhere = set()
        for open_window in self.unfinished.values():
            trained |= open_window.trained
            if open_window is not window:
                owned_elsewhere |= open_window.owned
        self._set_aside = {}
        for parameter in self.parameters:
            if ends and parameter not in owned_elsewhere:
                window.final.append(parameter)
            if parameter.requires_grad:
                window.trained.add(parameter)
            elif parameter in trained:
                window.frozen.add(parameter)
            gradient = GRAD.__get__(parameter)
            if gradient is not None:
                reuses = self._engine.reuses_gradients
                self._set_aside[parameter] = gradient.clone() if reuses else gradient
                GRAD.__set__(parameter, None)
        for parameter, part in self._accumulated.items():
            GRAD.__set__(parameter, part)
        self._accumulated = {}
        self._engine.window = window

    def sum_over_ranks(self, window: Window, batch: tuple[int, int]) -> Tensor:
        """[3] the window's sums over all ranks; drops the gradients of parameters that no rank has used in it.

        One all-reduce of three numbers, six by which ranks tell whether they have used the same units in the
        same ``batch`` (an epoch, and the index in it), and one for each parameter that may have a zero
        gradient in place of none. A rank that has not used some of these must know on the host whether
        another rank has: where this occurs in a run's first window, later ones sum these numbers on the host,
        which no device keeps waiting. Else that rank reads them.

        Raises RuntimeError, on every rank, if ranks have used different units or are in different batches;
        on an accelerator in a later window, so that no host waits.
        """
        uses = [parameter in window.used for parameter in window.zero_filled]
        told = [window.order, *(number % NUMBERS for number in batch)]
        squares = [number**2 for number in told]
        own = torch.tensor([*told, *squares, *uses], dtype=window.sums.dtype)
        on_host = self._agrees_on_host and len(uses) > 0
        if on_host:
            summed = window.sums
        else:
            summed = torch.cat([window.sums, rescale_clip.moved(own, self.device)])
        if self.divisor > 1:
            dist.all_reduce(summed, group=self._group)
        if self.mesh.sizes.context > 1:
            summed[2] /= self.mesh.sizes.context  # context-parallel ranks share each micro-batch
        if on_host:
            # From the second window on, only if in the first some rank had not used all parameters.
            dist.all_reduce(own, group=self._host_group)
            self._agrees_on_host = bool(own[6:].min() < dist.get_world_size())
            _check_equal(told, own[:6], self._host_group)
            self._drop_unused(window, own[6:])
        elif self.device.type == "cpu":
            _check_equal(told, summed[3:9], self._group)
            self._drop_unused(window, summed[9:])
        else:
            if self.divisor > 1:
                self._check_windows_before(told, summed[3:9])
            if not all(uses):
                self._drop_unused(window, summed[9:])
        return summed[:3]

    def _check_windows_before(self, told: list[int], sums: Tensor) -> None:
        """Keep what this window has ``told``; check earlier ones, as far as the device has come. Waits for nothing."""
        on_host = sums.to("cpu", non_blocking=True)
        self._told.append((told, on_host, torch.accelerator.current_stream().record_event()))
        while self._told and self._told[0][2].query():
            earlier, sums, _ = self._told.popleft()
            if any(differs := _differences(sums, self._group.size())):
                means = [round(total / self._group.size(), 2) for total in sums[:3].tolist()]
                raise _different(differs, {"all ranks on average": means, "this rank": earlier})

    def _drop_unused(self, window: Window, users: Tensor) -> None:
        """Drop the gradients of parameters that no rank has used, by the number of ranks that use each. Reads it."""
        for parameter, num_users in zip(window.zero_filled, users.tolist(), strict=True):
            if num_users == 0:
                GRAD.__set__(parameter, None)

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

    def abandon(self, error: BaseException) -> None:
        """After an ``error`` in a backward: put ``.grad`` back as it was, unless it is final, and drop all windows."""
        if self.in_backward:
            for parameter in self.parameters:
                GRAD.__set__(parameter, self._set_aside.get(parameter))
        self._set_aside = {}
        try:
            self.reset()
            self._engine.recover()
        except Exception as later:
            # A device that has failed raises in each later call: the first error is the cause.
            error.add_note(f"Dropping the window raised {type(later).__name__} too.")
        finally:
            self._engine.window = None

    def put_back(self, window: Window) -> None:
        """Add final gradients to older ones; keep the others for their windows, and put ``.grad`` back."""
        are_final = set(window.final)
        older = self._set_aside
        self._set_aside = {}
        self._engine.window = None
        self._engine.refusal = SECOND_BACKWARD
        for parameter in self.parameters:
            part = GRAD.__get__(parameter)
            before = older.get(parameter)
            if part is None:
                if before is not None:
                    GRAD.__set__(parameter, before)
            elif parameter not in are_final:
                self._accumulated[parameter] = part
                GRAD.__set__(parameter, before)
            elif before is not None:
                # In place, as autograd accumulates: the user may hold this tensor.
                if before.is_sparse or part.is_sparse:
                    GRAD.__set__(parameter, before + part)
                else:
                    GRAD.__set__(parameter, before.add_(part))

    def close(self, window: Window, totals: Tensor) -> None:
        """End a window with these [3] ``totals`` over all ranks, and report on the next step, so far."""
        # A hook may have zeroed its gradients within the backward.
        if self.unfinished.get(window.key) is window:
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

    # --- The optimizer's step -----------------------------------------------------------------------------------------

    def report_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Put the [] norm of an optimizer's final gradients into the report, if it is the first since its step."""
        if optimizer in self.since_step and optimizer not in self.measured and self.last_step is not None:
            self.measured.add(optimizer)
            self.last_step = replace(self.last_step, grad_norm=norm)


def _check_equal(told: list[int], sums: Tensor, group: dist.ProcessGroup) -> None:
    """Raise RuntimeError, on every rank of ``group``, unless all have told the same, by the [6] ``sums`` over them.

    ``told`` are the order of units, the epoch and the index of the batch. A collective only if they differ.
    """
    differs = _differences(sums, group.size())
    if any(differs):
        ranks = dist.get_process_group_ranks(group)
        by_rank = zip(ranks, gather_objects(told, group), strict=True)
        raise _different(differs, {f"rank {rank}": each for rank, each in by_rank})


def _differences(sums: Tensor, num_ranks: int) -> list[bool]:
    """Which of three numbers differ between ranks, by their sums, and the sums of their squares. Reads the device."""
    numbers = [int(number) for number in sums.tolist()]
    return [total**2 != square * num_ranks for total, square in zip(numbers[:3], numbers[3:], strict=True)]


def _different(differs: list[bool], told: Mapping[str, Sequence[float]]) -> RuntimeError:
    """The error for ranks that have not ``told`` the same; those in other batches use other units too."""
    if not any(differs[1:]):
        return RuntimeError(
            "Ranks have used different FSDP units in the forwards of one accumulation window,"
            f" {DIFFERENT_UNITS}"
        )
    first, (_, epoch, batch) = next(iter(told.items()))
    others = (name for name, each in told.items() if each[1:] != [epoch, batch])
    other = next(others, first)
    return RuntimeError(
        f"Ranks have ended one accumulation window in different batches: {first} in batch {batch} of epoch {epoch},"
        f" {other} in batch {told[other][2]} of epoch {told[other][1]}. {DIFFERENT_BATCHES}"
    )

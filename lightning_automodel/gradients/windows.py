"""Accumulation windows: gradients are kept aside until they are final, and then written to ``.grad``."""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.grad_sync import GradSync, Uses
from lightning_automodel.gradients.token_loss import (
    Count,
    StepReport,
    TokenWeighting,
    WindowTotals,
    wide_dtype,
)

OneOptimizer = Optimizer | LightningOptimizer

PLAIN_BACKWARD = (
    "A plain loss.backward() in the middle of an accumulation window, whose gradients it would join. For the"
    " gradient of inputs or activations, call torch.autograd.grad(loss, inputs), which leaves nothing"
    " behind. For a loss that trains, call self.manual_backward(loss), or end the window first, by a"
    " manual_backward outside of `optimizer.toggle_model(sync_grad=False)`; under automatic optimization,"
    " return the sum of the losses."
)
"""Why a backward that is not the strategy's is refused while a window is open."""

DIFFERENT_UNITS = (
    "so one rank gets the parameters or gradients of another layer than it asks for. Layers that are dropped"
    " at random, or experts that only some ranks need, must not be FSDP units of their own: pass"
    " auto_wrap_policy=set(), which makes one unit of the model, or the classes of modules that contain"
    " them. Or pass data_parallel='ddp' with ddp_kwargs={'find_unused_parameters': True}."
)
"""What ranks must do that use different units in one forward."""


def unwrap(optimizer: OneOptimizer) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    if isinstance(optimizer, LightningOptimizer):
        return optimizer.optimizer
    return optimizer


def optimizer_parameters(optimizer: OneOptimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [parameter for group in unwrap(optimizer).param_groups for parameter in group["params"]]


def mixing_shards(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Context for an optimizer's arithmetic where some of its parameters are shards and others are whole.

    The steps of torch that take all parameters at once (``foreach``, the default on accelerators) refuse
    such mixtures.
    """
    is_mixed = len({isinstance(parameter, DTensor) for parameter in optimizer_parameters(optimizer)}) == 2
    if is_mixed:
        return implicit_replication()
    return nullcontext()


@dataclass(eq=False)
class Window:
    """One accumulation window."""

    key: Optimizer | None  # the toggled optimizer; None without toggling
    optimizers: list[Optimizer]
    scale: Tensor | None  # [] what its losses are multiplied by before backward; None if by nothing
    sums: Tensor  # [3] over its micro-batches on this rank, see `sums_of`
    num_micro_batches: int = 0  # on this rank, without padding batches
    trained: set[nn.Parameter] = field(default_factory=set)  # in any of its backwards, the same on all ranks
    # If it was counted ahead: losses are divided by these, so that gradients are final at once.
    ahead: WindowTotals | None = None

    @property
    def owned(self) -> set[nn.Parameter]:
        """The parameters of its optimizers. No other open window may hold any of them."""
        return {parameter for optimizer in self.optimizers for parameter in optimizer_parameters(optimizer)}

    def add(self, sums: Tensor) -> None:
        """Add the [3] sums of a micro-batch; see :func:`sums_of`."""
        self.sums += sums.to(self.sums.device)
        self.num_micro_batches += 1


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
        sync: GradSync,
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
        self._sync = sync
        self.device = placement.device
        self._group = placement.mesh.group
        self._denominator_index = weighting.denominator_index
        self.unfinished: dict[Optimizer | None, Window] = {}  # the windows that have begun and not ended
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._set_aside: dict[nn.Parameter, Tensor] = {}  # what `.grad` held before the backward that runs
        self.optimizers: list[Optimizer] = []
        self.toggled: Optimizer | None = None
        self.in_backward = False
        self._host_group = placement.host_group
        self._agrees_on_host = placement.device.type != "cpu" and self.divisor > 1
        self.num_resets = 0  # how often an optimizer stepped, or gradients were zeroed

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
        if all(window.owned.isdisjoint(dropped) for window in self.unfinished.values()):
            return
        # If all of a window's parameters are dropped, so is the window, with its count.
        self.unfinished = {
            key: window for key, window in self.unfinished.items() if not window.owned <= dropped
        }
        if not self.unfinished:
            self._accumulated.clear()
            self._sync.discard()
            return
        for parameter in dropped:
            self._accumulated.pop(parameter, None)
        self._sync.discard(dropped)

    def reset(self) -> None:
        """Drop all windows and their gradients: a run begins or ends, or something has failed."""
        self.unfinished = {}
        self._accumulated = {}
        self.toggled = None
        self.since_step.clear()
        self.measured.clear()
        self._sync.discard()

    def stepped(self, optimizer: Optimizer) -> None:
        """Start a new report: the optimizer has stepped, or a gradient scaler has skipped its step."""
        self.num_resets += 1
        self._sync.stepped()
        self.since_step.pop(optimizer, None)
        self.measured.discard(optimizer)
        self.scaling.stepped(optimizer)

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

    def ending_with(self, window: Window) -> list[nn.Parameter]:
        """The parameters whose gradients become final when ``window`` ends: those that no other open window owns."""
        if len(self.unfinished) == 1:
            return self.parameters
        others = [other for other in self.unfinished.values() if other is not window]
        owned_elsewhere = {parameter for other in others for parameter in other.owned}
        return [parameter for parameter in self.parameters if parameter not in owned_elsewhere]

    def set_aside(self, window: Window) -> set[nn.Parameter]:
        """Take away what ``.grad`` holds, and put the gradients of all open windows there: a backward comes next.

        A reduction for one window also reduces what another has accumulated, which is harmless since
        reductions are linear. Returns the parameters that open windows have trained and that are frozen by
        now.
        """
        self.in_backward = True
        self._set_aside = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                window.trained.add(parameter)
            if parameter.grad is not None:
                self._set_aside[parameter] = (
                    parameter.grad.clone() if self._sync.reuses_gradients else parameter.grad
                )
                parameter.grad = None
        for parameter, part in self._accumulated.items():
            parameter.grad = part
        self._accumulated = {}
        trained = {
            parameter for open_window in self.unfinished.values() for parameter in open_window.trained
        }
        return {parameter for parameter in trained if not parameter.requires_grad}

    def sum_over_ranks(self, window: Window, uses: Uses) -> Tensor:
        """[3] the window's sums over all ranks; drops the gradients of parameters that no rank has used in it.

        One all-reduce of three numbers, two for the order of units, and one for each sharded parameter. A
        rank that has not used some parameter must know on the host whether another rank has: where this
        occurs in a run's first window, later ones sum these numbers on the host, which no device keeps
        waiting. Else that rank reads them.
        """
        own = [uses.order, uses.order**2, *uses.by_parameter.values()]
        reads = not all(uses.by_parameter.values()) or self.device.type == "cpu"
        on_host = self._agrees_on_host and len(uses.by_parameter) > 0
        totals = window.sums
        if on_host:
            summed = totals
        else:
            summed = torch.cat([totals, _filled(own, totals)])
        if self.divisor > 1:
            dist.all_reduce(summed, group=self._group)
        if self.mesh.sizes.context > 1:
            summed[2] /= self.mesh.sizes.context  # context-parallel ranks share each micro-batch
        if on_host:
            self._drop_unused(uses, self._summed_on_host(own), dist.get_world_size())
        elif reads:
            self._drop_unused(uses, summed[len(totals) :].tolist(), self.divisor)
        return summed[: len(totals)]

    def _summed_on_host(self, own: list[int]) -> list[float]:
        """The sums of the numbers of all ranks, for which no rank waits for its device. A collective over the world.

        From the second window on, only if in the first some rank had not used all parameters.
        """
        summed = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(summed, group=self._host_group)
        sums: list[float] = summed.tolist()
        self._agrees_on_host = min(sums[2:]) < dist.get_world_size()
        return sums

    def _drop_unused(self, uses: Uses, sums: list[float], num_ranks: int) -> None:
        """Drop the gradients of parameters that none of the ranks has used, from the ``sums`` of what they have told.

        Raises RuntimeError unless all ranks have used the same FSDP units, in one order, in the window.
        """
        order, square, *users = sums
        if order * order != square * num_ranks:
            raise RuntimeError(
                "Ranks have used different FSDP units in the forwards of one accumulation window,"
                f" {DIFFERENT_UNITS}"
            )
        for parameter, num_users in zip(uses.by_parameter, users, strict=True):
            if num_users == 0:
                parameter.grad = None

    def denominator(self, window: Window, totals: Tensor) -> Tensor | None:
        """[] the N that final gradients are divided by; None if the losses were, since it was counted ahead.

        Raises RuntimeError if this rank has run another number of micro-batches than it has counted ahead.
        """
        ahead = window.ahead
        if ahead is None:
            return totals[self._denominator_index]
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
        """After an ``error`` in a backward: put ``.grad`` back as it was before it, and drop all windows."""
        for parameter in self.parameters:
            parameter.grad = self._set_aside.get(parameter)
        self._set_aside = {}
        try:
            self.reset()
            self._sync.recover()
        except Exception as later:
            # A device that has failed raises in each later call: the first error is the cause.
            error.add_note(f"Dropping the window raised {type(later).__name__} too.")
        finally:
            self.in_backward = False

    def put_back(self, final: list[nn.Parameter]) -> None:
        """Add ``final`` gradients to the older ones; keep the others for their windows, and put ``.grad`` back."""
        are_final = set(final)
        older = self._set_aside
        self._set_aside = {}
        self.in_backward = False
        for parameter in self.parameters:
            part = parameter.grad
            before = older.get(parameter)
            if part is None:
                if before is not None:
                    parameter.grad = before
            elif parameter not in are_final:
                self._accumulated[parameter] = part
                parameter.grad = before
            elif before is not None:
                # In place, as autograd accumulates: the user may hold this tensor.
                if before.is_sparse or part.is_sparse:
                    parameter.grad = before + part
                else:
                    parameter.grad = before.add_(part)

    def close(self, window: Window, totals: Tensor) -> StepReport:
        """End a window with these [3] ``totals`` over all ranks. Returns the report on the next step, so far."""
        # A hook may have zeroed its gradients within the backward.
        if self.unfinished.get(window.key) is window:
            del self.unfinished[window.key]
        if window.scale is not None:
            self.scaling.window_ended(window.optimizers, totals[self._denominator_index])
        self.measured.difference_update(window.optimizers)
        for optimizer in window.optimizers:
            before = self.since_step.get(optimizer)
            self.since_step[optimizer] = totals if before is None else before + totals
        if window.optimizers:
            totals = self.since_step[window.optimizers[0]]
        self.last_step = self.weighting.report(totals)
        return self.last_step

    # --- The optimizer's step -----------------------------------------------------------------------------------------

    def report_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Put the [] norm of an optimizer's final gradients into the report, if it is the first since its step."""
        if optimizer in self.since_step and optimizer not in self.measured and self.last_step is not None:
            self.measured.add(optimizer)
            self.last_step = replace(self.last_step, grad_norm=norm)


def _filled(numbers: Sequence[float], like: Tensor) -> Tensor:
    """[n] the ``numbers``, in the dtype and on the device of ``like``, without a copy from the host.

    The host would wait for that copy on an accelerator. So each run of equal numbers is filled there.
    """
    if like.device.type == "cpu":
        return like.new_tensor(numbers)
    runs = [(number, len(list(equal))) for number, equal in itertools.groupby(numbers)]
    return torch.cat([like.new_full((length,), number) for number, length in runs])

"""Accumulation windows: gradients are kept aside until they are final, and then written to ``.grad``."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from lightning_automodel.distributed.collectives import filled, wide_dtype
from lightning_automodel.distributed.mesh import RunMesh
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.grad_scaling import LossScaling
from lightning_automodel.gradients.token_loss import Count, StepReport, TokenWeighting, WindowTotals, sums_of

if TYPE_CHECKING:  # it is built above this room
    from lightning_automodel.sharding.grad_sync import GradSync

OneOptimizer = Optimizer | LightningOptimizer

PLAIN_BACKWARD = (
    "A plain loss.backward() in the middle of an accumulation window, whose gradients it would join. For the gradient"
    " of inputs or activations, call torch.autograd.grad(loss, inputs), which leaves nothing behind. For a loss that"
    " trains, call self.manual_backward(loss), or end the window first, by a manual_backward outside of"
    " `optimizer.toggle_model(sync_grad=False)`; under automatic optimization, return the sum of the losses."
)
"""Why a backward that is not the strategy's is refused while a window is open."""

DIFFERENT_UNITS = (
    "so one rank gets the parameters or gradients of another layer than it asks for. Layers that are dropped at random,"
    " or experts that only some ranks need, must not be FSDP units of their own: pass auto_wrap_policy=set(), which"
    " makes one unit of the model, or the classes of modules that contain them. Or pass data_parallel='ddp' with"
    " ddp_kwargs={'find_unused_parameters': True}."
)
"""What ranks must do that use different units in one forward."""


def unwrap(optimizer: OneOptimizer) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def optimizer_parameters(optimizer: OneOptimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [parameter for group in unwrap(optimizer).param_groups for parameter in group["params"]]


def mixing_shards(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Context for an optimizer's arithmetic where some of its parameters are shards and others are whole.

    The steps of torch that take all parameters at once (``foreach``, the default on accelerators) refuse such mixtures.
    """
    is_mixed = len({isinstance(parameter, DTensor) for parameter in optimizer_parameters(optimizer)}) == 2
    return implicit_replication() if is_mixed else nullcontext()


@dataclass(eq=False)
class Window:
    """One accumulation window."""

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

    def add(self, objective: Tensor, count: Count) -> None:
        """Add the [] sum of token losses of a micro-batch, and its label tokens."""
        self.sums += sums_of(objective, count).to(self.sums.device)
        self.num_micro_batches += 1


class GradientWindows:
    """The open windows of a fit, and the totals of those that have ended since the last step.

    Between the backwards of a window, ``.grad`` is what it was before the window, usually None. The window's gradients
    are kept here (and inside FSDP2 while a reduction is deferred), so that nobody takes a sum over tokens for a
    gradient. When the window's last backward returns, they are rescaled and added to ``.grad``.

    Each toggled optimizer has its own window, so that those of a GAN can accumulate side by side. Without toggling
    there is one window. ``parameters`` are those of the sharded model: between a forward and its backward
    ``module.parameters()`` are the gathered ones. ``host_group`` has all ranks, and none of their devices.
    """

    def __init__(
        self,
        sync: "GradSync",
        weighting: TokenWeighting,
        scaling: LossScaling,
        mesh: RunMesh,
        device: torch.device,
        parameters: list[nn.Parameter],
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.last_step: StepReport | None = None
        self.since_step: dict[Optimizer, Tensor] = {}  # the [3] totals of the windows since its previous step
        self.measured: set[Optimizer] = set()  # since their previous step
        self.weighting, self.scaling, self.divisor = weighting, scaling, mesh.sizes.divisor
        self.parameters = parameters
        self._sync, self.mesh, self._device = sync, mesh, device
        self._open: dict[Optimizer | None, Window] = {}
        self._pending: dict[nn.Parameter, Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self.toggled: Optimizer | None = None
        self.in_backward = False
        self._host_group = host_group
        self._agrees_on_host = host_group is not None and device.type != "cpu" and self.divisor > 1
        self.num_resets = 0  # how often an optimizer stepped, or gradients were zeroed

    @property
    def open_windows(self) -> list[Window]:
        """The windows that have begun and not ended."""
        return list(self._open.values())

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that open windows hold for these parameters, which have been zeroed."""
        self.num_resets += 1
        dropped = set(parameters)
        if all(window.owned.isdisjoint(dropped) for window in self._open.values()):
            return
        # If all of a window's parameters are dropped, so is the window, with its count.
        self._open = {key: window for key, window in self._open.items() if not window.owned <= dropped}
        if not self._open:
            self._pending.clear()
            self._sync.discard()
            return
        for parameter in dropped:
            self._pending.pop(parameter, None)
        self._sync.discard(dropped)

    def reset(self) -> None:
        """Drop all windows and their gradients: a run begins or ends, or something has failed."""
        self._open, self._pending, self.toggled = {}, {}, None
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

    # --- One backward -------------------------------------------------------------------------------------------------

    def open(self, expected: Count) -> Window:
        """Return the window that the next backward adds to: the toggled optimizer's, else the open or a new one of all.

        ``expected`` are about as many label tokens as the window will have. A collective once in a run in float16.
        Raises RuntimeError if several are open and none is toggled, or if two windows would hold the same parameter.
        """
        key = self.toggled
        if key is not None and key in self._open:
            return self._open[key]
        optimizers = self.optimizers if key is None else [key]
        if key is None and len(self._open) == 1:
            window = next(iter(self._open.values()))
            window.optimizers = optimizers
            return window
        if key is None and self._open:
            raise RuntimeError(
                f"{len(self._open)} accumulation windows are open"
                f" ({', '.join(type(key).__name__ for key in self._open)}), and this backward belongs to none of them:"
                " run it inside `with optimizer.toggle_model():` of the optimizer whose window it ends."
            )
        sums = torch.zeros(3, dtype=wide_dtype(self._device), device=self._device)
        window = Window(optimizers, self.scaling.start_window(expected), sums)
        for other in self._open.values():
            if shared := window.owned & other.owned:
                raise RuntimeError(
                    f"{len(shared)} parameters of {type(key).__name__} belong to the open accumulation"
                    f" window of {', '.join(type(o).__name__ for o in other.optimizers)}. End that window first, by a"
                    " backward outside of toggle_model(sync_grad=False), or zero its gradients."
                )
        self._open[key] = window
        return window

    @contextmanager
    def backward(self, window: Window, loss: Tensor, ends: bool, counts: bool = True) -> Iterator[None]:
        """Context of one backward of ``loss``. If it ``ends`` the window, gradients are final on exit.

        Inside, ``.grad`` holds the gradients of all open windows: a reduction for one may also reduce what another has
        accumulated, which is harmless since reductions are linear. After an exception, all windows are dropped and
        ``.grad`` is what it was before. Ending a window is a collective over the data-parallel group: every rank must
        end the same window. A padding batch does not count.
        """
        trained_before = set[nn.Parameter]().union(*(each.trained for each in self._open.values()))
        window.trained.update(parameter for parameter in self.parameters if parameter.requires_grad)
        grads_before = self._swap_in()
        self.in_backward = True
        try:
            with self._sync.micro_batch(ends), self._sync.backward(loss, trained_before, counts):
                yield
            final = self._finalise(window) if ends else None
        except BaseException as error:
            for parameter in self.parameters:
                parameter.grad = grads_before.get(parameter)
            try:
                self.reset()
                self._sync.recover()
            except Exception as later:
                # A device that has failed raises in each later call: the first error is the cause.
                error.add_note(f"Dropping the window raised {type(later).__name__} too.")
            raise
        finally:
            self.in_backward = False
        self._swap_out(grads_before, final)

    def _swap_in(self) -> dict[nn.Parameter, Tensor]:
        """Put the gradients of open windows into ``.grad`` and return those that it held."""
        grads_before = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                grads_before[parameter] = parameter.grad.clone() if self._sync.reuses_gradients else parameter.grad
                parameter.grad = None
        for parameter, part in self._pending.items():
            parameter.grad = part
        self._pending = {}
        return grads_before

    def _swap_out(self, grads_before: dict[nn.Parameter, Tensor], final: set[nn.Parameter] | None) -> None:
        """Add final gradients to those from before; keep the others aside, and put ``.grad`` back."""
        for parameter in self.parameters:
            part, before = parameter.grad, grads_before.get(parameter)
            if part is None:
                if before is not None:
                    parameter.grad = before
            elif final is None or parameter not in final:
                self._pending[parameter] = part
                parameter.grad = before
            elif before is not None:
                # In place, as autograd accumulates: the user may hold this tensor.
                parameter.grad = before + part if before.is_sparse or part.is_sparse else before.add_(part)

    # --- The end of a window ------------------------------------------------------------------------------------------

    def _finalise(self, window: Window) -> set[nn.Parameter]:
        """Rescale a window's gradients, which are in ``.grad``, and report on it. Returns the final parameters.

        One all-reduce of three numbers and one more for each sharded parameter. A rank that has not used some parameter
        must know on the host whether another rank has: where this occurs in a run's first window, later ones sum these
        numbers on the host, which no device keeps waiting. Else that rank reads them.
        """
        self._open = {key: other for key, other in self._open.items() if other is not window}
        owned_elsewhere = {parameter for other in self._open.values() for parameter in other.owned}
        parameters = [parameter for parameter in self.parameters if parameter not in owned_elsewhere]
        trained = [parameter for parameter in parameters if parameter in window.trained]
        self._sync.complete_gradients(trained)
        totals = self._summed(window.sums, self._sync.tracked(trained))
        denominator = self.weighting.denominator(totals)
        factor = None if window.scale is None else 1 / window.scale
        if window.ahead is None:
            per_token = rescale_clip.gradient_factor(denominator, self.divisor)
            factor = per_token if factor is None else per_token * factor
        elif window.num_micro_batches != window.ahead.own_micro_batches:
            raise RuntimeError(
                f"A window was counted ahead as {window.ahead.own_micro_batches} micro-batches of this rank, and ends"
                f" after {window.num_micro_batches} backward(s), so that its gradients are divided by another number of"
                " label tokens than they hold. With count_window_ahead=True, training_step must return a loss for each"
                " batch, and neither accumulate_grad_batches nor gradients may change in mid-window."
            )
        if factor is not None:
            rescale_clip.scale_gradients_(parameters, factor)
        self._sync.discard(parameters)
        self.scaling.window_ended(window.optimizers, denominator)
        self.measured.difference_update(window.optimizers)
        for optimizer in window.optimizers:
            before = self.since_step.get(optimizer)
            self.since_step[optimizer] = totals if before is None else before + totals
        first = next(iter(window.optimizers), None)
        self.last_step = self.weighting.report(totals if first is None else self.since_step[first])
        return set(parameters)

    def _summed(self, totals: Tensor, tracked: list[tuple[nn.Parameter, bool]]) -> Tensor:
        """[3] ``totals`` over all ranks; drops the gradients of parameters that no rank has used in the window."""
        used = [was_used for _, was_used in tracked]
        order = self._sync.take_order()
        own = [order, order**2, *used]
        reads = not all(used) or self._device.type == "cpu"
        on_host = self._agrees_on_host and len(used) > 0
        summed = totals if on_host else torch.cat([totals, filled(own, totals)])
        if self.divisor > 1:
            dist.all_reduce(summed, group=self.mesh.group)
        if self.mesh.sizes.context > 1:
            summed[2] /= self.mesh.sizes.context  # context-parallel ranks share each micro-batch
        if on_host:
            self._drop_unused(tracked, self._summed_on_host(own), dist.get_world_size())
        elif reads:
            self._drop_unused(tracked, summed[len(totals) :].tolist(), self.divisor)
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

    def _drop_unused(self, tracked: list[tuple[nn.Parameter, bool]], sums: list[float], num_ranks: int) -> None:
        """Drop the gradients of parameters that none of the ranks has used, from the ``sums`` of what they have told.

        Raises RuntimeError unless all ranks have used the same FSDP units, in one order, in the window.
        """
        order, square, *users = sums
        if order * order != square * num_ranks:
            raise RuntimeError(
                f"Ranks have used different FSDP units in the forwards of one accumulation window, {DIFFERENT_UNITS}"
            )
        for (parameter, _), num_users in zip(tracked, users, strict=True):
            if num_users == 0:
                parameter.grad = None

    def report_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Put the [] norm of an optimizer's final gradients into the report, if it is the first since its step."""
        if optimizer in self.since_step and optimizer not in self.measured and self.last_step is not None:
            self.measured.add(optimizer)
            self.last_step = replace(self.last_step, grad_norm=norm)

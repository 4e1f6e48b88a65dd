"""What ranks tell each other where a window ends: its sums, in which batch they end it, and which units they used."""

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients.token_loss import wide_dtype
from lightning_automodel.gradients.window_records import Window

DIFFERENT_UNITS = (
    "Ranks have used different FSDP units, or trained different parameters of one, since they last compared: one rank"
    " got the parameters or gradients of another layer than it asked for. Freeze the same parameters on all ranks."
    " Layers that are dropped at random, and heads or experts that only some ranks need, or of which a loss uses only"
    " some, must not be FSDP units of their own: pass auto_wrap_policy=set(), which makes one unit of the model, or the"
    " classes of modules that contain them. Or pass data_parallel='ddp' with"
    " ddp_kwargs={'find_unused_parameters': True}. Heads that all ranks run may stay units if each loss depends on all"
    " of them: add 0 * output.sum() of the others."
)
"""What ranks must do that use different units."""

DIFFERENT_BATCHES = (
    "A hook, a step or a data set has raised StopIteration on some ranks, which Lightning takes for the end of the"
    " data; or on_train_batch_start has returned -1 there; or they have left batches out. Begin an iterator anew"
    " where it ends, and end an epoch early on all ranks."
)
"""What ranks must do that have come to different batches."""

DIFFERENT_ORDERS = (
    "Samplers have drawn another order of the data on each rank, which takes its part of it: some samples count twice,"
    " and others not at all. Seed a sampler's own generator alike on all ranks, let the order depend on nothing that"
    " differs between them, such as the order of a set of strings, and iterate loaders on all ranks or on none. If each"
    " rank shall draw samples of its own, pass Trainer(use_distributed_sampler=False)."
)
"""What ranks must do whose samplers have drawn different orders."""

DIFFERENT_WRITES = (
    "Forwards, steps or hooks have written other values to parameters or gradients on each rank, or on some ranks"
    " alone, as from its own batch (data-dependent initialisation, codebooks) or at random: shards are now parts of"
    " different tensors. Write what all ranks have reduced (self.all_gather(values).mean(0)), or draw by a"
    " torch.Generator with the same seed on all ranks. Optimizers write with their options: log the metric that a"
    " scheduler follows (ReduceLROnPlateau) with sync_dist=True."
)
"""What ranks must do that have written other values."""

_NUM_SUMS = 4093
"""Sums of what is written to a parameter by which ranks compare it: a prime, which no width of a matrix divides."""
_TINY = 1e-30
"""In place of zero, which has no logarithm."""
_HUGE = 1e300
"""In place of infinity, and of NaN, which is equal to nothing."""
_MODULUS = 2**20 - 3
"""A prime, so small that float64 holds the sum over ranks of squares of smaller numbers exactly."""
_FACTOR = 648_053
"""Makes one number of epoch and batch: few epochs and tens of thousands of batches give different ones."""
_ROUNDING = 1e-5
"""How far numbers of what ranks write alike may be apart, if their kernels round in other ways."""
_EPSILON = 1e-13
"""How far squares of sums in float64 are off, relative to them."""


@torch.no_grad()
def fingerprint(values: Tensor) -> Tensor:
    """[] a number of all entries of a tensor, by their values and places, which rounding hardly moves."""
    flat = values.flatten()
    num_sums = min(_NUM_SUMS, len(flat) or 1)
    rows, rest = flat.tensor_split([len(flat) // num_sums * num_sums])
    entries = rows.view(-1, num_sums).sum(0, dtype=wide_dtype(values.device))
    entries[: len(rest)] += rest
    entries = entries.nan_to_num(nan=2.0, posinf=3.0, neginf=-3.0)  # NaN is equal to nothing
    places = torch.arange(len(entries), dtype=entries.dtype, device=entries.device)
    norm = entries.norm().clamp(min=_TINY)
    return entries.dot(places.cos()) / norm + norm.log()


class WriteDigest:
    """A number [] made of what this rank has written to sharded parameters and gradients.

    Each rank holds a part of them, so that all must write alike. Ranks that have done so have the same number.
    """

    def __init__(self) -> None:
        self._number: Tensor | float = 0.0

    def add(self, what: str, tensors: Iterable[Tensor], numbers: Iterable[float]) -> None:
        """Note ``what`` this rank writes, and with which values, to be compared where the next window ends."""
        values: Tensor | float = 1.0
        for number in numbers:
            # Rounding, by which ranks may differ, hardly moves it. NaN and infinities count as a number too.
            values = values + (number < 0) + math.log(min(_HUGE, abs(number)) + _TINY)
        for tensor in tensors:
            values = values + fingerprint(tensor)
        # The same values, written to another parameter, give another number.
        weight = 1.0 + zlib.crc32(what.encode()) / 2**32
        self._number = self._number + weight * values

    def take(self) -> Tensor | float:
        """The number of what was written since it was last taken."""
        number = self._number
        self._number = 0.0
        return number


class Position(NamedTuple):
    """Where a rank ends a window: with which batch of which epoch and order, and after which units."""

    epoch: int
    batch: int
    order: int
    """A number of the order that samplers have drawn for all ranks."""
    unit_order: int
    """A number of the units that its engine has gathered and reduced."""


class RankAgreement:
    """Sums up what ranks have in a window, and raises where they end it in different positions.

    Each part of a position is compared by its sum over ranks and the sum of its squares. On
    the host they are compared at once. On an accelerator the sums are read when the device has computed them,
    in a later window, so that no host waits; :meth:`check_earlier` reads the last ones.
    """

    def __init__(self, placement: Placement) -> None:
        self._group = placement.mesh.group
        self._size = placement.mesh.sizes.divisor  # of the group
        self._num_slices = placement.mesh.sizes.context  # of each sequence
        self._device = placement.device
        self._host_group = placement.host_group  # has all ranks, and none of their devices
        self._sums_uses_on_host = placement.device.type != "cpu" and self._size > 1
        # Windows that were not compared yet: an event that tells when their sums are there, and what compares them.
        self._unchecked: deque[tuple[torch.Event, Callable[[], None]]] = deque()

    def sum_over_ranks(
        self, window: Window, own: Position, written: Tensor | float, parameters: list[nn.Parameter]
    ) -> tuple[Tensor, list[nn.Parameter]]:
        """[3] a window's totals over all ranks, and the ones of ``parameters`` that no rank has used in it.

        They are label tokens, the sum of losses, and micro-batches. One all-reduce sums up these, the ``own``
        position of each rank and what it has ``written``, the squares of both, and one number for each parameter.

        A rank that has not used some parameters must know on the host whether another rank has used them. If
        this occurs in a run's first window, later windows sum these numbers on the host too, which waits for no
        device. Otherwise that rank reads the device.

        Raises RuntimeError, on every rank, if ranks have used different units, are in different batches, have drawn
        their data in different orders, or have written different values to parameters.
        """
        batch = own.epoch * _FACTOR + own.batch
        position = [number % _MODULUS for number in (batch, own.order, own.unit_order)]
        uses = [parameter in window.used for parameter in parameters]
        # Pinned, so that the host need not wait until they are on an accelerator.
        on_host = torch.tensor(
            [window.num_micro_batches, *position, *uses],
            dtype=window.sums.dtype,
            pin_memory=self._device.type != "cpu",
        )
        on_device = on_host.to(self._device, non_blocking=True)
        num_micro_batches, position_on_device, num_uses = on_device.split([1, len(position), len(uses)])
        number = torch.zeros_like(num_micro_batches) + written
        compared = torch.cat([position_on_device, number])
        sums = torch.cat([window.sums, num_micro_batches, compared, compared.square(), num_uses])
        if self._size > 1:
            dist.all_reduce(sums, group=self._group)
        totals, compared, num_uses = sums.split([3, 2 * len(compared), len(uses)])
        if self._num_slices > 1:
            totals[2] /= self._num_slices  # context-parallel ranks share each micro-batch
        check = partial(self._check, own, compared.view(2, -1).to("cpu", non_blocking=True))
        if self._device.type == "cpu":
            check()
        else:
            self._unchecked.append((torch.accelerator.current_stream().record_event(), check))
            self.check_earlier(waits=False)
        if self._sums_uses_on_host and uses:
            num_uses = torch.tensor(uses, dtype=torch.int64)
            dist.all_reduce(num_uses, group=self._host_group)
            self._sums_uses_on_host = bool(num_uses.min() < self._host_group.size())
        if all(uses):
            return totals, []  # without reading the device
        pairs = zip(parameters, num_uses.tolist(), strict=True)
        return totals, [parameter for parameter, number in pairs if number == 0]

    def check_earlier(self, *, waits: bool) -> None:
        """Raise RuntimeError if ranks differed in windows that were not compared yet. Not a collective.

        ``waits`` for the device; otherwise compares as far as the device has come.
        """
        while self._unchecked and (waits or self._unchecked[0][0].query()):
            event, check = self._unchecked.popleft()
            if waits:
                event.synchronize()
            check()

    def clear(self) -> None:
        """Forget windows that were not compared: a run begins or ends, or something has failed."""
        self._unchecked.clear()

    def _check(self, own: Position, compared: Tensor) -> None:
        """Raise RuntimeError unless all ranks have the same position, and have written the same.

        ``compared`` [2, 4] are sums over ranks: of the three numbers of a position and that of what a rank has written,
        and of their squares. One rank is not compared: on MPS, which never has more, float32 would round the squares.
        """
        if self._size == 1:
            return
        different_batches = (
            f"Ranks have ended one accumulation window in different batches, this rank in batch {own.batch}"
            f" of epoch {own.epoch}. {DIFFERENT_BATCHES}"
        )
        (*totals, written), (*squares, square) = compared.tolist()
        causes = (different_batches, DIFFERENT_ORDERS, DIFFERENT_UNITS)
        for total, of_squares, cause in zip(totals, squares, causes, strict=True):
            if int(total) ** 2 != int(of_squares) * self._size:
                raise RuntimeError(cause)
        if not self._are_alike(written, square):
            raise RuntimeError(DIFFERENT_WRITES)

    def has_written_alike(self, number: Tensor) -> bool:
        """Whether [] a number of what each rank has written is the same on all. A collective that reads the device."""
        sums = torch.stack([number, number.square()])
        dist.all_reduce(sums, group=self._group)
        return self._are_alike(*sums.tolist())

    def _are_alike(self, total: float, square: float) -> bool:
        """Whether ranks have the same number, but for rounding, as its sum over them and that of its square tell."""
        variance = self._size * square - total**2  # over ranks, times the square of their number
        return variance <= (_ROUNDING * self._size) ** 2 + _EPSILON * self._size * square

"""Whether all ranks end an accumulation window in the same batch, with the same FSDP units: two numbers of each."""

from collections import deque
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.gradients.window import NUMBERS

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


@dataclass(frozen=True)
class Position:
    """Where a rank ends a window.

    Attributes:
        order: Of the FSDP units that its forwards have used, see :class:`Window`.
        epoch: Of training.
        batch: The index of the last batch in it.
    """

    order: int
    epoch: int
    batch: int

    @property
    def numbers(self) -> tuple[int, int]:
        """One number for the position, and its square: by the sums of both, :class:`RankAgreement` compares ranks."""
        number = 0
        for part in astuple(self):
            number = (number * _FACTOR + part) % NUMBERS
        return number, number**2


class RankAgreement:
    """Raises where ranks end a window in different positions.

    On the host it does so at once, and names the ranks. On an accelerator it reads the sums when the device
    has come to them, in a later window, so that no host waits; :meth:`check_earlier` reads the last ones.
    """

    def __init__(self) -> None:
        # On an accelerator, windows that were not compared yet: this rank's position, the sums and the number
        # of ranks, and when these sums are there.
        self._unchecked: deque[tuple[Position, Tensor, int, torch.Event]] = deque()

    def check(self, own: Position, sums: Tensor, group: dist.ProcessGroup) -> None:
        """Compare ``group`` by the [2] ``sums`` of its ranks' ``numbers``.

        A collective where it raises RuntimeError on the host, on every rank.
        """
        if sums.device.type != "cpu":
            on_host = sums.to("cpu", non_blocking=True)
            event = torch.accelerator.current_stream().record_event()
            self._unchecked.append((own, on_host, group.size(), event))
            self.check_earlier(waits=False)
        elif _differ(sums, group.size()):
            positions: list[Position] = gather_objects(own, group)
            raise _different_positions(dist.get_process_group_ranks(group), positions)

    def check_earlier(self, *, waits: bool) -> None:
        """Raise RuntimeError if ranks differed in windows that were not compared yet. Not a collective.

        ``waits`` for the device; or else compares as far as that has come.
        """
        while self._unchecked and (waits or self._unchecked[0][3].query()):
            own, sums, num_ranks, event = self._unchecked.popleft()
            if waits:
                event.synchronize()
            if _differ(sums, num_ranks):
                raise RuntimeError(
                    "Ranks have ended one accumulation window in different batches, this rank in batch"
                    f" {own.batch} of epoch {own.epoch}, or have used different FSDP units in it."
                    f" {DIFFERENT_BATCHES} If the batches are the same: {DIFFERENT_UNITS}"
                )

    def clear(self) -> None:
        """Forget windows that were not compared: a run begins or ends, or something has failed."""
        self._unchecked.clear()


def _differ(sums: Tensor, num_ranks: int) -> bool:
    """Whether the number of a rank differs, by the sums of all of them, and of their squares. Reads the device."""
    total, squares = sums.tolist()
    return int(total) ** 2 != int(squares) * num_ranks


def _different_positions(ranks: list[int], positions: list[Position]) -> RuntimeError:
    """The error that names the first rank in another batch; ranks in different batches use different units too."""
    first = positions[0]
    for rank, other in zip(ranks, positions, strict=True):
        if (other.epoch, other.batch) != (first.epoch, first.batch):
            return RuntimeError(
                "Ranks have ended one accumulation window in different batches:"
                f" rank {ranks[0]} in batch {first.batch} of epoch {first.epoch},"
                f" rank {rank} in batch {other.batch} of epoch {other.epoch}. {DIFFERENT_BATCHES}"
            )
    return RuntimeError(DIFFERENT_UNITS)

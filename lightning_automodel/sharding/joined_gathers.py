"""All-gathers of a rank that has no evaluation data left, while other ranks still evaluate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch.distributed.fsdp import FSDPModule

from lightning_automodel import torch_internals
from lightning_automodel.patching import PatchStack


class JoinedGathers:
    """Records which units an evaluation step gathers, so that a rank without data can take part in these gathers.

    No user code runs on that rank: nothing is logged, counted or drawn at random there.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units
        self._newest: list[FSDPModule] = []
        self._before: list[FSDPModule] | None = None

    def start_loop(self) -> None:
        """Begin an evaluation loop: earlier gathers do not apply to it."""
        self._newest, self._before = [], None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step of this rank, which begins with everything sharded."""
        self._before = self._newest or None
        self._newest = []
        with PatchStack() as patches:  # not for longer, since training gathers the same units
            for unit in self._units:
                torch_internals.note_all_gathers(unit, partial(self._newest.append, unit), patches)
            yield

    def join(self) -> None:
        """Take part in a step of other ranks by repeating the gathers of this rank's last step. A collective."""
        if self._before is not None and self._before != self._newest:
            raise RuntimeError(
                "This rank has evaluated all its data, and other ranks have not. It cannot take part in what they"
                " gather, since its own last two steps gathered different parameters: give all ranks equally many"
                " batches, for example by a sampler that repeats samples."
            )
        for unit in self._newest:
            unit.unshard()
            unit.reshard()

"""Buffers that all ranks take from the first one: running statistics follow each rank's own data."""

from collections.abc import Container, Iterator

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed import collectives
from lightning_automodel.internals.torch import persistent_buffers
from lightning_automodel.sharding import apply, weight_averaging


class SharedBuffers:
    """The persistent buffers of ``module``, without those ``left_out``, over the ranks of ``group``.

    Others are constants (masks, rotary frequencies) or caches, which may have other shapes on each rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        group: dist.ProcessGroup,
        device: torch.device,
        left_out: Container[str] = (),
    ) -> None:
        self._module = module
        self._group = group
        self._device = device
        self._left_out = left_out
        self._names = self._list()
        self._starts_window = True

    def _list(self) -> list[str]:
        return [name for name in persistent_buffers(self._module) if name not in self._left_out]

    def start_forward(self, ends_window: bool) -> None:
        """Where a window begins, overwrite those of all ranks with the first rank's. Then a collective over the group.

        Called before each training step; ``ends_window`` as of :class:`Engine`.
        """
        if self._starts_window:
            apply.broadcast_tensors([buffer for _, buffer in self._own()], self._group, self._device)
        self._starts_window = ends_window

    def synchronize(self) -> None:
        """The same, before an evaluation and where a fit ends, also for the averages that callbacks keep.

        A collective over the group, on the host. Raises ValueError on all ranks if a buffer has another
        shape on one of them.
        """
        if self._group.size() == 1:
            return
        self._names = self._list()  # one may have been None before
        shared = dict([*self._own(), *self._averaged()])
        shapes = {name: f"{list(buffer.shape)} of {buffer.dtype}" for name, buffer in shared.items()}
        if differing := collectives.disagreement(shapes, self._group):
            raise ValueError(
                f"A buffer of {type(self._module).__name__} differs on the ranks that hold different data:"
                f" {differing} of these."
                " All ranks must evaluate and save one model: gather what each rank has collected"
                " (torch.distributed.all_gather_object), or keep it out of the state dict"
                " (register_buffer(..., persistent=False))."
            )
        # Without their versions: a forward that has used them may still wait for its backward. An
        # average may be kept on another device.
        apply.broadcast_tensors([buffer.data for buffer in shared.values()], self._group, self._device)

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        # Looked up each time: a forward may replace a buffer by a new tensor.
        for name in self._names:
            buffer = self._module.get_buffer(name)
            if isinstance(buffer, Tensor) and not isinstance(buffer, DTensor):  # it may be None by now
                yield name, buffer

    def _averaged(self) -> Iterator[tuple[str, Tensor]]:
        for index, average in enumerate(weight_averaging.averaged_models(self._module)):
            # Within a validation, the others are each rank's own: the callback holds what the module is
            # trained with.
            for name, buffer in persistent_buffers(average.module).items():
                if not isinstance(buffer, DTensor):
                    yield f"{name} (average {index})", buffer

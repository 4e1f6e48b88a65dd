"""Buffers that all ranks take from the first one: running statistics follow each rank's own data."""

import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.sharding import apply, weight_averaging


class SharedBuffers:
    """The buffers in the state dict of ``module``, without those ``left_out``, over the ranks of ``group``.

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

    def _list(self) -> list[str]:
        saved = self._module.state_dict(keep_vars=True).keys()
        return [
            name for name, _ in self._module.named_buffers() if name in saved and name not in self._left_out
        ]

    def broadcast(self) -> None:
        """Overwrite those of all ranks with the first rank's, where a window begins. A collective over the group."""
        apply.broadcast_tensors([buffer for _, buffer in self._own()], self._group, self._device)

    def synchronize(self) -> None:
        """The same, before an evaluation, and for the averages that callbacks keep. Reads the device.

        A collective over the group. Raises ValueError on all ranks if the shapes of a buffer differ.
        """
        if self._group.size() > 1:
            self._overwrite(self._shared())

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """The same for as long as it lasts, for a save: after it, each rank has its own values again.

        A save may come between a forward and its backward, which needs the values that the forward has seen,
        or within a window, whose next forward goes on with each rank's own.
        """
        if self._group.size() == 1:
            yield
            return
        shared = self._shared()
        if self._group.rank() > 0:
            own = [buffer.clone() for buffer in shared]
        else:
            own = []
        self._overwrite(shared)
        try:
            yield
        finally:
            for buffer, value in zip(shared, own, strict=False):
                buffer.copy_(value)

    def _shared(self) -> list[Tensor]:
        """All buffers, once their shapes were found to be equal on all ranks. A collective over the group."""
        self._names = self._list()  # one may have been None before
        named = [*self._own(), *self._averaged()]
        self._check_shapes({name: f"{list(buffer.shape)} of {buffer.dtype}" for name, buffer in named})
        # Without their versions: a forward that has used them may still wait for its backward.
        return [buffer.data for _, buffer in named]

    def _overwrite(self, shared: list[Tensor]) -> None:
        # An average may be kept on another device.
        apply.broadcast_tensors(shared, self._group, self._device)

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
            saved = average.module.state_dict(keep_vars=True).keys()
            for name, buffer in average.module.named_buffers():
                if name in saved and not isinstance(buffer, DTensor):
                    yield f"{name} (average {index})", buffer

    def _check_shapes(self, shapes: dict[str, str]) -> None:
        checksum = zlib.crc32(repr(shapes).encode())
        extremes = torch.tensor([checksum, -checksum], device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        largest, smallest = extremes.tolist()
        if largest == -smallest:
            return
        by_rank = gather_objects(shapes, self._group)
        for name in dict.fromkeys(name for shapes in by_rank for name in shapes):
            found = [shapes.get(name, "absent") for shapes in by_rank]
            if len(set(found)) > 1:
                raise ValueError(
                    f"The buffer {name!r} of {type(self._module).__name__} is {', '.join(found)} on the"
                    " ranks that hold different data, and all ranks must evaluate and save one model: gather"
                    " what each rank has collected (torch.distributed.all_gather_object), or keep it out of"
                    " the state dict (register_buffer(..., persistent=False))."
                )

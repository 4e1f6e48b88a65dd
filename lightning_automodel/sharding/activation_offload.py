"""Activations that wait for the backward in pinned host memory: copied there and back while the device computes.

``torch.autograd.graph.save_on_cpu`` copies on the stream that computes, and waits for each copy on devices other than
CUDA. Here copies have a stream of their own, and a tensor is on its way back while the block behind it computes.
"""

import functools
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_NUM_LEAVING = 1
"""Tensors whose copy to the host may still run when the next is saved. With more, more of them are on the device."""


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class _Saved:
    """A tensor that a backward will need: on the host, and on the device as long as it leaves, or is on its way back.

    Device memory is allocated and freed in the order of the computing stream, which waits for copies: the allocator
    needs to know of no other stream. The backward will need ``before``, which was saved before it, after it.
    """

    def __init__(self, tensor: Tensor, before: "weakref.ref[_Saved] | None") -> None:
        self.before = before
        self._here: Tensor | None = tensor
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copied = self._copy(self._host, tensor)

    def _copy(self, target: Tensor, source: Tensor) -> torch.Event:
        stream = _copy_stream(self._device)
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def fetch(self) -> None:
        """Start to bring it back, unless it is on the device."""
        if self._here is None:
            self._here = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(self._here, self._host)

    def release(self) -> Tensor | None:
        """Let what is computed from now on wait for the copy, and keep the tensor on the host alone."""
        here, self._here = self._here, None
        torch.accelerator.current_stream(self._device).wait_event(self._copied)
        return here


class OffloadedActivations:
    """Keeps tensors that autograd saves in pinned host memory. Those on a CPU, parameters and DTensors stay."""

    def __init__(self) -> None:
        self._leaving: deque[_Saved] = deque()
        self._newest: weakref.ref[_Saved] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """A context: what autograd saves in it is offloaded."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def __reduce__(self) -> Any:
        return OffloadedActivations, ()  # copies of a module share no tensors that are on their way

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if type(tensor) is not Tensor or tensor.device.type == "cpu" or tensor.layout != torch.strided:
            return tensor
        saved = _Saved(tensor, self._newest)
        self._newest = weakref.ref(saved)
        self._leaving.append(saved)
        if len(self._leaving) > _NUM_LEAVING:
            self._leaving.popleft().release()
        return saved

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        saved.fetch()
        tensor = saved.release()
        assert tensor is not None
        if saved.before is not None and (before := saved.before()) is not None:
            before.fetch()
        return tensor

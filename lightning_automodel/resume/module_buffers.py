"""Plain buffers of modules: ranks hold values of their own in them, such as batch statistics under FSDP2."""

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class PlainBuffers:
    """Notes and restores the buffers of modules that are no shards; sparse and quantised ones are left to checkpoints.

    Args:
        modules: What is trained, and averages of it, by name, as they are before a checkpoint is loaded.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._copies: dict[str, Tensor] = {}
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        self.look_again()
        transient = {
            f"{prefix}.{name}"
            for prefix, submodule in self._submodules()
            for name in submodule._non_persistent_buffers_set
        }
        self._as_made = {name: _digest(buffer) for name, buffer in self._now().items() if name in transient}

    def _submodules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._modules.items():
            yield from module.named_modules(prefix=name)

    def look_again(self) -> None:
        """Look for buffers that were registered, or left out, since the last time."""
        self._places = [
            (f"{prefix}.{name}", submodule._buffers, name)
            for prefix, submodule in self._submodules()
            for name in submodule._buffers
        ]

    def _now(self) -> dict[str, Tensor]:
        buffers = ((name, owner.get(key)) for name, owner, key in self._places)
        return {
            name: buffer.detach()
            for name, buffer in buffers
            if buffer is not None and not isinstance(buffer, DTensor) and _has_plain_values(buffer)
        }

    def note(self) -> dict[str, Tensor]:
        """Copies on their device, in memory that the next call uses again. Synchronises nothing."""
        buffers = self._now()
        for name, buffer in buffers.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
                self._copies[name] = torch.empty_like(buffer)
        copies = {name: self._copies[name] for name in buffers}
        if buffers:
            torch._foreach_copy_(list(copies.values()), list(buffers.values()))
        return copies

    def savable(self, noted: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """Those of ``noted``, on the host, that the module's state dict does not tell for this rank.

        They are those that differ between ranks, those that have changed since they were noted, and those that no state
        dict holds, unless they are as the module was made.

        Args:
            noted: What :meth:`note` returned.
            group: The ranks to compare with; with it, and any buffer, a collective. None compares with nobody.
        """
        now = {name: _digest(buffer) for name, buffer in self._now().items()}
        digests = {name: _digest(buffer) for name, buffer in noted.items()}
        everywhere = [digests]
        if group is not None and digests:
            everywhere = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everywhere, digests, group=group)
        return {
            name: value.cpu().clone()
            for name, value in noted.items()
            if any(others.get(name) != digests[name] for others in everywhere)
            or digests[name] != self._as_made.get(name, now.get(name))
        }

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Copy saved values into the buffers of their names."""
        now = self._now()
        for name, value in saved.items():
            if name in now and now[name].shape == value.shape:
                now[name].copy_(value)


def _has_plain_values(buffer: Tensor) -> bool:
    return not buffer.is_meta and buffer.layout == torch.strided and not buffer.is_quantized


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    array = plain.view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()

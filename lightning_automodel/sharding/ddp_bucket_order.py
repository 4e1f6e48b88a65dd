"""The order in which DDP's buckets hold gradients, so that a resumed run adds them up in the same one."""

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class BucketOrder:
    """Records the order in which gradients become ready, and lets a new DDP arrange its buckets by it.

    DDP arranges its buckets anew after the first backward that it synchronises. Which rank adds first to an element
    depends on its place in a bucket, so more than two ranks round differently before that and after.

    Attributes:
        indices: Trainable parameters, in the order of their gradients; None until a synchronised backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._handles: list[RemovableHandle] = []
        self.indices: list[int] | None = None

    def start_recording(self) -> None:
        """Record the backward that is about to run, if it is the first."""
        if self.indices is not None:
            return
        indices = self.indices = []
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}

        def record(parameter: Tensor) -> None:
            indices.append(places[id(parameter)])

        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._handles = [parameter.register_post_accumulate_grad_hook(record) for parameter in trained]

    def stop_recording(self) -> None:
        """End what :meth:`start_recording` has begun."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def restore(self, indices: list[int]) -> None:
        """Let the buckets be arranged in this order with the next forward. A collective over DDP's group.

        It is a backward of zeros, unless the order lacks parameters, DDP looks for unused ones and so keeps its first
        arrangement, or has a static graph, which a backward that is not the model's would settle.
        """
        self.indices = list(indices)
        ddp = self._ddp
        if ddp.find_unused_parameters or ddp.static_graph or sorted(indices) != list(range(len(self._parameters))):
            return
        # Autograd begins with what was computed last.
        parameters = [self._parameters[index] for index in reversed(indices)]
        loss = torch.cat([(torch.zeros_like(p) * p).sum().reshape(1).to(torch.float32) for p in parameters]).sum()
        prepare_for_backward(ddp, loss)
        loss.backward()
        for parameter in self._parameters:
            parameter.grad = None

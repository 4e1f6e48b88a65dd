"""In which order DDP's buckets hold gradients: that of the first backward that was synchronised."""

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_automodel import lightning_internals


class ReadyOrder:
    """Notes the order in which gradients become ready, and lets a new DDP arrange its buckets by one.

    Which rank adds first to an element depends on where it lies in its bucket, so that more than two ranks round
    differently in another order.

    Attributes:
        indices: Trainable parameters, in the order of their gradients; None until a synchronised backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._handles: list[RemovableHandle] = []
        self.indices: list[int] | None = None

    def note(self) -> None:
        """Note the order of the backward that is about to run, if it is the first."""
        if self.indices is None:
            self.indices = []
            places = {id(parameter): index for index, parameter in enumerate(self._parameters)}

            def is_ready(parameter: Tensor) -> None:
                assert self.indices is not None
                self.indices.append(places[id(parameter)])

            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            self._handles = [parameter.register_post_accumulate_grad_hook(is_ready) for parameter in trained]

    def end(self) -> None:
        """That backward is over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def bring_about(self, indices: list[int]) -> None:
        """Let the buckets be arranged in this order with the next forward. A collective over DDP's group.

        It is a backward of zeros, unless the order is not of all parameters, DDP looks for unused ones and so keeps its
        first arrangement, or has a static graph, which a backward that is not the model's would settle.
        """
        self.indices = list(indices)
        ddp = self._ddp
        is_settled = ddp.find_unused_parameters or ddp.static_graph
        if is_settled or sorted(indices) != list(range(len(self._parameters))):
            return
        terms = [(torch.zeros_like(p) * p).sum().reshape(1).to(torch.float32) for p in self._in_reverse(indices)]
        loss = torch.cat(terms).sum()
        lightning_internals.prepare_ddp_for_backward(ddp, loss)
        loss.backward()
        for parameter in self._parameters:
            parameter.grad = None

    def _in_reverse(self, indices: list[int]) -> list[Tensor]:
        """Autograd begins with what was computed last."""
        return [self._parameters[index] for index in reversed(indices)]

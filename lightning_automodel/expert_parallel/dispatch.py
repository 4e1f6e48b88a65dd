"""Tokens travel to the ranks that hold their experts, and the results back: any number of tokens, none dropped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_automodel.internals.torch import not_compiled

_observers: list[Callable[[int], None]] = []


@contextmanager
def observed(observer: Callable[[int], None]) -> Iterator[None]:
    """Context in which ``observer`` gets, from each :func:`dispatch_tokens`, how many rows this rank has computed."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@not_compiled
def dispatch_tokens(
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    num_experts: int,
    compute: Callable[[Tensor, list[int]], Tensor],
    mesh: DeviceMesh,
) -> Tensor:
    """Compute a mixture of experts that are spread over ``mesh``: each token is computed where its experts are.

    A collective over the mesh's group, in the forward and in the backward: all its ranks must call it in the same
    order, a rank without tokens with empty tensors. It waits for the device once, since the host must know how many
    tokens arrive. If a rank fails, the others wait until the process group ends them.

    Args:
        tokens: This rank's tokens, [n, d].
        chosen: The experts of each token, from 0 to ``num_experts - 1``, [n, k].
        weights: The weight of each of them, [n, k].
        num_experts: Experts on all ranks of the mesh, of which each holds the same number, in the order of the ranks.
        compute: Gets rows [r, d], sorted by the experts of this rank, and how many rows are for each of these, and
            returns [r, d]. Without any rows its result must still depend on the rows and on the parameters.
        mesh: The one-dimensional mesh ``device_mesh["expert_parallel"]``.

    Returns:
        For each token the weighted sum of what its experts returned, in the dtype of ``tokens``, [n, d].
    """
    group, size, num_chosen = mesh.get_group(), mesh.size(), chosen.shape[1]
    by_expert = chosen.flatten().argsort(stable=True)  # also sorted by rank: each holds experts that follow each other
    leaving = torch.bincount(chosen.flatten(), minlength=num_experts).view(size, -1)  # [to rank, its expert]
    arriving = torch.empty_like(leaving)  # [from rank, own expert]
    dist.all_to_all_single(arriving, leaving, group=group)
    on_host: list[list[list[int]]] = torch.stack([leaving, arriving]).tolist()
    sent, received = ([sum(of_rank) for of_rank in counts] for counts in on_host)
    counts = [sum(of_expert) for of_expert in zip(*on_host[1], strict=True)]
    for observer in _observers:
        observer(sum(counts))

    # Repeated before it is permuted: the backward then adds up the copies of a token in one order on every device.
    copies = tokens.unsqueeze(1).expand(-1, num_chosen, -1).flatten(0, 1)  # [n * k, d]
    rows = _AllToAll.apply(copies.index_select(0, by_expert), sent, received, group)
    own_expert = torch.arange(len(counts), device=rows.device).repeat(size)
    order = own_expert.repeat_interleave(arriving.flatten(), output_size=len(rows)).argsort(stable=True)
    computed = compute(rows.index_select(0, order), counts).to(tokens.dtype)
    computed = computed.index_select(0, order.argsort())
    returned = _AllToAll.apply(computed, received, sent, group).index_select(0, by_expert.argsort())
    by_choice = returned.unflatten(0, chosen.shape)  # [n, k, d]
    return (by_choice * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


class _AllToAll(torch.autograd.Function):
    """Exchanges rows: the first ``sent[0]`` go to the first rank of the group, which sends ``received[0]``."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradient, *ctx.way_back), None, None, None

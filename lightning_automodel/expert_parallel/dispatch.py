"""Tokens travel to the ranks that hold their experts, and the results back: any number of tokens, none dropped."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_automodel.internals.torch import not_compiled


@not_compiled
def dispatch_tokens(
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    num_experts: int,
    compute: Callable[[Tensor, list[int]], Tensor],
    mesh: DeviceMesh | None,
) -> Tensor:
    """Compute a mixture of experts that are spread over ranks: each token is computed where its experts are.

    No token is dropped: results and gradients are those of one process. A collective over ``mesh``, in the
    forward and in the backward: all its ranks must call it in the same order, a rank without tokens with
    empty tensors. It waits for the device once, since the host must know how many tokens arrive. If a rank
    fails, the others raise when the strategy tells them, or when the group's timeout ends.

    Args:
        tokens: This rank's tokens, [n, d].
        chosen: The experts of each token, from 0 to ``num_experts - 1``, [n, k].
        weights: The weight of each of them, [n, k].
        num_experts: Experts on all ranks together. Each rank holds the same number, in the order of the
            ranks, as ``spread_experts`` leaves them.
        compute: Gets rows [r, d], sorted by the experts of this rank, and how many rows each of these gets;
            returns [r, d]. It may get no rows: its result must depend on the rows and on the parameters even
            then, so that all ranks communicate in the backward. ``torch.cat`` over the experts does.
        mesh: ``self.device_mesh["expert_parallel"]``; None if this rank holds all experts.

    Returns:
        For each token the weighted sum of what its experts returned, in the dtype of ``tokens``, [n, d].

    Raises:
        ValueError: If ``compute`` returns another number of rows than it got.
        RuntimeError: If ``chosen`` has an expert that does not exist.
    """
    by_expert = chosen.flatten().argsort(stable=True)
    # Repeated before it is permuted: the backward then adds up the copies of a token in one order anywhere.
    copies = tokens.unsqueeze(1).expand(-1, chosen.shape[1], -1).flatten(0, 1)  # [n * k, d]
    rows = copies.index_select(0, by_expert)
    # Not bincount, which waits for the device, and accepts numbers of experts that do not exist.
    counts = chosen.new_zeros(num_experts, dtype=torch.int64)
    counts.scatter_add_(0, chosen.flatten().long(), torch.ones_like(by_expert))
    if mesh is None:
        computed = _computed(compute, rows, counts.tolist())
    else:
        computed = _computed_where_experts_are(compute, rows, counts, mesh)
    by_choice = computed.index_select(0, by_expert.argsort()).unflatten(0, chosen.shape)  # [n, k, d]
    return (by_choice * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def _computed_where_experts_are(
    compute: Callable[[Tensor, list[int]], Tensor], rows: Tensor, counts: Tensor, mesh: DeviceMesh
) -> Tensor:
    """What the experts of all ranks make of ``rows``, which are sorted by expert and so by rank; ``counts`` of each."""
    group = mesh.get_group()
    leaving = counts.view(mesh.size(), -1)  # [to rank, its experts]
    arriving = torch.empty_like(leaving)  # [from rank, own experts]
    dist.all_to_all_single(arriving, leaving, group=group)
    leaving_on_host, arriving_on_host = torch.stack([leaving, arriving]).tolist()
    sent = [sum(of_rank) for of_rank in leaving_on_host]
    received = [sum(of_rank) for of_rank in arriving_on_host]
    of_experts = [sum(of_expert) for of_expert in zip(*arriving_on_host, strict=True)]

    arrived = _AllToAll.apply(rows, sent, received, group)
    own_experts = torch.arange(len(of_experts), device=rows.device).repeat(mesh.size())
    order = own_experts.repeat_interleave(arriving.flatten(), output_size=len(arrived)).argsort(stable=True)
    computed = _computed(compute, arrived.index_select(0, order), of_experts)
    return _AllToAll.apply(computed.index_select(0, order.argsort()), received, sent, group)


def _computed(compute: Callable[[Tensor, list[int]], Tensor], rows: Tensor, counts: list[int]) -> Tensor:
    computed = compute(rows, counts)
    if len(computed) != len(rows):
        raise ValueError(
            f"dispatch_tokens: compute got {len(rows)} rows and returned {len(computed)}; return one row for"
            " each, in their order."
        )
    # Ranks must agree on the dtype that travels, also one that has nothing to compute.
    return computed.to(rows.dtype)


class _AllToAll(torch.autograd.Function):
    """Exchanges rows: the first ``sent[0]`` go to the first rank of the group, which sends ``received[0]``."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.way_back = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradient, *ctx.way_back), None, None, None

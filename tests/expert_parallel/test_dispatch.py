"""Tokens are computed where their experts are: results and gradients against one process that holds all experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from tests.rank_pool import RankPool

NUM_EXPERTS = 8
WIDTH = 6
CHOSEN = 2
ROUNDING = {"rtol": 0.0, "atol": 1e-13}
"""Sums of the same few dozen numbers in another order, in float64."""
ROUTINGS = {
    "spread": list(range(NUM_EXPERTS)),
    "two experts": [1, 2],  # which one rank holds of four: the others compute nothing
}


def routed(num_tokens: list[int], routing: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Tokens, the experts of each and their weights by rank, and the experts' [E, d, d] weights."""
    generator = torch.Generator().manual_seed(3)
    allowed = torch.tensor(ROUTINGS[routing])
    tokens = []
    chosen = []
    weights = []
    for number in num_tokens:
        tokens.append(torch.randn(number, WIDTH, generator=generator, dtype=torch.float64))
        scores = torch.rand(number, len(allowed), generator=generator)
        chosen.append(allowed[scores.topk(CHOSEN).indices])
        weights.append(torch.rand(number, CHOSEN, generator=generator, dtype=torch.float64))
    matrices = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, chosen, weights, matrices


def objective(output: Tensor, rank: int) -> Tensor:
    """[] a number that depends on each element of a rank's output in a way of its own."""
    factors = (
        torch.arange(output.numel(), dtype=output.dtype, device=output.device).view_as(output) - 7.5 * rank
    )
    return (output * factors).sum()


def of_one_process(num_tokens: list[int], routing: str) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """Output and gradients of tokens and weights by rank, and the gradient of the experts."""
    tokens, chosen, weights, matrices = routed(num_tokens, routing)
    leaves = [*tokens, *weights, matrices]
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = []
    for own_tokens, own_chosen, own_weights in zip(tokens, chosen, weights, strict=True):
        by_choice = torch.einsum("nkde,ne->nkd", matrices[own_chosen], own_tokens).tanh()
        outputs.append((by_choice * own_weights.unsqueeze(-1)).sum(1))
    torch.stack([objective(output, rank) for rank, output in enumerate(outputs)]).sum().backward()
    of_ranks = [
        (output.detach(), own_tokens.grad, own_weights.grad)
        for output, own_tokens, own_weights in zip(outputs, tokens, weights, strict=True)
    ]
    return of_ranks, matrices.grad


def dispatched(num_tokens: list[int], routing: str, size: int) -> tuple[Tensor, ...]:
    """The same on this rank, whose experts see the tokens of the ``size`` ranks of its group; and the rows computed."""
    shape = (dist.get_world_size() // size, size)
    both = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "expert_parallel"))
    rank = dist.get_rank()
    mesh = both["expert_parallel"]
    all_tokens, all_chosen, all_weights, matrices = routed(num_tokens, routing)
    tokens = all_tokens[rank]
    chosen = all_chosen[rank]
    weights = all_weights[rank]
    own = matrices.chunk(size)[mesh.get_local_rank()].clone()
    for leaf in (tokens, weights, own):
        leaf.requires_grad_()

    computed_rows: list[int] = []

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        computed_rows.append(len(rows))
        parts = [(part @ matrix.T).tanh() for part, matrix in zip(rows.split(counts), own, strict=True)]
        return torch.cat(parts)

    output = dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, compute, mesh)
    objective(output, rank).backward()
    dist.all_reduce(own.grad, group=both["copies"].get_group())
    return output.detach(), tokens.grad, weights.grad, own.grad, torch.tensor(computed_rows)


def test_what_one_rank_computes() -> None:
    """Without a mesh this rank holds all experts; one that does not exist, and a result of another length, raise."""
    [tokens], [chosen], [weights], matrices = routed([6], "spread")

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat(
            [(part @ own.T).tanh() for part, own in zip(rows.split(counts), matrices, strict=True)]
        )

    [(expected, *_)], _ = of_one_process([6], "spread")
    found = dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, compute, None)
    torch.testing.assert_close(found, expected, **ROUNDING)
    with pytest.raises(RuntimeError, match="out of bounds"):
        dispatch_tokens(tokens, chosen + NUM_EXPERTS, weights, NUM_EXPERTS, compute, None)
    with pytest.raises(ValueError, match="compute got 12 rows and returned 11; return one row for each"):
        dispatch_tokens(tokens, chosen, weights, NUM_EXPERTS, lambda rows, _: rows[1:], None)


@pytest.mark.every_case
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize(
    ("num_tokens", "routing"),
    [([5, 0, 3, 1], "spread"), ([4, 4, 0, 7], "two experts"), ([0, 0, 0, 0], "spread")],
    ids=["ragged", "two experts", "no tokens"],
)
def test_any_number_of_tokens(pool4: RankPool, num_tokens: list[int], routing: str, size: int) -> None:
    """A rank may have no tokens, and its experts may get none; it takes part in the backward all the same."""
    expected, of_experts = of_one_process(num_tokens, routing)
    results = pool4.run(dispatched, num_tokens, routing, size)
    for rank, (*of_tokens, own_gradient, _) in enumerate(results):
        for actual, wanted in zip(of_tokens, expected[rank], strict=True):
            torch.testing.assert_close(actual, wanted, **ROUNDING)
        torch.testing.assert_close(own_gradient, of_experts.chunk(size)[rank % size], **ROUNDING)
    assert sum(int(computed_rows) for *_, computed_rows in results) == CHOSEN * sum(num_tokens)

"""Small tensors that stand for the parameters of a run where its optimizers are tried."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.gradients.owner_exchange import holders_of
from lightning_automodel.gradients.whole_tensors import is_split, sharding_of

_NUM_KINDS = 12
_MANY_ROWS = 16

Kind = tuple[tuple[int, ...], torch.dtype, Any]
"""The shape of a small tensor, its dtype, and mesh and placements, None for one that is not sharded."""


@dataclass(eq=False)
class TrialTensor:
    """A small tensor that is sharded like a parameter.

    Attributes:
        like: The parameter.
        values: Of the whole tensor.
        gradients: Of the whole tensor, for each step; None where a step does not use it.
    """

    like: nn.Parameter
    values: Tensor
    gradients: list[Tensor | None] = field(default_factory=list)

    def whole(self, values: Tensor) -> Tensor:
        """A copy of ``values``."""
        return values.clone()

    def shard(self, values: Tensor) -> Tensor:
        """This rank's part of ``values``, as a sharded tensor if the parameter is one."""
        if not is_split(self.like):
            return values.clone()
        mesh, placements = sharding_of(self.like)
        part = self.part(values).clone(memory_format=torch.contiguous_format)
        sharded = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
        )
        # It was moved to the mesh's devices; an offloaded parameter is on the host.
        return sharded.to(self.like.device)

    def part(self, values: Tensor) -> Tensor:
        """This rank's part of ``values``."""
        if not is_split(self.like):
            return values
        holders = holders_of(*sharding_of(self.like))
        return holders.part(values, holders.ranks.index(dist.get_rank()))


def trial_tensors(
    parameters: Sequence[nn.Parameter], num_steps: int, dtype: torch.dtype | None
) -> list[TrialTensor]:
    """Tensors that stand for the ``parameters`` of a group; none if none of these can train.

    ``dtype``: parameters in half precision are tried in float32 too, where more can be seen.
    """
    chosen = list(kinds(parameters).items())[:_NUM_KINDS]
    if len(chosen) == 1:  # two at least: some optimizers mix their parameters
        chosen *= 2
    generator = torch.Generator().manual_seed(0)
    tensors = [
        TrialTensor(like, _random(shape, generator, 0.1, dtype, like)) for (shape, _, _), like in chosen
    ]
    for _ in range(num_steps):
        for tensor in tensors:
            tensor.gradients.append(_random(tensor.values.shape, generator, 1.0, dtype, tensor.like))
    if tensors:  # a parameter that a step has not used
        tensors[0].gradients[1] = None
    return tensors


def _random(
    shape: Sequence[int], generator: torch.Generator, scale: float, dtype: torch.dtype | None, like: Tensor
) -> Tensor:
    if like.is_complex():
        wide = torch.complex64
    else:
        wide = torch.float32
    values = torch.randn(shape, generator=generator, dtype=wide) * scale
    if values.dim() > 0:  # another norm for each part
        rows = values.size(0)
        values *= torch.linspace(0.5, 2, rows).view(rows, *[1] * (values.dim() - 1))
    return values.to(device=like.device, dtype=dtype or like.dtype)


def kinds(parameters: Iterable[nn.Parameter]) -> dict[Kind, nn.Parameter]:
    """The first parameter of each kind, among those that may get gradients now or, being frozen, later."""
    # A model of many layers repeats a few shapes.
    distinct: dict[Any, nn.Parameter] = {}
    for parameter in filter(_can_train, parameters):
        sharding = None
        if is_split(parameter):
            sharding = sharding_of(parameter)
        distinct.setdefault((parameter.shape, parameter.dtype, sharding), parameter)
    found: dict[Kind, nn.Parameter] = {}
    for (_, dtype, sharding), parameter in distinct.items():
        found.setdefault((_small_shape(parameter), dtype, sharding), parameter)
    return found


def _can_train(parameter: Tensor) -> bool:
    """Whether a parameter may ever get gradients: those of quantised bases do not."""
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.dtype.itemsize > 1 and parameter.numel() > 0


def _small_shape(parameter: Tensor) -> tuple[int, ...]:
    """A small shape in which a parameter's looks alike: wide or tall, rows that do not divide, fewer than ranks."""
    num_parts: dict[int, int] = defaultdict(lambda: 1)
    if is_split(parameter):
        for split in holders_of(*sharding_of(parameter)).splits:
            num_parts[split.tensor_dim] *= split.num_parts
    shape = [_small_size(size, num_parts[dim]) for dim, size in enumerate(parameter.shape)]
    if len(shape) > 1:
        rows, columns = parameter.shape[:2]
        if columns >= rows and shape[0] > _MANY_ROWS:  # as large as the square of the ranks otherwise
            shape[0] = 5
        if columns > rows:
            shape[1] = max(shape[1], shape[0] + 2)
        elif columns == rows:
            shape[1] = shape[0]
        else:
            shape[1] = max(min(shape[1], shape[0] - 1), 1)
    return tuple(shape)


def _small_size(size: int, num_parts: int) -> int:
    if size <= 3:
        return size
    if num_parts == 1:
        return 3
    if size < num_parts:
        return min(num_parts - 1, 5)
    return 2 * num_parts + (1 if size % num_parts else 0)

"""Small tensors that stand for the parameters of a run where its optimizers are tried."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.gradients.owner_exchange import Layout, holders_of
from lightning_automodel.gradients.whole_tensors import is_split, sharding_of

_NUM_KINDS = 12
_MANY_ROWS = 16


class TrialTensors:
    """Small tensors that are sharded like the parameters of a group, with gradients for some steps.

    Args:
        parameters: Of the group.
        dtype: That of parameters in half precision is tried in float32 too, where more can be seen.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], num_steps: int, dtype: torch.dtype | None
    ) -> None:
        self.likes: list[nn.Parameter] = []
        self.layouts: list[Layout | None] = []
        shapes: list[tuple[int, ...]] = []
        seen = set[Any]()
        for parameter in distinct(filter(can_train, parameters)):
            shape, layout = scaled_down(parameter)
            if layout is not None:
                sharding = sharding_of(parameter)
            else:
                sharding = None
            key = (shape, parameter.dtype, sharding)
            if key not in seen and len(seen) < _NUM_KINDS:
                seen.add(key)
                self.likes.append(parameter)
                self.layouts.append(layout)
                shapes.append(shape)
        if len(shapes) == 1:  # two at least: some optimizers mix their parameters
            self.likes *= 2
            self.layouts *= 2
            shapes *= 2
        generator = torch.Generator().manual_seed(0)
        pairs = list(zip(shapes, self.likes, strict=True))
        self.values = [self._random(shape, generator, 0.1, dtype, like) for shape, like in pairs]
        self.gradients = [
            [self._random(shape, generator, 1.0, dtype, like) for shape, like in pairs]
            for _ in range(num_steps)
        ]

    @staticmethod
    def _random(
        shape: tuple[int, ...],
        generator: torch.Generator,
        scale: float,
        dtype: torch.dtype | None,
        like: Tensor,
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

    def __len__(self) -> int:
        return len(self.values)

    def whole(self, index: int, values: Tensor) -> Tensor:
        """A copy of ``values``."""
        return values.clone()

    def shard(self, index: int, values: Tensor) -> Tensor:
        """This rank's part of ``values``, as a sharded tensor if the parameter is one."""
        like = self.likes[index]
        layout = self.layouts[index]
        if layout is None:
            return values.clone()
        mesh, placements = sharding_of(like)
        part = self.part(index, values).clone(memory_format=torch.contiguous_format)
        sharded = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
        )
        # It was moved to the mesh's devices; an offloaded parameter is on the host.
        return sharded.to(like.device)

    def part(self, index: int, values: Tensor) -> Tensor:
        """This rank's part of ``values``."""
        layout = self.layouts[index]
        if layout is None:
            return values
        holders = holders_of(*sharding_of(self.likes[index]))
        return layout.part(values, holders.ranks.index(dist.get_rank()))


def distinct(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The first of the parameters of each shape, dtype and sharding: a model of many layers repeats a few."""
    found: dict[Any, nn.Parameter] = {}
    for parameter in parameters:
        if is_split(parameter):
            sharding = sharding_of(parameter)
        else:
            sharding = None
        found.setdefault((parameter.shape, parameter.dtype, parameter.device, sharding), parameter)
    return list(found.values())


def can_train(parameter: Tensor) -> bool:
    """Whether a parameter may get gradients now or, being frozen, later: those of quantised bases never do."""
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.dtype.itemsize > 1 and parameter.numel() > 0


def scaled_down(parameter: Tensor) -> tuple[tuple[int, ...], Layout | None]:
    """A small shape in which a parameter's looks alike: wide or tall, rows that do not divide, fewer than ranks."""
    if is_split(parameter):
        holders = holders_of(*sharding_of(parameter))
    else:
        holders = None
    num_parts: dict[int, int] = defaultdict(lambda: 1)
    for split in holders.splits if holders is not None else ():
        num_parts[split.tensor_dim] *= split.num_parts
    shape = [_scaled_size(size, num_parts[dim]) for dim, size in enumerate(parameter.shape)]
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
    found = tuple(shape)
    return found, None if holders is None else holders.layout(found)


def _scaled_size(size: int, num_parts: int) -> int:
    if size <= 3:
        return size
    if num_parts == 1:
        return 3
    if size < num_parts:
        return min(num_parts - 1, 5)
    return 2 * num_parts + (1 if size % num_parts else 0)

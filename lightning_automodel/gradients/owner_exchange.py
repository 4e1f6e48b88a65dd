"""Which rank holds which part of a sharded tensor, and parts that travel to a tensor's owner and back.

A tensor is whole on its owner alone. Each rank sends and receives about as much as it holds, whereas
gathering would bring every tensor to every rank.
"""

from collections.abc import Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Split(NamedTuple):
    """One dimension of a tensor, split over one dimension of the mesh."""

    mesh_dim: int
    tensor_dim: int
    num_parts: int


class Holders(NamedTuple):
    """The ranks that together hold one copy of a sharded tensor, and which part of it each has.

    Attributes:
        splits: In the order in which they are applied: tensor parallelism splits before FSDP2, whatever the
            order of the mesh's dimensions.
        coordinates: In the mesh, by rank of the world. All holders have the same, in one order.
    """

    splits: list[Split]
    coordinates: dict[int, tuple[int, ...]]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The view of ``whole`` that a ``rank`` of the world holds; it may be empty."""
        coordinate = self.coordinates[rank]
        for split in self.splits:
            size = whole.size(split.tensor_dim)
            length = -(-size // split.num_parts)
            start = min(coordinate[split.mesh_dim] * length, size)
            whole = whole.narrow(split.tensor_dim, start, min(length, size - start))
        return whole


def holders_of(mesh: DeviceMesh, placements: Sequence[Any]) -> Holders:
    """Which ranks hold the parts of this rank's copy of a tensor, which is sharded or replicated. Not a collective."""
    own: Any = mesh.get_coordinate()
    splits: list[Split] = []
    along: list[Sequence[int]] = []  # the coordinates of the holders in each dimension of the mesh
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            along.append([own[mesh_dim]])
            continue
        along.append(range(mesh.size(mesh_dim)))
        splits.append(Split(mesh_dim, placement.dim, mesh.size(mesh_dim)))
    # FSDP2 splits what tensor parallelism has left, though its dimensions come first: torch notes it.
    splits.sort(key=lambda split: hasattr(placements[split.mesh_dim], "split_factor"))
    return Holders(splits, {int(mesh.mesh[coordinate]): coordinate for coordinate in product(*along)})


def exchange(sent: list[list[Tensor]], received: list[list[Tensor]], device: torch.device) -> None:
    """Copy tensors of each rank into those of others: ``sent`` and ``received`` are by rank of the world.

    A collective over the world, on its device ``device``, where tensors that are offloaded are copied: one
    ``all_to_all`` of bytes. What a rank sends to another has the order, the shapes and the dtypes of
    what that one receives from it. If a rank fails, the others raise as in any collective.
    """
    outgoing = [part.to(device).reshape(-1).view(torch.uint8) for part in chain(*sent)]
    num_sent = [sum(part.nbytes for part in of_rank) for of_rank in sent]
    num_received = [sum(place.nbytes for place in of_rank) for of_rank in received]
    incoming = torch.empty(sum(num_received), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, torch.cat([incoming[:0], *outgoing]), num_received, num_sent)
    places = list(chain(*received))
    values = incoming.split([place.nbytes for place in places])
    for place, value in zip(places, values, strict=True):
        aligned = value.clone()  # as a view of another dtype must be
        place.copy_(aligned.view(place.dtype).view(place.shape))

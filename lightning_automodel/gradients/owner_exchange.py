"""Sharded tensors that travel to the ranks that own them, and back: ``all_to_all`` over the ranks that hold the parts.

A tensor is whole on its owner alone. Each rank sends and receives about as much as it holds, whereas
gathering would bring every tensor to every rank.
"""

import functools
import math
from collections.abc import Sequence
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from lightning_automodel.distributed import process_group
from lightning_automodel.distributed.mesh import kept_groups
from lightning_automodel.internals import process_groups


class Split(NamedTuple):
    """One dimension of a tensor, split over one dimension of the mesh."""

    mesh_dim: int
    tensor_dim: int
    num_parts: int


class Holders(NamedTuple):
    """The ranks that together hold one copy of a sharded tensor, and which part of it each has.

    Attributes:
        ranks: Of the world, in the order of the group.
        splits: In the order in which they are applied: tensor parallelism splits before FSDP2, whatever the
            order of the mesh's dimensions.
        coordinates: One for each rank, by split.
    """

    ranks: tuple[int, ...]
    splits: tuple[Split, ...]
    coordinates: tuple[tuple[int, ...], ...]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The view of ``whole`` that the group's ``rank`` holds; it may be empty."""
        for split, coordinate in zip(self.splits, self.coordinates[rank], strict=True):
            size = whole.size(split.tensor_dim)
            length = -(-size // split.num_parts)
            start = min(coordinate * length, size)
            whole = whole.narrow(split.tensor_dim, start, min(length, size - start))
        return whole

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of its ``parts`` by rank of the group: the reverse of :meth:`part`."""
        at = dict(zip(self.coordinates, parts, strict=True))
        for index, split in reversed(list(enumerate(self.splits))):
            at = {
                rest: torch.cat([at[*rest, number] for number in range(split.num_parts)], split.tensor_dim)
                for rest in dict.fromkeys(coordinate[:index] for coordinate in at)
            }
        return at[()]


def holders_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> Holders:
    """Which ranks hold the parts of this rank's copy of a tensor. Not a collective.

    Raises NotImplementedError for a placement that is neither a shard nor a replica.
    """
    inner: list[Split] = []
    outer: list[Split] = []
    own = mesh.get_coordinate()
    assert own is not None
    index: list[int | slice] = []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            index.append(own[mesh_dim])
            continue
        tensor_dim = getattr(placement, "dim", None)
        if tensor_dim is None:
            raise NotImplementedError(f"the placement {placement}")
        index.append(slice(None))
        # FSDP2 splits what tensor parallelism has left, though its dimensions of the mesh come first: torch
        # notes it.
        if hasattr(placement, "split_factor"):
            applied = inner
        else:
            applied = outer
        applied.append(Split(mesh_dim, tensor_dim, mesh.size(mesh_dim)))
    splits = (*outer, *inner)
    ranks = mesh.mesh[tuple(index)]
    by_mesh_dim = sorted(splits)
    at = product(*(range(split.num_parts) for split in by_mesh_dim))
    order = [by_mesh_dim.index(split) for split in splits]
    coordinates = [tuple(coordinate[place] for place in order) for coordinate in at]
    # A group has its ranks in ascending order. Those of experts under context parallelism come in another
    # order here: the dimension of FSDP2 contains the context-parallel one, which is the innermost of all.
    by_rank = dict(sorted(zip(ranks.flatten().tolist(), coordinates, strict=True)))
    return Holders(tuple(by_rank), splits, tuple(by_rank.values()))


def group_of(mesh: DeviceMesh, holders: Holders) -> dist.ProcessGroup:
    """The process group of the holders. A collective over the world if no dimension of the mesh has this group."""
    if len(holders.splits) == 1:
        return mesh.get_group(holders.splits[0].mesh_dim)
    world = dist.group.WORLD
    assert world is not None
    if len(holders.ranks) == world.size():
        return world
    kept = process_group.kept_with_world()
    # All parts of an expert lie on the ranks that other parameters are sharded over, which have a group.
    # Torch cannot slice the expert's own mesh where context parallelism lies within a dimension of it.
    known = kept_groups().get(holders.ranks)
    if known is not None:
        return known
    key = ("holders", holders.ranks)
    if key not in kept:
        names = mesh.mesh_dim_names or ()
        split = tuple(names[split_dim.mesh_dim] for split_dim in sorted(holders.splits))
        kept[key] = process_groups.flatten_mesh(mesh[split], "_".join(("holders", *split))).get_group()
    group: dist.ProcessGroup = kept[key]
    return group


class Owned:
    """A sharded tensor of this ``shape`` and its ``owner``, a rank of the group of its holders."""

    def __init__(self, holders: Holders, shape: Sequence[int], owner: int) -> None:
        self.holders = holders
        self.shape = shape
        self.owner = owner

    @functools.cached_property
    def part_shapes(self) -> list[torch.Size]:
        """The shapes of all parts, by rank of the group: their owner asks for them in each step."""
        whole = torch.empty(*self.shape, device="meta")
        return [self.holders.part(whole, rank).shape for rank in range(len(self.holders.ranks))]


class OwnerExchange:
    """Sends tensors between their holders and their owners.

    Every rank of ``group`` must call the same method, with the same tensors in the same order: each call is
    one ``all_to_all`` for each dtype. If a rank fails, the others raise as in any collective.

    Args:
        group: The holders.
        device: On which ``group`` communicates; tensors that are offloaded are copied there and back.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self._device = device
        self._num_owned = [0] * group.size()  # elements, by rank

    def choose_owner(self, numel: int) -> int:
        """The rank that owns the fewest elements so far; now it owns ``numel`` more. Not a collective."""
        owner = self._num_owned.index(min(self._num_owned))
        self._num_owned[owner] += numel
        return owner

    def to_owners(self, tensors: Sequence[tuple[Owned, Tensor]]) -> list[Tensor | None]:
        """Send this rank's parts. Returns the whole tensor for each that this rank owns, else None."""
        wholes: list[Tensor | None] = [None] * len(tensors)
        for chosen in _by_dtype([part for _, part in tensors]):
            sent: list[list[Tensor]] = [[] for _ in range(self.group.size())]
            mine: dict[int, Owned] = {}
            for index in chosen:
                owned, part = tensors[index]
                sent[owned.owner].append(part)
                if owned.owner == self.rank:
                    mine[index] = owned
            shapes = [[owned.part_shapes[rank] for owned in mine.values()] for rank in range(len(sent))]
            parts = self._all_to_all(sent, shapes, tensors[chosen[0]][1])
            for (index, owned), by_rank in zip(mine.items(), zip(*parts, strict=True), strict=True):
                wholes[index] = owned.holders.join(by_rank)
        return wholes

    def to_holders(self, tensors: Sequence[tuple[Owned, Tensor | None, Tensor]]) -> None:
        """Send the whole tensors that this rank owns (the second of each), and overwrite the parts (the third)."""
        for chosen in _by_dtype([part for _, _, part in tensors]):
            sent: list[list[Tensor]] = [[] for _ in range(self.group.size())]
            places: list[list[Tensor]] = [[] for _ in range(self.group.size())]
            for index in chosen:
                owned, whole, part = tensors[index]
                places[owned.owner].append(part)
                if whole is not None:
                    for rank, parts in enumerate(sent):
                        parts.append(owned.holders.part(whole, rank))
            shapes = [[place.shape for place in by_owner] for by_owner in places]
            found = self._all_to_all(sent, shapes, tensors[chosen[0]][2])
            for place, value in zip(chain(*places), chain(*found), strict=True):
                place.copy_(value)

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[torch.Size]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send tensors to each rank; returns those of the ``shapes`` that each rank sends. A collective."""
        flat = [part.reshape(-1) for part in chain(*sent)]
        if flat:
            outgoing = torch.cat(flat).to(self._device)
        else:
            outgoing = like.new_empty(0, device=self._device)
        num_sent = [sum(part.numel() for part in parts) for parts in sent]
        num_received = [sum(map(math.prod, of_rank)) for of_rank in shapes]
        incoming = like.new_empty(sum(num_received), device=self._device)
        if self.group.size() == 1:
            incoming.copy_(outgoing)
        else:
            dist.all_to_all_single(incoming, outgoing, num_received, num_sent, group=self.group)
        incoming = incoming.to(like.device)
        numels = list(map(math.prod, chain(*shapes)))
        pieces = iter(incoming.split(numels))
        return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors of each dtype, in the order in which dtypes come."""
    found: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(index)
    return list(found.values())

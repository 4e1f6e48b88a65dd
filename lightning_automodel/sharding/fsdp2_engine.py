"""FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_automodel.distributed.collectives import Gathers
from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients.rank_agreement import DIFFERENT_UNITS
from lightning_automodel.internals import fsdp2
from lightning_automodel.sharding import tensor_parallel
from lightning_automodel.sharding.fsdp2_setup import set_prefetch
from lightning_automodel.sharding.fsdp2_window import FSDP2Window
from lightning_automodel.sharding.phases import Phase

_STEP_ENDS = -1
"""Told in place of the number of a unit."""

_BACKWARD_ALONE = (
    "A backward in a step of evaluation in which other ranks have no data left: FSDP2 would reduce gradients of"
    " parameters with these ranks. For gradients of inputs or activations, call torch.autograd.grad(loss, inputs), or"
    " give all ranks equally many batches."
)
"""Why a backward is refused whose reductions others do not join."""


class FSDP2Engine(FSDP2Window):
    """Parameters, gradients and optimizer state sharded by FSDP2, over one group or over each replica (HSDP).

    To the windows of the base class it adds what surrounds them: evaluation, and the order in
    which FSDP2 gathers and reduces units. FSDP2 matches the collectives of ranks by their order alone: where ranks use
    different units, each gets parameters or gradients of another layer than it asks for, without an error if layers
    have one shape.

    In an evaluation step that a rank joins without data, the first rank with some, its leader, tells all ranks, over a
    group of hosts, which unit it gathers next. No user code runs on the rank without data: nothing is logged, counted
    or drawn at random there.

    ``report`` is what :func:`shard_module` has returned of ``module``. Creating one is a collective
    over the tensor-parallel ranks.
    """

    def __init__(self, module: pl.LightningModule, placement: Placement, report: dict[str, Any]) -> None:
        mesh = placement.mesh
        super().__init__(
            module,
            defer=report["defer_fsdp_grad_sync"],
            retain_unsharded=not report["reshard_during_accumulation"],
            group=mesh.group if mesh.sizes.divisor > 1 else None,
        )
        self.discard()  # units that the user has sharded may hold gradients of earlier training
        self.first_peer = min(dist.get_process_group_ranks(mesh.fsdp.get_group(mesh.fsdp.ndim - 1)))
        self._host_group = placement.host_group
        self._leader: int | None = None  # while it tells what it gathers
        for index, unit in enumerate(self.units):
            fsdp2.watch_unit(unit.module, partial(self._note, index), self.keep_gathered, self._patches)
        if report["prefetch"]:
            self._patches.callback(set_prefetch, module, 0, in_background=False)
        tensor_parallel.share_random_state(mesh.tensor_group, placement.device)

    @override
    @contextmanager
    def evaluation(self, find_leader: Callable[[], int | None]) -> Iterator[None]:
        """See the base class. A collective if there is a leader; RuntimeError if it gathers other units."""
        with self.apart(Phase.EVALUATION):
            self._leader = find_leader()
            try:
                yield
                self._note(_STEP_ENDS)
            finally:
                self._leader = None

    @override
    def join_evaluation(self, leader: int) -> None:
        if self._experts:
            raise RuntimeError(
                "This rank has evaluated all its data, and other ranks have not: it cannot take part in"
                " their forwards, which send tokens to the experts that it holds (expert_parallel_size >"
                " 1). Give all ranks equally many batches: Trainer(limit_val_batches=...), or"
                " limit_test_batches or limit_predict_batches, with as many as each rank has, or a"
                " DistributedSampler with drop_last=True."
            )
        with self.apart(Phase.EVALUATION):
            while (index := self._told(leader, _STEP_ENDS)) != _STEP_ENDS:
                unit = self.units[index].module
                unit.unshard()
                unit.reshard()
            self._note(_STEP_ENDS)

    def _note(self, index: int, *reduced: int) -> None:
        """Note what begins: a unit's all-gather, or the reduction of some of its parameters; or that a step ends."""
        if self.phase is Phase.HOOKS:
            Gathers.check()
        elif self._leader is not None:
            if reduced:
                raise RuntimeError(_BACKWARD_ALONE)
            if self._told(self._leader, index) != index:
                raise RuntimeError(DIFFERENT_UNITS)
        self.collectives = hash((self.collectives, index, *reduced))

    def _told(self, leader: int, own: int) -> int:
        """What the leader tells, which this rank tells if it is the leader. A collective over the hosts."""
        told = torch.tensor(own, device="cpu")
        dist.broadcast(told, leader, self._host_group)
        return int(told)

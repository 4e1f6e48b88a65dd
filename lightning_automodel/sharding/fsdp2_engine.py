"""FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.sharding import tensor_parallel
from lightning_automodel.sharding.buffers import SharedBuffers
from lightning_automodel.sharding.fsdp2_window import FSDP2Window
from lightning_automodel.sharding.gathers import UnitCollectives, set_prefetch
from lightning_automodel.sharding.phases import Phase


class FSDP2Engine(FSDP2Window):
    """Parameters, gradients and optimizer state sharded by FSDP2, over one group or over each replica (HSDP).

    To the windows of the base class it adds what surrounds them: the first batch, buffers, and evaluation.
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
            is_manual=not module.automatic_optimization,
        )
        self._module = module
        self._mesh = mesh
        self._device = placement.device
        self._report = report
        self._is_first_batch = True
        self.discard()  # units that the user has sharded may hold gradients of earlier training
        self.first_peer = min(dist.get_process_group_ranks(mesh.fsdp.get_group(mesh.fsdp.ndim - 1)))
        self._collectives = UnitCollectives(self, [u.module for u in self.units], placement.host_group)
        tensor_parallel.share_random_state(mesh.tensor_group, placement.device)
        self._buffers = SharedBuffers(module, mesh.group, placement.device)

    @override
    def start_forward(self, batch: Any) -> None:
        if self._is_first_batch:
            self._is_first_batch = False
            if not self._module.automatic_optimization or self._mesh.sizes.expert > 1:
                # Before backwards in the step that are not the strategy's, which are refused within a
                # window, and wherever they reach spread experts.
                self.track({p for p in self._module.parameters() if p.requires_grad})
            if self._mesh.tensor_group is not None:
                tensor_parallel.check_same_batch(
                    batch, self._mesh.tensor_group, self._device, "tensor-parallel"
                )
        self._buffers.start_forward(self.ends_window)
        self.start_step()

    @override
    def synchronize_buffers(self) -> None:
        self._buffers.synchronize()

    @override
    @contextmanager
    def evaluation(self, find_leader: Callable[[], int | None]) -> Iterator[None]:
        with self.apart(Phase.EVALUATION), self._collectives.step(find_leader()):
            yield

    @override
    def join_evaluation(self, leader: int) -> None:
        if self._mesh.sizes.expert > 1:
            raise RuntimeError(
                "This rank has evaluated all its data, and other ranks have not: it cannot take part in"
                " their forwards, which send tokens to the experts that it holds (expert_parallel_size >"
                " 1). Give all ranks equally many batches: Trainer(limit_val_batches=...), or"
                " limit_test_batches or limit_predict_batches, with as many as each rank has, or a"
                " DistributedSampler with drop_last=True."
            )
        with self.apart(Phase.EVALUATION):
            self._collectives.join(leader)

    @override
    def close(self) -> None:
        try:
            super().close()
        finally:
            self._collectives.close()
            if self._report["prefetch"]:
                set_prefetch(self._module, 0, in_background=False)

    @override
    def describe(self) -> dict[str, Any]:
        return dict(self._report)

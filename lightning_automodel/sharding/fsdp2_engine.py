"""FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel.distributed.mesh import Placement, num_expert_ranks
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import (
    apply,
    checks,
    memory,
    precision,
    quantized,
    tensor_parallel,
    units,
)
from lightning_automodel.sharding.buffers import SharedBuffers
from lightning_automodel.sharding.fsdp2_window import FSDP2Window, Phase
from lightning_automodel.sharding.gathers import JoinedGathers, set_prefetch
from lightning_automodel.sharding.shards import shard_parameters


class FSDP2Engine(FSDP2Window):
    """Parameters, gradients and optimizer state sharded by FSDP2, over one group or over each replica (HSDP).

    Creating one is a collective over the world. ``policy`` has the dtypes that units compute and reduce in;
    ``give_values`` initialises tensors without values, once they are sharded.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        placement: Placement,
        options: StrategyOptions,
        policy: MixedPrecisionPolicy,
        give_values: Callable[[], None],
    ) -> None:
        self.mesh = placement.mesh
        self.device = placement.device
        self.options = options
        self._policy = policy
        self._module: pl.LightningModule = module
        self._report: dict[str, Any] = {}
        self._is_first_batch = True
        with apply.attributes_kept(module):
            self._shard(module)
        give_values()
        self._report["averaged_by_the_strategy"] = [
            name for name, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)
        ]
        if self.mesh.sizes.expert > 1:
            self._report["experts"] = [n for n, p in module.named_parameters() if num_expert_ranks(p) > 1]
        apply.initialise_fsdp2(module, self.mesh.sizes.divisor)
        if self.mesh.sizes.divisor > 1:
            group = self.mesh.group
        else:
            group = None
        choice = self._choose(module, placement)
        shard_parameters(module, accept_hooks=options.count_window_ahead)
        super().__init__(
            module,
            defer=choice.defer,
            retain_unsharded=choice.keep,
            group=group,
            is_manual=not module.automatic_optimization,
        )
        self.discard()  # units that the user has sharded may hold gradients of earlier training
        self._start_gathers_ahead(module)
        self._gathers = JoinedGathers([unit.module for unit in self.units])
        tensor_parallel.share_random_state(self.mesh, self.device)
        self._buffers = SharedBuffers(module, self.mesh.group, self.device)

    def _shard(self, module: pl.LightningModule) -> None:
        """Make weights equal on all ranks, and shard them unless they are sharded. A collective over the world."""
        plan = None if units.has_fsdp_units(module) else self._plan(module)
        if plan is None:
            self._report = {
                "units": "sharded before this set-up (by configure_model or an earlier run); left as they were"
            }
        else:
            checks.check_shardable({n: p for n, p in module.named_parameters() if n not in plan.replicated})
            names = {
                id(submodule): name or units.class_name(module) for name, submodule in module.named_modules()
            }
            self._report = {
                "roots": [names[id(root)] for root in plan.roots],
                "units": [f"{names[id(unit)]} ({units.class_name(unit)})" for unit in plan.units],
                "replicated": dict(plan.replicated),
            }
            if plan.head is not None:
                self._report["head"] = f"{names[id(plan.head)]} ({units.class_name(plan.head)})"
        tensor_parallel.distribute(module, self.mesh)
        apply.broadcast_states(module, self.mesh)
        if plan is not None:
            apply.apply_fsdp2(module, plan, self.mesh, self.options, self._policy)

    def _plan(self, module: pl.LightningModule) -> units.ShardingPlan:
        whole = precision.kept_wide(module, self._policy) | quantized.kept_whole(module, self._policy)
        policy = self.options.auto_wrap_policy
        return units.plan_sharding(module, policy, module.automatic_optimization, whole)

    def _choose(self, module: pl.LightningModule, placement: Placement) -> memory.Choice:
        """Decide ``defer_fsdp_grad_sync`` and ``reshard_during_accumulation``. A collective over the world for "auto".

        One rank short of memory decides for all.
        """
        options = self.options
        defer = options.defer_fsdp_grad_sync
        defer_reason = None
        if self.mesh.sizes.divisor == 1:
            # Deferral would save nothing and only keep gradients out of ``.grad``.
            defer = False
            defer_reason = "one rank reduces nothing"
        reshard = options.reshard_during_accumulation
        keep: bool | Literal["auto"] = "auto" if reshard == "auto" else not reshard
        keep_reason = None
        if keep == "auto" and not module.automatic_optimization:
            keep = False
            keep_reason = "manual optimization may step between two forwards of one training step"
        needed = memory.estimate(module, self.device)
        spare = 0
        if "auto" in (defer, keep):
            spare = memory.spare_bytes(needed, placement)
        choice = memory.choose(defer, keep, needed, spare, defer_reason, keep_reason)
        if choice.keep or "roots" in self._report:
            self._report["reshard_after_forward"] = False if choice.keep else options.reshard_after_forward
        self._report |= {
            "defer_fsdp_grad_sync": choice.defer,
            "defer_fsdp_grad_sync_reason": choice.defer_reason,
            "reshard_during_accumulation": not choice.keep,
            "reshard_during_accumulation_reason": choice.keep_reason,
            "estimated_extra_bytes": needed if choice.defer is True else needed | {memory.GRADIENTS: 0},
        }
        return choice

    def _start_gathers_ahead(self, module: pl.LightningModule) -> None:
        """Decide ``prefetch``, and set it."""
        option = self.options.prefetch
        is_cpu = self.device.type == "cpu"
        if self.mesh.fsdp.size() == 1:
            ahead = 0
            reason = "one rank gathers nothing"
        elif option != "auto":
            ahead = option
            reason = f"prefetch={option}"
        elif is_cpu and "roots" in self._report:
            ahead = 1
            reason = "auto: 1 on CPU, where FSDP2 by itself waits for each all-gather"
        else:
            ahead = 0
            reason = "auto: what FSDP2 does by itself"
        if ahead:
            set_prefetch(module, ahead, in_background=is_cpu)
        self._report["prefetch"] = ahead
        self._report["prefetch_reason"] = reason

    @override
    def start_forward(self, batch: Any) -> None:
        if self._is_first_batch:
            self._is_first_batch = False
            if not self._module.automatic_optimization or self.mesh.sizes.expert > 1:
                # Before backwards in the step that are not the strategy's, which are refused within a
                # window, and wherever they reach spread experts.
                self.gather_once()
                self.track({p for p in self._module.parameters() if p.requires_grad})
            if self.mesh.tensor_group is not None:
                tensor_parallel.check_same_batch(
                    batch, self.mesh.tensor_group, self.device, "tensor-parallel"
                )
        self._buffers.start_forward(self.is_last)
        self.release(retains=True)
        self.go_on()

    @override
    def synchronize_buffers(self) -> None:
        self._buffers.synchronize()

    @override
    def start_evaluation_loop(self) -> None:
        self._gathers.start_loop()

    @override
    @contextmanager
    def evaluation(self) -> Iterator[None]:
        with self._released_around(), self._gathers.step():
            yield

    @override
    def join_evaluation(self) -> None:
        if self.mesh.sizes.expert > 1:
            raise RuntimeError(
                "This rank has evaluated all its data, and other ranks have not: it cannot take part in"
                " their forwards, which send tokens to the experts that it holds (expert_parallel_size >"
                " 1). Give all ranks equally many batches: Trainer(limit_val_batches=...), or"
                " limit_test_batches or limit_predict_batches, with as many as each rank has, or a"
                " DistributedSampler with drop_last=True."
            )
        with self._released_around():
            self._gathers.join()

    @contextmanager
    def _released_around(self) -> Iterator[None]:
        """Context of forwards without a backward, which leaves no parameters gathered."""
        self.release()
        self.enter(Phase.EVALUATION)
        try:
            yield
        except BaseException:
            self.recover()  # a caller may go on, as BatchSizeFinder does when memory is short
            raise
        self.release()
        self.enter(Phase.HOOKS)

    @override
    def close(self) -> None:
        super().close()
        if self._report.get("prefetch"):
            set_prefetch(self._module, 0, in_background=False)

    @override
    def describe(self) -> dict[str, Any]:
        return {"cpu_offload": self.options.cpu_offload, **self._report}

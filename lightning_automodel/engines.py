"""The two ways to hold a model on many ranks, behind one interface: FSDP2 shards it, DDP copies it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_automodel import _compat, gradients, memory, precision, sharding, tensor_parallel
from lightning_automodel.grad_sync import Deferral, FSDPGradSync
from lightning_automodel.mesh import RunMesh
from lightning_automodel.options import StrategyOptions
from lightning_automodel.resume.bucket_order import ReadyOrder

_SHARDED_BEFORE = "sharded before this set-up (by configure_model or an earlier run); left as they were"


class Engine(ABC):
    """How the model is held, and what each micro-batch communicates.

    Args:
        mesh: Mesh of the run.
        device: This rank's device.
    """

    def __init__(self, mesh: RunMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device

    @abstractmethod
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        """Distribute ``module``, converted and on the device. A collective over the world.

        Args:
            module: The user's LightningModule.
            fitting: Whether gradients will be needed.
            give_values: Gives values to what has none yet; to be called once, with shards where there are to be some.

        Returns:
            What the steps are to be called on.
        """

    @abstractmethod
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: the optimizer steps after it."""

    def start_forward(self, batch: Any) -> None:
        """Called before each training step, with its batch."""

    def start_backward(self, loss: Tensor) -> None:
        """Called before each backward."""

    def end_backward(self) -> None:
        """Called after each backward, before anybody else sees the gradients."""

    def complete_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average what the engine itself does not, once a window. May be a collective over the data-parallel group."""

    def followed(self, parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, bool]]:
        """Those that get a zero gradient where their window did not use them, and whether it did, on this rank."""
        return []

    def release(self) -> None:
        """Free gathered parameters: somebody may be about to write weights."""

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Drop gradients that the engine holds outside of ``.grad`` for these (or all) parameters."""

    def state(self) -> dict[str, Any]:
        """What decides how the next micro-batch communicates, and is not settled by it."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` returned."""

    def recover(self) -> None:
        """Forget an interrupted micro-batch."""

    def close(self) -> None:
        """Leave the model to itself."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What was decided, and why."""


class FSDP2Engine(Engine):
    """Parameters, gradients and optimizer state sharded by FSDP2, over one group or over each replica (HSDP).

    Args:
        mesh: Mesh of the run.
        device: This rank's device.
        options: What the user chose.
        local_ranks: Ranks on this node, which share its memory.
        policy: What units compute and reduce in.
    """

    def __init__(
        self,
        mesh: RunMesh,
        device: torch.device,
        options: StrategyOptions,
        local_ranks: int,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(mesh, device)
        self._options = options
        self._policy = policy
        self._local_ranks = local_ranks
        self._report: dict[str, Any] = {}
        self._is_first_batch = True

    @override
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        with sharding.attributes_kept(module):
            self._shard(module)
        give_values()
        self._report["averaged_by_the_strategy"] = [
            name for name, parameter in module.named_parameters() if sharding.is_plain_and_trainable(parameter)
        ]
        sharding.initialise_fsdp2(module, self.mesh.sizes.data_parallel)
        self._sync = FSDPGradSync(module, self._defer(), self._keep_gathered(module))
        self._sync.discard()
        tensor_parallel.share_random_state(self.mesh, self.device)
        return module

    def _shard(self, module: pl.LightningModule) -> None:
        """Make weights equal everywhere and shard them, unless somebody has. A collective over the world."""
        plan = None if sharding.has_fsdp_units(module) else self._plan(module)
        if plan is None:
            self._report = {"units": _SHARDED_BEFORE}
        else:
            sharding.refuse_gradient_hooks(module, plan.replicated)
            self._check_reshard_after_forward()
            self._report = _describe_plan(module, plan)
        tensor_parallel.apply_own_plans(module, self.mesh)
        tensor_parallel.refuse_compiled(module, self.mesh)
        sharding.broadcast_states(module, self.mesh)
        if plan is not None:
            sharding.apply_fsdp2(
                module,
                plan,
                self.mesh.fsdp,
                self._options.reshard_after_forward,
                self._options.cpu_offload,
                self._policy,
            )

    def _plan(self, module: pl.LightningModule) -> sharding.ShardingPlan:
        plan = sharding.plan_sharding(module, self._options.auto_wrap_policy, module.automatic_optimization)
        return replace(plan, replicated=plan.replicated | precision.kept_wide(module, self._policy))

    def _check_reshard_after_forward(self) -> None:
        """Raise ValueError unless the size to reshard to divides the number of ranks that a unit is sharded over."""
        size, shards = self._options.reshard_after_forward, self.mesh.sizes.shard
        if isinstance(size, bool) or shards % size == 0:
            return
        valid = ["True", "False", *(str(n) for n in range(2, shards + 1) if shards % n == 0)]
        raise ValueError(
            f"reshard_after_forward={size} does not divide the {shards} ranks that a unit is sharded over; valid are"
            f" {', '.join(valid)}."
        )

    def _defer(self) -> Deferral:
        """Without peers nothing is communicated, and unreduced gradients would only be out of sight."""
        return self._options.defer_fsdp_grad_sync if self.mesh.sizes.data_parallel > 1 else False

    def _keep_gathered(self, module: pl.LightningModule) -> bool:
        """Settle ``reshard_during_accumulation``. A collective for "auto": ranks must agree, the smallest decides."""
        option = self._options.reshard_during_accumulation
        need = memory.estimate(module, defers_gradients=self._defer() is True)
        if not module.automatic_optimization:
            keep, reason = False, "manual optimization may step between two forwards of one training step"
        elif option != "auto":
            keep, reason = not option, f"reshard_during_accumulation={option}"
        else:
            keep, reason = self._fits_everywhere(need.total)
        if keep or "roots" in self._report:
            self._report["reshard_after_forward"] = False if keep else self._options.reshard_after_forward
        self._report["reshard_during_accumulation"] = not keep
        self._report["reshard_during_accumulation_reason"] = reason
        self._report["estimated_extra_bytes"] = asdict(need)
        return keep

    def _fits_everywhere(self, needed_bytes: int) -> tuple[bool, str]:
        """Whether every rank has the memory, and why. A collective over the data-parallel group."""
        free = memory.free_bytes(self.device, self._local_ranks)
        budget = 0 if free is None else int(free * memory.FREE_MEMORY_SHARE)
        fits = torch.tensor(float(needed_bytes <= budget), device=self.device)
        dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=self.mesh.group)
        keep = bool(fits.item())
        known = "unknown" if free is None else f"{budget / 2**20:.0f} MiB on this rank"
        return keep, (
            f"auto: an estimated {needed_bytes / 2**20:.0f} MiB {'fits into' if keep else 'exceeds'}"
            f" {memory.FREE_MEMORY_SHARE:.0%} of the free memory ({known}) of {'every' if keep else 'some'} rank"
        )

    @override
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        return self._sync.micro_batch(is_last)

    @override
    def start_forward(self, batch: Any) -> None:
        if self._is_first_batch:
            self._is_first_batch = False
            tensor_parallel.check_same_batch(batch, self.mesh, self.device)
        self._sync.resume()

    @override
    def end_backward(self) -> None:
        self._sync.end_backward()

    @override
    def complete_gradients(self, parameters: list[nn.Parameter]) -> None:
        plain = [parameter for parameter in parameters if sharding.is_plain_and_trainable(parameter)]
        if plain and self.mesh.sizes.data_parallel > 1:
            gradients.average_gradients_(plain, self.mesh.group)

    @override
    def followed(self, parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, bool]]:
        return self._sync.followed(parameters)

    @override
    def release(self) -> None:
        self._sync.release()

    @override
    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        self._sync.discard(parameters)

    @override
    def recover(self) -> None:
        self._sync.recover()

    @override
    def close(self) -> None:
        self._sync.close()

    @override
    def describe(self) -> dict[str, Any]:
        return {"defer_fsdp_grad_sync": self._defer(), "cpu_offload": self._options.cpu_offload, **self._report}


def _describe_plan(module: nn.Module, plan: sharding.ShardingPlan) -> dict[str, Any]:
    names = {id(submodule): name or sharding.class_name(module) for name, submodule in module.named_modules()}
    return {
        "roots": [names[id(root)] for root in plan.roots],
        "units": [f"{names[id(unit)]} ({sharding.class_name(unit)})" for unit in plan.units],
        "replicated": dict(plan.replicated),
    }


class DDPEngine(Engine):
    """The whole model on every rank, gradients averaged by ``DistributedDataParallel``.

    Args:
        mesh: Mesh of the run.
        device: This rank's device.
        options: What the user chose.
    """

    def __init__(self, mesh: RunMesh, device: torch.device, options: StrategyOptions) -> None:
        super().__init__(mesh, device)
        self._ddp_kwargs = options.ddp_kwargs or {}
        self._ddp: DistributedDataParallel | None = None
        self._static_graph_is_flushed = False
        self._reduced: set[int] = set()
        self._order: ReadyOrder | None = None

    @override
    def setup(self, module: pl.LightningModule, fitting: bool, give_values: Callable[[], None]) -> nn.Module:
        if sharding.is_sharded(module):
            raise ValueError(
                f"{sharding.class_name(module)} is already sharded by FSDP2, which data_parallel='ddp' cannot"
                " replicate: pass data_parallel='fsdp2', or a module that was not sharded before."
            )
        give_values()
        if not fitting:
            sharding.broadcast_states(module, self.mesh)
            return module
        self._reduced = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self._ddp = sharding.apply_ddp(module, self.device, self.mesh.group, self._ddp_kwargs)
        self._order = ReadyOrder(self._ddp)
        return self._ddp

    @override
    def state(self) -> dict[str, Any]:
        """What DDP makes of the micro-batches so far.

        Whether the next forward broadcasts rank 0's buffers (not after one without gradient synchronisation), and the
        order of gradients in its buckets, in which more than two ranks add them up.
        """
        if self._ddp is None or self._order is None:
            return {}
        return {"broadcasts_buffers": self._ddp.require_forward_param_sync, "order": self._order.indices}

    @override
    def load_state(self, state: dict[str, Any]) -> None:
        if self._ddp is not None and "broadcasts_buffers" in state:
            if self._order is not None and state["order"] is not None:
                self._order.bring_about(state["order"])
            self._ddp.require_forward_param_sync = state["broadcasts_buffers"]

    @override
    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    @override
    def start_backward(self, loss: Tensor) -> None:
        if self._ddp is not None and not self._ddp.module.automatic_optimization:
            _compat.prepare_ddp_for_backward(self._ddp, loss)
        if self._order is not None and self._ddp is not None and self._ddp.require_backward_grad_sync:
            self._order.note()

    @override
    def end_backward(self) -> None:
        """Refuse gradients that DDP left unreduced.

        Raises:
            RuntimeError: If a parameter took no part in a synchronised backward, which leaves it, and the others of its
                bucket, with this rank's own gradient.
        """
        ddp = self._ddp
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        if self._order is not None:
            self._order.end()
        if ddp.static_graph:
            if not ddp.module.automatic_optimization and not self._static_graph_is_flushed:
                self._static_graph_is_flushed = True
                _compat.flush_static_graph(ddp)
            return
        try:
            _compat.check_ddp_backward_is_complete(ddp)
        except RuntimeError as error:
            trainable = [name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad]
            listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            unused = [trainable[int(i)] for i in listed[1].split() if int(i) < len(trainable)] if listed else []
            raise RuntimeError(
                "DistributedDataParallel did not reduce all gradients of this window: parameters"
                f" {', '.join(unused) or '(unknown)'} took no part in its last micro-batch, so ranks would step with"
                " different gradients. Pass AutomodelStrategy(data_parallel='ddp',"
                " ddp_kwargs={'find_unused_parameters': True})."
            ) from error

    @override
    def close(self) -> None:
        if self._order is not None:
            self._order.end()

    @override
    def complete_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average what was frozen when DDP was set up and trains since: DDP itself never reduces it."""
        unfrozen = [p for p in parameters if p.requires_grad and id(p) not in self._reduced]
        if unfrozen and self.mesh.sizes.data_parallel > 1:
            gradients.average_gradients_(unfrozen, self.mesh.group)

    @override
    def describe(self) -> dict[str, Any]:
        return {"ddp_kwargs": dict(self._ddp_kwargs)}

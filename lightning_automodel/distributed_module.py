"""The user's module as a run trains it: prepared, then sharded by FSDP2 or replicated by DDP."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.advice import Advice
from lightning_automodel.distributed.mesh import EXPERT, Placement
from lightning_automodel.expert_parallel.hugging_face import spread_by_plan
from lightning_automodel.expert_parallel.spread import check_spread
from lightning_automodel.gradients.engine import Engine
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import checks, meta_init, precision, units
from lightning_automodel.sharding.activation_checkpointing import checkpoint_blocks, compile_blocks
from lightning_automodel.sharding.buffers import SharedBuffers
from lightning_automodel.sharding.ddp_engine import DDPEngine
from lightning_automodel.sharding.fsdp2_engine import FSDP2Engine
from lightning_automodel.sharding.fsdp2_setup import shard_module
from lightning_automodel.sharding.replaced import ModuleParameters, check_foreign_shards
from lightning_automodel.sharding.replicas import check_replicas


@dataclass(frozen=True)
class RunConfig:
    """What a run is made from.

    Attributes:
        module: The user's.
        options: The strategy's.
        placement: Where this rank computes.
        plugin: The Trainer's precision plugin.
        advice: Tells the user.
    """

    module: pl.LightningModule
    options: StrategyOptions
    placement: Placement
    plugin: Precision
    advice: Advice


class DistributedModule:
    """A module that is prepared and distributed, in the order of the methods of this class.

    Creating it is a collective over the world: weights are made equal and sharded or replicated.

    Attributes:
        parameters: The module's, before and after sharding has replaced them.
        engine: Distributes the module and reduces gradients.
        model: What the Trainer calls: the module, or DistributedDataParallel around it.
        buffers: Those that ranks take from the first one; None if none are.

    Args:
        config: Of the run.
        fitting: Whether the module is trained.
        patches: Restored when the run ends.
    """

    def __init__(self, config: RunConfig, fitting: bool, patches: PatchStack) -> None:
        self._module = config.module
        self._options = config.options
        self._placement = config.placement
        self._plugin = config.plugin
        self._advice = config.advice
        self._fitting = fitting
        self._sharding: dict[str, Any] = {}  # what was decided for FSDP2, and why
        self._check()
        self._prepare(patches)
        self._distribute(patches)

    def _check(self) -> None:
        """Refuse what cannot be distributed, before anything is changed."""
        module = self._module
        check_foreign_shards(module)
        precision.check_precision(self._plugin, self._options.data_parallel)
        if self._options.is_sharded:
            precision.check_conversion(self._plugin, module)
        if self._fitting and self._placement.mesh.sizes.divisor > 1:
            checks.check_embeddings(module)

    def _prepare(self, patches: PatchStack) -> None:
        """Change the module as it must be changed before it is distributed. A collective over the world."""
        module = self._module
        options = self._options
        if self._plugin.convert_module(module) is not module:
            raise ValueError(
                f"{type(self._plugin).__name__}.convert_module returns another module, which would not be trained: let"
                " it change the one that it is given, and return that."
            )
        named = torch_internals.named_tensors(module)
        self._without_values = meta_init.names_without_values(named)
        self.move_to_device()
        precision.convert_metrics(self._plugin, module)
        parameters = {name: tensor for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
        self.parameters = ModuleParameters(module, parameters)
        checks.check_hooks(parameters)
        checks.check_equal_models(named, self._placement.host_group)
        if self._fitting:
            checkpointed = options.activation_checkpointing
        else:
            checkpointed = False
        policy = options.auto_wrap_policy
        is_automatic = module.automatic_optimization
        self._checkpointed = checkpoint_blocks(module, checkpointed, policy, is_automatic, patches)
        # After activation checkpointing, which compile traces, and before sharding, whose hooks it must not.
        self._compiled = compile_blocks(module, options.compile, policy, is_automatic, patches)

    def _distribute(self, patches: PatchStack) -> None:
        """Shard or replicate the module. A collective over the world."""
        module = self._module
        mesh = self._placement.mesh
        if mesh.sizes.expert > 1:
            spread_by_plan(module, mesh.mesh[EXPERT])
        check_spread(module, mesh.sizes.expert)
        self.engine = self._make_engine()
        patches.callback(self.engine.close)
        self.model = self.engine.model
        self._ignored = getattr(self.model, "parameters_to_ignore", ())  # of DistributedDataParallel
        self.buffers: SharedBuffers | None = None
        if self.engine.shares_buffers:
            self.buffers = SharedBuffers(module, mesh.group, self._placement.device, self._ignored)
        self.parameters.invalidate_replaced()
        self._replicated = [p for p in self.parameters.named.values() if not isinstance(p, DTensor)]

    def _make_engine(self) -> Engine:
        """The engine, which distributes the module."""
        module = self._module
        options = self._options
        placement = self._placement
        if not options.is_sharded:
            return DDPEngine(module, placement, options, self._fitting, self._give_values)
        policy = precision.resolve_policy(self._plugin, options.mp_policy, module.parameters())
        if precision.is_overruled(policy, options.mp_policy, module):
            self._advice.say_once(
                f"mp_policy={options.mp_policy} beside precision={self._plugin.precision!r} has no effect on a model"
                " that was sharded before, with another policy."
            )
        settings = shard_module(module, placement, options, policy, self._give_values)
        self._sharding = settings.report
        return FSDP2Engine(module, placement, settings)

    def _give_values(self) -> None:
        """Initialise tensors from the meta device, once they are sharded (FSDP2) or before they are copied (DDP)."""
        if self._without_values:
            offloads = self._options.is_sharded and self._options.cpu_offload
            meta_init.materialize(self._module, self._placement.device, offloads)
            self.move_to_device()

    def move_to_device(self) -> None:
        """Move the module to this rank's device, except tensors without values and offloaded shards."""
        module = self._module
        device = self._placement.device
        named = torch_internals.named_tensors(module) if self._without_values else {}
        if meta_init.names_without_values(named):
            meta_init.move_what_has_values(module, device)
        elif not (self._options.cpu_offload and units.is_sharded(module)):
            module.to(device)

    def check_parameters(self) -> None:
        """Raise before a window's first training step if parameters were replaced or hooked since set-up."""
        self.parameters.check_module()
        # Shards refuse hooks where these are registered.
        if any(map(torch_internals.has_post_accumulate_hook, self._replicated)):
            checks.check_hooks(self.parameters.named)

    def check_replicas(self) -> None:
        """Raise RuntimeError, on every rank, if copies of a parameter differ. A collective over the world."""
        check_replicas(self._module, self._placement.mesh, self._placement.device, self._ignored)

    def describe(self) -> dict[str, Any]:
        """What was decided for the module, and why."""
        return {
            "tensors_created_without_values": len(self._without_values),
            "activation_checkpointing": self._checkpointed,
            "compiled": self._compiled,
            **self._sharding,
        }

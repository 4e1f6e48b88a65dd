"""A PyTorch Lightning strategy whose gradients equal those of one big single-process batch."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel.internals.releases import importing_private_names

# First, so that its error is the one for a release that is too old or too new.
with importing_private_names():
    import lightning_automodel.internals.fsdp2
    import lightning_automodel.internals.lightning
    import lightning_automodel.internals.logged_values
    import lightning_automodel.internals.metrics
    import lightning_automodel.internals.process_groups
    import lightning_automodel.internals.torch  # noqa: F401

from lightning_automodel.callbacks import (
    EvaluationLoss,
    ExactnessCheck,
    ModelExport,
    StepMonitor,
    TrainingReport,
)
from lightning_automodel.context_parallel.attention import context_parallel_attention
from lightning_automodel.data.eval_shard import dp_eval_sample_shard
from lightning_automodel.distributed.collectives import barrier_and_log
from lightning_automodel.distributed.first_rank import FirstRankPerNode
from lightning_automodel.distributed.process_group import (
    DistInfo,
    destroy_global_state,
    get_local_rank_preinit,
    get_local_world_size_preinit,
    get_rank_safe,
    get_world_size_safe,
    initialize_distributed,
)
from lightning_automodel.expert_parallel.dispatch import dispatch_tokens
from lightning_automodel.expert_parallel.spread import spread_experts
from lightning_automodel.gradients.chunked_loss import token_loss
from lightning_automodel.gradients.rescale_clip import clip_gradients, rescale_gradients
from lightning_automodel.gradients.token_loss import StepReport, reduce_loss
from lightning_automodel.sharding.sync_context import get_sync_ctx
from lightning_automodel.strategy import AutomodelStrategy

__all__ = [
    "AutomodelStrategy",
    "DistInfo",
    "EvaluationLoss",
    "ExactnessCheck",
    "FirstRankPerNode",
    "ModelExport",
    "StepMonitor",
    "StepReport",
    "TrainingReport",
    "barrier_and_log",
    "clip_gradients",
    "context_parallel_attention",
    "destroy_global_state",
    "dispatch_tokens",
    "dp_eval_sample_shard",
    "get_local_rank_preinit",
    "get_local_world_size_preinit",
    "get_rank_safe",
    "get_sync_ctx",
    "get_world_size_safe",
    "initialize_distributed",
    "reduce_loss",
    "rescale_gradients",
    "spread_experts",
    "token_loss",
]

AutomodelStrategy.register_strategies(StrategyRegistry)

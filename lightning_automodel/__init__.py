"""A PyTorch Lightning strategy whose gradients equal those of one big single-process batch."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel.collectives import barrier_and_log
from lightning_automodel.data import dp_eval_sample_shard
from lightning_automodel.first_rank import FirstRankPerNode
from lightning_automodel.grad_sync import get_sync_ctx
from lightning_automodel.gradients import clip_gradients, rescale_gradients
from lightning_automodel.process_group import (
    DistInfo,
    destroy_global_state,
    get_local_rank_preinit,
    get_rank_safe,
    get_world_size_safe,
    initialize_distributed,
)
from lightning_automodel.strategy import AutomodelStrategy
from lightning_automodel.token_loss import StepReport, reduce_loss

__all__ = [
    "AutomodelStrategy",
    "DistInfo",
    "FirstRankPerNode",
    "StepReport",
    "barrier_and_log",
    "clip_gradients",
    "destroy_global_state",
    "dp_eval_sample_shard",
    "get_local_rank_preinit",
    "get_rank_safe",
    "get_sync_ctx",
    "get_world_size_safe",
    "initialize_distributed",
    "reduce_loss",
    "rescale_gradients",
]

AutomodelStrategy.register_strategies(StrategyRegistry)

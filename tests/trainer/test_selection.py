"""The strategy from a YAML file; `tests/test_public_names.py` has registered names."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from tests.rank_pool import RankPool
from tests.trainer.exactness import TinyDecoder, full_weights, weight_error
from tests.trainer.plain import plain_weights, prefixed
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, loader

ACCUMULATE = 3
COMMON = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  accumulate_grad_batches: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  use_distributed_sampler: false
  plugins:
    - class_path: lightning.pytorch.plugins.environments.LightningEnvironment
"""
EVERY_OPTION = """
  strategy:
    class_path: lightning_automodel.AutomodelStrategy
    init_args:
      data_parallel: fsdp2
      data_parallel_size: auto
      data_parallel_replicate_size: 2
      ddp_kwargs: {}
      per_token_loss: true
      loss_reduction: mean
      label_key: labels
      ignore_index: -100
      label_shift: 0
      count_label_tokens: null
      defer_fsdp_grad_sync: all_reduce
      reshard_during_accumulation: auto
      auto_wrap_policy: null
      reshard_after_forward: true
      mp_policy:
        param_dtype: torch.float64
        reduce_dtype: torch.float64
        cast_forward_inputs: false
      cpu_offload: false
      activation_checkpointing: [tests.trainer.exactness.Block, torch.nn.LayerNorm]
      track_grad_norm: true
      error_if_nonfinite: true
      process_group_backend: gloo
      timeout: '0:02:00'
"""


class FromCommandLine(LabelledModule):
    """A module without arguments, with its own data."""

    def train_dataloader(self) -> Any:
        return loader()


def _fit_from_yaml(make: type, text: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = Path(folder) / f"{dist.get_rank()}.yaml"
    path.write_text(COMMON + text)
    cli = LightningCLI(make, args=["fit", "--config", str(path)], save_config_callback=None)
    return full_weights(cli.model), cli.trainer.strategy.describe()


def test_from_yaml(pool2: RankPool, tmp_path: Path) -> None:
    """Every option is read, dtypes by their names, and trained with exactly."""
    expected = prefixed(plain_weights(TinyDecoder(CASE.seed).double(), ACCUMULATE))
    for weights, described in pool2.run(_fit_from_yaml, FromCommandLine, EVERY_OPTION, str(tmp_path)):
        assert described["options"]["timeout"] == timedelta(minutes=2)
        assert described["precision"]["reduction"] == "torch.float64"
        assert described["mesh"].items() >= {"data_parallel_replicate": 2, "data_parallel_shard": 1}.items()
        recomputed = ["model.blocks.0 (Block)", "model.blocks.1 (Block)", "model.norm (LayerNorm)"]
        assert described["activation_checkpointing"] == recomputed
        assert weight_error(weights, expected) <= TOLERANCE

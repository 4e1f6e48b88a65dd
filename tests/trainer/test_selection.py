"""Every way to choose the strategy: an instance, a registered name, a YAML file, a script that starts its own ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Outcome, TinyDecoder, full_weights, weight_error
from tests.trainer.plain import ModelModule, plain_weights
from tests.trainer.runs import CASE, TOLERANCE, LabelledModule, first_by_default, loader, make_trainer

ACCUMULATE = 3
NAMES = {
    "automodel": {"data_parallel": "fsdp2"},
    "automodel_fsdp2": {"data_parallel": "fsdp2"},
    "automodel_ddp": {"data_parallel": "ddp"},
    "automodel_hsdp": {"data_parallel": "fsdp2", "data_parallel_replicate_size": "auto"},
    "automodel_fsdp2_offload": {"data_parallel": "fsdp2", "cpu_offload": True},
}


def expected_weights(case: Case = CASE) -> Outcome:
    return Outcome(plain_weights(TinyDecoder(CASE.seed).double(), ACCUMULATE, case), None)


def test_registered_names() -> None:
    """All of them, and no others."""
    assert {name for name in StrategyRegistry.available_strategies() if "automodel" in name} == set(NAMES)


def _fit_by_name(name: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    module = ModelModule(TinyDecoder(CASE.seed).double())
    trainer = make_trainer(name, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader())
    strategy = trainer.strategy
    return (
        full_weights(module.model),
        isinstance(strategy, AutomodelStrategy),
        strategy.describe()["options"],
    )


@pytest.mark.parametrize("name", first_by_default(reversed(NAMES), 2))
def test_by_name(pool2: RankPool, name: str) -> None:
    """A name is the strategy with the options that it stands for, and trains exactly."""
    for weights, is_ours, options in pool2.run(_fit_by_name, name):
        assert is_ours
        assert options.items() >= NAMES[name].items()
        assert weight_error(Outcome(weights, None), expected_weights()) <= TOLERANCE


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
BY_CLASS = """
  strategy:
    class_path: lightning_automodel.AutomodelStrategy
    init_args:
      data_parallel: {data_parallel}
      reshard_during_accumulation: false
      count_label_tokens: null
      ddp_kwargs: null
      timeout: {timeout}
"""
BY_NAME = """
  strategy: automodel_ddp
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
      mp_policy: {cast_forward_inputs: false}
      cpu_offload: false
      activation_checkpointing: [tests.trainer.exactness.Block, torch.nn.LayerNorm]
      track_grad_norm: true
      error_if_nonfinite: true
      process_group_backend: gloo
      timeout: 0.5
"""


class FromCommandLine(LabelledModule):
    """A module without arguments, with its own data."""

    def train_dataloader(self) -> Any:
        return loader()


def _fit_from_yaml(text: str, folder: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    path = Path(folder) / f"{dist.get_rank()}.yaml"
    path.write_text(COMMON + text)
    cli = LightningCLI(FromCommandLine, args=["fit", "--config", str(path)], save_config_callback=None)
    described = cli.trainer.strategy.describe()
    timeout = described["options"]["timeout"]
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 60 * timeout
    return full_weights(cli.model.model), described, seconds


@pytest.mark.parametrize(
    ("text", "expected", "seconds"),
    [
        pytest.param(
            BY_CLASS.format(data_parallel="fsdp2", timeout=5),
            {"data_parallel": "fsdp2"},
            300,
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            BY_CLASS.format(data_parallel="fsdp2", timeout="'0:02:00'"),
            {"reshard_during_accumulation": False},
            120,
            marks=pytest.mark.sweep,
        ),
        pytest.param(BY_NAME, {"data_parallel": "ddp", "ddp_kwargs": {}}, 1800, marks=pytest.mark.sweep),
        (
            EVERY_OPTION,
            {
                "mesh": {"data_parallel_replicate": 2, "data_parallel_shard": 1},
                "activation_checkpointing": [
                    "model.blocks.0 (Block)",
                    "model.blocks.1 (Block)",
                    "model.norm (LayerNorm)",
                ],
            },
            30,
        ),
    ],
    ids=["class", "class-timedelta", "name", "every-option"],
)
def test_from_yaml(
    pool2: RankPool, tmp_path: Path, text: str, expected: dict[str, Any], seconds: float
) -> None:
    """LightningCLI reads the strategy both ways, every option included, and trains exactly with it."""
    for weights, described, found_seconds in pool2.run(_fit_from_yaml, text, str(tmp_path)):
        assert found_seconds == seconds
        for name, value in expected.items():
            found = described[name]
            assert found.items() >= value.items() if isinstance(value, dict) else found == value
        assert weight_error(Outcome(weights, None), expected_weights()) <= TOLERANCE

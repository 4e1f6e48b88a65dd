"""Ray Train starts the ranks and joins them; the strategy trains on them. Needs the extra `ray`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[tests,ray]'"
)
ROOT = Path(__file__).parents[2]


def train(settings: dict[str, Any]) -> None:
    """What Ray runs in each worker; `ray.train.lightning.prepare_trainer` refuses other strategies."""
    from ray.train.lightning import RayLightningEnvironment

    from tests.launch.launched import Launched, fit_as_rank

    module = Launched(Path(settings["folder"]), fault=settings["fault"])
    fit_as_rank(module, settings["options"], devices=2, plugins=[RayLightningEnvironment()])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Any:
    variables = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {"env_vars": variables}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def fit(folder: Path, options: dict[str, Any], fault: str | None = None) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "options": options, "fault": fault},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("ddp", marks=pytest.mark.sweep)])
def test_training(tmp_path: Path, engine: str) -> None:
    from tests.launch.launched import assert_exact

    fit(tmp_path, {"data_parallel": engine})
    assert_exact(torch.load(tmp_path / "weights.pt"))


@pytest.mark.sweep
def test_failure(tmp_path: Path) -> None:
    """Ray raises what happened on the rank that failed."""
    with pytest.raises(Exception, match="no labels here"):
        fit(tmp_path, {}, fault="exception")

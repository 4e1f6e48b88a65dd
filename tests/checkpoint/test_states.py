"""What a run hands out to be saved: whole states for one file, plain data beside the tensors, a note on its form."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_automodel.checkpoint import DIRECTORY_NOTE, CheckpointError
from tests.checkpoint.checkpoints import FORMS, AdamModule, adamw, fit
from tests.rank_pool import RankPool
from tests.trainer.exactness import TinyDecoder, full_weights
from tests.trainer.plain import ModelModule


def test_states_for_one_file(pool2: RankPool) -> None:
    """Lightning's contract: whole on rank 0, empty on the others, so that ``torch.save`` of it is complete."""
    (first, weights), (second, _) = pool2.run(_states_in_fit, FORMS["one_file_of_shards"])
    model, moments = first
    assert model.keys() == weights.keys()
    assert all(torch.equal(model[name], weights[name]) for name in weights)
    assert {name: each["exp_avg"].shape for name, each in moments.items()} == {n: w.shape for n, w in weights.items()}
    assert second == [{}, {}]


class TakesStates(Callback):
    """In training, where an optimizer's state can be asked for."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        optimizer = strategy.optimizer_state(trainer.optimizers[0])
        self.states = [strategy.lightning_module_state_dict(), optimizer.get("state", {})]
        self.weights = full_weights(pl_module)


def _states_in_fit(options: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    callback = TakesStates()
    fit(options, callbacks=[callback])
    return callback.states, callback.weights


class HoldsANetwork(ModelModule):
    """Its network is among the hyper-parameters, as in libraries that take one."""

    def __init__(self, net: Any, ignore: Any = None) -> None:
        super().__init__(net)
        self.save_hyperparameters(ignore=ignore, logger=False)

    def configure_optimizers(self) -> Any:
        return adamw(self)


class KeepsTheModule(Callback):
    """Its state is a module."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.module = pl_module.model

    def state_dict(self) -> dict[str, Any]:
        return {"of": {"net": self.module}}


def _fail_to_save(options: dict[str, Any], folder: str, by_callback: bool) -> str:
    module = HoldsANetwork(TinyDecoder(0).double(), ignore=["net"] if by_callback else None)
    trainer, _ = fit(options, module, callbacks=[KeepsTheModule()] if by_callback else [])
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(f"{folder}/a")
    return str(raised.value)


@pytest.mark.parametrize("by_callback", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("form", ["shards", pytest.param("one_file_of_shards", marks=pytest.mark.sweep)])
@pytest.mark.filterwarnings("ignore:Attribute 'net'")
def test_sharded_modules_in_the_rest(pool2: RankPool, tmp_path: Path, form: str, by_callback: bool) -> None:
    """Cannot be pickled: saving fails on every rank, with the class; a fit that saves nothing is not disturbed."""
    for message in pool2.run(_fail_to_save, FORMS[form], str(tmp_path), by_callback):
        assert message.startswith(f"Cannot save {tmp_path}/a: rank 0: ")
        assert "Can't pickle" in message
        assert "FSDP" in message


def _notes_and_timeout(options: dict[str, Any], folder: str) -> tuple[list[str], timedelta | None]:
    """Log lines about directories, and the timeout of the group that writes in the background."""
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Handler()
    logger.addHandler(handler)
    try:
        saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
        trainer, _ = fit({**options, "timeout": 2.5}, AdamModule(), callbacks=[saves], enable_checkpointing=True)
    finally:
        logger.removeHandler(handler)
    group = trainer.strategy._checkpoints._group
    timeout = None if group is None else group[1]._get_backend(torch.device("cpu")).options._timeout
    return [record for record in records if DIRECTORY_NOTE in record], timeout


def test_note_on_directories_and_timeout_in_the_background(pool2: RankPool, tmp_path: Path) -> None:
    """Once, on rank 0, with the first path; libraries that call ``torch.load`` are lost at the end of a run."""
    first, second = pool2.run(_notes_and_timeout, {"async_checkpoint": True}, str(tmp_path))
    assert first == ([f"{tmp_path}/epoch=0-step=1.ckpt {DIRECTORY_NOTE}"], timedelta(minutes=2.5))
    assert second == ([], timedelta(minutes=2.5))
    assert "save_distributed_checkpoint=False" in DIRECTORY_NOTE
    chosen = {"save_distributed_checkpoint": True}
    assert pool2.run(_notes_and_timeout, chosen, str(tmp_path / "chosen"))[0][0] == []

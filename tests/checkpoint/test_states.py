"""What a checkpoint cannot hold is left out or refused, by name."""

from __future__ import annotations

import io
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint.checkpoints import FORMS, AdamModule, adamw, fit
from tests.checkpoint.optimizers import HidesTensors
from tests.rank_pool import RankPool
from tests.trainer.exactness import Block, TinyDecoder, full_weights
from tests.trainer.plain import ModelModule


class HoldsANetwork(ModelModule):
    """Its network is among the hyper-parameters, as in libraries that take one."""

    def __init__(self, net: Any, ignore: Any = None) -> None:
        super().__init__(net)
        self.save_hyperparameters(ignore=ignore, logger=False)

    def configure_optimizers(self) -> Any:
        return adamw(self)


class PutsItThere(HoldsANetwork):
    """By its own hook, as disent's modules do: nothing that is left out of the hyper-parameters helps."""

    def __init__(self, net: Any) -> None:
        super().__init__(net, ignore=["net"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = {"width": 3, "nested": {"net": [self.model, self.model.head]}}


def _save_hyper_parameters(
    options: dict[str, Any], folder: str, how: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Whole weights, and what was said of the hyper-parameters at the first save."""
    net = TinyDecoder(0).double()
    module = PutsItThere(net) if how == "hook" else HoldsANetwork(net)
    callbacks: list[Callback] = [ModelCheckpoint(folder, filename="a")]
    with warnings.catch_warnings(record=True) as caught:
        fit(options, module, callbacks=callbacks, enable_checkpointing=True)
    said = [str(warning.message) for warning in caught]
    return full_weights(module.model), [text for text in said if text.startswith("The hyper-parameters")]


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["hyper-parameter", "hook"])
@pytest.mark.parametrize("form", ["shards", "one_file_of_shards"])
@pytest.mark.filterwarnings("ignore:Attribute 'net'")
def test_networks_among_the_hyper_parameters(pool2: RankPool, tmp_path: Path, form: str, how: str) -> None:
    """Are left out, which a note tells: they are passed to ``load_from_checkpoint``, which fills them."""
    (weights, said), _ = pool2.run(_save_hyper_parameters, FORMS[form], str(tmp_path), how)
    path = tmp_path / "a.ckpt"
    saved = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)["hyper_parameters"]
    assert saved == ({"width": 3} if how == "hook" else {"ignore": None})
    assert f"load_from_checkpoint(path, {'nested=nested' if how == 'hook' else 'net=net'})" in said[0]
    if how == "hyper-parameter":
        with pytest.raises(TypeError, match="net"):
            HoldsANetwork.load_from_checkpoint(path)
        loaded = HoldsANetwork.load_from_checkpoint(path, net=TinyDecoder(0).double())
        assert all(torch.equal(weights[name], value) for name, value in loaded.model.named_parameters())


class Unpicklable(AdamModule):
    """Puts there what nothing can pickle, or shards that are no parameter's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        other = fully_shard(Block())
        held = {
            "function": lambda: None,
            "module": other,
            "shards": HidesTensors(self.model.head.weight.detach()),
        }
        checkpoint["mine"] = {"of": {"net": held[self.kind]}}


def _fail_to_save(options: dict[str, Any], folder: str, kind: str) -> str:
    trainer, _ = fit(options, Unpicklable(kind))
    with pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint(f"{folder}/a")
    return str(raised.value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("function", "cannot be pickled: Can't"),
        ("module", "cannot be pickled: Can't pickle <class 'torch.distributed.fsdp."),
        ("shards", "cannot be pickled: it is an object that holds sharded tensors"),
    ],
)
def test_what_cannot_be_pickled_is_named(pool2: RankPool, tmp_path: Path, kind: str, message: str) -> None:
    """On every rank, and nothing is left."""
    for raised in pool2.run(_fail_to_save, FORMS["shards"], str(tmp_path), kind):
        assert raised.startswith(
            f"Cannot save {tmp_path}/a: rank 0: checkpoint['mine']['of']['net'] {message}"
        )
    assert list(tmp_path.iterdir()) == []


class Pickles(AdamModule):
    def on_train_start(self) -> None:
        torch.save(self.model.blocks[0], io.BytesIO())


def _pickle() -> str:
    with pytest.raises(pickle.PicklingError) as raised:
        fit({}, Pickles())
    return str(raised.value)


def test_pickling_a_sharded_module(pool2: RankPool) -> None:
    for message in pool2.run(_pickle):
        assert message.startswith("A sharded module, of which this rank holds a part, cannot be pickled")
        assert "(torch: Can't pickle" in message


def _timeout_in_the_background(options: dict[str, Any], folder: str) -> timedelta:
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trainer, _ = fit({**options, "timeout": 2.5}, AdamModule(), callbacks=[saves], enable_checkpointing=True)
    group = trainer.strategy._saver._host_group(in_background=True)
    return group._get_backend(torch.device("cpu")).options._timeout


def test_timeout_in_the_background(pool2: RankPool, tmp_path: Path) -> None:
    told = pool2.run(_timeout_in_the_background, {"async_checkpoint": True}, str(tmp_path))
    assert told == [timedelta(minutes=2.5)] * 2

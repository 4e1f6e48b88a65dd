"""What projects do with checkpoints in hooks and modules of their own, compared with plain Lightning in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError
from tests.checkpoint import checkpoints
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import CASE, TOLERANCE, make_trainer

MEAN = {"per_token_loss": False}
"""Micro-batches weigh the same, as in plain Lightning; every rank trains on the same ones."""


# --- on_save_checkpoint -----------------------------------------------------------------------------------------------


class EditsOnRankZero(checkpoints.AdamModule):
    """The mistake of who believes that rank 0 writes all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.how != "on all ranks" and not self.trainer.is_global_zero:
            return
        state = checkpoint["state_dict"]
        if self.how == "removed":
            del state["model.head.weight"]
        elif self.how == "added":
            checkpoint["average"] = [parameter.detach().clone() for parameter in self.parameters()]
        else:
            state.update({name: 2 * value for name, value in state.items()})


def _edit_what_is_saved(options: dict[str, Any], path: str, how: str) -> str:
    """The message, if any; else all that was saved is as rank 0 has edited it."""
    trainer, module = checkpoints.fit(options, EditsOnRankZero(how))
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    doubled = {name: 2 * value for name, value in full_weights(module.model).items()}
    checkpoints.assert_equal([checkpoints.load_only(options, path)], doubled)
    return ""


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("form", "how", "message"),
    [
        (
            "shards",
            "changed",
            "model.embedding.weight is a hook's (torch.float64 of shape [11, 7]) on rank 0 and the run's",
        ),
        ("shards", "removed", "state_dict.model.head.weight is missing on rank 0 and the run's"),
        (
            "one_file_of_shards",
            "added",
            "average.0 is a hook's (torch.float64 of shape [11, 7]) on rank 0 and missing",
        ),
        ("shards", "on all ranks", ""),
        ("replicated", "changed", ""),
    ],
)
def test_edits_on_one_rank(pool2: RankPool, tmp_path: Path, form: str, how: str, message: str) -> None:
    """Of what each rank writes a part are refused: half of a tensor would be edited. What rank 0 has whole may be."""
    for found in pool2.run(_edit_what_is_saved, checkpoints.FORMS[form], str(tmp_path / "last.ckpt"), how):
        assert message in found
        assert (found == "") == (message == "")
        assert not message or "on_save_checkpoint must edit it on all ranks, not on rank 0 alone" in found
    assert message == "" or list(tmp_path.iterdir()) == []


# --- on_load_checkpoint -----------------------------------------------------------------------------------------------


class Renamed(checkpoints.AdamModule):
    """Holds the network under another name than the run that saved, and more; edits what it loads in every way.

    It also loads entries in its hook, the whole module and a part of it, and copies one.
    """

    def __init__(self) -> None:
        super().__init__(CASE.seed + 2)
        self.net = self.model
        self.model = None
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.noted: list[Any] = []
        self.held: list[dict[str, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch["input_ids"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        before = copy.deepcopy(state)
        self.noted = [len(state), "model.head.weight" in state, isinstance(state, dict), sorted(state)]
        for name in list(state):
            state[name.replace("model.", "net.", 1)] = state.pop(name)
        state["scale"] = state["net.head.weight"][0, :3].clone()
        self.load_state_dict(state)
        self.held.append(full_weights(self))
        head = {
            name.removeprefix("net.head."): 3 * state[name].data for name in state if "net.head." in name
        }
        self.net.head.load_state_dict(head)
        with torch.no_grad():
            self.net.norm.bias.copy_(state["net.norm.weight"])
        self.held.append(full_weights(self))
        entry = state["net.embedding.weight"]
        self.noted.append((entry.shape, entry.device.type, entry.is_meta))
        del state["net.head.bias"]
        state["net.head.bias"] = torch.arange(11.0, dtype=torch.float64)
        state["net.norm.weight"].mul_(3)
        state["net.norm.bias"].mul_(3)
        state["net.norm.bias"] = before["model.norm.bias"]
        checkpoint["state_dict"] = {
            **state,
            "net.blocks.0.linear.bias": 2 * state["net.blocks.0.linear.bias"],
        }


def _load_renamed(options: dict[str, Any], path: str) -> tuple[list[Any], list[dict[str, Tensor]]]:
    module = checkpoints.loaded(options, path, Renamed())
    return module.noted, [*module.held, full_weights(module)]


@pytest.mark.parametrize("form", checkpoints.forms("shards", "one_file_of_shards"))
def test_edits_of_the_state_dict(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Renamed, removed, added, changed in place, replaced, and loaded within the hook, all at once."""
    path = tmp_path / "last.ckpt"
    pool2.run(checkpoints.save, checkpoints.FORMS[form], str(path))
    expected_notes, expected = _load_renamed({"plain": True}, checkpoints.consolidated(path))
    for notes, found in pool2.run(_load_renamed, checkpoints.FORMS[form], str(path)):
        assert notes == expected_notes
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _keys(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Of parameters in a saved optimizer, which has their names or numbers them."""
    names = [name for name, _ in checkpoints.AdamModule().named_parameters()]
    return dict(zip(names, optimizer["param_groups"][0]["params"], strict=True))


def _change(checkpoint: dict[str, Any]) -> None:
    """In place: a weight, a moment, an option; one weight gets two names, and one parameter's state is removed."""
    state = checkpoint["state_dict"]
    state["model.norm.weight"] += 0.5
    state["model.blocks.1.linear.weight"] = state["model.blocks.0.linear.weight"]
    (optimizer,) = checkpoint["optimizer_states"]
    keys = _keys(optimizer)
    optimizer["state"][keys["model.head.weight"]]["exp_avg"].mul_(3)
    optimizer["param_groups"][0]["weight_decay"] = 0.5
    del optimizer["state"][keys["model.norm.weight"]]


def _replace(checkpoint: dict[str, Any]) -> None:
    """The list, an entry, and what is within it."""
    checkpoint["optimizer_states"] = list(checkpoint["optimizer_states"])
    (optimizer,) = checkpoint["optimizer_states"]
    key = _keys(optimizer)["model.norm.weight"]
    state = {**optimizer["state"]}
    state[key] = {**state[key], "exp_avg": torch.full((7,), 0.1, dtype=torch.float64)}
    checkpoint["optimizer_states"][0] = {**optimizer, "state": state}


Edit = Callable[[dict[str, Any]], Any]


def _leave(checkpoint: dict[str, Any]) -> None:
    """Edit nothing."""


class EditsLoaded(checkpoints.AdamModule):
    """Edits what it loads, on one rank or on all."""

    def __init__(self, edit: Edit = _leave, on_rank: int | None = None) -> None:
        super().__init__(CASE.seed + 2)
        self.edit = edit
        self.on_rank = on_rank

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.on_rank in (None, self.global_rank):
            self.edit(checkpoint)


class EditsLater(Callback):
    """Lightning calls it when the module is loaded, before optimizers are; it looks at the state first."""

    def __init__(self, edit: Edit = _leave) -> None:
        self.edit = edit

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen = {name: value.sum().item() for name, value in checkpoint.get("state_dict", {}).items()}
        self.edit(checkpoint)


def _resume_edited(options: dict[str, Any], path: str) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """Weights after each edit, and what a callback has seen of the state."""
    found = []
    for edit, later in (
        (_change, _leave),
        (_leave, _replace),
        (_leave, lambda checkpoint: checkpoint.update(optimizer_states=[])),
    ):
        module = EditsLoaded(edit)
        callback = EditsLater(later)
        if options.get("plain"):
            trainer = checkpoints.plain_trainer(
                max_epochs=2, accumulate_grad_batches=checkpoints.ACCUMULATE, callbacks=[callback]
            )
            trainer.fit(module, checkpoints.batches(), ckpt_path=path)
        else:
            checkpoints.fit({**options, **MEAN}, module, ckpt_path=path, max_epochs=2, callbacks=[callback])
        found.append((full_weights(module.model), callback.seen))
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("form", checkpoints.forms("shards", "one_file_of_shards"))
def test_training_goes_on_from_edits(pool2: RankPool, tmp_path: Path, form: str) -> None:
    """Of what the hooks leave, what they did not touch is read as shards."""
    path = tmp_path / "last.ckpt"
    pool2.run(checkpoints.save, {**checkpoints.FORMS[form], **MEAN}, str(path))
    expected = _resume_edited({"plain": True}, checkpoints.consolidated(path))
    for found in pool2.run(_resume_edited, checkpoints.FORMS[form], str(path)):
        for (weights, seen), (wanted, seen_plainly) in zip(found, expected, strict=True):
            assert weight_error(weights, wanted) <= TOLERANCE
            assert seen == seen_plainly


WRONG: dict[str, tuple[Edit, str]] = {
    "missing": (
        lambda checkpoint: checkpoint["state_dict"].pop("model.norm.weight"),
        "rank 1: RuntimeError: Error(s) in loading state_dict for EditsLoaded",
    ),
    "none": (lambda checkpoint: checkpoint.pop("state_dict"), "rank 1: KeyError: 'state_dict'"),
    "no list": (
        lambda checkpoint: checkpoint.update(optimizer_states=None),
        "rank 1: TypeError: 'NoneType' object is not iterable",
    ),
}


def _load_wrong(options: dict[str, Any], path: str, how: str) -> tuple[str, bool]:
    """The error, and whether weights are as they were; a next run without a checkpoint must not fail."""
    module = EditsLoaded(WRONG[how][0], on_rank=1)
    before = full_weights(module.model)
    trainer = make_trainer(AutomodelStrategy(**options))
    load = trainer.fit if how == "no list" else partial(trainer.validate, verbose=False)
    with pytest.raises(CheckpointError) as raised:
        load(module, checkpoints.batches(), ckpt_path=path)
    is_unchanged = checkpoints.are_equal(full_weights(module.model), before)
    trainer.validate(module, checkpoints.batches(), verbose=False)
    return str(raised.value), is_unchanged


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.every_case
def test_edits_that_do_not_fit(pool2: RankPool, tmp_path: Path, how: str) -> None:
    """An error on every rank, and the next run of the Trainer knows nothing of it.

    What torch's ``load_state_dict`` refuses it has loaded but for that; all else comes before.
    """
    path = tmp_path / "last.ckpt"
    pool2.run(checkpoints.save, checkpoints.FORMS["shards"], str(path))
    for raised, is_unchanged in pool2.run(_load_wrong, checkpoints.FORMS["shards"], str(path), how):
        assert raised.startswith(f"Cannot load {path}: {WRONG[how][1]}")
        assert ("model.norm.weight" in raised) == (how == "missing")
        assert is_unchanged == (how != "missing")


def _start_over(checkpoint: dict[str, Any]) -> None:
    checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] = 0


def _resume_elsewhere(options: dict[str, Any], path: str) -> list[str]:
    found = []
    for module, callbacks in (
        (EditsLoaded(_start_over), []),
        (EditsLoaded(), [EditsLater(lambda checkpoint: checkpoint.pop("loops"))]),
    ):
        with pytest.raises(CheckpointError) as raised:
            checkpoints.fit(options, module, ckpt_path=path, max_epochs=2, callbacks=callbacks)
        found.append(str(raised.value))
    return found


def test_edits_of_loops_are_refused(pool2: RankPool, tmp_path: Path) -> None:
    """Counters that stand elsewhere than loaders and random numbers."""
    path = str(tmp_path / "last.ckpt")
    pool2.run(checkpoints.save, {}, path)
    for messages in pool2.run(_resume_elsewhere, {}, path):
        for message in messages:
            assert "on_load_checkpoint has changed checkpoint['loops']" in message
            assert "call fit without ckpt_path" in message


# --- Plugins ----------------------------------------------------------------------------------------------------------


class OwnIO(TorchCheckpointIO):
    """Writes in a form of its own: a directory with a file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).mkdir()
        super().save_checkpoint({"inner": checkpoint}, f"{path}/own.pt")

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().load_checkpoint(f"{path}/own.pt", *args, **kwargs)["inner"]


def _use_plugin(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    plugins = [OwnIO(), LightningEnvironment()]
    trainer, module = checkpoints.fit(options, plugins=plugins)
    trainer.save_checkpoint(path)
    return full_weights(module.model), checkpoints.resume(options, path, plugins=plugins, max_epochs=1)


@pytest.mark.parametrize(
    "options", [{}, {"data_parallel": "ddp"}, {"save_distributed_checkpoint": False}], ids=str
)
def test_a_plugin_is_used(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """It writes one file, also where the default would have been a directory."""
    path = tmp_path / "last.ckpt"
    for saved, found in pool2.run(_use_plugin, options, str(path)):
        checkpoints.assert_equal([found], saved)
    assert [each.name for each in path.iterdir()] == ["own.pt"]


def _ask_for_directories_beside_a_plugin() -> None:
    checkpoints.fit({"save_distributed_checkpoint": True}, plugins=[OwnIO(), LightningEnvironment()])


def test_a_plugin_has_no_effect_on_directories(pool1: RankPool) -> None:
    with pytest.raises(Exception, match="writes directories of shards, on which OwnIO would have no effect"):
        pool1.run(_ask_for_directories_beside_a_plugin)


# --- One device -------------------------------------------------------------------------------------------------------


def test_one_device_writes_one_file(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """Which torch, plain Lightning and any layout read; a directory only where it was asked for."""
    path = tmp_path / "last.ckpt"
    (saved,) = pool1.run(checkpoints.save, {}, str(path))
    assert path.is_file()
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(state[f"model.{name}"], saved[name]) for name in saved)
    checkpoints.assert_equal(pool2.run(checkpoints.load_only, {}, str(path)), saved)
    pool1.run(checkpoints.save, {"save_distributed_checkpoint": True}, str(tmp_path / "directory.ckpt"))
    assert (tmp_path / "directory.ckpt").is_dir()

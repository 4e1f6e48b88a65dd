"""Starting workers: what is refused, how they are sent, and where trained weights go. Without any process."""

from __future__ import annotations

import sys
import tempfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.launch.launchers import WorkerLauncher
from lightning_automodel.launch.pickling import ByValue
from lightning_automodel.launch.results import load_trained_weights, write_weights
from lightning_automodel.launch.workers import describe_exit
from tests.trainer.runs import SILENT, LabelledModule


def make_trainer(start_method: Any, **kwargs: Any) -> pl.Trainer:
    """A Trainer of two ranks, which are not started."""
    strategy = AutomodelStrategy(start_method=start_method, **kwargs)
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, **SILENT)


class Counts:
    """Cannot be pickled if `function` cannot."""

    def __init__(self, function: Any) -> None:
        self.function = function


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_unpicklable_attribute_is_found(start_method: str) -> None:
    """By its place in the module, not as an error of pickle alone."""
    module = LabelledModule()
    module.counts = {"words": Counts(lambda batch: 1)}
    with pytest.raises(TypeError) as raised:
        make_trainer(start_method).fit(module, DataLoader([1]))
    message = str(raised.value)
    assert message.startswith(f"start_method='{start_method}' sends the Trainer, the module and its data")
    assert "the module.counts['words'].function (function) cannot be pickled" in message
    assert "pass start_method='fork', or 'popen' in a script." in message


class Unspeakable:
    """Fails when it is asked what it is pickled with."""

    def __getstate__(self) -> Any:
        raise NotImplementedError("no state")


def test_whatever_pickling_raises_is_explained() -> None:
    """A class that refuses raises other errors than pickle's own."""
    module = LabelledModule()
    module.last = Unspeakable()
    with pytest.raises(TypeError, match=r"but the module\.last \(Unspeakable\) cannot be pickled: no state\. Define"):
        make_trainer("spawn").fit(module, DataLoader([1]))


def test_other_errors_of_starting_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything can be pickled; the system had no process left."""

    def start_processes(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_processes)
    with pytest.raises(BlockingIOError, match="no more processes"):
        make_trainer("spawn").fit(LabelledModule(), DataLoader([1]))


def test_tensors_are_sent_by_value() -> None:
    """Parameters, buffers and metrics' states arrive in memory of the worker's own; what is one object stays one."""
    module = nn.Linear(1, 1)
    module.again, module.state = module.weight, torch.ones(1).share_memory_()
    found = ForkingPickler.loads(ForkingPickler.dumps(ByValue([module, module.state]))).value
    assert found[0].again is found[0].weight
    assert found[0].state is found[1]
    assert not any(tensor.is_shared() for tensor in (found[0].weight, found[1]))
    assert found[0].weight.tolist() == module.weight.tolist()
    assert not module.weight.is_shared()


def test_unpicklable_class_and_option_are_found() -> None:
    """A class inside of a function, and a function given to the strategy."""

    class Local(LabelledModule):
        pass

    with pytest.raises(TypeError, match=r"but the module \(Local\) cannot be pickled"):
        make_trainer("spawn").fit(Local(), DataLoader([1]))
    with pytest.raises(TypeError, match=r"the strategy\._options\.count_label_tokens \(function\) cannot be pickled"):
        make_trainer("spawn", count_label_tokens=lambda batch: 1).fit(LabelledModule(), DataLoader([1]))


def test_launchers_in_notebooks() -> None:
    """Only forked ranks know what the cells defined."""
    launchers = {name: make_trainer(name).strategy.launcher for name in ("fork", "forkserver", "spawn")}
    assert all(isinstance(launcher, WorkerLauncher) for launcher in launchers.values())
    compatible = {name for name, launcher in launchers.items() if launcher.is_interactive_compatible}
    assert compatible == {"fork"}
    assert not make_trainer("popen").strategy.launcher.is_interactive_compatible


def test_unknown_start_method() -> None:
    """With the valid ones."""
    with pytest.raises(ValueError, match=r"start_method must be one of 'popen', .*'spawn'.*, got 'thread'\."):
        AutomodelStrategy(start_method="thread")


def test_no_effect_where_processes_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else has started them."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.warns(UserWarning, match="start_method='spawn' has no effect: LightningEnvironment says that"):
        make_trainer("spawn")


def test_second_fit_is_refused() -> None:
    """Optimizer states and loops were in processes that have ended."""
    trainer = make_trainer("fork")
    trainer.strategy.launcher._already_fit = True
    with pytest.raises(NotImplementedError, match=r"make a new Trainer and pass fit\(ckpt_path=\.\.\.\)"):
        trainer.fit(LabelledModule(), DataLoader([1]))


class Late(pl.LightningModule):
    """Makes its layer in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(2, 2)


class LateOnMesh(Late):
    """Needs the ranks for it."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        super().configure_model()


def _save(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    weights = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.full((2,), 3.0)}
    torch.save(weights, folder / "weights.pt")
    return folder / "weights.pt", weights


def test_weights_of_configure_model(tmp_path: Path) -> None:
    """The layers are made where they are needed to hold the weights."""
    path, weights = _save(tmp_path)
    module = Late()
    load_trained_weights(module, path)
    assert {name: tensor.tolist() for name, tensor in module.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


def test_weights_without_a_place(tmp_path: Path) -> None:
    """Kept, and an error: the module would seem trained."""
    path, _ = _save(tmp_path)
    expected = r"LateOnMesh is trained, but .* no place for 2 of the 2 trained tensors \(layer\.weight, layer\.bias\)"
    with pytest.raises(RuntimeError, match=expected) as raised:
        load_trained_weights(LateOnMesh(), path)
    assert str(path) in str(raised.value)
    assert raised.value.__cause__ is not None
    with torch.device("meta"):
        module = Late()
        module.configure_model()
    with pytest.raises(RuntimeError, match="no place for 2 of the 2"):
        load_trained_weights(module, path)
    assert path.exists()


def test_weights_of_another_shape(tmp_path: Path) -> None:
    """Kept and named as well, such as those of an embedding that `setup` has enlarged."""
    path, _ = _save(tmp_path)
    module = Late()
    module.layer = nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match=r"no place for 2 of the 2 trained tensors") as raised:
        load_trained_weights(module, path)
    assert str(path) in str(raised.value)


def test_no_space_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says where, and leaves nothing there."""

    def save(state: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RuntimeError, match=f"could not be written to {tmp_path}, from where .* set TMPDIR to a folder"):
        write_weights({})
    assert list(tmp_path.iterdir()) == []


def test_script_start_method_is_refused_in_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run nothing again; one device needs no other process."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(Exception, match=r"AutomodelStrategy\(start_method='fork'\)"):
        make_trainer("popen")
    pl.Trainer(strategy=AutomodelStrategy(), accelerator="cpu", devices=1, **SILENT)


@pytest.mark.parametrize(("status", "text"), [(3, "ended with exit status 3"), (-9, "was ended by SIGKILL")])
def test_exit_statuses(status: int, text: str) -> None:
    """As a person would say them."""
    assert describe_exit(status) == text

"""What cannot be sent to a worker that is no fork is refused by name. Without any process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.trainer.runs import SILENT, LabelledModule


def make_trainer(start_method: Any, **kwargs: Any) -> pl.Trainer:
    """A Trainer of two ranks, which are not started."""
    strategy = AutomodelStrategy(start_method=start_method, **kwargs)
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, **SILENT)


class Counts:
    """Cannot be pickled if `function` cannot."""

    def __init__(self, function: Any) -> None:
        self.function = function


def test_unpicklable_part_is_named() -> None:
    """With what pickle says of it."""
    module = LabelledModule()
    module.counts = {"words": Counts(lambda batch: 1)}
    with pytest.raises(TypeError) as raised:
        make_trainer("spawn").fit(module, DataLoader([1]))
    message = str(raised.value)
    assert message.startswith("start_method='spawn' sends the Trainer, the module and its data")
    assert "and something of them cannot be pickled: Can't pickle local object" in message
    assert "test_unpicklable_part_is_named.<locals>.<lambda>" in message
    assert "pass start_method='fork', or 'popen' in a script." in message


class Unspeakable:
    """Fails when it is asked what it is pickled with."""

    def __getstate__(self) -> Any:
        raise NotImplementedError("no state")


def test_whatever_pickling_raises_is_explained() -> None:
    """A class that refuses raises other errors than pickle's own."""
    module = LabelledModule()
    module.last = Unspeakable()
    with pytest.raises(TypeError, match=r"something of them cannot be pickled: no state\. Define"):
        make_trainer("spawn").fit(module, DataLoader([1]))


def test_other_errors_of_starting_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything can be pickled; the system had no process left."""

    def start_processes(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_processes)
    with pytest.raises(BlockingIOError, match="no more processes"):
        make_trainer("spawn").fit(LabelledModule(), DataLoader([1]))


def test_unpicklable_class_data_and_option_are_found() -> None:
    """A class inside of a function, a function of a loader, and one given to the strategy."""

    class Local(LabelledModule):
        pass

    with pytest.raises(TypeError, match=r"<locals>\.Local"):
        make_trainer("spawn").fit(Local(), DataLoader([1]))
    loader = DataLoader([1], collate_fn=lambda batch: batch)
    with pytest.raises(TypeError, match="<lambda>"):
        make_trainer("spawn").fit(LabelledModule(), loader)
    with pytest.raises(TypeError, match="<lambda>"):
        make_trainer("spawn", count_label_tokens=lambda batch: 1).fit(LabelledModule(), DataLoader([1]))

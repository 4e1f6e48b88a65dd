"""Manual optimization: several backwards of one batch, and roots that a backward leaves out.

What else users write stands in `test_final_gradients.py`; clipping and counts by hand are drawn by `tests/search`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import CASE, TOLERANCE, ManualModule, loader, make_trainer, train_plainly

TWO_ROWS = replace(CASE, ragged=False)


AGAIN = "manual_backward is called again for the same batch, and each loss weighs by all {} of that batch."


class Chunks(ManualModule):
    """One backward for each row, told its count or not."""

    def __init__(self, tell: bool) -> None:
        super().__init__()
        self.tell = tell

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        rows = len(batch["labels"])
        for row in range(rows):
            chunk = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            kwargs = {"num_label_tokens": (chunk["labels"] != -100).sum()} if self.tell else {}
            with optimizer.toggle_model(sync_grad=row == rows - 1):
                self.manual_backward(self(chunk), **kwargs)
        optimizer.step()
        optimizer.zero_grad()


def _fit_chunks(tell: bool, options: dict[str, Any]) -> tuple[dict[str, Tensor], str, list[str]]:
    module = Chunks(tell)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make_trainer(AutomodelStrategy(**options)).fit(module, loader(TWO_ROWS))
        except ValueError as raised:
            error = str(raised)
    warned = [str(each.message) for each in caught if "manual_backward is called" in str(each.message)]
    return full_weights(module.model), error, warned


def test_chunks_of_a_batch(pool2: RankPool) -> None:
    """Exact with a count for each; without, none of them may weigh as the whole batch in silence."""
    expected = train_plainly([[index] for index in range(8)], TWO_ROWS)
    for weights, error, warned in pool2.run(_fit_chunks, True, {}):
        assert weight_error(weights, expected) <= TOLERANCE
        assert (error, warned) == ("", [])
    for _, error, _ in pool2.run(_fit_chunks, False, {}):
        assert error.startswith(AGAIN.format("label tokens"))


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"count": "samples"}, "samples"),
        ({"per_token_loss": False}, None),
    ],
)
def test_backwards_that_may_be_of_the_whole_batch(
    pool2: RankPool, options: dict[str, Any], counted: str | None
) -> None:
    """A GAN and SAM run several: a warning at most, once."""
    for rank, (_, error, warned) in enumerate(pool2.run(_fit_chunks, False, options)):
        assert error == ""
        assert [message.startswith(AGAIN.format(counted)) for message in warned] == [True] * (
            rank == 0 and counted is not None
        )


DDP = {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}


class TwoWindows(ManualModule):
    """Opens the window of one optimizer, ends that of another one, and calls `backward` by itself."""

    def __init__(self, opens: bool) -> None:
        super().__init__()
        self.opens = opens

    def configure_optimizers(self) -> Any:
        parts = [self.model.blocks, self.model.head]
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts], []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        if self.opens:
            with first.toggle_model(sync_grad=False):
                self.manual_backward(self(batch))
        with second.toggle_model(sync_grad=True):
            self.manual_backward(self(batch))
        self(batch).backward()
        second.step()


def _fit_two_windows(options: dict[str, Any], opens: bool) -> str:
    trainer = make_trainer(AutomodelStrategy(count="samples", **options), max_steps=2)
    try:
        trainer.fit(TwoWindows(opens), loader(TWO_ROWS))
    except RuntimeError as raised:
        return str(raised)
    return ""


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{}, DDP], ids=["fsdp2", "ddp"])
def test_a_plain_backward_while_another_window_is_open(pool2: RankPool, options: dict[str, Any]) -> None:
    """It would join the gradients of that window; without one it is the user's own."""
    refused = "A plain loss.backward() in the middle of an accumulation window"
    assert all(message.startswith(refused) for message in pool2.run(_fit_two_windows, options, True))
    assert not any(message.startswith(refused) for message in pool2.run(_fit_two_windows, options, False))

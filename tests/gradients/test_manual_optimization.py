"""Manual optimization: several backwards of one batch.

What else users write stands in `test_final_gradients.py`; clipping and counts by hand are drawn by `tests/search`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.exactness import full_weights, weight_error
from tests.trainer.runs import (
    CASE,
    TOLERANCE,
    ManualModule,
    loader,
    make_trainer,
    train_plainly,
    warnings_of,
)

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
    said: list[str] = []
    error = ""
    trainer = make_trainer(AutomodelStrategy(**options))
    try:
        said = warnings_of("manual_backward is called", trainer.fit, module, loader(TWO_ROWS))
    except ValueError as raised:
        error = str(raised)
    return full_weights(module.model), error, said


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

"""A module's own `backward`, and backwards within the strategy's: gradients are final when autograd's backward returns.

The reference is one process with all tokens of a window in one batch, whose gradients are edited once, before
its step. Clipping and counts by hand are drawn by `tests/search`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_automodel import AutomodelStrategy
from tests.gradients.test_foreign_gradients import Trains, fit_or_error, plainly
from tests.rank_pool import RankPool
from tests.trainer import runs
from tests.trainer.cases import Case
from tests.trainer.exactness import Batch, TinyDecoder, assert_exact, full_weights, weight_error
from tests.trainer.plain import plain_weights
from tests.trainer.refusals import Refused, check_refused

NUM_BATCHES = 6
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "resharded": (2, {"reshard_during_accumulation": True}),
    "undeferred": (2, {"defer_fsdp_grad_sync": False}),
    "ddp": (2, {"data_parallel": "ddp"}),
    "static": (2, {"data_parallel": "ddp", "ddp_kwargs": {"static_graph": True}}),
    "unused": (2, {"data_parallel": "ddp", "ddp_kwargs": {"find_unused_parameters": True}}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "hsdp_all_reduce": (4, {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"}),
}


def case(num_ranks: int) -> Case:
    return Case(seed=20, telling="labels", num_ranks=num_ranks, num_batches=NUM_BATCHES, gap="micro_batches")


def edit(parameters: list[nn.Parameter]) -> None:
    """Clip each element, decay the weights and clip the norm: each wants final gradients."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in trained:
        parameter.grad.clamp_(-0.05, 0.05)
        parameter.grad.add_(parameter.detach(), alpha=0.01)
    nn.utils.clip_grad_norm_(trained, 0.1)


class Edits(runs.LabelledModule):
    """Changes gradients in its `backward`."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        edit(list(self.parameters()))


class Differentiates(Edits):
    """Asks for gradients of the loss that leave nothing in `.grad`, before and after it runs its backward."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.autograd.grad(loss, self.hidden, retain_graph=True)
        super().backward(loss, *args, retain_graph=True, **kwargs)
        torch.autograd.grad(loss, self.hidden)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.hidden = torch.ones((), dtype=torch.float64, requires_grad=True)
        return super().training_step(batch, batch_idx) * self.hidden


class Recomputes(Edits):
    """Reentrant checkpoints run a backward of their own within that of the loss."""

    def forward(self, batch: Batch) -> Tensor:
        model = self.model
        hidden = model.embedding(batch["input_ids"])
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), batch["labels"].flatten())


MODULES: dict[str, type[runs.LabelledModule]] = {
    kind.__name__: kind for kind in (Edits, Differentiates, Recomputes)
}


CASES = {
    f"{name}, {accumulate}, {engine}": (name, accumulate, engine)
    for name in MODULES
    for accumulate in (1, 3)
    for engine in ENGINES
    # DDP itself allows no more: a static graph neither accumulation nor other gradients of the loss, and with
    # unused parameters no reentrant checkpoints.
    if (engine, name, accumulate) == ("static", "Edits", 1)
    or not (engine == "static" or (engine, name) == ("unused", "Recomputes"))
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "case_",
    runs.by_default(
        CASES,
        "Edits, 1, static",
        "Differentiates, 3, fsdp2",
        "Differentiates, 3, ddp",
        "Recomputes, 3, fsdp2",
    ),
)
def test_a_backward_that_edits_gradients(
    pool2: RankPool, pool4: RankPool, case_: tuple[str, int, str]
) -> None:
    name, accumulate, engine = case_
    num_ranks, options = ENGINES[engine]
    data = case(num_ranks)
    pool = pool2 if num_ranks == 2 else pool4
    expected = plain_weights(TinyDecoder(20).double(), accumulate, data, clip=edit)
    settings = {"accumulate_grad_batches": accumulate}
    assert_exact(pool.run(runs.fit_weights, MODULES[name], options, data, **settings), expected)


# --- Backwards within the strategy's ----------------------------------------------------------------------------------


class RunsTwice(runs.LabelledModule):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class RunsNone(runs.LabelledModule):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        pass


class Nested(runs.ManualModule):
    """Runs a backward of the strategy in a hook of the other one."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first = super().training_step(batch, batch_idx)
        second = super().training_step(batch, batch_idx)
        first.register_hook(lambda _: self.manual_backward(second, num_label_tokens=1))
        self.manual_backward(first)


class ZeroesInMidWindow(runs.LabelledModule):
    """In the second backward of a window, before anything of it has come."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.zero_grad()
        super().backward(loss, *args, **kwargs)


class ZeroesHalfway(runs.LabelledModule):
    """By a hook of autograd, when some gradients have come."""

    def forward(self, batch: Batch) -> Tensor:
        handle = self.model.blocks[0].register_forward_hook(self._zero_in_backward)
        loss = super().forward(batch)
        handle.remove()
        return loss

    def _zero_in_backward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: self.optimizers().zero_grad())


ZEROED = "zero_grad() was called within a backward of the strategy"
REFUSED = {
    f"{make.__name__}, {engine}": Refused(
        make,
        (sentence,),
        lambda: runs.loader(case(2)),
        ENGINES[engine][1],
        {"accumulate_grad_batches": accumulate},
    )
    for make, accumulate, sentence in (
        (RunsTwice, 3, "Add up what is backpropagated"),
        # A rank that leaves it out would let the others wait.
        (RunsNone, 3, "LightningModule.backward has run no backward"),
        (Nested, 1, "Call loss.backward() there"),
        # The window's count would cover more than its gradients.
        (ZeroesInMidWindow, 2, ZEROED),
        (ZeroesHalfway, 1, ZEROED),
    )
    for engine in ("fsdp2", "ddp")
}


def test_backwards_that_are_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


class Cached(Trains):
    """A loss over the rows of a batch, whose gradients a hook computes chunk by chunk, as GradCache does."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self.num_chunks = num_chunks

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        chunks = batch[0].tensor_split(self.num_chunks)  # as many on each rank
        with torch.no_grad():
            features = torch.cat([self.net(chunk) for chunk in chunks])
        features.requires_grad_()
        features.register_hook(lambda gradient: self.backpropagate(chunks, gradient))
        return contrast(features)

    def backpropagate(self, chunks: tuple[Tensor, ...], gradient: Tensor) -> None:
        for chunk, part in zip(chunks, gradient.tensor_split(self.num_chunks), strict=True):
            with torch.enable_grad():
                (self.net(chunk) * part).sum().backward()


def contrast(features: Tensor) -> Tensor:
    """[] a mean over rows that no sum over chunks of them is."""
    logits = features @ features.T
    return F.cross_entropy(logits, torch.arange(len(features), device=features.device))


def _cached_plainly(accumulate: int) -> dict[str, Tensor]:
    return plainly(accumulate, sums=lambda net, batch: len(batch[0]) * contrast(net(batch[0])))


@pytest.mark.every_case
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "options",
    runs.by_default({name: ENGINES[name][1] for name in ("fsdp2", "resharded", "undeferred")}, "fsdp2"),
)
def test_backwards_in_a_hook(pool2: RankPool, accumulate: int, options: dict[str, Any]) -> None:
    """FSDP2 reduces after each of them, or after the last one: right either way."""
    expected = _cached_plainly(accumulate)
    for weights in pool2.run(fit_or_error, partial(Cached, 3), options, accumulate):
        assert not isinstance(weights, str), weights
        assert weight_error(weights, expected) <= runs.TOLERANCE


@pytest.mark.every_case
@pytest.mark.parametrize("accumulate", [1, 2])
def test_backwards_in_a_hook_are_refused_under_ddp(pool2: RankPool, accumulate: int) -> None:
    """Which averages the gradients of the first of them; one alone is right."""
    ddp = {"data_parallel": "ddp"}
    for message in pool2.run(fit_or_error, partial(Cached, 3), ddp, accumulate):
        assert "averages the first of them alone over ranks. Pass data_parallel='fsdp2'" in message
    for weights in pool2.run(fit_or_error, partial(Cached, 1), ddp, accumulate):
        assert not isinstance(weights, str), weights
        assert weight_error(weights, _cached_plainly(accumulate)) <= runs.TOLERANCE


class ZeroesInIt(runs.LabelledModule):
    """Zeroes gradients within the strategy's backward, before anything has come; nothing else zeroes them."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.zero_grad()
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize("engine", runs.first_by_default(["fsdp2", "ddp", "resharded"]))
def test_zeroing_within_a_backward(pool2: RankPool, engine: str) -> None:
    """Right where the window holds nothing yet."""
    data = case(2)
    expected = plain_weights(TinyDecoder(20).double(), 2, data)
    found = pool2.run(runs.fit_weights, ZeroesInIt, ENGINES[engine][1], data, accumulate_grad_batches=2)
    assert_exact(found, expected)


# --- Several backwards of one batch -----------------------------------------------------------------------------------

TWO_ROWS = replace(runs.CASE, ragged=False)


AGAIN = "manual_backward is called again for the same batch, and each loss weighs by all {} of that batch."


class Chunks(runs.ManualModule):
    """One backward for each row, told its count or not; with a step after each, as PPO's minibatches."""

    def __init__(self, tell: bool, steps: bool) -> None:
        super().__init__()
        self.tell = tell
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        rows = len(batch["labels"])
        for row in range(rows):
            chunk = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            kwargs = {"num_label_tokens": (chunk["labels"] != -100).sum()} if self.tell else {}
            with optimizer.toggle_model(sync_grad=self.steps or row == rows - 1):
                self.manual_backward(self(chunk), **kwargs)
            if self.steps or row == rows - 1:
                optimizer.step()
                optimizer.zero_grad()


def _fit_chunks(
    tell: bool, options: dict[str, Any], steps: bool = False
) -> tuple[dict[str, Tensor], str, list[str]]:
    module = Chunks(tell, steps)
    said: list[str] = []
    error = ""
    trainer = runs.make_trainer(AutomodelStrategy(**options))
    try:
        said = runs.warnings_of("manual_backward is called", trainer.fit, module, runs.loader(TWO_ROWS))
    except ValueError as raised:
        error = str(raised)
    return full_weights(module.model), error, said


def test_chunks_of_a_batch(pool2: RankPool) -> None:
    """Exact with a count for each; without, none of them may weigh as the whole batch in silence."""
    expected = runs.train_plainly([[index] for index in range(8)], TWO_ROWS)
    for weights, error, warned in pool2.run(_fit_chunks, True, {}):
        assert weight_error(weights, expected) <= runs.TOLERANCE
        assert (error, warned) == ("", [])
    for _, error, _ in pool2.run(_fit_chunks, False, {}):
        assert error.startswith(AGAIN.format("label tokens"))


@pytest.mark.parametrize(
    ("options", "steps", "counted"),
    [
        ({"count": "samples"}, False, "samples"),
        ({"count": "samples"}, True, "samples"),
        ({"per_token_loss": False}, False, None),
    ],
)
def test_backwards_that_may_be_of_the_whole_batch(
    pool2: RankPool, options: dict[str, Any], steps: bool, counted: str | None
) -> None:
    """A GAN and SAM run several: a warning at most, once."""
    for rank, (_, error, warned) in enumerate(pool2.run(_fit_chunks, False, options, steps)):
        assert error == ""
        assert [message.startswith(AGAIN.format(counted)) for message in warned] == [True] * (
            rank == 0 and counted is not None
        )

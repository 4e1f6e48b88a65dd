"""Rank 0's comparison of each step with its replay, and the verdict on all steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.callbacks.exactness import results
from lightning_automodel.callbacks.exactness.count_check import CountCheck
from lightning_automodel.callbacks.exactness.gradient_check import GradientCheck
from lightning_automodel.callbacks.exactness.isolation import random_states_kept
from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.callbacks.exactness.optimizer_check import OptimizerCheck, changes_gradients
from lightning_automodel.callbacks.exactness.recording import RecordedMicroBatch, RecordedWindow, Recorder
from lightning_automodel.callbacks.exactness.replay import Gradients, Replay, Shares
from lightning_automodel.callbacks.exactness.results import CountResult, StepResult, described, number_of
from lightning_automodel.callbacks.running_strategy import options_of, weighting_of
from lightning_automodel.data.samplers import distributed_sampler, repeats
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples
from lightning_automodel.internals import lightning as lightning_internals

_NO_COUNT = CountResult(
    results.NOT_CHECKED,
    "none was given, and nothing in the batch can be counted, so that every micro-batch weighs the same"
    " here: pass ExactnessCheck(count_label_tokens=<function of the batch>), or per_token_loss=False if"
    " that is meant",
    is_decisive=True,
)


class Comparison:
    """Compares steps of the run with a replay, one after the other.

    Args:
        replay: The replay of the run.
        trainer: The run's Trainer.
        given: The counting options that the user passed for another strategy; None if there are none.
    """

    def __init__(self, replay: Replay, trainer: pl.Trainer, given: TokenWeighting | None) -> None:
        self.steps: list[StepResult] = []
        self._replay = replay
        self._trainer = trainer
        self._num_slices = options_of(trainer).get("context_parallel_size", 1)
        weighting = weighting_of(trainer)
        self._weighting = weighting or given or TokenWeighting()
        self._is_ours = weighting is not None
        self._knows_count = given is not None or self._is_ours
        self._count: CountResult | None = None
        self._step = StepResult()
        self._is_skipped = False
        self._gradients: Gradients = {}
        self._optimizer: OptimizerCheck | None = None

    # --- Before the step ----------------------------------------------------------------------------------

    def compare_gradients(
        self,
        windows: list[RecordedWindow],
        recorder: Recorder,
        gradients: Gradients,
        weights: dict[str, Tensor],
        now: dict[str, Tensor],
        unequal: list[str],
    ) -> None:
        """Compare the final ``gradients`` of a step with those of one batch.

        ``weights`` are the weights before the window, ``now`` those that have changed since, ``unequal`` the
        names of those that differ between ranks.
        """
        step = StepResult(unequal=unequal)
        self._step = step
        self._gradients = gradients
        own = _by_data_rank(windows, self._num_slices, self._weighting.loss_reduction == "sum")
        known = [gradient for gradient in gradients.values() if gradient is not None]
        is_finite = all(bool(torch.isfinite(gradient).all()) for gradient in known)
        is_scaled = getattr(self._trainer.precision_plugin, "scaler", None) is not None
        losses = [record.loss for window in own for record in window.micro_batches]
        # With gradients that are not finite, a gradient scaler skips the step.
        self._is_skipped = all(loss is None for loss in losses) or (is_scaled and not is_finite)
        if self._is_skipped:
            return
        problems = [window.problem for window in windows if window.problem]
        try:
            self._replay.begin_step(recorder.trainable, recorder.training)
            if problems:
                raise ReplayError(problems[0])
            if not is_finite:
                raise ReplayError("gradients are not finite")
            with torch.enable_grad(), random_states_kept(self._trainer.strategy.root_device):
                self._replay_gradients(own, gradients, weights, now)
        except ReplayError as reason:
            step.problem = str(reason)
        except Exception as error:
            step.problem = f"the replay has raised {described(error)}"
        self._suspect_callbacks()

    def _suspect_callbacks(self) -> None:
        """Withdraw the verdict on wrong gradients if a user's callback may have changed them on purpose."""
        step = self._step
        callbacks = changes_gradients(self._trainer)
        if step.is_wrong and callbacks and not step.explanation and step.problem is None:
            step.problem = (
                f"they are {results.percent(step.gradient_error)} off, which the callback {callbacks[0]} may"
                " do on purpose: check without it"
            )

    def _replay_gradients(
        self,
        windows: list[RecordedWindow],
        gradients: Gradients,
        weights: dict[str, Tensor],
        now: dict[str, Tensor],
    ) -> None:
        records = [record for window in windows for record in window.micro_batches]
        shares = self._shares(records)
        if self._count is None:
            self._check_count(windows, weights)
            shares = self._shares(records)
        self._step.counts = shares.counts
        check = GradientCheck(self._replay, self._trainer, windows, shares, self._step)
        check.compare(gradients, weights, now)
        if self._count is _NO_COUNT and self._step.explanation:
            self._step.problem = f"no count was given. {self._step.explanation}".rstrip(".")

    # --- The count ----------------------------------------------------------------------------------------

    def _shares(self, records: list[RecordedMicroBatch]) -> Shares:
        try:
            counts = [self._count_of(record) for record in records]
        except (ValueError, TypeError):
            if self._knows_count or not self._weighting.per_token_loss:
                raise
            # The strategy does not count: try one sample per row, then no count at all.
            by_rows = TokenWeighting(count_label_tokens=count_samples)
            if self._weighting == by_rows:
                by_rows = TokenWeighting(per_token_loss=False)
            self._weighting = by_rows
            return self._shares(records)
        denominator = sum(counts)
        if not self._weighting.per_token_loss:
            denominator = float(sum(count > 0 for count in counts))
        return Shares(self._weighting, counts, denominator)

    def _count_of(self, record: RecordedMicroBatch) -> float:
        if record.loss is None:
            return 0.0
        if record.returned_count is None:
            output = None
        else:
            output = {"num_label_tokens": record.returned_count}
        return float(self._weighting.count(record.arguments[0], output))

    def _check_count(self, windows: list[RecordedWindow], weights: dict[str, Tensor]) -> None:
        """Find out, once, whether the loss is divided by the count."""
        if not self._weighting.per_token_loss:
            self._count = _NO_COUNT
            if self._knows_count:
                self._count = CountResult(results.EXACT, "every micro-batch weighs the same, as told")
            return
        check = CountCheck(self._replay, windows, weights, self._weighting)
        try:
            count = check.check()
        except ReplayError:
            raise
        except Exception as error:
            count = CountResult(results.NOT_CHECKED, f"not checked ({described(error)})")
        if count.verdict == results.WRONG and not self._knows_count:
            # This class chose the count, so it is not the user's mistake.
            if check.better is None:
                raise ReplayError(
                    f"the weight of micro-batches is not known, as {count.text}: tell ExactnessCheck the"
                    " count, or return it as num_label_tokens"
                )
            self._weighting = check.better
            count = CountResult(results.EXACT, "agrees with the loss")
        self._count = count

    # --- The step -----------------------------------------------------------------------------------------

    def step_copy(
        self,
        optimizer: Optimizer,
        names: dict[int, str],
        gradients: Gradients,
        weights: dict[str, Tensor],
        states: dict[str, dict[str, Any]],
    ) -> None:
        """Step a copy of the optimizer with the run's own ``gradients``, after hooks and clipping."""
        if self._is_skipped:
            return
        try:
            with random_states_kept(self._trainer.strategy.root_device):
                check = OptimizerCheck(self._replay, optimizer, names, weights, states)
                check.compare_clipping(self._gradients, gradients, self._trainer, self._step)
                check.step(gradients)
            self._optimizer = check
        except Exception as error:
            self._step.note = described(error)

    def compare_weights(self, after: dict[str, Tensor]) -> int:
        """Compare the weights ``after`` the run's step. Returns how many steps have been compared."""
        if not self._is_skipped:
            if self._optimizer is not None:
                self._optimizer.compare(after, self._step)
            self.steps.append(self._step)
            for logger in self._trainer.loggers:
                logger.log_metrics(self._step.numbers(), lightning_internals.logging_step(self._trainer))
        self._optimizer = None
        self._gradients = {}
        return len(self.steps)

    # --- The verdict --------------------------------------------------------------------------------------

    def verdict(self, seconds: float) -> tuple[str, str]:
        """The verdict, and the report with its reasons."""
        count = self._count
        unit = self._weighting.unit
        if count is _NO_COUNT and all(len(step.counts) <= 1 for step in self.steps):
            count = CountResult(results.EXACT, "not needed, as every step has one micro-batch")
        verdict = results.verdict_of(self.steps, count)
        head = f"ExactnessCheck: {verdict.upper()}"
        if not self.steps:
            return verdict, f"{head}. There was no optimizer step."
        if verdict == results.EXACT and count is not None and count.verdict == results.NOT_CHECKED:
            head += " for the count given" if self._knows_count else f" if each {unit} counts the same"
        steps = number_of(len(self.steps), "optimizer step")
        ranks = number_of(self._trainer.world_size, "rank")
        lines = results.report_of(self.steps, count, unit, self._is_ours)
        for loader in CombinedLoader(self._trainer.train_dataloader).flattened:
            sampler = distributed_sampler(loader)
            if sampler is not None and getattr(loader, "last_batch", None) is None:
                lines.append(
                    f"{repeats(sampler)}: one process takes each once, which these steps do not show."
                )
        return verdict, "\n  ".join([f"{head} in {steps} on {ranks}, compared in {seconds:.1f} s.", *lines])


def _by_data_rank(windows: list[RecordedWindow], num_slices: int, is_sum: bool) -> list[RecordedWindow]:
    """One window for all ranks that share their data, in the order of the data."""
    peers: dict[int, list[RecordedWindow]] = {}
    for window in windows:
        peers.setdefault(window.data_rank, []).append(window)
    ordered = [peers[rank] for rank in sorted(peers)]
    if num_slices == 1:
        return [first for first, *_ in ordered]
    merged: list[RecordedWindow] = []
    for same_data in ordered:
        slices = zip(*(window.micro_batches for window in same_data), strict=False)
        records = [_whole(parts, num_slices, is_sum) for parts in slices]
        merged.append(replace(same_data[0], micro_batches=records))
    return merged


def _whole(slices: Sequence[RecordedMicroBatch], num_slices: int, is_sum: bool) -> RecordedMicroBatch:
    """The micro-batch of which ranks had ``slices``, with its count and its loss."""
    share = num_slices / len(slices)  # tensor-parallel ranks have the same slice
    counted = [
        (part.loss, part.returned_count) for part in slices if part.loss is not None and part.returned_count
    ]
    if not counted:
        return slices[0]
    count = share * sum(count for _, count in counted)
    if is_sum:
        loss = share * sum(loss for loss, _ in counted)
    else:
        loss = share * sum(loss * count for loss, count in counted) / count
    return replace(slices[0], returned_count=count, loss=loss)

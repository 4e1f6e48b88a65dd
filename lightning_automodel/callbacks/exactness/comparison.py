"""What rank 0 compares in each step, and its verdict on all of them."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel import lightning_internals
from lightning_automodel.callbacks.exactness import results
from lightning_automodel.callbacks.exactness.count_check import CountCheck
from lightning_automodel.callbacks.exactness.gradient_check import GradientCheck
from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.callbacks.exactness.optimizer_check import OptimizerCheck, changes_gradients
from lightning_automodel.callbacks.exactness.recording import Recorder, Window
from lightning_automodel.callbacks.exactness.replay import Gradients, Replay, Shares, random_states_kept
from lightning_automodel.callbacks.exactness.results import CountResult, StepResult, described
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples


class Comparison:
    """Compares steps of the run with a replay, one after the other.

    Args:
        replay: Of the run.
        trainer: Of the run.
        told: How the user has told to count under another strategy; None: not at all.
    """

    def __init__(self, replay: Replay, trainer: pl.Trainer, told: TokenWeighting | None) -> None:
        self.steps: list[StepResult] = []
        self._replay, self._trainer = replay, trainer
        strategy = automodel(trainer)
        options = {} if strategy is None else strategy.describe()["options"]
        self._is_ours = strategy is not None
        self._has_slices = options.get("context_parallel_size", 1) > 1
        self._weighting = _weighting_of(options) if options else told or TokenWeighting()
        self._knows_count = told is not None or self._is_ours
        self._count: CountResult | None = None
        self._step = StepResult()
        self._is_skipped = False
        self._gradients: Gradients = {}
        self._optimizer: OptimizerCheck | None = None

    # --- Before the step ----------------------------------------------------------------------------------------------

    def compare_gradients(
        self,
        windows: list[Window],
        recorder: Recorder,
        gradients: Gradients,
        weights: dict[str, Tensor],
        now: dict[str, Tensor],
        unequal: list[str],
    ) -> None:
        """Compare the final ``gradients`` of a step with those of one batch.

        ``weights`` are those before the window, ``now`` those that have changed since, ``unequal`` the names of those
        that differ between ranks.
        """
        step, self._gradients = StepResult(unequal=unequal), gradients
        self._step = step
        peers = _by_data_rank(windows)
        own = [each[0] for each in peers]
        records = [record for window in own for record in window.micro_batches]
        is_finite = all(gradient is None or bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        is_scaled = getattr(self._trainer.precision_plugin, "scaler", None) is not None
        # A gradient scaler does not make the step either.
        self._is_skipped = all(record.loss is None for record in records) or (is_scaled and not is_finite)
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
                self._replay_gradients(own, peers, gradients, weights, now)
        except ReplayError as reason:
            step.problem = str(reason)
        except Exception as error:
            step.problem = f"the replay has raised {described(error)}"
        callbacks = changes_gradients(self._trainer)
        if step.is_wrong and callbacks and not step.explanation and step.problem is None:
            step.problem = (
                f"they are {results.percent(step.gradient_error)} off, which the callback {callbacks[0]} may do on"
                " purpose: check without it"
            )

    def _replay_gradients(
        self,
        windows: list[Window],
        peers: list[list[Window]],
        gradients: Gradients,
        weights: dict[str, Tensor],
        now: dict[str, Tensor],
    ) -> None:
        shares = self._shares(peers)
        if self._count is None:
            self._check_count(windows, weights)
            shares = self._shares(peers)
        self._step.counts = shares.counts
        check = GradientCheck(self._replay, self._trainer, windows, shares, self._step)
        check.compare(gradients, weights, now)

    # --- The count ----------------------------------------------------------------------------------------------------

    def _shares(self, peers: list[list[Window]]) -> Shares:
        counts = []
        for own, *others in peers:
            for index, record in enumerate(own.micro_batches):
                told = record.returned_count
                if told is not None and self._has_slices:  # each peer returns the count of its slice
                    told += sum(window.micro_batches[index].returned_count or 0.0 for window in others)
                output = None if told is None else {"num_label_tokens": told}
                counts.append(0.0 if record.loss is None else float(self._count_of(record.arguments[0], output)))
        is_mean_of_losses = not self._weighting.per_token_loss
        denominator = float(sum(count > 0 for count in counts)) if is_mean_of_losses else sum(counts)
        return Shares(self._weighting, counts, denominator)

    def _count_of(self, batch: Any, output: Any) -> Any:
        try:
            return self._weighting.count(batch, output)
        except (ValueError, TypeError):
            if self._knows_count:
                raise
        # Under a strategy that does not count: without labels, a row may be a sample.
        self._weighting = TokenWeighting(count_label_tokens=count_samples)
        return self._weighting.count(batch, output)

    def _check_count(self, windows: list[Window], weights: dict[str, Tensor]) -> None:
        """Find out, once, whether what is counted is what the loss is divided by."""
        if not self._weighting.per_token_loss:
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
            # What was tried first is not the user's mistake.
            if check.better is None:
                raise ReplayError(
                    f"the weight of micro-batches is not known, as {count.text}: tell ExactnessCheck the count, or"
                    " return it as num_label_tokens"
                )
            self._weighting, count = check.better, CountResult(results.EXACT, "agrees with the loss")
        self._count = count

    # --- The step -----------------------------------------------------------------------------------------------------

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
        self._optimizer, self._gradients = None, {}
        return len(self.steps)

    # --- The verdict --------------------------------------------------------------------------------------------------

    def verdict(self, seconds: float) -> tuple[str, str]:
        """The verdict, and the report that says why."""
        verdict = results.verdict_of(self.steps, self._count)
        head = f"ExactnessCheck: {verdict.upper()}"
        if not self.steps:
            return verdict, f"{head}. There was no optimizer step."
        if verdict == results.EXACT and self._count is not None and self._count.verdict == results.NOT_CHECKED:
            head += " for the count given"
        steps = _number(len(self.steps), "optimizer step")
        ranks = _number(self._trainer.world_size, "rank")
        lines = results.report_of(self.steps, self._count, self._weighting.unit, self._is_ours)
        return verdict, "\n  ".join([f"{head} in {steps} on {ranks}, compared in {seconds:.1f} s.", *lines])


def _weighting_of(options: dict[str, Any]) -> TokenWeighting:
    return TokenWeighting(
        options["per_token_loss"],
        options["loss_reduction"],
        options["label_key"],
        options["ignore_index"],
        options["label_shift"],
        count_samples if options["count"] == "samples" else options["count_label_tokens"],
    )


def _by_data_rank(windows: list[Window]) -> list[list[Window]]:
    """Windows of ranks that share their data together, in the order of the data."""
    peers: dict[int, list[Window]] = {}
    for window in windows:
        peers.setdefault(window.data_rank, []).append(window)
    return [peers[rank] for rank in sorted(peers)]


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

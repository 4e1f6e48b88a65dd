"""The callback that computes a training's first steps again, on all ranks together, and reports the difference.

==========================  =============================================================================
in ``exactness/``           what it does
==========================  =============================================================================
``recording``               records micro-batches, what each step starts from, and gradients of windows
``module_state``            takes a snapshot of the state of modules, and starts a step from one
``counting``                counts what each micro-batch should weigh, and says whether its loss divides by it
``replay``                  computes a window again, as one batch, on all ranks together
``comparison``              compares its gradients with the run's
``report``                  the results in words
==========================  =============================================================================
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel.callbacks.exactness.comparison import compare, training_problem
from lightning_automodel.callbacks.exactness.counting import Counting
from lightning_automodel.callbacks.exactness.recording import RecordedWindow, Recorder
from lightning_automodel.callbacks.exactness.replay import Replay
from lightning_automodel.callbacks.exactness.report import WRONG, StepResult, conclude
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.gradients.token_loss import TokenWeighting
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions

log = logging.getLogger(__name__)


class ExactnessCheck(Callback):
    """Checks whether the gradients of a training's first steps equal those of one process with one big batch.

    It works under any strategy that holds parameters as plain tensors or as ``DTensor``, and does not change
    the training, which has the same bits without it. Before each of the first optimizer steps all ranks
    compute the micro-batches of all ranks again, each of them together, and compare what they add up to
    with the gradients of the run, as autograd has left them: before any hook, callback, clipping or
    optimizer. So each of these steps is a collective over all ranks, and takes as long as two steps of a
    single rank on the micro-batches of all.

    The verdict is logged by rank 0, as a warning; docs/is_my_training_exact.md explains each verdict and its remedy.

    Args:
        steps: Number of optimizer steps to check.
        raises: Whether to raise RuntimeError on all ranks if the verdict is ``"wrong"``.
        count: Unit that the loss is a mean over, as for ``AutomodelStrategy``. This and the options below
            are for other strategies. None takes what the loss divides by, as its graph tells, else the
            labels of the batch.
        count_label_tokens: A function of the batch that returns what the loss divides by.
        per_token_loss: False if every micro-batch should weigh the same.
        loss_reduction: ``"sum"`` if ``training_step`` returns a sum.
        label_key: Entry of the batch that holds the labels.
        ignore_index: Label that the loss ignores.
        label_shift: Number of labels at the start of each row that the loss does not use.

    Raises:
        ValueError: If ``steps`` is not positive, or a counting option is not valid; at the start of a fit, if one
            is given beside ``AutomodelStrategy``.

    Attributes:
        verdict: ``"exact"``, ``"wrong"`` or ``"not checked"``; None until it is known.
        report: The logged text.
        results: A ``StepResult`` for each step, with all numbers.

    Examples:
        >>> callbacks = [ExactnessCheck()]
    """

    def __init__(
        self,
        steps: int = 3,
        raises: bool = False,
        count: Literal["tokens", "samples"] | None = None,
        count_label_tokens: Callable[..., Any] | None = None,
        per_token_loss: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        label_key: str = "labels",
        ignore_index: int = -100,
        label_shift: int = 0,
    ) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"ExactnessCheck: steps must be an integer of at least 1, got {steps}.")
        options = StrategyOptions(
            per_token_loss=per_token_loss,
            loss_reduction=loss_reduction,
            label_key=label_key,
            ignore_index=ignore_index,
            label_shift=label_shift,
            count_label_tokens=count_label_tokens,
            count=count,
        )
        given = options.weighting()
        self._given = given if count or given != TokenWeighting() else None
        self._num_steps = steps
        self._patches = PatchStack()
        self._raises = raises
        self._reset()

    def _reset(self) -> None:
        self.verdict: str | None = None
        self.report = ""
        self.results: list[StepResult] = []
        self._seconds = 0.0
        self._recorder: Any = None  # of a fit, until its verdict

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        run = run_of(trainer)
        if run is not None and self._given:
            raise ValueError(
                "ExactnessCheck checks the counting options of AutomodelStrategy, and takes its own only"
                " under other strategies: pass them to AutomodelStrategy alone."
            )
        weighting = self._given if run is None else run.windows.weighting
        self._recorder = Recorder(trainer, Counting(pl_module, weighting), self._patches)
        reason = training_problem(self._recorder)
        if reason:
            self._finish(trainer, reason)
        else:
            self._recorder.start()

    # --- One step -----------------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if pl_module.automatic_optimization:
            self._compare(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        run = run_of(trainer)
        # Weights of each step were recorded. A replay needs what an open window holds.
        if run and not (pl_module.automatic_optimization or run.windows.open_windows):
            self._compare(trainer)

    def _compare(self, trainer: pl.Trainer) -> None:
        """Compare the windows that have ended."""
        if self.verdict:
            return
        started_at = time.perf_counter()
        self._patches.restore()
        ended = [window for window in self._recorder.windows.values() if window.gradients is not None]
        # A rank without a window joins the others' replays: its empty one cannot be judged.
        for window in ended or [RecordedWindow()]:
            replay = Replay(self._recorder, window)
            if replay.micro_batches:  # else no rank has computed a loss
                self.results.append(compare(replay, measures_slope=not self.results))
        self._seconds += time.perf_counter() - started_at
        if len(self.results) >= self._num_steps:
            self._finish(trainer)
        else:
            self._recorder.start()

    # --- The verdict --------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.verdict is None:
            self._finish(trainer)

    @override
    def on_exception(self, *_: Any) -> None:
        self._patches.restore()
        self._recorder = None

    def _finish(self, trainer: pl.Trainer, reason: str = "") -> None:
        self._patches.restore()
        self.verdict, self.report = conclude(self.results, self._recorder, self._seconds, reason)
        self._recorder = None  # with batches, gradients and weights on the host
        if trainer.is_global_zero:
            log.warning(self.report)  # its user has asked for it, and many silence what is below
        if self._raises and self.verdict == WRONG:
            raise RuntimeError(self.report)

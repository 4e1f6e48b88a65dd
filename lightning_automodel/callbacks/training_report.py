"""The callback that writes a fit's report as an HTML page."""

import os
from importlib.util import find_spec
from typing import Any

import fsspec
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_automodel.callbacks import report_page
from lightning_automodel.callbacks.running_strategy import automodel, below_root
from lightning_automodel.callbacks.step_monitor import StepMonitor


class TrainingReport(Callback):
    """Writes ``report.html``: a report of the fit, in one file that needs no network.

    It shows training and validation loss, gradient norm, learning rate, throughput and
    ``strategy.describe()``. The curves begin with this fit. They come from ``StepMonitor``, which must be among
    the Trainer's callbacks too. Unknown values are left out; a value that is not finite is a gap.

    Rank 0 writes the file when the fit ends, even with an exception. If that fails, a warning says why.
    Nothing is communicated. Needs plotly: ``pip install 'lightning-automodel[report]'``.

    Args:
        path: Path of the file. A relative path is below the Trainer's ``default_root_dir``.

    Raises:
        ImportError: If plotly is not installed.
        ValueError: At the start of the fit, if the Trainer has no ``StepMonitor``.

    Examples:
        >>> callbacks = [StepMonitor(), TrainingReport()]
    """

    def __init__(self, path: str | os.PathLike[str] = "report.html") -> None:
        if find_spec("plotly") is None:  # now, not after days of training
            raise ImportError("TrainingReport draws with plotly: pip install 'lightning-automodel[report]'.")
        self._path = os.fspath(path)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [callback for callback in callbacks if isinstance(callback, StepMonitor)]
        if not monitors:
            raise ValueError(
                "TrainingReport draws what StepMonitor records, and the Trainer has none:"
                " pass callbacks=[StepMonitor(), TrainingReport()]."
            )
        self._history = monitors[0].history
        self._first_entry = len(self._history)  # earlier entries belong to another fit
        self._validated: dict[str, dict[int, float]] = {}
        self._title = type(pl_module).__name__  # before sharding changes the class

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # All ranks read the metrics, although rank 0 writes: reading one may compute it in a collective.
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        for name, value in values.items():
            if not name.startswith("train"):
                self._validated.setdefault(name, {})[trainer.global_step] = value

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING and hasattr(self, "_history"):
            self._write(trainer, **{"Ended by": f"{type(exception).__name__}: {exception}"})

    def _write(self, trainer: pl.Trainer, **ended_by: str) -> None:
        if not trainer.is_global_zero:
            return
        try:
            facts: dict[str, Any] = {
                "Strategy": type(trainer.strategy).__name__,
                "Ranks": trainer.world_size,
                "Steps": trainer.global_step,
                **ended_by,
            }
            strategy = automodel(trainer)
            if strategy is not None:
                facts["Configuration"] = strategy.describe()
            history = self._history[self._first_entry :]
            page = report_page.render(self._title, facts, history, self._validated)
            with fsspec.open(below_root(trainer, self._path), "w") as file:  # makes its directory
                file.write(page)
        except Exception as error:  # a report must not end the run, nor hide the exception that did
            rank_zero_warn(f"TrainingReport could not write {self._path}: {type(error).__name__}: {error}")

"""The Trainer's own loops, told to say where they are, and to go on where a checkpoint says.

Lightning 2.6.6 guesses from its counters where a checkpoint was saved, and guesses wrong in several places: a
validation that was due is skipped, the logger's step is one off, the end of an epoch is skipped or its means are. It
has no setting for any of this, so for the time of a fit the loops are of these subclasses.
"""

from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_automodel import lightning_internals

RUN_START = "run start"
EPOCH_START = "epoch start"
BATCH = "batch"
BATCH_END = "batch end"
AFTER_BATCH = "after batch"
AFTER_VALIDATION = "after validation"
EPOCH_END = "epoch end"
"""What a fit does next, in its order."""

WITHIN_EPOCH = (BATCH, BATCH_END, AFTER_BATCH, AFTER_VALIDATION)
UNFINISHED = (BATCH_END, AFTER_BATCH, AFTER_VALIDATION, EPOCH_END)


class Follower(ABC):
    """Whom the loops tell where they are.

    Attributes:
        planned: What comes next by a checkpoint, until that begins; None without one.
    """

    planned: str | None = None

    @abstractmethod
    def begin_run(self) -> None:
        """The fit loop begins."""

    @abstractmethod
    def loaders_made(self, combined: Any) -> bool:
        """Training loaders are about to be iterated for the first time. Returns whether they begin where planned."""

    @abstractmethod
    def loaders_iterated(self, fetcher: Any) -> None:
        """Training loaders are iterated, anew or still."""

    @abstractmethod
    def begin_planned(self) -> None:
        """What was planned begins: from here on, random numbers are those of the stopped run."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """An epoch begins, its hooks first."""

    @abstractmethod
    def begin_iteration(self) -> bool:
        """The epoch's batches begin. Returns whether the loaders stand where a checkpoint says already."""

    @abstractmethod
    def epoch_iterated(self) -> None:
        """The loaders are iterated for this epoch."""

    @abstractmethod
    def begin_batch(self) -> None:
        """A batch is about to be drawn."""

    @abstractmethod
    def end_step(self) -> None:
        """The hooks of a batch are over, and validation may follow."""

    @abstractmethod
    def end_batch(self) -> None:
        """Nothing is left of the batch."""

    @abstractmethod
    def validation_loaders_made(self) -> None:
        """Validation loaders exist."""

    @abstractmethod
    def begin_validation(self) -> None:
        """Validation begins."""

    @abstractmethod
    def has_validated(self) -> None:
        """Validation has ended but for its last hooks."""

    @abstractmethod
    def begin_epoch_end(self) -> None:
        """The hooks that end an epoch are about to run, or those that end a run within one."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Nothing is left of the epoch, or of the run."""


class FollowedFitLoop(lightning_internals.FitLoop):
    """Epochs."""

    follower: Follower

    @property
    @override
    def done(self) -> bool:
        """Not while what a checkpoint left unfinished is to be done, whatever limits were reached with it."""
        return self.follower.planned not in UNFINISHED and super().done

    @lightning_internals.FitLoop.restarting.setter
    def restarting(self, restarting: bool) -> None:
        """With a plan, at the end of an epoch too: Lightning runs no sanity check where it restarts."""
        owner: Any = lightning_internals.FitLoop if self.follower.planned is None else lightning_internals.Loop
        owner.restarting.fset(self, restarting)

    @override
    def run(self) -> None:
        self.follower.begin_run()
        super().run()
        if self.follower.planned is not None:
            self.follower.begin_planned()

    @override
    def setup_data(self) -> None:
        super().setup_data()
        if self._data_fetcher is not None:
            self.follower.loaders_iterated(self._data_fetcher)

    @override
    def _load_combined_loader_states(self) -> None:
        """What Lightning calls between making the loaders and iterating them; it would load rank 0's states."""
        if self.follower.loaders_made(self._combined_loader):
            self._combined_loader_states_to_load = []
        super()._load_combined_loader_states()

    @override
    def reset(self) -> None:
        super().reset()
        if self.follower.planned in WITHIN_EPOCH:
            self._restart_stage = lightning_internals.RestartStage.RESTARTED_MID_EPOCH

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        if self.follower.planned == EPOCH_END:
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        """The end of :meth:`on_advance_end`, whose hooks have run."""
        self.follower.begin_planned()
        connector, completed = self.trainer._logger_connector, vars(self.epoch_progress.current)
        completed["completed"] = completed["processed"] - 1
        connector.on_epoch_end()
        self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch_loop._batches_that_stepped -= 1
        connector.update_train_epoch_metrics()
        self.epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
        self.follower.end_epoch()

    @override
    def on_advance_start(self) -> None:
        if self.follower.planned == EPOCH_START:
            self.follower.begin_planned()
        if self.follower.planned is None:
            self.follower.begin_epoch()
        super().on_advance_start()

    @override
    def on_advance_end(self) -> None:
        self.follower.begin_epoch_end()
        try:
            super().on_advance_end()
        finally:
            counts = vars(self.epoch_progress.current)
            if counts["completed"] == counts["processed"]:
                self.follower.end_epoch()


class FollowedEpochLoop(lightning_internals.TrainingEpochLoop):
    """Batches."""

    follower: Follower

    @property
    @override
    def done(self) -> bool:
        """Not while the last batch is to be finished."""
        return self.follower.planned not in UNFINISHED and super().done

    @override
    def reset(self) -> None:
        if self.follower.planned not in WITHIN_EPOCH:
            super().reset()

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        fetched, fit_loop = data_fetcher.fetched, self.trainer.fit_loop
        if is_placed := self.follower.begin_iteration():
            fit_loop._resuming_from_checkpoint = True
        super().on_run_start(data_fetcher)
        if is_placed:
            fit_loop._resuming_from_checkpoint = False
            data_fetcher.fetched = fetched
        self.follower.epoch_iterated()

    @override
    def advance(self, data_fetcher: Any) -> None:
        planned = self.follower.planned
        if planned is not None:
            self.follower.begin_planned()
        if planned == BATCH_END:
            self._finish_batch()
        elif planned == AFTER_VALIDATION:
            self._skip_next_val = True
        if planned not in UNFINISHED:
            self.follower.begin_batch()
            super().advance(data_fetcher)

    def _finish_batch(self) -> None:
        """The end of :meth:`advance`, whose hooks have run."""
        connector = self.trainer._logger_connector
        connector.on_batch_end()
        self.batch_progress.increment_completed()
        connector.update_train_step_metrics()

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        self.follower.end_step()
        super().on_advance_end(data_fetcher)

    @override
    def _save_loggers_on_train_batch_end(self) -> None:
        """The last that Lightning does in a batch, before it may raise ``SIGTERMException``."""
        self.follower.end_batch()
        super()._save_loggers_on_train_batch_end()


class FollowedValidationLoop(lightning_internals.EvaluationLoop):
    """Validation within a fit."""

    follower: Follower

    @override
    def run(self) -> list[Any]:
        if not self.trainer.sanity_checking:
            self.setup_data()
            self.follower.validation_loaders_made()
            self.follower.begin_validation()
        return super().run()

    @override
    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.trainer.sanity_checking:
            self.follower.has_validated()
        super()._on_evaluation_end(*args, **kwargs)


def follow(trainer: "pl.Trainer", follower: Follower) -> None:
    """Let the loops of ``trainer`` tell ``follower``, until :func:`unfollow`."""
    unfollow(trainer)
    for loop, followed in zip(
        _loops(trainer), (FollowedFitLoop, FollowedEpochLoop, FollowedValidationLoop), strict=True
    ):
        loop.__class__ = type(followed.__name__, (followed, type(loop)), {})
        loop.follower = follower


def unfollow(trainer: "pl.Trainer") -> None:
    """Give the loops back."""
    for loop in _loops(trainer):
        if "follower" in loop.__dict__:
            loop.__class__ = type(loop).__bases__[1]
            del loop.__dict__["follower"]


def _loops(trainer: "pl.Trainer") -> tuple[Any, Any, Any]:
    epoch_loop = trainer.fit_loop.epoch_loop
    return trainer.fit_loop, epoch_loop, epoch_loop.val_loop


def forget_restart(trainer: "pl.Trainer") -> None:
    """Let no loop guess that it restarts."""
    loops: list[Any] = [trainer.fit_loop]
    while loops:
        loop = loops.pop()
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        loops.extend(value for value in loop.__dict__.values() if isinstance(value, lightning_internals.Loop))


def is_validation_due(trainer: "pl.Trainer") -> bool:
    """Whether validation follows the batch, had nobody asked training to stop."""
    fit_loop = trainer.fit_loop
    assert fit_loop._data_fetcher is not None
    asked, trainer.should_stop = trainer.should_stop, False
    try:
        return fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)
    finally:
        trainer.should_stop = asked


def progress_of(trainer: "pl.Trainer") -> dict[str, Any]:
    """All counters of the fit loops as their ``state_dict`` has them, without the loaders' states, in microseconds."""
    state: dict[str, Any] = {}
    _gather(trainer.fit_loop, "", state)
    return state


def _gather(loop: Any, prefix: str, state: dict[str, Any]) -> None:
    steps = getattr(loop, "_batches_that_stepped", None)
    state[f"{prefix}state_dict"] = {} if steps is None else {"_batches_that_stepped": steps}
    for name, value in loop.__dict__.items():
        if isinstance(value, lightning_internals.BaseProgress):
            state[f"{prefix}{name}"] = _copied(value)
        elif isinstance(value, lightning_internals.Loop):
            _gather(value, f"{prefix}{name}.", state)


def _copied(progress: Any) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, lightning_internals.BaseProgress) else value
        for name, value in vars(progress).items()
    }


def with_states_of_users(progress: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """``progress``, and what loops of the user's own had added to what was ``saved``."""
    states = {name: {**saved.get(name, {}), **state} for name, state in progress.items() if name.endswith("state_dict")}
    return {**saved, **progress, **states}


def steps_without_end(trainer: "pl.Trainer") -> int:
    """Steps that began and never ended, but for the newest: one that draws its batches may find that there is none."""
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    return max(0, steps.ready - steps.completed - 1)


def finish_counting(progress: dict[str, Any], without_end: int) -> None:
    """Count the batch that stepped last as processed, and its step as completed, wherever in its hooks it is."""
    for batches in (progress["epoch_loop.batch_progress"][which] for which in ("total", "current")):
        batches["started"] = batches["processed"] = batches["ready"]
        batches["completed"] = batches["ready"] - 1
    steps = progress["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    steps["total"]["completed"] = steps["total"]["ready"] - without_end
    steps["current"]["completed"] = steps["current"]["ready"]


def batches_of_epoch(progress: dict[str, Any]) -> int:
    """Batches of the epoch that have begun."""
    return progress["epoch_loop.batch_progress"]["current"]["ready"]

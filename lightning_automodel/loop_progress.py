"""The Trainer's own loops, told to say where they are, and to go on where a checkpoint says.

Lightning 2.6.6 guesses from its counters where a checkpoint was saved, and guesses wrong in several places: a
validation that was due is skipped, the logger's step is one off, the end of an epoch is skipped or its means are. It
has no setting for any of this, so for the time of a fit the loops are of these subclasses.
"""

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.loops.training_epoch_loop import RestartStage as EpochRestartStage

from lightning_automodel import _compat

EPOCH_START = "epoch start"
BATCH = "batch"
BATCH_END = "batch end"
AFTER_BATCH = "after batch"
AFTER_VALIDATION = "after validation"
EPOCH_END = "epoch end"
"""What a fit does next, in the order of an epoch."""

WITHIN_EPOCH = (BATCH, BATCH_END, AFTER_BATCH, AFTER_VALIDATION)
UNFINISHED = (BATCH_END, AFTER_BATCH, AFTER_VALIDATION, EPOCH_END)


class Follower(Protocol):
    """Whom the loops tell where they are; ``planned`` is what a checkpoint says that comes next, until that begins."""

    planned: str | None

    def begin_run(self) -> None: ...
    def loaders_made(self, combined: Any) -> None: ...
    def loaders_iterated(self, fetcher: Any) -> None: ...
    def begin_planned(self) -> None: ...
    def begin_epoch(self) -> None: ...
    def keeps_iterators(self) -> bool: ...
    def epoch_iterated(self) -> None: ...
    def begin_batch(self) -> None: ...
    def end_step(self) -> None: ...
    def end_batch(self) -> None: ...
    def begin_validation(self) -> None: ...
    def has_validated(self) -> None: ...
    def begin_epoch_end(self) -> None: ...
    def end_epoch(self) -> None: ...
    def validation_loaders_made(self) -> None: ...


class FollowedFitLoop(_compat.FitLoop):
    """Epochs."""

    follower: Follower

    @property
    def done(self) -> bool:
        """Not while what a checkpoint left unfinished is to be done, whatever limits were reached with it."""
        return self.follower.planned not in UNFINISHED and super().done

    @_compat.FitLoop.restarting.setter  # type: ignore[attr-defined]
    def restarting(self, restarting: bool) -> None:
        """With a plan, at the end of an epoch too: Lightning runs no sanity check where it restarts."""
        owner = _compat.FitLoop if self.follower.planned is None else _compat.Loop
        owner.restarting.fset(self, restarting)  # type: ignore[attr-defined]

    def run(self) -> None:
        self.follower.begin_run()
        super().run()
        if self.follower.planned is not None:
            self.follower.begin_planned()

    def setup_data(self) -> None:
        super().setup_data()
        self.follower.loaders_iterated(self._data_fetcher)

    def _load_combined_loader_states(self) -> None:
        """What Lightning calls between making the loaders and iterating them; it would load rank 0's states."""
        self._combined_loader_states_to_load = []
        self.follower.loaders_made(self._combined_loader)

    def reset(self) -> None:
        super().reset()
        if self.follower.planned in WITHIN_EPOCH:
            self._restart_stage = "restarted_mid_epoch"

    def on_run_start(self) -> None:
        super().on_run_start()
        if self.follower.planned == EPOCH_END:
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        """The end of :meth:`on_advance_end`, whose hooks have run."""
        self.follower.begin_planned()
        connector = self.trainer._logger_connector
        self.epoch_progress.current.completed = self.epoch_progress.current.processed - 1
        connector.on_epoch_end()
        self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch_loop._batches_that_stepped -= 1
        connector.update_train_epoch_metrics()
        self.epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
        self.follower.end_epoch()

    def on_advance_start(self) -> None:
        if self.follower.planned == EPOCH_START:
            self.follower.begin_planned()
        if self.follower.planned is None:
            self.follower.begin_epoch()
        super().on_advance_start()

    def on_advance_end(self) -> None:
        self.follower.begin_epoch_end()
        try:
            super().on_advance_end()
        finally:
            if self.epoch_progress.current.completed == self.epoch_progress.current.processed:
                self.follower.end_epoch()


class FollowedEpochLoop(_compat.TrainingEpochLoop):
    """Batches."""

    follower: Follower

    @property
    def done(self) -> bool:
        """Not while the last batch is to be finished."""
        return self.follower.planned not in UNFINISHED and super().done

    def reset(self) -> None:
        if self.follower.planned in WITHIN_EPOCH:
            self._restart_stage = EpochRestartStage.NONE
        else:
            super().reset()

    def on_run_start(self, data_fetcher: Any) -> None:
        fetched, fit_loop = data_fetcher.fetched, self.trainer.fit_loop
        if keeps_iterators := self.follower.keeps_iterators():
            fit_loop._resuming_from_checkpoint = True
        super().on_run_start(data_fetcher)
        if keeps_iterators:
            fit_loop._resuming_from_checkpoint = False
            data_fetcher.fetched = fetched
        self.follower.epoch_iterated()

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

    def on_advance_end(self, data_fetcher: Any) -> None:
        self.follower.end_step()
        super().on_advance_end(data_fetcher)

    def _save_loggers_on_train_batch_end(self) -> None:
        """The last that Lightning does in a batch, before it may raise ``SIGTERMException``."""
        self.follower.end_batch()
        super()._save_loggers_on_train_batch_end()

    def is_validation_due(self, data_fetcher: Any) -> bool:
        """Whether validation follows the batch, if nobody has asked training to stop."""
        trainer = self.trainer
        asked, trainer.should_stop = trainer.should_stop, False
        try:
            return self._should_check_val_fx(data_fetcher)
        finally:
            trainer.should_stop = asked


class FollowedValidationLoop(_compat.EvaluationLoop):
    """Validation within a fit."""

    follower: Follower

    def run(self) -> list[Any]:
        if self.trainer.sanity_checking:
            return super().run()
        self.setup_data()
        self.follower.validation_loaders_made()
        self.follower.begin_validation()
        return super().run()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.trainer.sanity_checking:
            self.follower.has_validated()
        super()._on_evaluation_end(*args, **kwargs)


def follow(trainer: "pl.Trainer", follower: Follower) -> None:
    """Let the loops of ``trainer`` tell ``follower``, until :func:`unfollow`."""
    fit_loop = trainer.fit_loop
    for loop, followed in (
        (fit_loop, FollowedFitLoop),
        (fit_loop.epoch_loop, FollowedEpochLoop),
        (fit_loop.epoch_loop.val_loop, FollowedValidationLoop),
    ):
        loop.__class__ = type(followed.__name__, (followed, type(loop)), {})
        loop.follower = follower  # type: ignore[attr-defined]


def unfollow(trainer: "pl.Trainer") -> None:
    """Give the loops back."""
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        if "follower" in loop.__dict__:
            loop.__class__ = type(loop).__bases__[1]
            del loop.__dict__["follower"]


def progress_of(trainer: "pl.Trainer") -> dict[str, Any]:
    """All counters of the fit loops as their ``state_dict`` has them, without the loaders' states, in microseconds."""
    state: dict[str, Any] = {}
    _gather(trainer.fit_loop, "", state)
    return state


def _gather(loop: Any, prefix: str, state: dict[str, Any]) -> None:
    steps = getattr(loop, "_batches_that_stepped", None)
    state[f"{prefix}state_dict"] = {} if steps is None else {"_batches_that_stepped": steps}
    for name, value in loop.__dict__.items():
        if isinstance(value, _compat.BaseProgress):
            state[f"{prefix}{name}"] = _copied(value)
        elif isinstance(value, _compat.Loop):
            _gather(value, f"{prefix}{name}.", state)


def _copied(progress: Any) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, _compat.BaseProgress) else value
        for name, value in vars(progress).items()
    }


def finish_counting(progress: dict[str, Any]) -> None:
    """Count the batch that stepped last as processed, and its step as completed, wherever in its hooks it is."""
    for name, counted in progress.items():
        if name.endswith("epoch_loop.batch_progress") or name == "epoch_loop.batch_progress":
            for counter in (counted["total"], counted["current"]):
                counter["started"] = counter["processed"] = counter["ready"]
                counter["completed"] = counter["ready"] - 1
        if name.endswith("optim_progress"):
            for counter in (counted["optimizer"]["step"]["total"], counted["optimizer"]["step"]["current"]):
                counter["completed"] = counter["ready"]


def forget_restart(trainer: "pl.Trainer") -> None:
    """Let no loop guess that it restarts."""
    loops: list[Any] = [trainer.fit_loop]
    while loops:
        loop = loops.pop()
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        loops.extend(value for value in loop.__dict__.values() if isinstance(value, _compat.Loop))

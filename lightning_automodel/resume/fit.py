"""From where a stopped fit goes on, bit for bit: kept up to date as it trains, written with a checkpoint, taken up."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from typing_extensions import override

from lightning_automodel.resume import dataloaders, loops, other_world_size, rng, schedule_callbacks
from lightning_automodel.resume.loops import (
    AFTER_BATCH,
    AFTER_VALIDATION,
    BATCH,
    BATCH_END,
    EPOCH_END,
    EPOCH_START,
    RUN_START,
)
from lightning_automodel.resume.save_order import LateSaves
from lightning_automodel.resume.snapshot import Noting, Point

CHECKPOINT_KEY = "lightning_automodel"
FORMAT = 1
_OTHER_RANKS = (
    "The checkpoint was written by other ranks ({then}, now {now}): the data goes on where it stopped, and each rank's"
    " random states, buffers and running metrics of the epoch start anew."
)
_GOES_BACK = (
    "The checkpoint resumes before batch {batch} of epoch {epoch}, where the window of gradients began that has not"
    " stepped yet: gradients are not saved."
)
_HALF_A_STEP = (
    "The checkpoint is inexact: one optimizer has stepped, and another holds gradients, which are not saved. Save where"
    " all of them have stepped."
)


class Resume(loops.Follower):
    """Knows from where a fit would go on if it stopped now, and takes up what a checkpoint holds.

    Between two optimizer steps there is no state to save: gradients are not kept. So the moment before a window's first
    batch is noted, and a checkpoint that is written before the window has stepped holds that moment; likewise the one
    before a validation, and before the hooks that begin an epoch. Noting synchronises nothing and does not communicate.

    Args:
        trainer: Whose loops to follow until :meth:`close`.
        device: Of this rank.
        own: Returns what the strategy keeps from step to step.
        restore_own: Takes it back.
        holds_gradients: Whether a window of manual optimization has begun and not stepped.
        say: Tells the user, on rank 0, once.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        device: torch.device,
        own: Callable[[], dict[str, Any]],
        restore_own: Callable[[dict[str, Any]], None],
        holds_gradients: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._say = trainer, say
        self._holds_gradients = holds_gradients
        self._is_manual = not trainer.lightning_module.automatic_optimization
        self._loaders = dataloaders.TrainingLoaders(device, say)
        self._noting = Noting(trainer, device, self._loaders, own, restore_own)
        self._noted: Point | None = None
        self._next = RUN_START
        self._is_iterated = False
        self._is_placed = False
        self._is_validating = False
        self._validated: Point | None = None
        self._plan: dict[str, Any] | None = None
        self._position_to_take: dataloaders.Position | None = None
        self._before_validation: dict[str, Any] = {}
        self._late_saves = LateSaves(trainer)
        loops.follow(trainer, self)

    # --- Writing ------------------------------------------------------------------------------------------------------

    def state(self, sizes: dict[str, int], group: dist.ProcessGroup | None) -> dict[str, Any]:
        """What a checkpoint that is written now must hold.

        A collective on ``group`` where it is given: every rank must call it, and rank 0 gets the states of all. None
        gets this rank's alone, as after a failure.

        Args:
            sizes: Ranks along each dimension of the mesh, by name.
            group: All ranks, on the host.

        Returns:
            The format's version, the sizes, and the state of each rank.
        """
        own = self._plan if self._plan is not None else self._noting.savable(self._point(), group)
        ranks = [own]
        if group is not None:
            gathered: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
            dist.gather_object(own, gathered, dst=dist.get_global_rank(group, 0), group=group)
            ranks = gathered or []
        return {"format": FORMAT, "sizes": dict(sizes), "ranks": ranks}

    def _point(self) -> Point:
        if self._noted is None:
            if self._is_manual and self._holds_gradients():
                self._say(_HALF_A_STEP)
            return self._take(self._next)
        then = loops.batches_of_epoch(self._noted.progress)
        now = loops.batches_of_epoch(loops.progress_of(self._trainer))
        if self._noted.next == BATCH and now > then:
            epoch = self._noted.progress["epoch_progress"]["current"]["processed"]
            self._say(_GOES_BACK.format(batch=then, epoch=epoch))
        return self._noted

    def states_of_callbacks(self) -> dict[str, Any]:
        """States by key of callbacks that have seen a validation which the checkpoint goes back before."""
        return self._before_validation

    # --- Taking up ----------------------------------------------------------------------------------------------------

    def load(self, state: dict[str, Any], checkpoint: dict[str, Any], sizes: dict[str, int], rank: int) -> None:
        """Plan to go on from where a checkpoint was written.

        Not a collective. What the loops are given, Lightning loads from ``checkpoint`` after this.

        Args:
            state: What :meth:`state` returned.
            checkpoint: What is left of the checkpoint; its ``loops`` are replaced.
            sizes: Ranks along each dimension of the mesh, by name.
            rank: Global rank.

        Raises:
            ValueError: If a newer version of this package wrote ``state``.
        """
        if state["format"] > FORMAT:
            raise ValueError(
                f"The checkpoint's resume state has format {state['format']}, and this version of lightning_automodel"
                f" knows formats up to {FORMAT}: upgrade the package that loads it."
            )
        if (len(state["ranks"]), state["sizes"]["data_parallel"]) == (self._trainer.world_size, sizes["data_parallel"]):
            plan = state["ranks"][rank]
        else:
            plan = other_world_size.carried_over(state, sizes["data_parallel"])
            self._say(_OTHER_RANKS.format(then=state["sizes"], now=sizes))
        self._plan = plan
        self.planned = plan["next"]
        self._noting.restore_what_is_trained(plan)
        fit_loop = loops.with_states_of_users(plan["progress"], checkpoint["loops"]["fit_loop"])
        checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": fit_loop}

    # --- What the loops tell ------------------------------------------------------------------------------------------

    @override
    def begin_run(self) -> None:
        if self._plan is None:
            return
        loops.forget_restart(self._trainer)
        plan = rng.loaded(self._plan)
        self._noting.restore(plan)
        self._position_to_take = dataloaders.loaded(plan["position"])
        if self.planned == RUN_START:
            self.begin_planned()

    @override
    def loaders_made(self, combined: Any) -> bool:
        self._loaders.follow(combined)
        self._loaders.begin_iteration()
        if self._position_to_take is not None:
            epoch = self._trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
            self._loaders.remake_at(self._position_to_take, epoch)
        return self._plan is not None

    @override
    def loaders_iterated(self, fetcher: Any) -> None:
        if self._position_to_take is not None:
            self._loaders.place(fetcher)
            self._position_to_take = None
            self._is_iterated = self._is_placed = True
        if self._plan is None and self._next == RUN_START:
            self._noting.look_again()
            self._is_iterated, self._next = self._trainer.current_epoch == 0, EPOCH_START

    @override
    def begin_planned(self) -> None:
        assert self._plan is not None
        plan, self._plan, self.planned = rng.loaded(self._plan), None, None
        self._next = plan["next"]
        if self._next in loops.WITHIN_EPOCH:
            schedule_callbacks.within_epoch(self._trainer)
        self._noting.restore_randomness(plan)

    @override
    def validation_loaders_made(self) -> None:
        self._noting.validation_loaders_made()

    @override
    def begin_epoch(self) -> None:
        self._noting.look_again()
        self._next = EPOCH_START
        self._noted = self._take(EPOCH_START)

    @override
    def begin_iteration(self) -> bool:
        if not self._is_iterated:
            self._loaders.begin_iteration()
        is_placed, self._is_placed = self._is_placed, False
        return is_placed

    @override
    def epoch_iterated(self) -> None:
        self._is_iterated = True

    @override
    def begin_batch(self) -> None:
        if self._begins_window():
            self._noted, self._before_validation = self._take(BATCH), {}
        self._next = BATCH_END
        self._loaders.begin_batch(self._trainer.fit_loop._data_fetcher)

    def _begins_window(self) -> bool:
        if self._noted is None or self._noted.next != BATCH:
            return True
        if self._is_manual:
            return not self._holds_gradients()
        begun = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return begun % self._trainer.accumulate_grad_batches == 0

    def stepped(self) -> None:
        """The optimizer has stepped: there is nothing left of the window to go back for."""
        self._noted, self._next, self._before_validation = None, BATCH_END, {}
        self._noting.steps_without_end = loops.steps_without_end(self._trainer)

    @override
    def end_step(self) -> None:
        self._next = AFTER_BATCH
        if self._is_manual and not self._holds_gradients():
            self._noted = None
        is_asked_to_stop = self._trainer.should_stop and not self._is_last_batch()
        if is_asked_to_stop and self._noted is None and not loops.is_validation_due(self._trainer):
            self._noted = self._take(AFTER_BATCH)

    @override
    def begin_validation(self) -> None:
        self._is_validating = self._noted is None
        if self._noted is None:
            self._noted = self._take(AFTER_BATCH)
        elif not self._before_validation:
            watching = [c for c in self._trainer.callbacks if isinstance(c, EarlyStopping)]  # type: ignore[attr-defined]
            self._before_validation = {callback.state_key: callback.state_dict() for callback in watching}

    @override
    def has_validated(self) -> None:
        self._next = AFTER_VALIDATION
        if self._is_validating and self._noted is not None:
            self._validated, self._noted = self._noted, None

    @override
    def end_batch(self) -> None:
        self._next = BATCH

    @override
    def begin_epoch_end(self) -> None:
        if self._is_last_batch():
            self._noted, self._next = None, EPOCH_END
        elif self._noted is None:
            self._noted = self._take(BATCH)

    @override
    def end_epoch(self) -> None:
        self._is_iterated = self._is_placed = False
        if self._noted is None:
            self._next = EPOCH_START
            self._noted = self._take(EPOCH_START)

    def close(self) -> None:
        """Give loops and loaders back; :meth:`state` stays what it is."""
        if self._noted is None and self._plan is None:
            self._noted = self._take(self._next)
        self._late_saves.close()
        loops.unfollow(self._trainer)
        self._loaders.close()

    # --- Noting -------------------------------------------------------------------------------------------------------

    def _take(self, next_: str) -> Point:
        return self._noting.take(next_, self._is_iterated, self._validated)

    def _is_last_batch(self) -> bool:
        fit_loop = self._trainer.fit_loop
        is_exhausted = fit_loop._data_fetcher is not None and fit_loop._data_fetcher.done
        return is_exhausted or fit_loop.epoch_loop._num_ready_batches_reached()

"""Where a stopped fit resumes: recorded as it trains, saved with a checkpoint, and restored from one.

The states of a fit (:class:`FitState`), which only `Resume._become` changes, and what a checkpoint saved then
holds:

    WAITING ---- on_train_start() ---------------> RECORDING ---- close() ---> CLOSED
       |                                               ^
       +-- load() --> LOADED ---- on_train_start() ----+

    WAITING, RECORDING    the newest snapshot, or the present state
    LOADED                what was loaded, as it was
    CLOSED                where the fit ended

A fit that was over when its checkpoint was saved goes from LOADED back to WAITING.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.releases import UnsupportedReleaseError
from lightning_automodel.resume import checkpoint_callbacks, dataloaders, loops, rng, snapshot, world_size
from lightning_automodel.resume.snapshot import Snapshot

CHECKPOINT_KEY = "lightning_automodel"
FORMAT = 4
_FETCH = "train_dataloader_next"


class FitState(Enum):
    """Where a fit is between its checkpoint and its end; see the module's docstring."""

    WAITING = auto()  # nothing waits to be restored, and no batch was drawn
    LOADED = auto()  # a checkpoint was loaded, and waits for the start of training
    RECORDING = auto()  # the loops run, and snapshots are taken
    CLOSED = auto()  # patches are restored, and no snapshot is taken any more


class Resume:
    """Records where a fit would resume if it stopped now, and resumes it from a checkpoint.

    Gradients are not saved. So a snapshot is taken before a window's first batch is drawn, and a checkpoint
    that is saved before the window has stepped resumes there; likewise before a validation. Once a window
    has stepped, the state at the save is saved. Only :meth:`add_to` and the reduction of logged means at an
    epoch's end communicate.

    ``own_state`` returns what the strategy keeps from step to step, and ``restore_own_state`` restores it.
    ``holds_gradients`` tells whether a window of manual optimization has begun and not stepped. ``say``
    warns once. ``patches`` last as long as the fit.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        own_state: Callable[[], dict[str, Any]],
        restore_own_state: Callable[[dict[str, Any]], None],
        holds_gradients: Callable[[], bool],
        say: Callable[[str], None],
        patches: PatchStack,
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._own_state = own_state
        self._restore_own_state = restore_own_state
        self._holds_gradients = holds_gradients
        self._say = say
        # A list: each window asks for the parameters' versions, and walking over the module is slow.
        self._parameters = list(self._module.parameters())
        self._is_manual = not self._module.automatic_optimization
        self._loaders = dataloaders.TrainingLoaders(trainer, self._device, say)
        self._first_flags = snapshot.flags(self._module)
        self._first_buffers: dict[str, Tensor] = {}
        self._patches = patches
        self._state = FitState.WAITING
        self._loaded: dict[str, Any] = {}  # in FitState.LOADED, what is to be restored
        self._snapshot: Snapshot | None = None
        self._final: Snapshot | None = None  # in FitState.CLOSED, where the fit ended
        self._logged = 0
        self._actions_seen: set[str] = set()

    def _become(self, state: FitState) -> None:
        """Change the state, here alone, and drop what was loaded unless it waits."""
        self._state = state
        if state is not FitState.LOADED:
            self._loaded = {}

    def process_dataloader(self, loader: Any) -> None:
        """Called in ``process_dataloader``, before a loader is iterated. Only training loaders are recorded."""
        if self._trainer.state.fn == TrainerFn.FITTING and self._trainer.training:
            self._loaders.process(loader)

    def _run_to_its_end(self, run: Callable[[], None]) -> None:
        """Run the fit loop. If no step is left, it does nothing: then do what followed after the checkpoint."""
        fit_loop: Any = self._trainer.fit_loop
        fit_loop.setup_data()
        if self._state is not FitState.LOADED or self._trainer.limit_train_batches == 0 or not fit_loop.done:
            run()
            return
        loaded = self._loaded
        at = world_size.position(loaded)
        is_within_batch = at.stage in (loops.STEP, loops.VALIDATION)
        if at.stage == loops.BATCH:
            # The epoch was over, even if not all of its batches were used.
            fit_loop.epoch_progress.increment_processed()
            fit_loop.epoch_progress.increment_completed()
        if not is_within_batch and not at.is_epoch_ending:  # the fit was over
            self._become(FitState.WAITING)
            self._restore(loaded)
            return
        for callback in self._trainer.checkpoint_callbacks:
            # It would save the same step once more.
            self._patches.set(callback, "on_train_end", lambda *_: None)
        loops.run_rest(fit_loop, is_within_batch)

    def on_train_start(self) -> None:
        """Called in ``on_train_start``, after everything is loaded and all other hooks. Every rank calls it."""
        self._first_buffers = snapshot.buffers(self._module)
        loaded = self._loaded
        self._become(FitState.RECORDING)
        if loaded:
            self._go_on(loaded)
        self._logged = lightning_internals.logging_step(self._trainer)
        checkpoint_callbacks.save_last(self._trainer, self._patches)
        # Lightning has no hook before a batch is drawn, and none that comes before those of all callbacks.
        # But its loops tell the profiler what they are about to do: call a hook, or draw a batch.
        profiler: Any = self._trainer.profiler  # type: ignore[attr-defined]
        start = profiler.start
        before = {
            _FETCH: self._before_fetch,
            "on_validation_model_zero_grad": self._before_validation,
            "on_train_epoch_end": self._before_epoch_end,
        }

        def call_then_start(action_name: str) -> None:
            name = action_name.rsplit(".", 1)[-1]
            self._actions_seen.add(name)
            if name in before:
                before[name]()
            start(action_name)

        self._patches.set(profiler, "start", call_then_start)

    def _before_epoch_end(self) -> None:
        """Before any hook of an epoch's end."""
        self._loaders.end_epoch()
        # Restarted after the epoch's last batch, the loop of batches would end the next epoch at once.
        self._trainer.fit_loop.epoch_loop.restarting = False
        at = loops.position(self._trainer)
        if at.stage == loops.BATCH and (self._snapshot is None or self._snapshot.at.stage == loops.STEP):
            # The run ends within the epoch, and Lightning resets the epoch's metrics as if it were over.
            self._snapshot = self._take(at, lightning_internals.logging_step(self._trainer))
        # Reduce what was logged over the epoch, on every rank. Otherwise the progress bar, on rank 0 alone,
        # would do it while another rank gathers parameters in a hook of the module: both would wait.
        _ = self._trainer.callback_metrics

    def _before_fetch(self) -> None:
        """Before a training batch is drawn, which may use random numbers: the last point before a window."""
        self._loaders.before_fetch()
        self._logged = lightning_internals.logging_step(self._trainer)
        fit_loop: Any = self._trainer.fit_loop
        used = fit_loop.epoch_loop.batch_progress.current.processed
        at = loops.Position(loops.BATCH, used, fit_loop.epoch_progress.current.processed)
        is_within = used % self._trainer.accumulate_grad_batches > 0
        if self._is_manual:
            is_within = self._holds_gradients()
        if self._snapshot is None or self._snapshot.at.stage == loops.STEP or not is_within:
            self._snapshot = self._take(at, self._logged)

    def stepped(self) -> None:
        """An optimizer has stepped: a checkpoint can no longer resume before the step."""
        for name in {_FETCH, "on_train_batch_start"} - self._actions_seen:
            raise UnsupportedReleaseError("lightning", f"the profiler's action {name!r}, to resume exactly")
        self._snapshot = None

    def _before_validation(self) -> None:
        """Before a validation, which follows a step and has drawn no random number yet."""
        if self._snapshot is None or (self._is_manual and not self._holds_gradients()):
            at = replace(loops.position(self._trainer), stage=loops.STEP)
            self._snapshot = self._take(at, self._logged + 1)

    def close(self) -> None:
        """Stop recording, once ``patches`` are restored; :meth:`add_to` still adds where the fit ended."""
        if self._state in (FitState.WAITING, FitState.RECORDING):
            self._final = self._to_save()
            self._become(FitState.CLOSED)
        self._loaders.close()

    def add_to(
        self,
        checkpoint: dict[str, Any],
        sizes: dict[str, int],
        group: dist.ProcessGroup | None,
        extra_states: dict[str, Any],
    ) -> None:
        """Add the state of every rank to a checkpoint, whose counters and callbacks become those of that moment.

        A collective on ``group``, that of all ranks on the host. Without it, as after a failure, only this
        rank's state is added. ``sizes`` are the ranks along each dimension of the mesh, ``extra_states``
        what this rank's modules keep besides tensors, where that is not the same on every rank.
        """
        if self._state is FitState.LOADED:  # a hook saves before the run has started
            own = self._loaded
        else:
            own = self._add_moment(checkpoint, self._final or self._to_save())
        own = {**own, "extra_states": extra_states}
        ranks = [own]
        if group is not None:
            ranks = gather_objects(own, group)
        # Without its loops, a checkpoint begins a new run, as under Lightning's own strategies.
        if "loops" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = {"format": FORMAT, "sizes": dict(sizes), "ranks": ranks}

    def _add_moment(self, checkpoint: dict[str, Any], taken: Snapshot) -> dict[str, Any]:
        """Set the counters and callbacks of a checkpoint to those ``taken``; returns this rank's state of then."""
        own = self._savable(taken)
        if "loops" in checkpoint:
            progress = checkpoint["loops"]["fit_loop"]
            checkpoint["loops"]["fit_loop"] = loops.counters_at(progress, taken.at, taken.logged)
        if taken is self._snapshot:
            if "callbacks" in checkpoint:
                checkpoint["callbacks"] = {**checkpoint["callbacks"], **taken.callbacks}
            taken.beside.put_into(checkpoint, self._trainer)
            if taken.versions != torch_internals.versions(self._parameters):
                self._say(
                    "A checkpoint was saved within a window in which parameters were written, as those of a"
                    " teacher that averages are, or weights that are clamped. A resumed run repeats the"
                    " window, and writes them twice. Keep a teacher in buffers, or write where"
                    " trainer.global_step has grown."
                )
        return own

    def _to_save(self) -> Snapshot:
        """The snapshot that a checkpoint written now resumes from."""
        at = loops.position(self._trainer)
        held = self._snapshot
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        is_within_epoch = epochs.processed < epochs.started
        holds_gradients = self._is_manual and self._holds_gradients()
        if held is not None and held.at.epochs == at.epochs and at.stage != loops.EPOCH:
            # Before the window that has not stepped. Under manual optimization, it must have begun, or the
            # save must be within a batch.
            is_batch_over = batches.processed == batches.ready
            is_between_steps = self._is_manual and is_batch_over and not holds_gradients
            if held.at.stage == loops.BATCH and not is_between_steps:
                state = held.state
                if held.at.batches == at.batches and not is_within_epoch and not at.is_epoch_ending:
                    # The fit ended between two windows of an epoch. A hook may have put averages into the
                    # module.
                    state = {**state, "buffers": snapshot.buffers(self._module)}
                ends = replace(held.at, is_epoch_ending=at.is_epoch_ending)
                self._snapshot = replace(held, at=ends, state=state)
                return self._snapshot
            # Before the validation that runs now.
            if held.at.stage == at.stage == loops.STEP:
                return held
        if holds_gradients:
            self._say(
                "A checkpoint was saved while an optimizer held gradients that it has not stepped with, and"
                " gradients are not saved. Nothing is lost where each step begins with zero_grad(), as in"
                " most GANs. Otherwise a resumed run is not exact: save where all optimizers have stepped."
            )
        logged = lightning_internals.logging_step(self._trainer)
        if at.stage in (loops.STEP, loops.VALIDATION):  # the batch's step is not counted yet
            logged = self._logged + 1
        now = self._take(at, logged)
        # At the end of a validation, modules are still in evaluation mode.
        if at.stage == loops.VALIDATION and held is not None:
            now.state["flags"] = held.state["flags"]
        return now

    def _take(self, at: loops.Position, logged: int) -> Snapshot:
        state = {
            "random": rng.global_states(self._device),
            "loaders": self._loaders.positions(at),
            "buffers": snapshot.buffers(self._module),
            "metrics": snapshot.metrics(self._module),
            "flags": snapshot.flags(self._module),
            "own": self._own_state(),
        }
        return Snapshot(
            at,
            logged,
            state,
            snapshot.callbacks(self._trainer),
            snapshot.beside_callbacks(self._trainer),
            torch_internals.versions(self._parameters),
        )

    def _savable(self, taken: Snapshot) -> dict[str, Any]:
        state = taken.state
        first = self._first_flags
        seen: dict[str, Any] = {}
        if not self._trainer.interrupted:  # after an exception, it may not be possible to compute metrics
            seen |= self._trainer.callback_metrics
            if taken.at.stage != loops.EPOCH and loops.is_last_batch(self._trainer):
                seen |= lightning_internals.epoch_metrics(self._trainer)
        own = {
            **state,
            **vars(taken.at),
            "logged": taken.logged,
            "buffers": snapshot.unsaved_buffers(self._module, state["buffers"], self._first_buffers),
            "metrics": self._without_reset(taken),
            # A resumed run may set the others differently.
            "flags": {name: flag for name, flag in state["flags"].items() if flag != first.get(name, flag)},
            # A DTensor's mesh does not outlive the run. torch's clip_grad_norm_ returns one, which may be
            # logged.
            "seen": {name: value for name, value in seen.items() if not isinstance(value, DTensor)},
        }
        return apply_to_collection(own, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))

    def _without_reset(self, taken: Snapshot) -> dict[str, Any]:
        """States of the metrics, except those that Lightning resets before another batch updates them."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        stage = taken.at.stage
        reset: set[int] = set()
        if stage == loops.EPOCH or (stage != loops.BATCH and loops.is_last_batch(self._trainer)):
            reset |= lightning_internals.logged_metrics(epoch_loop)
        if stage == loops.VALIDATION:
            reset |= lightning_internals.logged_metrics(epoch_loop.val_loop)
        names = {name for name, module in self._module.named_modules() if id(module) in reset}
        return {name: state for name, state in taken.state["metrics"].items() if name not in names}

    def load(
        self, state: dict[str, Any] | None, checkpoint: dict[str, Any], sizes: dict[str, int], rank: int
    ) -> None:
        """Prepare to resume from a checkpoint; :meth:`on_train_start` does the rest. Not a collective.

        ``state`` is what :meth:`add_to` added; None for a checkpoint of another strategy. Lightning loads
        the loops from ``checkpoint`` after this. Raises ValueError if another version of this package wrote
        ``state``.
        """
        if self._state in (FitState.RECORDING, FitState.CLOSED):
            return  # the fit runs, and a hook loads weights: it goes on where it is
        if state is not None and state["format"] != FORMAT:
            raise ValueError(
                f"The checkpoint's resume state has format {state['format']}, and this version of"
                f" lightning_automodel knows format {FORMAT}: resume with the version that wrote it, or take"
                " only its weights (load_from_checkpoint)."
            )
        checkpoint_callbacks.load_early(self._trainer, checkpoint.get("callbacks", {}))
        if state is None:
            return
        own = world_size.choose(state, sizes, rank, self._trainer.world_size, self._say)
        # Checkpoints of earlier releases have none.
        extra_states = own.get("extra_states", {})
        model_state = checkpoint["state_dict"]
        for name in list(model_state):
            plain = torch_internals.without_wrappers(name)
            if plain in extra_states:
                model_state[name] = extra_states[plain]
        self._loaded = own
        self._become(FitState.LOADED)
        fit_loop: Any = self._trainer.fit_loop
        self._patches.set(fit_loop, "run", partial(self._run_to_its_end, fit_loop.run))
        # Before optimizers are loaded, as these have no state for frozen parameters.
        unfrozen = {
            name: True for name, flag in own["flags"].items() if flag and name.endswith(".requires_grad")
        }
        snapshot.restore_flags(self._module, unfrozen)
        counters = loops.counters_at(
            checkpoint["loops"]["fit_loop"], world_size.position(own), own["logged"]
        )
        checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": counters}
        # Lightning warns of every loader without a state, and does not know that these resume.
        self._patches.ignore_warnings("You're resuming from a checkpoint that ended before the epoch ended")

    def _go_on(self, loaded: dict[str, Any]) -> None:
        at = world_size.position(loaded)
        self._loaders.start(loaded["loaders"], at)
        self._restore(loaded)
        if at.is_epoch_ending and at.stage == loops.EPOCH:
            loops.step_plateau_schedulers(self._trainer)
        loops.finish_restart(self._trainer, at.stage, loaded["logged"])
        if loaded["random"] is not None:  # drawn from meanwhile
            rng.set_global_states(loaded["random"], self._device)
        if at.stage == loops.EPOCH:
            self._trainer.fit_loop.on_iteration_done()

    def _restore(self, loaded: dict[str, Any]) -> None:
        unknown = snapshot.restore(self._module, loaded, self._device)
        if unknown:
            self._say(
                f"The checkpoint holds buffers of modules that this run does not have: {', '.join(unknown)}."
                " Where they matter, build these modules before on_train_start ends."
            )
        self._restore_own_state(loaded["own"])
        if loaded["random"] is not None:
            rng.set_global_states(loaded["random"], self._device)

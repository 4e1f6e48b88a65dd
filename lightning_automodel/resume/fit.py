"""Where a stopped fit resumes: recorded as it trains, saved with a checkpoint, and restored from one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.collectives import gather_objects
from lightning_automodel.distributed.mesh import CONTEXT
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.release_probe import UnsupportedReleaseError
from lightning_automodel.resume import checkpoint_callbacks, dataloaders, loops, rng, snapshot

CHECKPOINT_KEY = "lightning_automodel"
FORMAT = 4
_FETCH = "train_dataloader_next"


@dataclass(frozen=True)
class Snapshot:
    """State of a fit at one moment on this rank: its position, batches that stepped as loggers count them, the rest."""

    at: loops.Position
    logged: int
    state: dict[str, Any]
    callbacks: dict[str, Any]
    beside: snapshot.BesideCallbacks
    versions: list[int]  # of frozen parameters


class Resume:
    """Records where a fit would resume if it stopped now, and resumes it from a checkpoint.

    Gradients are not saved. So a snapshot is taken before a window's first batch is drawn, and a checkpoint that is
    written before the window has stepped resumes there; likewise before a validation. Once a window has stepped, the
    state at the save counts. Only :meth:`add_to` communicates, and the reduction of logged means at an epoch's end.

    ``own_state`` returns what the strategy keeps from step to step, and ``restore_own_state`` restores it.
    ``holds_gradients`` tells whether a window of manual optimization has begun and not stepped. ``say`` warns once.
    ``patches`` last as long as the fit.
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
        self._trainer, self._module, self._device = trainer, trainer.lightning_module, trainer.strategy.root_device
        self._say, self._patches = say, patches
        self._own_state, self._restore_own_state = own_state, restore_own_state
        self._holds_gradients = holds_gradients
        # A list: walks over the module are slow, and each window asks for their versions.
        self._parameters, self._is_manual = list(self._module.parameters()), not self._module.automatic_optimization
        self._loaders = dataloaders.TrainingLoaders(trainer, self._device, say)
        self._first_flags = snapshot.flags(self._module)
        self._first_buffers: dict[str, Tensor] = {}
        self._snapshot: Snapshot | None = None
        self._final: Snapshot | None = None
        self._logged = 0
        self._loaded: dict[str, Any] | None = None
        self._actions_seen: set[str] = set()

    def process_dataloader(self, loader: Any) -> None:
        """Called in ``process_dataloader``, before a loader is iterated; only training loaders are recorded."""
        if self._trainer.state.fn == TrainerFn.FITTING and self._trainer.training:
            self._loaders.process(loader)

    def _run_to_its_end(self, run: Callable[[], None]) -> None:
        """Run the fit loop, which does nothing where no step is left; then do what followed after the checkpoint."""
        fit_loop: Any = self._trainer.fit_loop
        fit_loop.setup_data()
        loaded = self._loaded
        if loaded is None or self._trainer.limit_train_batches == 0 or not fit_loop.done:
            run()
            return
        at = _position(loaded)
        is_within_batch = at.stage in (loops.STEP, loops.VALIDATION)
        if at.stage == loops.BATCH:
            # The epoch was over, if not all of its batches were used.
            fit_loop.epoch_progress.increment_processed()
            fit_loop.epoch_progress.increment_completed()
        if not is_within_batch and not at.is_epoch_ending:  # the fit was over
            self._loaded = None
            self._restore(loaded)
            return
        for callback in self._trainer.checkpoint_callbacks:
            self._patches.set(callback, "on_train_end", lambda *_: None)  # which would save the same step once more
        fit_loop.reset()
        fit_loop.on_run_start()
        if is_within_batch:
            fit_loop.on_advance_start()
            fit_loop.advance()
            fit_loop.on_advance_end()
            fit_loop.on_iteration_done()
        fit_loop.on_run_end()

    def on_train_start(self) -> None:
        """Called in ``on_train_start``, after everything is loaded and the other hooks. Every rank calls it."""
        self._first_buffers = snapshot.buffers(self._module)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._go_on(loaded)
        self._logged = lightning_internals.logging_step(self._trainer)
        checkpoint_callbacks.save_last(self._trainer, self._patches)
        # Lightning has no hook before a batch is drawn, and none that comes before those of all callbacks. But its
        # loops tell the profiler what they are about to do: the name of a hook, or that they draw a batch.
        profiler: Any = self._trainer.profiler  # type: ignore[attr-defined]
        start = profiler.start
        before = {_FETCH: self._before_fetch, "on_validation_model_zero_grad": self._before_validation}
        before["on_train_epoch_end"] = self._before_epoch_end

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
        # Reduce what was logged over the epoch, on every rank. Otherwise the progress bar, on rank 0 alone, would do it
        # while another rank gathers parameters in a hook of the module: both would wait.
        _ = self._trainer.callback_metrics

    def _before_fetch(self) -> None:
        """Before a training batch is drawn, which may use random numbers: the last point before a window."""
        self._loaders.before_fetch()
        self._logged = lightning_internals.logging_step(self._trainer)
        fit_loop: Any = self._trainer.fit_loop
        used = fit_loop.epoch_loop.batch_progress.current.processed
        at = loops.Position(loops.BATCH, used, fit_loop.epoch_progress.current.processed)
        is_within = self._holds_gradients() if self._is_manual else used % self._trainer.accumulate_grad_batches > 0
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
        """Stop to record, once ``patches`` are restored; :meth:`add_to` still adds where the fit ended."""
        if self._loaded is None and self._final is None:
            self._final = self._to_save()
        self._loaders.close()

    def add_to(
        self,
        checkpoint: dict[str, Any],
        sizes: dict[str, int],
        group: dist.ProcessGroup | None,
        extra_states: dict[str, Any],
    ) -> None:
        """Add the state of every rank to a checkpoint, and set its counters and callbacks to the same moment.

        A collective on ``group``, that of all ranks on the host. Without it, as after a failure, only this rank's state
        is added. ``sizes`` are the ranks along each dimension of the mesh, ``extra_states`` what this rank's modules
        keep beside tensors, where that is not the same on every rank.
        """
        if self._loaded is not None:  # a hook saves before the run has started
            own = self._loaded
        else:
            taken = self._final or self._to_save()
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
                        "A checkpoint was saved within a window in which parameters were written, as those of a teacher"
                        " that averages are, or weights that are clamped. A resumed run repeats the window, and writes"
                        " them twice. Keep a teacher in buffers, or write where trainer.global_step has grown."
                    )
        own = {**own, "extra_states": extra_states}
        ranks = [own] if group is None else gather_objects(own, group)
        # Without its loops, a checkpoint begins a new run, as under Lightning's own strategies.
        if "loops" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = {"format": FORMAT, "sizes": dict(sizes), "ranks": ranks}

    def _to_save(self) -> Snapshot:
        """The snapshot that a checkpoint written now resumes from."""
        at, held = loops.position(self._trainer), self._snapshot
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        is_within_epoch = epochs.processed < epochs.started
        holds_gradients = self._is_manual and self._holds_gradients()
        if held is not None and held.at.epochs == at.epochs and at.stage != loops.EPOCH:
            # Before the window that has not stepped; under manual optimization, between batches, only if it has begun.
            is_batch_over = batches.processed == batches.ready
            if held.at.stage == loops.BATCH and not (self._is_manual and is_batch_over and not holds_gradients):
                state = held.state
                if held.at.batches == at.batches and not is_within_epoch and not at.is_epoch_ending:
                    # The fit ended within an epoch, between two windows. A hook may have put averages into the module.
                    state = {**state, "buffers": snapshot.buffers(self._module)}
                ends = replace(held.at, is_epoch_ending=at.is_epoch_ending)
                self._snapshot = replace(held, at=ends, state=state)
                return self._snapshot
            # Before the validation that runs now.
            if held.at.stage == at.stage == loops.STEP:
                return held
        if holds_gradients:
            self._say(
                "A checkpoint was saved while an optimizer held gradients that it has not stepped with, and gradients"
                " are not saved. Nothing is lost where each step begins with zero_grad(), as in most GANs. Otherwise a"
                " resumed run is not exact: save where all optimizers have stepped."
            )
        is_counted = at.stage not in (loops.STEP, loops.VALIDATION)
        logged = lightning_internals.logging_step(self._trainer) if is_counted else self._logged + 1
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
        state, first = taken.state, self._first_flags
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
            "flags": {name: value for name, value in state["flags"].items() if value != first.get(name, value)},
            # A DTensor's mesh does not outlive the run. One is logged if torch's clip_grad_norm_ returned it.
            "seen": {name: value for name, value in seen.items() if not isinstance(value, DTensor)},
        }
        return apply_to_collection(own, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))

    def _without_reset(self, taken: Snapshot) -> dict[str, Any]:
        """States of the metrics, except those that Lightning resets before another batch updates them."""
        epoch_loop, stage = self._trainer.fit_loop.epoch_loop, taken.at.stage
        reset: set[int] = set()
        if stage == loops.EPOCH or (stage != loops.BATCH and loops.is_last_batch(self._trainer)):
            reset |= lightning_internals.logged_metrics(epoch_loop)
        if stage == loops.VALIDATION:
            reset |= lightning_internals.logged_metrics(epoch_loop.val_loop)
        names = {name for name, each in self._module.named_modules() if id(each) in reset}
        return {name: state for name, state in taken.state["metrics"].items() if name not in names}

    def load(self, state: dict[str, Any] | None, checkpoint: dict[str, Any], sizes: dict[str, int], rank: int) -> None:
        """Prepare to resume from a checkpoint; :meth:`on_train_start` does the rest. Not a collective.

        ``state`` is what :meth:`add_to` added; None for a checkpoint of another strategy. Lightning loads the loops
        from ``checkpoint`` after this. Raises ValueError if another version of this package wrote ``state``.
        """
        if self._actions_seen:  # the fit runs, and a hook loads weights: it goes on where it is
            return
        if state is not None and state["format"] != FORMAT:
            raise ValueError(
                f"The checkpoint's resume state has format {state['format']}, and this version of lightning_automodel"
                f" knows format {FORMAT}: resume with the version that wrote it, or take only its weights"
                " (load_from_checkpoint)."
            )
        checkpoint_callbacks.load_early(self._trainer, checkpoint.get("callbacks", {}))
        if state is None:
            return
        # Each context peer has its own metrics; tensor-parallel peers have the same.
        is_alike = all(state["sizes"].get(name, 1) == sizes.get(name, 1) for name in ("data_parallel", CONTEXT))
        if is_alike and len(state["ranks"]) == self._trainer.world_size:
            own = state["ranks"][rank]
        else:
            own = carried_over(state, sizes["data_parallel"])
            self._say(
                f"The checkpoint was saved with a different world size ({state['sizes']}, now {sizes}): the data goes"
                " on where it stopped, and each rank's random states, buffers and metrics of the epoch start afresh."
                " Without a DistributedSampler, samples of this epoch may be left out or used twice."
            )
            if own_states := own.get("extra_states"):
                self._say(
                    "Extra states of modules (get_extra_state) differed between the ranks that saved the checkpoint,"
                    f" and every rank of another layout starts with rank 0's: {', '.join(own_states)}."
                )
        # Checkpoints of earlier releases have none.
        extra_states = own.get("extra_states", {})
        model_state = checkpoint["state_dict"]
        for name in list(model_state):
            if (plain := torch_internals.without_wrappers(name)) in extra_states:
                model_state[name] = extra_states[plain]
        self._loaded = own
        fit_loop: Any = self._trainer.fit_loop
        self._patches.set(fit_loop, "run", partial(self._run_to_its_end, fit_loop.run))
        # Before optimizers are loaded, as these have no state for frozen parameters.
        unfrozen = {name for name, value in own["flags"].items() if value and name.endswith(".requires_grad")}
        snapshot.restore_flags(self._module, dict.fromkeys(unfrozen, True))
        counters = loops.counters_at(checkpoint["loops"]["fit_loop"], _position(own), own["logged"])
        checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": counters}
        # Lightning warns of every loader without a state, and does not know that these resume.
        self._patches.ignore_warnings("You're resuming from a checkpoint that ended before the epoch ended")

    def _go_on(self, loaded: dict[str, Any]) -> None:
        at = _position(loaded)
        self._loaders.start(loaded["loaders"], at)
        self._restore(loaded)
        if at.is_epoch_ending and at.stage == loops.EPOCH:
            self._step_plateau_schedulers()
        loops.finish_restart(self._trainer, at.stage, loaded["logged"])
        if loaded["random"] is not None:  # drawn from meanwhile
            rng.set_global_states(loaded["random"], self._device)
        if at.stage == loops.EPOCH:
            self._trainer.fit_loop.on_iteration_done()

    def _restore(self, loaded: dict[str, Any]) -> None:
        if unknown := snapshot.restore(self._module, loaded, self._device):
            self._say(
                f"The checkpoint holds buffers of modules that this run does not have: {', '.join(unknown)}. Where they"
                " matter, build these modules before on_train_start ends."
            )
        self._restore_own_state(loaded["own"])
        if loaded["random"] is not None:
            rng.set_global_states(loaded["random"], self._device)

    def _step_plateau_schedulers(self) -> None:
        """Do what Lightning does after the hooks that end an epoch; the checkpoint was written in one of these."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        configs = [config for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(config.monitor in self._trainer.callback_metrics for config in configs):
            epochs.completed -= 1
            self._trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            epochs.completed += 1


def _position(loaded: dict[str, Any]) -> loops.Position:
    return loops.Position(*(loaded[name] for name in ("stage", "batches", "epochs", "is_epoch_ending")))


def carried_over(state: dict[str, Any], data_parallel: int) -> dict[str, Any]:
    """One state for every rank of the present world size, without what was each rank's own.

    Within an epoch, the used samples are counted as batches of the present ranks, rounded down: a few are used again.
    """
    carried, then = state["ranks"][0], state["sizes"]["data_parallel"]
    loaders = []
    for at in carried["loaders"]:
        scaled = {name: at[name] for name in ("kind", "seed", "keeps_iterator", "epoch_counters") if name in at} | {
            "generators": [],
            "samplers": [],
        }
        if "iteration" in at:
            scaled |= {"iteration": (None, 0), "yielded": at["yielded"] * then // data_parallel, "length": None}
        if "state" in at:
            scaled["kind"] = "no position"  # refused within an epoch
        loaders.append(scaled)
    carried = {**carried, "random": None, "buffers": {}, "metrics": {}, "loaders": loaders}
    if carried["stage"] != loops.EPOCH:
        carried["batches"] = carried["batches"] * then // data_parallel
    return carried

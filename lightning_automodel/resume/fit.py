"""Where a stopped fit resumes: read when a checkpoint is saved, and restored from one.

A checkpoint is of the moment of its save. Gradients are not saved: of what is saved within an accumulation
window, the fit begins the window again.
"""

import copy
import pickle
import zlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.collectives import disagreement, gather_objects
from lightning_automodel.distributed.mesh import CONTEXT
from lightning_automodel.gradients.window_records import optimizer_parameters
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import logged_values
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import EXTRA_STATE
from lightning_automodel.resume import checkpoint_callbacks, dataloaders, loops, rng, snapshot
from lightning_automodel.sharding import weight_averaging

if TYPE_CHECKING:
    from lightning_automodel.training_run import TrainingRun

CHECKPOINT_KEY = "lightning_automodel"
FORMAT = 7

REPEATS = (
    "A checkpoint was saved within an accumulation window or a validation, which a resumed run begins again:"
    " no batch is missed in the weights, and none is used twice. But random numbers, running statistics,"
    " metrics, what callbacks count, and weights that hooks write are those of the save, so that they differ"
    " from a run that was not stopped. Save after a step, or after a validation, for one that is the same bit"
    " for bit."
)
WITHOUT_POSITION = (
    "A checkpoint was saved within an epoch, from where no run can be resumed: a training loader is neither a"
    " map-style DataLoader that torch itself iterates in order once in an epoch, nor has it state_dict() and"
    " load_state_dict() that hold its order, and that no other iteration of it has changed. Use torchdata's"
    " StatefulDataLoader, over a stream (IterableDataset) that has both too, with shuffle=True beside"
    " Trainer(use_distributed_sampler=False) and a sampler that shares the data out, or resume after an epoch."
)
BEGINS_ANEW = (
    "A checkpoint was saved between epochs, and the training data is a stream with a state of its own. A"
    " resumed run begins the next epoch as a new process does. It trains on other data, or on the same in"
    " another order, if the stream counts its epochs itself (litdata, MosaicML), or goes on where the last"
    " epoch has ended. Save within an epoch, or set what differs in on_train_epoch_start."
)
HELD = (
    "A checkpoint was saved while an optimizer held gradients that it has not stepped with, or within a"
    " training_step between the steps of two optimizers. Gradients are not saved, and a resumed run goes on with"
    " the next batch: what this one still does is lost. It is exact where all optimizers have stepped, or where"
    " each step begins with zero_grad(), as in most GANs. Save in on_train_batch_end."
)


class Resume:
    """Says where a fit would resume if it stopped now, and resumes it from a checkpoint.

    Only :meth:`add_to` communicates.

    ``run`` trains the module, and ``patches`` last as long as the fit.

    Attributes:
        loaders: The training loaders.
        has_stopped_before_validation: Whether the fit has stopped after a batch, before a validation that is due: a
            resumed run begins with it.

    ====================================  ================  ===============================================
    the fit                               ``_has_started``  ``_kept``
    ====================================  ================  ===============================================
    is set up                             False             None
    has loaded a checkpoint               False             what was loaded, until training starts
    trains                                True              None: a save reads the present
    is over                               True              where it has ended, for saves that follow
    ====================================  ================  ===============================================
    """

    def __init__(self, run: "TrainingRun", patches: PatchStack) -> None:
        self._run = run
        self._module = run.module
        self._trainer = run.module.trainer
        self._device = run.device
        self._holds_averages = weight_averaging.save_unswapped(self._module, patches)
        self._say = run.advice.say_once
        self._patches = patches
        self.loaders = dataloaders.TrainingLoaders(self._trainer, self._window_start)
        self._first_flags = snapshot.flags(self._module)
        self._first_buffers: snapshot.Buffers = {}
        self._batches = 0  # of all epochs that were used when an optimizer last stepped
        self._logged = 0  # batches that stepped, as loggers count them, at that time
        self._optimizes = False
        # What saves hold in place of the present: what waits for the start of training, or where the fit ended.
        self._kept: dict[str, Any] | None = None
        self._has_started = False
        self.has_stopped_before_validation = False

    def on_train_start(self) -> None:
        """Called in ``on_train_start``, after everything is loaded and all other hooks. Every rank calls it."""
        self._first_buffers = snapshot.buffers(self._module)
        self._has_started = True
        loaded = self._kept
        self._kept = None
        self._batches = self._progress.total.ready
        self._logged = lightning_internals.logging_step(self._trainer)
        self._optimizes = any(map(optimizer_parameters, self._trainer.optimizers))
        if loaded is not None:
            self._go_on(loaded)
        checkpoint_callbacks.save_last(self._trainer, lambda: self.is_within_window, self._patches)

    @property
    def _progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    def _window_start(self) -> int:
        """Batches of the epoch that were used when an optimizer last stepped: an open window begins there."""
        before = self._progress.total.ready - self._progress.current.ready
        return max(self._batches - before, 0)

    @property
    def is_within_window(self) -> bool:
        """Whether batches were used that no optimizer has stepped with."""
        return self._optimizes and self._window_start() < self._progress.current.ready

    def stepped(self) -> None:
        """An optimizer has stepped, or a gradient scaler has skipped its step: the next batch begins a window."""
        self._batches = self._progress.total.ready
        self._logged = lightning_internals.logging_step(self._trainer) + 1

    def close(self) -> None:
        """The fit is over: :meth:`add_to` adds from now on where it ended."""
        if self._has_started:
            self._kept = self._now()
        self.loaders.close()

    def add_to(
        self,
        checkpoint: dict[str, Any],
        sizes: dict[str, int],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Add the state of every rank to a checkpoint, whose counters become those to go on from.

        A collective on ``group``, that of all ranks on the host. Without it, as after a failure, only this
        rank's state is added. ``sizes`` are the ranks along each dimension of the mesh. Raises ValueError, on every
        rank, if extra states differ: the state dict of the checkpoint holds rank 0's.
        """
        own = self._kept or self._now()
        ranks = [own]
        if group is not None:
            extra_states = {
                # Tensors are compared as numbers: pickles of equal tensors differ.
                name: str(zlib.crc32(pickle.dumps(apply_to_collection(value, Tensor, Tensor.tolist))))
                for name, value in checkpoint.get("state_dict", {}).items()
                if name.endswith(EXTRA_STATE) and not isinstance(value, DTensor)
            }
            if difference := disagreement(extra_states, group):
                raise ValueError(
                    "Extra states of modules (get_extra_state) differ between ranks, and a checkpoint would bring back"
                    f" rank 0's everywhere (by their checksums, {difference}): keep what differs in a buffer, of which"
                    " each rank gets its own back, or let get_extra_state return what all ranks have in common."
                )
            ranks = gather_objects(own, group)
        # Without its loops, a checkpoint begins a new run, as under Lightning's own strategies.
        if "loops" in checkpoint:
            self._remark(own)
            _set_counters(checkpoint, own)
            checkpoint[CHECKPOINT_KEY] = {"format": FORMAT, "sizes": sizes, "ranks": ranks}

    def _remark(self, own: dict[str, Any]) -> None:
        """Tell what a run that resumes from ``own`` state does not repeat exactly, or cannot do."""
        at = loops.position(self._trainer, self.has_stopped_before_validation)
        if at.stage == loops.EPOCH:
            if at.epochs > 0 and self.loaders.begin_anew:
                self._say(BEGINS_ANEW)
            return
        if any(loader["by"][0] == dataloaders.NOTHING for loader in own["loaders"]):
            self._say(WITHOUT_POSITION)
        if self.is_within_window or (at.stage == loops.STEP and self._trainer.validating):
            self._say(REPEATS)
            return
        is_within_step = self._progress.current.processed < at.batches
        if self._run.holds_gradients() or (is_within_step and not self._module.automatic_optimization):
            self._say(HELD)

    def _now(self) -> dict[str, Any]:
        """This rank's state. Its position is that of an open window's first batch."""
        trainer = self._trainer
        at = loops.position(self._trainer, self.has_stopped_before_validation)
        logged = lightning_internals.logging_step(trainer)
        if at.stage != loops.EPOCH and self.is_within_window:
            at = loops.Position(loops.BATCH, self._window_start(), at.epochs)
            logged = self._logged
        elif at.stage in (loops.STEP, loops.VALIDATION):  # the batch's step is not counted yet
            logged += 1
        flags = snapshot.flags(self._module)
        if trainer.validating:
            modes = lightning_internals.modes_before_validation(trainer)
            flags |= {f"{name}.training": mode for name, mode in modes.items()}
        first = self._first_flags
        seen: dict[str, Any] = {}
        if not trainer.interrupted:  # after an exception, it may not be possible to compute metrics
            seen |= trainer.callback_metrics
            if at.stage != loops.EPOCH and loops.is_last_batch(trainer):
                seen |= logged_values.peek_at_epoch_metrics(trainer, self._run.gather)
        own = {
            "at": vars(at),
            "logged": logged,
            "generators": {name: each.get_state() for name, each in rng.generators_of(self._module).items()},
            "loaders": self.loaders.positions(at),
            "buffers": snapshot.unsaved_buffers(self._module, self._first_buffers, self._holds_averages()),
            "metrics": snapshot.metrics(self._module, self._reset_next(at)),
            # A resumed run may set the others differently.
            "flags": {name: flag for name, flag in flags.items() if flag != first.get(name, flag)},
            "own": self._run.state(),
            "seen": seen,
            "random": rng.global_states(self._device),
        }
        return dict(apply_to_collection(own, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True)))

    def _reset_next(self, at: loops.Position) -> set[int]:
        """Ids of the metrics that Lightning resets before another batch updates them."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        reset: set[int] = set()
        if at.stage == loops.EPOCH or (at.stage != loops.BATCH and loops.is_last_batch(self._trainer)):
            reset |= logged_values.logged_metrics(epoch_loop)
        if self._trainer.validating:
            reset |= logged_values.logged_metrics(epoch_loop.val_loop)
        return reset

    def load(self, state: dict[str, Any] | None, checkpoint: dict[str, Any], sizes: dict[str, int]) -> None:
        """Prepare to resume from a checkpoint; :meth:`on_train_start` does the rest. Not a collective.

        ``state`` is what :meth:`add_to` added; None for a checkpoint of another strategy. Lightning loads
        the loops from ``checkpoint`` after this. Raises ValueError if another version of this package wrote
        ``state``.
        """
        # The Trainer itself loads in no hook. What a hook loads are weights, such as those that
        # LearningRateFinder has saved in on_fit_start: the fit goes on where it is.
        if lightning_internals.current_hook(self._module) is not None:
            return
        if state is not None and state["format"] != FORMAT:
            raise ValueError(
                f"The checkpoint's resume state has format {state['format']}, and this version of"
                f" lightning_automodel knows format {FORMAT}: resume with the version that wrote it, or take"
                " only its weights (load_from_checkpoint)."
            )
        checkpoint_callbacks.load_early(self._trainer, checkpoint.get("callbacks", {}))
        if state is None or "loops" not in checkpoint:
            return
        own = self._choose(state, sizes)
        self._kept = own
        _set_counters(checkpoint, own)
        # Lightning warns of every loader without a state, and does not know that these resume.
        self._patches.ignore_warnings("You're resuming from a checkpoint that ended before the epoch ended")

    def _choose(self, saved: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
        """What this rank resumes from, of the states of all ranks that were ``saved``. Not a collective.

        ``sizes`` are the present ranks along each dimension of the mesh. The user is told of a layout that changed: all
        ranks get one state then, and within an epoch, used samples are counted as batches of these ranks.
        """
        # Each context peer has its own metrics; tensor-parallel peers have the same.
        is_alike = all(
            saved["sizes"].get(name, 1) == sizes.get(name, 1) for name in ("data_parallel", CONTEXT)
        )
        ranks: list[dict[str, Any]] = saved["ranks"]
        world_size = self._trainer.world_size
        if is_alike and len(ranks) == world_size:
            return ranks[self._trainer.global_rank]
        used = ranks[0]["at"]["batches"] * saved["sizes"]["data_parallel"]
        batches, num_repeated = divmod(used, sizes["data_parallel"])
        self._say(
            f"The checkpoint holds the states of {len(ranks)} ranks, saved in a run of {saved['sizes']}, and this run"
            f" has {world_size} of {sizes} (after an error, one rank saves alone): the data goes on where it stopped,"
            " and each rank's random states, buffers and metrics of the epoch start afresh. Within an epoch,"
            f" {num_repeated} of {used} batches are used again, which these ranks do not divide evenly; without a"
            " DistributedSampler, samples may be left out or used twice."
        )
        # Without what each rank has for itself.
        first = {**copy.deepcopy(ranks[0]), "random": None, "buffers": {}, "metrics": {}}
        for loader in first["loaders"]:
            kind, _, batch_size = loader["by"]
            if kind == dataloaders.STATE:
                kind = dataloaders.NOTHING  # refused within an epoch
            loader.update(by=(kind, None, batch_size), generators=[], samplers=[])
            loader.pop("state", None)
            if "begun" in loader:
                loader["begun"] = {}
        if first["at"]["stage"] != loops.EPOCH:
            first["at"]["batches"] = batches
        return first

    def _go_on(self, loaded: dict[str, Any]) -> None:
        at = loops.Position(**loaded["at"])
        self._logged = loaded["logged"]
        self.loaders.start(loaded["loaders"], at)
        unknown = snapshot.restore(self._module, loaded, self._device)
        if unknown:
            self._say(
                f"The checkpoint holds buffers of modules that this run does not have: {', '.join(unknown)}."
                " Where they matter, build these modules before on_train_start ends."
            )
        self._run.load_state(loaded["own"])
        if at.is_epoch_ending:
            loops.step_plateau_schedulers(self._trainer)
        loops.finish_restart(self._trainer, at.stage, self.loaders.iterate, self._patches)
        if loaded["random"] is not None:  # drawn from meanwhile
            rng.set_global_states(loaded["random"], self._device)
            saved = loaded["generators"]
            for name, generator in rng.generators_of(self._module).items():
                if name in saved:
                    generator.set_state(saved[name])


def _set_counters(checkpoint: dict[str, Any], own: dict[str, Any]) -> None:
    """Set the counters of a checkpoint's loops to those from which they go on with ``own`` state."""
    saved = checkpoint["loops"]
    saved["fit_loop"] = loops.counters_at(saved["fit_loop"], loops.Position(**own["at"]), own["logged"])

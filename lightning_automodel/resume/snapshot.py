"""Moments of a fit: all of what a rank would need to go on from one, noted, written and put back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.resume import dataloaders, loops, rng, running_metrics
from lightning_automodel.resume.loops import AFTER_VALIDATION, BATCH_END, EPOCH_END
from lightning_automodel.resume.module_buffers import PlainBuffers
from lightning_automodel.resume.switches import Noted, Switches
from lightning_automodel.sharding import weight_averaging


@dataclass(frozen=True)
class Point:
    """A moment of a fit on this rank.

    Attributes:
        next: What comes next, one of the names in :mod:`loop_progress`.
        progress: Counters of the loops.
        random: Global random states, then those of the generators of training and of validation loaders, of training
            samplers, and of the module's own generators.
        position: Where the training loaders are; None where they are yet to be iterated.
        metrics: Running metrics.
        buffers: Plain buffers.
        switches: How modules and parameters are switched.
        counted: Small things that Lightning counts and does not save.
        own: What the strategy itself keeps from step to step.
    """

    next: str
    progress: dict[str, Any]
    random: dict[str, Any]
    position: dataloaders.Position | None
    metrics: dict[str, Any]
    buffers: dict[str, Tensor]
    switches: Noted
    counted: dict[str, Any]
    own: dict[str, Any]


class Noting:
    """Notes where a fit is, and puts it there. Noting neither synchronises nor communicates.

    Args:
        trainer: Of the fit, set up.
        device: Of this rank.
        loaders: Its training loaders.
        own: Returns what the strategy keeps from step to step.
        restore_own: Takes it back.

    Attributes:
        steps_without_end: Steps that began and never ended, of those before the newest.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        device: torch.device,
        loaders: dataloaders.TrainingLoaders,
        own: Callable[[], dict[str, Any]],
        restore_own: Callable[[dict[str, Any]], None],
    ) -> None:
        self._fit_loop, self._device, self._loaders = trainer.fit_loop, device, loaders
        self._trainer, self._own, self._restore_own = trainer, own, restore_own
        module = trainer.lightning_module
        self._metrics = running_metrics.RunningMetrics(trainer, module)
        averages = enumerate(weight_averaging.averaged_models(module))
        self._buffers = PlainBuffers({"module": module} | {f"average{index}": average for index, average in averages})
        self._switches = Switches(trainer, module)
        self._generators: dict[str, list[list[rng.Generator]]] = {"training": [], "validation": []}
        self._generators_of_module: list[rng.Generator] = []
        self._samplers: list[Any] = []
        self.steps_without_end = 0
        self._validation_to_take: tuple[list[list[Any]], dict[int, int]] | None = None

    @property
    def _validation(self) -> Any:
        return self._fit_loop.epoch_loop.val_loop

    def look_again(self) -> None:
        """Look for what is to be noted: finding it takes longer than noting it."""
        self._buffers.look_again()
        self._metrics.look_again()
        self._switches.look_again()
        self._generators = {
            "training": _generators(self._fit_loop._combined_loader),
            "validation": _generators(self._validation._combined_loader),
        }
        self._samplers = _samplers(self._fit_loop._combined_loader)
        self._generators_of_module = rng.generators_of_modules(self._trainer.lightning_module)

    def restore_what_is_trained(self, plan: dict[str, Any]) -> None:
        """Before optimizers are loaded, which have no state for what is frozen."""
        self._switches.restore_what_is_trained(plan["switches"])

    def take(self, next_: str, is_iterated: bool, before_validation: Point | None) -> Point:
        """The moment now.

        Args:
            next_: What comes next.
            is_iterated: Whether the training loaders are iterated for the epoch.
            before_validation: The moment before the newest validation: until its last hooks are over, modules still
                evaluate, and Lightning's loggers have forgotten whether the batch before was an epoch's first.
        """
        progress, metrics = loops.progress_of(self._trainer), self._metrics.note()
        switches = self._switches.note()
        if next_ == BATCH_END:
            loops.finish_counting(progress, self.steps_without_end)
        elif next_ == AFTER_VALIDATION and before_validation is not None:
            metrics |= {"first_batch": before_validation.metrics["first_batch"], "hook": None}
            switches = before_validation.switches
        has_position = is_iterated and next_ != EPOCH_END
        return Point(
            next=next_,
            progress=progress,
            random={
                "global": rng.note(self._device),
                "training": _states(self._generators["training"]),
                "validation": _states(self._generators["validation"]),
                "samplers": [sampler.state_dict() for sampler in self._samplers],
                "module": rng.note_generators(self._generators_of_module),
            },
            position=self._loaders.position(self._fit_loop._data_fetcher) if has_position else None,
            metrics=metrics,
            buffers=self._buffers.note(),
            switches=switches,
            counted={
                "validation_batches": dict(self._validation._seen_batches_per_dataloader),
                "training_loaders_made": self._fit_loop._last_train_dl_reload_epoch,
                "validation_loaders_made": self._validation._last_val_dl_reload_epoch,
            },
            own=self._own(),
        )

    def savable(self, point: Point, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """``point`` as a checkpoint holds it. A collective on ``group`` where it is given."""
        plain = vars(point) | {
            "buffers": self._buffers.savable(point.buffers, group),
            "position": dataloaders.savable(point.position),
            "metrics": running_metrics.savable(point.metrics),
            "switches": self._switches.savable(point.switches),
        }
        return rng.savable(plain)

    def restore(self, plan: dict[str, Any]) -> None:
        """Before the run begins, put back what no hook changes until it goes on. Every rank must call it."""
        self._metrics.restore(plan["metrics"], self._device)
        self._buffers.restore(plan["buffers"])
        self._restore_own(plan["own"])

    def restore_randomness(self, plan: dict[str, Any]) -> None:
        """Where the run goes on, put back random states, switches and what Lightning counts."""
        counted, random = plan["counted"], plan["random"]
        self._fit_loop._last_train_dl_reload_epoch = counted["training_loaders_made"]
        self._validation._last_val_dl_reload_epoch = counted["validation_loaders_made"]
        self.look_again()
        self._switches.restore(plan["switches"])
        self._validation_to_take = [] if random is None else random["validation"], counted["validation_batches"]
        if self._validation._combined_loader is not None:
            self.validation_loaders_made()
        if random is not None:
            _set_states(self._generators["training"], random["training"])
            if plan["position"] is None:
                for sampler, state in zip(self._samplers, random["samplers"], strict=False):
                    sampler.load_state_dict(state)
            rng.set_generators(self._generators_of_module, random["module"])
            rng.set_to(random["global"], self._device)

    def validation_loaders_made(self) -> None:
        """Put back the states of their generators, where that is due."""
        if not self._generators["validation"]:
            self.look_again()
        taken, self._validation_to_take = self._validation_to_take, None
        if taken is not None:
            _set_states(self._generators["validation"], taken[0])
            self._validation._seen_batches_per_dataloader.update(taken[1])


def _generators(combined: Any) -> list[list[rng.Generator]]:
    return [] if combined is None else [rng.generators_of(loader) for loader in combined.flattened]


def _states(generators: list[list[rng.Generator]]) -> list[list[Any]]:
    return [rng.note_generators(of_loader) for of_loader in generators]


def _samplers(combined: Any) -> list[Any]:
    loaders = [] if combined is None else combined.flattened
    return [sampler for loader in loaders for sampler in rng.samplers_of(loader)]


def _set_states(generators: list[list[rng.Generator]], states: list[list[Any]]) -> None:
    for of_loader, saved in zip(generators, states, strict=False):
        rng.set_generators(of_loader, saved)

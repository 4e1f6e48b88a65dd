"""Compares the gradients of one step with those of one batch."""

from contextlib import suppress
from dataclasses import replace

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.counting import Counting
from lightning_automodel.callbacks.exactness.lockstep import (
    Gradients,
    LockStep,
    ReplayError,
    Turn,
)
from lightning_automodel.callbacks.exactness.recording import RecordedWindow, Recorder
from lightning_automodel.callbacks.exactness.slope import slope_along
from lightning_automodel.callbacks.exactness.verdict import StepResult
from lightning_automodel.callbacks.exactness.words import percent
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack

_NO_COUNT = (
    "no count was given, nothing in the batch can be counted, and the graph of the loss does not tell, so that"
    " every micro-batch weighs the same here: pass ExactnessCheck(count_label_tokens=<function of the batch>),"
    " or per_token_loss=False if that is meant"
)


def reason_against(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Why this training cannot be replayed; None if there is no known reason."""
    strategy = type(trainer.strategy).__name__
    if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)) or "XLA" in strategy:
        return f"{strategy} keeps parameters in a form of its own"
    if not (module.automatic_optimization or automodel(trainer)):
        return f"under manual optimization {strategy} does not tell which backwards belong together"
    if lightning_internals.draws_its_batches(module.training_step):
        return "training_step(dataloader_iter) draws its batches itself"
    return None


def first(text: str | None) -> str | None:
    """The text of the first rank that has one. A collective over the world."""
    return next(filter(None, collectives.gather_objects(text)), None)


class Comparison:
    """Records windows of a run, and compares them with one batch, each before its optimizer step."""

    def __init__(self, trainer: pl.Trainer, counting: Counting, patches: PatchStack) -> None:
        self._trainer = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        self._counting = counting
        self.lockstep = LockStep(trainer, counting.weighting)
        self.recorder = Recorder(trainer, counting, self.lockstep, patches)
        self._asks_forwards = True

    def window(self, recorded: RecordedWindow) -> StepResult | None:
        """Compare a window of which this rank has ``recorded`` its part.

        None if no rank has computed a loss. A collective over the world.
        """
        lockstep = self.lockstep
        sampler = self._trainer.distributed_sampler_kwargs or {}
        data_rank = sampler.get("rank", self._trainer.global_rank)
        own = recorded.micro_batches
        shown = [replace(each, pickled=b"") for each in own]
        by_rank = collectives.gather_objects((data_rank, shown))
        everywhere = [each for _, records in by_rank for each in records]
        if not everywhere:
            return None
        counts = self._counting.settle([each.told for each in everywhere])
        for each, count in zip(everywhere, counts, strict=False):
            each.count = count
        turns = Turn.all_of(by_rank, lockstep.num_slices)
        step = StepResult([turn.count for turn in turns])
        step.unequal = _unequal(lockstep.parameters)
        step.is_manual = not self._module.automatic_optimization
        with lockstep.apart(own, recorded.trained, self.recorder.weights):
            step.is_sharded = lockstep.is_sharded
            step.problem = first(self._reason_against(recorded))
            try:
                if step.problem is None:
                    self._replay(step, turns, recorded.gradients or {}, is_counted=bool(counts))
            except ReplayError as error:
                step.problem = str(error)
            if lockstep.restore_weights() and not step.is_manual:
                step.problem = (
                    "training_step writes weights, which a micro-batch would find as another wrote them"
                )
            step.problem = first(step.problem)
            has_slope = step.is_sharded and not (step.problem or step.is_half or step.is_manual)
            if has_slope and self._asks_forwards:
                self._asks_forwards = False
                with suppress(ReplayError, ArithmeticError):  # a step may differentiate by itself
                    step.slope = slope_along(recorded.gradients or {}, lockstep, turns)
        return step

    def _reason_against(self, recorded: RecordedWindow) -> str | None:
        """Why this rank's part of a window cannot be replayed; None if there is no known reason."""
        if recorded.gradients is None:
            return "no backward of the loss that training_step has returned was seen"
        plain = {name: p for name, p in self.lockstep.trained.items() if not isinstance(p, DTensor)}
        hooked = [name for name, parameter in plain.items() if torch_internals.has_hooks(parameter)]
        if hooked:
            return (
                f"{list_first(hooked, 4)} has a hook (register_hook), which sees something else in each"
                " micro-batch than in one batch: use on_before_optimizer_step, or remove it for the check"
            )
        weights = self.recorder.weights
        found = [weights[each.step][0] for each in recorded.micro_batches if weights]
        if any(not torch.equal(each[name], found[0][name]) for each in found for name in recorded.trained):
            return "weights are written within a window that trains them"
        return None

    def _replay(self, step: StepResult, turns: list[Turn], final: Gradients, is_counted: bool) -> None:
        lockstep = self.lockstep
        run = {name: gradient for name, gradient in final.items() if name in lockstep.trained}
        exact, parts, losses = lockstep.one_batch(turns)
        again, _, _ = lockstep.one_batch(turns, scale=0.75, reverse=True)  # which rounds differently
        numel = {name: parameter.numel() for name, parameter in lockstep.trained.items()}
        step.eps = _rounding_unit(self._trainer, lockstep.trained)
        off = lockstep.norms(run, exact)
        step.judge(off, lockstep.norms(again, exact), lockstep.norms(exact), numel)
        columns = torch.cat([parts, lockstep.sample(run)[:, None]], dim=1)
        step.explain(lockstep.products(columns), self._counting.unit)
        tolerance = 1e-2 if step.is_half else 1e-5
        pairs = [
            (turn.recorded.loss, loss)
            for turn, loss in zip(turns, losses, strict=True)
            if abs(turn.recorded.loss - loss) > tolerance * abs(turn.recorded.loss)
        ]
        if pairs:
            step.problem = (
                f"{len(pairs)} of {len(turns)} losses differ in the replay, such as {pairs[0][0]:.6g} in the"
                f" run and {pairs[0][1]:.6g} in the replay: training_step is not repeatable, depends on the"
                " rank or on other ranks, or keeps a state that is no attribute of a module"
            )
        elif not is_counted and (step.explanation or not step.is_wrong):
            step.problem = f"{_NO_COUNT}. {step.explanation}".rstrip(". ")
        elif step.is_wrong and not step.explanation and is_overridden("backward", self._module):
            step.problem = (
                f"they are {percent(step.gradient_error)} off, as LightningModule.backward may mean it"
            )


def _rounding_unit(trainer: pl.Trainer, parameters: dict[str, nn.Parameter]) -> float:
    if "16" in str(trainer.precision_plugin.precision):
        return torch.finfo(torch.bfloat16).eps
    return max((torch.finfo(p.dtype).eps for p in parameters.values()), default=0.0)


def _unequal(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Plain parameters of which ranks hold different values. A collective over the world."""
    sums = {
        name: float(parameter.detach().double().sum().nan_to_num())
        for name, parameter in parameters.items()
        if not isinstance(parameter, DTensor)
    }
    by_rank = collectives.gather_objects(sums)
    return [name for name in sums if len({of_rank[name] for of_rank in by_rank}) > 1]

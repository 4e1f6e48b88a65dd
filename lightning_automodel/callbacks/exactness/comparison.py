"""Compares the gradients of one window with those of one batch."""

from contextlib import suppress
from dataclasses import replace

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.counting import Counting
from lightning_automodel.callbacks.exactness.lockstep import LockStep, ReplayError, Turn, agree
from lightning_automodel.callbacks.exactness.parts import Parts
from lightning_automodel.callbacks.exactness.recording import RecordedWindow, Recorder
from lightning_automodel.callbacks.exactness.slope import slope_along
from lightning_automodel.callbacks.exactness.verdict import StepResult
from lightning_automodel.callbacks.exactness.words import percent
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals

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


def compare(
    trainer: pl.Trainer,
    counting: Counting,
    recorder: Recorder,
    recorded: RecordedWindow,
    asks_forwards: bool,
) -> StepResult | None:
    """Compare a window of which this rank has ``recorded`` its part, by forwards alone too if ``asks_forwards``.

    None if no rank has computed a loss. A collective over the world.
    """
    sampler = trainer.distributed_sampler_kwargs or {}
    shown = [replace(each, pickled=b"") for each in recorded.micro_batches]
    by_rank = collectives.gather_objects((sampler.get("rank", trainer.global_rank), shown))
    everywhere = [each for _, records in by_rank for each in records]
    if not everywhere:
        return None
    is_counted = counting.settle(everywhere)
    lockstep = LockStep(trainer, counting.weighting, recorder, recorded)
    turns = Turn.all_of(by_rank, lockstep.num_slices)
    step = StepResult([turn.count for turn in turns], is_sharded=lockstep.is_sharded)
    step.unequal = _unequal(lockstep.parameters)
    step.is_manual = not trainer.lightning_module.automatic_optimization
    with lockstep.apart():
        try:
            agree(_reason_against(recorded, recorder))
            _replay(trainer, step, lockstep, turns, recorded.gradients or {}, is_counted, counting.unit)
        except ReplayError as error:
            step.problem = str(error)
        if asks_forwards and step.is_sharded and not (step.problem or step.is_half or step.is_manual):
            with suppress(ReplayError, ArithmeticError):  # a step may differentiate by itself
                step.slope = slope_along(recorded.gradients or {}, lockstep, turns)
    return step


def _reason_against(recorded: RecordedWindow, recorder: Recorder) -> str | None:
    """Why this rank's part of a window cannot be replayed; None if there is no known reason."""
    if recorded.gradients is None:
        return "no backward of the loss that training_step has returned was seen"
    graded = {name: recorder.parameters[name] for name in recorded.gradients}
    plain = {name: parameter for name, parameter in graded.items() if not isinstance(parameter, DTensor)}
    hooked = [name for name, parameter in plain.items() if torch_internals.has_hooks(parameter)]
    if hooked:
        return (
            f"{list_first(hooked, 4)} has a hook (register_hook), which sees something else in each"
            " micro-batch than in one batch: use on_before_optimizer_step, or remove it for the check"
        )
    found = [recorder.weights[each.step][0] for each in recorded.micro_batches if recorder.weights]
    if any(not torch.equal(each[name], found[0][name]) for each in found for name in graded):
        return "weights are written within a window that trains them"
    return None


def _replay(
    trainer: pl.Trainer,
    step: StepResult,
    lockstep: LockStep,
    turns: list[Turn],
    run: Parts,
    is_counted: bool,
    unit: str,
) -> None:
    """Fill in what a replay shows. ReplayError if it can't be judged."""
    exact, parts, losses = lockstep.one_batch(turns)
    again, _, _ = lockstep.one_batch(turns, scale=0.75, reverse=True)  # which rounds differently
    has_written = lockstep.write(lockstep.weights) and not step.is_manual
    if "16" in str(trainer.precision_plugin.precision):
        step.eps = torch.finfo(torch.bfloat16).eps
    else:
        step.eps = max((torch.finfo(gradient.dtype).eps for gradient in exact.values()), default=0.0)
    numel = {name: parameter.numel() for name, parameter in lockstep.parameters.items()}
    off = lockstep.norms(run, exact)
    step.judge(off, lockstep.norms(again, exact), lockstep.norms(exact), numel)
    columns = torch.cat([parts, lockstep.sample(run)[:, None]], dim=1)
    step.explain(lockstep.products(columns), unit)
    agree(_problem_of(trainer.lightning_module, step, turns, losses, has_written, is_counted))


def _problem_of(module, step, turns, losses, has_written, is_counted) -> str | None:
    if has_written:
        return "training_step writes weights, which a micro-batch would find as another wrote them"
    tolerance = 1e-2 if step.is_half else 1e-5
    pairs = [
        (turn.recorded.loss, loss)
        for turn, loss in zip(turns, losses, strict=True)
        if abs(turn.recorded.loss - loss) > tolerance * abs(turn.recorded.loss)
    ]
    if pairs:
        return (
            f"{len(pairs)} of {len(turns)} losses differ in the replay, such as {pairs[0][0]:.6g} in the"
            f" run and {pairs[0][1]:.6g} in the replay: training_step is not repeatable, depends on the"
            " rank or on other ranks, or keeps a state that is no attribute of a module"
        )
    if not is_counted and (step.explanation or not step.is_wrong):
        return f"{_NO_COUNT}. {step.explanation}".rstrip(". ")
    if step.is_wrong and not step.explanation and is_overridden("backward", module):
        return f"they are {percent(step.gradient_error)} off, as LightningModule.backward may mean it"
    return None


def _unequal(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Plain parameters of which ranks hold different values. A collective over the world."""
    sums = {
        name: float(parameter.detach().double().sum().nan_to_num())
        for name, parameter in parameters.items()
        if not isinstance(parameter, DTensor)
    }
    by_rank = collectives.gather_objects(sums)
    return [name for name in sums if len({of_rank[name] for of_rank in by_rank}) > 1]

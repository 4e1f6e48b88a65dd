"""The callback that replays the first optimizer steps of a training in one process, and says how far off they are."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.callbacks.exactness import results
from lightning_automodel.callbacks.exactness.count_check import CountCheck
from lightning_automodel.callbacks.exactness.gradient_check import GradientCheck
from lightning_automodel.callbacks.exactness.module_copy import ReplayError, copy_module
from lightning_automodel.callbacks.exactness.optimizer_check import (
    ClippingCheck,
    OptimizerCheck,
    changes_gradients,
    unwrapped,
    whole_state,
)
from lightning_automodel.callbacks.exactness.recording import Recorder, Window, gathered_on_first, whole_on_host
from lightning_automodel.callbacks.exactness.replay import Gradients, Replay, Shares, random_states_kept
from lightning_automodel.callbacks.exactness.results import CountResult, StepResult
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.distributed import collectives
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples
from lightning_automodel.patching import PatchStack

_WAIT = timedelta(hours=2)  # for rank 0's replay
_BYTES = 12  # on rank 0's host for each parameter: weights, and gradients of the run and of the replay
_BYTES_IN_FLOAT64 = 16  # on its device: weights and gradients


class ExactnessCheck(Callback):
    """Tells whether the first optimizer steps of this training are those of one process with one big batch.

    It works under any strategy that holds parameters plain or as ``DTensor``, and changes nothing: the training has the
    same bits without it. For each step, rank 0 takes all micro-batches of all ranks and computes them once more, from
    the run's own weights and random states, on a copy of the module. It compares gradients, weights written within
    ``training_step``, clipping, the optimizer's step, weights that should be equal on all ranks, and the count. The
    verdict is printed; docs/is_my_training_exact.md says what each means, and what to do.

    It is ``"exact"`` only if everything was looked at. Manual optimization, a step that communicates, or one that
    cannot be repeated are ``"not checked"``, with the reason.

    Each checked step is a collective over all ranks; the others wait for rank 0 at most two hours. Rank 0 needs up to
    28 bytes for each parameter, 16 of them on its device, and the activations of one micro-batch in float64: check a
    small configuration of a large model.

    Args:
        steps: Optimizer steps to check.
        raises: Raise RuntimeError on all ranks if the verdict is ``"wrong"``.
        count: What a loss is the mean of, as for ``AutomodelStrategy``. This and the following are for other
            strategies; None: the labels of the batch, or its samples, whichever agrees with the loss.
        count_label_tokens: A function of the batch.
        per_token_loss: False if every micro-batch should weigh the same.
        loss_reduction: ``"sum"`` if ``training_step`` returns a sum.
        label_key: Entry of the batch that holds the labels.
        ignore_index: Label that the loss ignores.
        label_shift: First labels of each row that the loss does not use.

    Raises:
        ValueError: If ``steps`` is not positive, or a counting option is given beside ``AutomodelStrategy``.

    Attributes:
        verdict: ``"exact"``, ``"wrong"`` or ``"not checked"``; None until it is known.
        report: What is printed.
        results: A :class:`StepResult` for each step, on rank 0, with all numbers. Loggers get those of
            ``exactness/gradient_error``, ``exactness/rounding`` and ``exactness/optimizer_error``.

    Examples:
        >>> callbacks = [ExactnessCheck()]
    """

    def __init__(
        self,
        steps: int = 3,
        raises: bool = False,
        count: Literal["tokens", "samples"] | None = None,
        count_label_tokens: Callable[..., Any] | None = None,
        per_token_loss: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        label_key: str = "labels",
        ignore_index: int = -100,
        label_shift: int = 0,
    ) -> None:
        if steps < 1:
            raise ValueError(f"ExactnessCheck: steps must be at least 1, got {steps}.")
        counter = count_samples if count == "samples" else count_label_tokens
        self._told = TokenWeighting(per_token_loss, loss_reduction, label_key, ignore_index, label_shift, counter)
        self._is_told = count is not None or self._told != TokenWeighting()
        self._num_steps, self._raises = steps, raises
        self._patches = PatchStack()
        self._reset()

    def _reset(self) -> None:
        self.verdict: str | None = None
        self.report = ""
        self.results: list[StepResult] = []
        self._count: CountResult | None = None
        self._refusal: str | None = None
        self._is_active = False
        self._copy: pl.LightningModule | None = None
        self._replay: Replay | None = None
        self._step: StepResult | None = None
        self._skips = False
        self._clipping: ClippingCheck | None = None
        self._optimizer: OptimizerCheck | None = None

    # --- Before training ----------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        self._reset()
        if self._is_told and automodel(trainer) is not None:
            raise ValueError(
                "ExactnessCheck checks the counting options of AutomodelStrategy, and takes its own only under other"
                " strategies: pass them to AutomodelStrategy alone."
            )
        self._refusal = _refusal(trainer, pl_module)
        if self._refusal is None and trainer.is_global_zero:
            self._copy_before_sharding(trainer, pl_module)

    def _copy_before_sharding(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Copy the module between its ``configure_model`` and the strategy's ``setup``, which shards it.

        ``configure_model`` may shard it too: a copy is then made before.
        """
        patches, strategy = self._patches, trainer.strategy
        setup, configure_model = strategy.setup, module.configure_model
        early: list[pl.LightningModule] = []

        @wraps(configure_model)
        def copy_and_configure() -> None:
            vars(module).pop("configure_model")
            with suppress(Exception):  # it may be complete only afterwards
                early.append(copy_module(module, trainer))
            configure_model()

        def copy_and_setup(*args: Any, **kwargs: Any) -> None:
            patches.restore()
            try:
                self._copy = _whole_copy(module, trainer, early)
            except Exception as error:
                self._refusal = f"the module cannot be copied ({_described(error)})"
            setup(*args, **kwargs)

        if is_overridden("configure_model", module):
            patches.set(module, "configure_model", copy_and_configure)
        patches.set(strategy, "setup", copy_and_setup)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refusal = self._refusal or _refusal(trainer, pl_module)
        if refusal is None and trainer.is_global_zero:
            refusal = self._start_replay(trainer, pl_module)
        refusal = collectives.broadcast_object(refusal, 0)
        if refusal is not None:
            self._say(trainer, results.NOT_CHECKED, f"ExactnessCheck: NOT CHECKED. {_sentence(refusal)}")
            return
        self._is_active = True
        self._recorder = Recorder(trainer, pl_module, self._patches)
        lightning_internals.patch_after_closure(trainer.precision_plugin, self._before_stepping, self._patches)
        optimizer_step = trainer.strategy.optimizer_step

        def step_and_compare(*args: Any, **kwargs: Any) -> Any:
            output = optimizer_step(*args, **kwargs)
            self._after_stepping(trainer, pl_module)
            return output

        self._patches.set(trainer.strategy, "optimizer_step", step_and_compare)

    def _start_replay(self, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Make the replay. Returns why that is not possible."""
        if self._copy is None:
            return "the module was not copied before it was sharded"
        hooks = vars(self._copy).pop(_HOOKS)
        try:
            self._replay = Replay(self._copy, module, trainer, hooks)
        except Exception as error:
            return f"the copy of the module cannot be set up ({_described(error)})"
        ours = automodel(trainer)
        self._is_ours = ours is not None
        self._weighting = self._told if ours is None else _weighting_of(ours.describe())
        self._has_slices = ours is not None and ours.describe()["options"]["context_parallel_size"] > 1
        numel = sum(parameter.numel() for parameter in self._copy.parameters())
        gib = numel * (_BYTES + _BYTES_IN_FLOAT64) / 2**30
        rank_zero_info(
            f"ExactnessCheck compares the first {self._num_steps} optimizer steps with one process. On rank 0 this"
            f" needs about {gib:.2g} GiB, and the activations of one micro-batch in float64."
        )
        return None

    @property
    def _required_replay(self) -> Replay:
        if self._replay is None:
            raise ReplayError("the replay has ended")
        return self._replay

    @property
    def _required_step(self) -> StepResult:
        if self._step is None:
            raise ReplayError("there is no open step")
        return self._step

    # --- One optimizer step -------------------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self._is_active:
            return
        recorder, step = self._recorder, StepResult()
        self._step, self._skips = step, False
        parameters = dict(pl_module.named_parameters())
        optimized = {id(each) for group in unwrapped(optimizer).param_groups for each in group["params"]}
        own = {name for name, each in parameters.items() if id(each) in optimized and each.grad is not None}
        told = collectives.gather_objects((own, recorder.written(), recorder.replicas()))
        with_gradient = set.intersection(*(each[0] for each in told))
        written = set.union(*(each[1] for each in told))
        step.unequal = _unequal([each[2] for each in told])
        is_first = trainer.is_global_zero
        # Each loop is a collective for shards: all ranks go through all parameters in their order.
        weights = _whole({name: recorder.weights.get(name, each) for name, each in parameters.items()}, is_first)
        now = _whole({name: each for name, each in parameters.items() if name in written}, is_first)
        graded = {name: each.grad for name, each in parameters.items() if name in with_gradient}
        gradients: Gradients = dict(_whole(graded, is_first))
        self._graded, self._names = list(graded), {id(each): name for name, each in parameters.items()}
        windows = gathered_on_first(recorder.window, trainer.world_size)
        if windows is not None:
            missing = [n for n, p in parameters.items() if id(p) in optimized and recorder.trainable.get(n)]
            gradients = {**dict.fromkeys(missing), **gradients}
            with torch.enable_grad(), random_states_kept(trainer.strategy.root_device):
                self._compare_gradients(trainer, windows, gradients, weights, now)
        recorder.clear()
        collectives.named_barrier("ExactnessCheck", _WAIT)

    def _compare_gradients(
        self,
        trainer: pl.Trainer,
        windows: list[Window | None],
        gradients: Gradients,
        weights: dict[str, Tensor],
        now: dict[str, Tensor],
    ) -> None:
        """Fill in what is found of this step's gradients, on rank 0."""
        step, recorder, replay = self._required_step, self._recorder, self._required_replay
        problems = [window.problem for window in windows if window is not None and window.problem]
        is_finite = all(gradient is None or bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        peers = _by_data_rank([window for window in windows if window is not None])
        own = [each[0] for each in peers]
        try:
            replay.begin_step(recorder.trainable, recorder.training)
        except ReplayError as reason:
            problems = [str(reason)]
        if problems:
            step.problem = problems[0]
        elif not is_finite and getattr(trainer.precision_plugin, "scaler", None) is not None:
            self._skips = True  # the step is not made either
        elif not is_finite:
            step.problem = "gradients are not finite"
        elif not any(record.loss is not None for window in own for record in window.micro_batches):
            self._skips = True
        if step.problem or self._skips:
            return
        try:
            shares = self._shares(own, peers)
            if self._count is None:
                self._check_count(trainer, own, weights)
                shares = self._shares(own, peers)
            if step.problem is None:
                step.counts = shares.counts
                self._clipping = ClippingCheck(gradients, replay.sample(set(gradients)))
                GradientCheck(replay, trainer, own, shares, step).compare(gradients, weights, now)
        except ReplayError as reason:
            step.problem = str(reason)
        except Exception as error:
            step.problem = f"the replay has raised {_described(error)}"
        callbacks = changes_gradients(trainer)
        if step.is_wrong and callbacks and not step.explanation and step.problem is None:
            step.problem = (
                f"they are {results.percent(step.gradient_error)} off, which the callback {callbacks[0]} may do on"
                " purpose: check without it"
            )

    def _shares(self, windows: list[Window], peers: list[list[Window]]) -> Shares:
        weighting = self._weighting
        counts = []
        for window, same_data in zip(windows, peers, strict=True):
            for index, record in enumerate(window.micro_batches):
                told = [each.micro_batches[index].returned_count for each in same_data]
                # Context-parallel peers return the counts of their slices.
                returned = sum(told) if None not in told and self._has_slices else told[0]  # type: ignore[arg-type]
                output = None if returned is None else {"num_label_tokens": returned}
                counts.append(0.0 if record.loss is None else float(self._count_of(record.arguments[0], output)))
        denominator = sum(counts) if weighting.per_token_loss else float(sum(count > 0 for count in counts))
        return Shares(self._weighting, counts, denominator)

    def _count_of(self, batch: Any, output: Any) -> Any:
        try:
            return self._weighting.count(batch, output)
        except (ValueError, TypeError):
            if self._is_told or self._is_ours:
                raise
        # A strategy that does not count; a batch without labels may hold one sample a row.
        self._weighting = TokenWeighting(count_label_tokens=count_samples)
        return self._weighting.count(batch, output)

    def _check_count(self, trainer: pl.Trainer, windows: list[Window], weights: dict[str, Tensor]) -> None:
        """Find out, once, whether what is counted is what the loss is divided by."""
        if not self._weighting.per_token_loss:
            self._count = CountResult(results.EXACT, "every micro-batch weighs the same, as told")
            return
        check = CountCheck(self._required_replay, windows, weights, self._weighting)
        try:
            self._count = check.check()
        except ReplayError:
            raise
        except Exception as error:
            self._count = CountResult(results.NOT_CHECKED, f"not checked ({_described(error)})")
        if self._count.verdict != results.WRONG or self._is_told or self._is_ours:
            return
        # Nobody has told a count: what was tried first is not the user's mistake.
        if check.better is not None:
            self._weighting = check.better
            self._count = CountResult(results.EXACT, "agrees with the loss")
        else:
            self._required_step.problem = (
                f"the weight of micro-batches is not known, as {self._count.text}: tell ExactnessCheck the count, or"
                " return it as num_label_tokens"
            )
            self._count = None

    def _before_stepping(self, optimizer: Any) -> None:
        """After hooks and clipping: step a copy of the optimizer. A collective."""
        if self._step is None:
            return
        trainer, module = self._recorder.trainer, self._recorder.module
        parameters, is_first = dict(module.named_parameters()), trainer.is_global_zero
        gradients: Gradients = dict(_whole({n: parameters[n].grad for n in self._graded}, is_first))
        weights = _whole(parameters, is_first)
        states = whole_state(unwrapped(optimizer), self._names, is_first)
        if states is None or self._skips:
            return
        try:
            if self._clipping is not None:
                self._clipping.compare(gradients, trainer, self._step)
            with random_states_kept(trainer.strategy.root_device):
                self._optimizer = OptimizerCheck(
                    self._required_replay, unwrapped(optimizer), self._names, weights, gradients, states
                )
        except Exception as error:
            self._step.note = _described(error)

    def _after_stepping(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """After the optimizer's step: compare weights. A collective."""
        step, self._step = self._step, None
        if step is None:
            return
        after = _whole(dict(module.named_parameters()), trainer.is_global_zero)
        if self._optimizer is not None:
            self._optimizer.compare(after, step)
        self._optimizer = self._clipping = None
        if trainer.is_global_zero and not self._skips:
            self.results.append(step)
            for logger in trainer.loggers:
                logger.log_metrics(step.numbers(), lightning_internals.logging_step(trainer))
        if collectives.broadcast_object(len(self.results), 0) >= self._num_steps:
            self._finish(trainer)

    # --- The verdict --------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_active:
            self._finish(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._is_active = False
        self._patches.restore()
        self._copy = self._replay = None

    def _finish(self, trainer: pl.Trainer) -> None:
        self._stop()
        told: tuple[str, str] | None = None
        if trainer.is_global_zero:
            verdict = results.verdict_of(self.results, self._count)
            told = verdict, self._report(trainer, verdict)
        self._say(trainer, *collectives.broadcast_object(told, 0))
        if self._raises and self.verdict == results.WRONG:
            raise RuntimeError(self.report)

    def _report(self, trainer: pl.Trainer, verdict: str) -> str:
        head = f"ExactnessCheck: {verdict.upper()}"
        if not self.results:
            return f"{head}. There was no optimizer step."
        if verdict == results.EXACT and self._count is not None and self._count.verdict == results.NOT_CHECKED:
            head += " for the count given"
        steps, ranks = _number(len(self.results), "optimizer step"), _number(trainer.world_size, "rank")
        lines = results.report_of(self.results, self._count, self._weighting.unit, self._is_ours)
        return "\n  ".join([f"{head} in {steps} on {ranks}.", *lines])

    def _say(self, trainer: pl.Trainer, verdict: str, report: str) -> None:
        self.verdict, self.report = verdict, report
        if trainer.is_global_zero:
            # A progress bar has not ended its line.
            print(report if trainer.progress_bar_callback is None else f"\n{report}", flush=True)


def _refusal(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Why this training cannot be checked; None if nothing is known against it."""
    strategy = type(trainer.strategy).__name__
    if not module.automatic_optimization:
        return "manual optimization steps within training_step, which the replay does not repeat"
    if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)) or "XLA" in strategy:
        return f"{strategy} keeps parameters in a form of its own"
    if lightning_internals.draws_its_batches(module.training_step):
        return "training_step(dataloader_iter) draws its batches itself"
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        return "SyncBatchNorm takes statistics over the batches of all ranks, which the replay takes one by one"
    if any(isinstance(unwrapped(each), torch.optim.LBFGS) for each in trainer.strategy.optimizers):
        return "LBFGS computes gradients several times in a step"
    return None


_HOOKS = "_exactness_parameter_hooks"


def _whole_copy(module: pl.LightningModule, trainer: pl.Trainer, early: list[pl.LightningModule]) -> pl.LightningModule:
    """A copy with whole parameters: of the module as it is, or the one before ``configure_model`` has sharded it."""
    copied = early[0] if early else None
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        copied = copy_module(module, trainer)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if copied is None or {name: parameter.shape for name, parameter in copied.named_parameters()} != shapes:
        raise ReplayError("configure_model creates parameters and shards them at once; create them in __init__")
    hooks = {name: torch_internals.tensor_hooks(parameter) for name, parameter in module.named_parameters()}
    vars(copied)[_HOOKS] = hooks
    return copied


def _weighting_of(described: dict[str, Any]) -> TokenWeighting:
    options = described["options"]
    return TokenWeighting(
        options["per_token_loss"],
        options["loss_reduction"],
        options["label_key"],
        options["ignore_index"],
        options["label_shift"],
        count_samples if options["count"] == "samples" else options["count_label_tokens"],
    )


def _whole(tensors: dict[str, Any], keeps: bool) -> dict[str, Any]:
    """Tensors whole and on the host, where this rank ``keeps`` them. A collective for those that are sharded."""
    found = {}
    for name, tensor in tensors.items():
        if keeps or isinstance(tensor, DTensor):
            whole = None if tensor is None else whole_on_host(tensor)
            if keeps:
                found[name] = whole
    return found


def _unequal(by_rank: list[dict[tuple[str, tuple[int, ...]], int]]) -> list[str]:
    """Parameters of which ranks that should hold the same part hold another one."""
    values: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for found in by_rank:
        for key, value in found.items():
            values.setdefault(key, set()).add(value)
    return sorted({name for (name, _), distinct in values.items() if len(distinct) > 1})


def _by_data_rank(windows: list[Window]) -> list[list[Window]]:
    """Windows of ranks that share their data together, in the order of the data."""
    peers: dict[int, list[Window]] = {}
    for window in windows:
        peers.setdefault(window.data_rank, []).append(window)
    return [peers[rank] for rank in sorted(peers)]


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"

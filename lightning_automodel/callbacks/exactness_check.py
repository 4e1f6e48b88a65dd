"""The callback that replays a training's first optimizer steps in one process and reports the difference.

A check goes through the files of ``exactness/`` in this order. ``module_copy`` copies the module before
it is sharded, or says why it cannot. ``recording`` keeps what each rank computes in a step, and gathers
it on rank 0. There ``comparison`` drives the checks of the step: ``replay`` computes it again,
``isolation`` keeps the other ranks and the run's own module out of reach, ``gradient_check`` judges
gradients and written weights, ``count_check`` the count, and ``optimizer_check`` clipping and the step.
``results`` turns the numbers into the verdict and its words.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel.callbacks.exactness import results
from lightning_automodel.callbacks.exactness.comparison import Comparison
from lightning_automodel.callbacks.exactness.module_copy import copy_module, reason_against, whole_copy
from lightning_automodel.callbacks.exactness.optimizer_check import unwrapped, whole_states
from lightning_automodel.callbacks.exactness.recording import Recorder, gathered_on_first, unequal, whole
from lightning_automodel.callbacks.exactness.replay import Replay
from lightning_automodel.callbacks.exactness.results import StepResult, described
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.distributed import collectives
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack

_WAIT = timedelta(hours=2)  # for rank 0's replay
# Bytes per parameter: weights and two gradients on the host, weights and gradients in float64 on the device.
_BYTES = 28


class ExactnessCheck(Callback):
    """Checks whether the first optimizer steps of this training equal those of one process with one big batch.

    It works under any strategy that holds parameters as plain tensors or as ``DTensor``. It does not change
    the training, which has the same bits without it. For each step, rank 0 recomputes all micro-batches of
    all ranks on a copy of the module, from the run's own weights and random states. It compares gradients,
    weights written within ``training_step``, clipping, the optimizer's step, weights that should be equal on
    all ranks, and the count. The verdict is printed; docs/is_my_training_exact.md explains each verdict and
    its remedy.

    The verdict is ``"exact"`` only if everything was checked. Manual optimization, a step that communicates,
    and a step that cannot be repeated are ``"not checked"``, with the reason.

    Each checked step is a collective over all ranks; the others wait for rank 0 at most two hours. Rank 0
    needs up to 28 bytes per parameter, 16 of them on its device, and the activations of one micro-batch in
    float64: check a small configuration of a large model.

    Args:
        steps: Number of optimizer steps to check.
        raises: Whether to raise RuntimeError on all ranks if the verdict is ``"wrong"``.
        count: Unit that the loss is a mean over, as for ``AutomodelStrategy``. This and the options below
            are for other strategies. None takes the labels of the batch or its samples, whichever agrees
            with the loss.
        count_label_tokens: A function of the batch that returns its number of label tokens.
        per_token_loss: False if every micro-batch should weigh the same.
        loss_reduction: ``"sum"`` if ``training_step`` returns a sum.
        label_key: Entry of the batch that holds the labels.
        ignore_index: Label that the loss ignores.
        label_shift: Number of labels at the start of each row that the loss does not use.

    Raises:
        ValueError: If ``steps`` is not positive, or a counting option is given beside ``AutomodelStrategy``.

    Attributes:
        verdict: ``"exact"``, ``"wrong"`` or ``"not checked"``; None until it is known.
        report: The printed text.
        results: A ``StepResult`` for each step, on rank 0, with all numbers. Loggers get
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
        if count == "samples":
            count_label_tokens = count_samples
        given = TokenWeighting(
            per_token_loss, loss_reduction, label_key, ignore_index, label_shift, count_label_tokens
        )
        self._given: TokenWeighting | None = None
        if count is not None or given != TokenWeighting():
            self._given = given
        self._num_steps = steps
        self._raises = raises
        self._patches = PatchStack()
        self._reset()

    def _reset(self) -> None:
        self.verdict: str | None = None
        self.report = ""
        self.results: list[StepResult] = []
        self._refusal: str | None = None
        self._copy: pl.LightningModule | None = None
        self._hooks: dict[str, list[Callable[[Tensor], Tensor | None]]] = {}
        self._comparison: Comparison | None = None  # on rank 0
        self._is_active = False
        self._has_gradients = False
        self._seconds = 0.0

    # --- Before training ----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        self._reset()
        if self._given is not None and automodel(trainer) is not None:
            raise ValueError(
                "ExactnessCheck checks the counting options of AutomodelStrategy, and takes its own only"
                " under other strategies: pass them to AutomodelStrategy alone."
            )
        self._refusal = reason_against(trainer, pl_module)
        if self._refusal is None and trainer.is_global_zero:
            self._copy_before_sharding(trainer, pl_module)

    def _copy_before_sharding(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Copy the module between its ``configure_model`` and the strategy's ``setup``, which shards it.

        ``configure_model`` may shard it too, so another copy is made before it.
        """
        patches = self._patches
        strategy = trainer.strategy
        setup = strategy.setup
        configure_model = module.configure_model
        early: pl.LightningModule | None = None

        @wraps(configure_model)
        def copy_and_configure() -> None:
            nonlocal early
            vars(module).pop("configure_model")
            with suppress(Exception):  # the module may be complete only afterwards
                early = copy_module(module, trainer)
            configure_model()

        def copy_and_setup(*args: Any, **kwargs: Any) -> None:
            patches.restore()
            try:
                self._copy = whole_copy(module, trainer, early)
                parameters = module.named_parameters()
                self._hooks = {name: torch_internals.tensor_hooks(value) for name, value in parameters}
            except Exception as error:
                self._refusal = f"the module cannot be copied ({described(error)})"
            setup(*args, **kwargs)

        if is_overridden("configure_model", module):
            patches.set(module, "configure_model", copy_and_configure)
        patches.set(strategy, "setup", copy_and_setup)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refusal = self._refusal or reason_against(trainer, pl_module)
        if refusal is None and self._copy is not None:
            self._comparison, refusal = self._start_comparison(self._copy, trainer, pl_module)
        refusal = collectives.broadcast_object(refusal, 0)
        if refusal is not None:
            sentence = f"{refusal[0].upper()}{refusal[1:]}."
            self._say(trainer, results.NOT_CHECKED, f"ExactnessCheck: NOT CHECKED. {sentence}")
            return
        self._is_active = True
        self._recorder = Recorder(trainer, pl_module, self._patches)
        lightning_internals.patch_after_closure(
            trainer.precision_plugin, self._before_stepping, self._patches
        )
        optimizer_step = trainer.strategy.optimizer_step

        def step_and_compare(*args: Any, **kwargs: Any) -> Any:
            output = optimizer_step(*args, **kwargs)
            self._after_stepping(trainer, pl_module)
            return output

        self._patches.set(trainer.strategy, "optimizer_step", step_and_compare)

    def _start_comparison(
        self, copied: pl.LightningModule, trainer: pl.Trainer, module: pl.LightningModule
    ) -> tuple[Comparison | None, str | None]:
        """What compares, or why that is not possible."""
        try:
            replay = Replay(copied, module, trainer, self._hooks)
        except Exception as error:
            return None, f"the copy of the module cannot be set up ({described(error)})"
        gib = sum(parameter.numel() for parameter in copied.parameters()) * _BYTES / 2**30
        rank_zero_info(
            f"ExactnessCheck compares the first {self._num_steps} optimizer steps with one process. On rank"
            f" 0 this needs up to {gib:.2g} GiB, and the activations of one micro-batch in float64."
        )
        return Comparison(replay, trainer, self._given), None

    # --- One optimizer step -------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self._is_active:
            return
        started_at = time.perf_counter()
        recorder = self._recorder
        is_first = trainer.is_global_zero
        parameters = dict(pl_module.named_parameters())
        groups = unwrapped(optimizer).param_groups
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        trained = {
            name
            for name, parameter in parameters.items()
            if id(parameter) in optimized and recorder.trainable.get(name)
        }
        own = {name for name in trained if parameters[name].grad is not None}
        by_rank = collectives.gather_objects((own, recorder.written(), recorder.replicas()))
        graded, written, replicas = zip(*by_rank, strict=True)
        self._graded = [name for name in parameters if all(name in names for names in graded)]
        # Each of these is a collective for shards: all ranks go through all parameters in their order.
        weights = whole(
            {name: recorder.weights.get(name, parameters[name]) for name in parameters}, is_first
        )
        changed = set().union(*written)
        now = whole({name: parameters[name] for name in parameters if name in changed}, is_first)
        gradients = whole({name: parameters[name].grad for name in self._graded}, is_first)
        windows = gathered_on_first(recorder.window, trainer.world_size)
        if self._comparison is not None and windows is not None:
            gradients = {**dict.fromkeys(trained), **gradients}
            differing = unequal(list(replicas))
            self._comparison.compare_gradients(windows, recorder, gradients, weights, now, differing)
        recorder.clear()
        self._has_gradients = True
        collectives.named_barrier("ExactnessCheck", _WAIT)
        self._seconds += time.perf_counter() - started_at

    def _before_stepping(self, optimizer: Any) -> None:
        """Step a copy of the optimizer. Called after hooks and clipping. A collective."""
        if not self._has_gradients:
            return
        is_first = self._recorder.trainer.is_global_zero
        parameters = dict(self._recorder.module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        gradients = whole({name: parameters[name].grad for name in self._graded}, is_first)
        weights = whole(parameters, is_first)
        states = whole_states(unwrapped(optimizer), names, is_first)
        if self._comparison is not None:
            self._comparison.step_copy(unwrapped(optimizer), names, gradients, weights, states)

    def _after_stepping(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Compare the weights. Called after the optimizer's step. A collective."""
        if not self._has_gradients:
            return
        self._has_gradients = False
        after = whole(dict(module.named_parameters()), trainer.is_global_zero)
        num_compared = 0
        if self._comparison is not None:
            num_compared = self._comparison.compare_weights(after)
        if collectives.broadcast_object(num_compared, 0) >= self._num_steps:
            self._finish(trainer)

    # --- The verdict --------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_active:
            self._finish(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._is_active = False
        self._has_gradients = False
        self._patches.restore()
        self._copy = None
        self._comparison = None
        self._hooks = {}

    def _finish(self, trainer: pl.Trainer) -> None:
        verdict: tuple[str, str] | None = None
        if self._comparison is not None:
            self.results = self._comparison.steps
            verdict = self._comparison.verdict(self._seconds)
        self._stop()
        self._say(trainer, *collectives.broadcast_object(verdict, 0))
        if self._raises and self.verdict == results.WRONG:
            raise RuntimeError(self.report)

    def _say(self, trainer: pl.Trainer, verdict: str, report: str) -> None:
        self.verdict = verdict
        self.report = report
        if trainer.is_global_zero:
            if trainer.progress_bar_callback is not None:
                report = f"\n{report}"  # the progress bar has not ended its line
            print(report, flush=True)

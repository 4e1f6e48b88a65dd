"""Recomputes the micro-batches of all ranks on a copy of the module, in this process, as one batch."""

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.callbacks.exactness import module_copy
from lightning_automodel.callbacks.exactness.isolation import alone, refuse_to_gather
from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.callbacks.exactness.recording import (
    Fingerprints,
    RecordedMicroBatch,
    RecordedWindow,
    fingerprints,
    loss_of,
    whole_on_host,
)
from lightning_automodel.callbacks.running_strategy import automodel, options_of
from lightning_automodel.gradients.token_loss import TokenWeighting
from lightning_automodel.resume.rng import set_global_states
from lightning_automodel.sharding.precision import FSDP2_PRECISIONS, HALF, cast_floating

_SAMPLED = 50_000  # entries of a gradient, at most, by which micro-batches are told apart
Gradients = dict[str, Tensor | None]
Modes = dict[str, bool]


@dataclass(frozen=True)
class Shares:
    """The weight of each micro-batch of a step, in the order of ranks and batches.

    Attributes:
        weighting: The meaning of a loss, and how counts are made.
        counts: Label tokens or samples of each micro-batch, or 1 for each.
        denominator: Denominator of the mean over all micro-batches.
    """

    weighting: TokenWeighting
    counts: list[float]
    denominator: float


@dataclass
class Replayed:
    """The result of replaying one batch.

    Attributes:
        gradients: Gradients of the batch's loss, by parameter.
        losses: Loss of each micro-batch; None if the step returned none.
        contributions: Contribution of each micro-batch to the sampled entries of the gradients, [k] in
            float64.
        written: Weights that rank 0's steps have written, with their values after its window.
    """

    gradients: Gradients
    losses: list[float | None]
    contributions: list[Tensor]
    written: dict[str, Tensor]


class Replay:
    """Runs ``training_step`` and backward on a copy of the module: no other ranks, logs or lasting effects.

    Args:
        copied: The copy, made before the module was sharded.
        module: The module of the run, which the replay must not reach.
        trainer: The Trainer of both.
        hooks: Hooks of parameters by the parameter's name; copies do not have them.
    """

    def __init__(
        self,
        copied: pl.LightningModule,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        hooks: dict[str, list[Callable[[Tensor], Tensor | None]]],
    ) -> None:
        self.module = copied
        self.device = trainer.strategy.root_device
        self._run = module
        self._trainer = trainer
        self._hooks = hooks
        if any(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers())):
            copied.to_empty(device=self.device)
        copied.to(self.device)
        copied.trainer = trainer  # copies have none
        self._plugin = trainer.precision_plugin
        self._plugin.convert_module(copied)
        for name in ("log", "log_dict"):
            vars(copied)[name] = lambda *_, **__: None
        vars(copied)["all_gather"] = refuse_to_gather
        self._trainable: Modes = {}
        self._training: Modes = {}
        taken = signature(copied.training_step).parameters.values()
        self._takes_index = sum(parameter.kind <= 2 for parameter in taken) > 1  # positional ones

    def begin_step(self, trainable: Modes, training: Modes) -> None:
        """Take over which parameters train and which modules are in training mode.

        Raises ReplayError if the module has other parameters.
        """
        self._trainable = trainable
        self._training = training
        own = {name for name, _ in self.module.named_parameters()}
        if own != set(trainable):
            changed = ", ".join(sorted(own ^ set(trainable))[:4])
            raise ReplayError(f"the module has got or lost parameters since its set-up ({changed})")

    def load(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Set all weights, in ``dtype`` or their own, and the train flags; drop gradients."""
        for name, parameter in self.module.named_parameters():
            if parameter.is_floating_point():
                wanted = dtype
            else:
                wanted = None
            parameter.grad = None
            parameter.data = weights[name].to(self.device, wanted, copy=True)
            parameter.requires_grad_(self._trainable[name])
        for name, submodule in self.module.named_modules():
            submodule.training = self._training.get(name, submodule.training)

    def sample(self, names: set[str]) -> dict[str, Tensor]:
        """Positions of entries by parameter: all if there are few, else random ones, in parameters ``names``."""
        numel = {
            name: p.numel() for name, p in self.module.named_parameters() if name in names and p.numel()
        }
        share = min(1.0, _SAMPLED / max(1, sum(numel.values())))
        if share == 1:
            return {name: torch.arange(n) for name, n in numel.items()}
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(n, (max(1, round(n * share)),), generator=generator)
            for name, n in numel.items()
        }

    @property
    def sharded_dtype(self) -> torch.dtype | None:
        """The dtype that FSDP2 units of this strategy compute in instead of autocast; None for other engines."""
        options = options_of(self._trainer)
        if options.get("data_parallel") != "fsdp2":
            return None
        if options["mp_policy"] is not None:
            return options["mp_policy"].param_dtype
        if isinstance(self._plugin, MixedPrecision):
            return FSDP2_PRECISIONS[self._plugin.precision]
        return None

    def one_batch(
        self,
        windows: list[RecordedWindow],
        shares: Shares,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        sample: dict[str, Tensor],
        alike: bool = False,
    ) -> Replayed:
        """Gradients of all micro-batches as one batch, from the loaded weights. ``dtype`` None is the Trainer's.

        ``weights`` has the weights before the window that steps may write; each rank begins with them. In
        half precision the size of a loss determines its rounding: the loss gets the factor of
        ``AutomodelStrategy``, up to a power of two. With ``alike`` it gets the factor of Lightning's
        strategies; only contributions are right then.
        """
        replayed = Replayed({}, [], [], {})
        wide: dict[str, Tensor] = {}  # sums of gradients of parameters in half precision
        before = fingerprints(self.module)
        total = _sampled({}, sample)
        counts = iter(shares.counts)
        scale = self._scale(dtype, shares.denominator)
        if alike:
            scale = shares.denominator / self._trainer.accumulate_grad_batches
        for window in windows:
            self.set_tensors(window, dtype)
            for record in window.micro_batches:
                count = next(counts)
                used_count = float(count > 0) if alike else count
                output = self.call(record, record.arguments[0], dtype)
                replayed.losses.append(loss_of(output))
                objective = None
                if output is not None:
                    objective = self._objective(output, used_count, shares)
                if objective is not None:
                    with self._alone():
                        (objective * scale).backward()
                    self._widen(wide)
                previous = total
                total = _sampled(self._totals(wide), sample)
                correction = count / used_count if used_count else 1.0
                replayed.contributions.append((total - previous) * correction / scale)
            written = self._take_back(before, weights)
            if window is windows[0]:
                replayed.written = written
        gradients = self._totals(wide)
        for name, gradient in gradients.items():
            if gradient is not None:
                gradients[name] = self._hooked(name, gradient / scale)
        replayed.gradients = self._after_backward(gradients)
        return replayed

    def _take_back(self, before: Fingerprints, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo the steps' writes to weights. Returns the values that they wrote."""
        now = fingerprints(self.module)
        written: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if now.get(name) != before.get(name):
                written[name] = whole_on_host(parameter)
                parameter.data.copy_(weights[name])
        return written

    def sampled_gradient(self, loss: Tensor, sample: dict[str, Tensor]) -> Tensor:
        """[k] sampled entries of the gradient of ``loss``."""
        with self._alone():
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        self.module.zero_grad()
        return _sampled(gradients, sample)

    def set_tensors(self, window: RecordedWindow, dtype: torch.dtype | None) -> None:
        """Set buffers, and tensors that modules keep as attributes, to their values before a rank's window."""
        values = dict(window.tensors)
        for key, tensor in values.items():
            if tensor is not None:
                is_widened = dtype == torch.float64 and tensor.dtype == torch.float32
                values[key] = tensor.to(self.device, torch.float64 if is_widened else None, copy=True)
        module_copy.set_tensors(self.module, values)

    def call(
        self, record: RecordedMicroBatch, batch: Any, dtype: torch.dtype | None, seed: int | None = None
    ) -> Any:
        """Run ``training_step`` on ``batch`` with the random states and counters of ``record``, or from a seed."""
        set_global_states(record.random, self.device)
        module_copy.set_attributes(self.module, record.numbers)
        generators = module_copy.generators_of(self.module)
        for generator, state in zip(generators, record.generators, strict=True):
            generator.set_state(state)
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            for generator in generators:
                generator.manual_seed(seed)
        batch = move_data_to_device(copy.deepcopy(batch), self.device)
        if dtype is not None:
            batch = cast_floating(batch, dtype)
        if self._takes_index:
            rest = record.arguments[1:]
        else:
            rest = ()
        with self._computing_in(dtype), self._alone():
            return self.module.training_step(batch, *rest)

    def losses_of(self, output: Any, weighting: TokenWeighting) -> tuple[Tensor, Tensor | None]:
        """[] the loss that the count weighs, and [] an auxiliary loss of equal weight in all micro-batches."""
        if hasattr(output, "keys"):
            loss = output["loss"]
        else:
            loss = output
        aux = None
        if automodel(self._trainer) is not None:
            aux = weighting.aux_loss(output, is_counted_ahead=True)
        if aux is None:
            return loss, None
        return loss - aux, aux

    def _scale(self, dtype: torch.dtype | None, denominator: float) -> float:
        """The factor of losses in half precision; 1 in other precisions."""
        dtypes = {dtype}
        if dtype is None:
            dtypes = {parameter.dtype for parameter in self.module.parameters()}
        precision = str(self._plugin.precision)
        is_half = not dtypes.isdisjoint(HALF) or (dtype is None and precision.endswith("-mixed"))
        if not is_half or not denominator:
            return 1.0
        # Gradients of single micro-batches are small for float16.
        if torch.float16 in dtypes or precision.startswith("16"):
            reserve = 1024.0
        else:
            reserve = 1.0
        return reserve * denominator / 2.0 ** round(math.log2(denominator))

    def _objective(self, output: Any, count: float, shares: Shares) -> Tensor | None:
        """[] the contribution of a micro-batch to the loss of one batch; None if it has none."""
        weighting = shares.weighting
        part = None
        loss, aux = self.losses_of(output, weighting)
        if count or weighting.loss_reduction == "sum":
            part = weighting.objective(loss, count) / max(shares.denominator, 1e-30)
        if aux is None:
            return part
        aux = aux / len(shares.counts)
        if part is None:
            return aux
        return part + aux

    def _widen(self, wide: dict[str, Tensor]) -> None:
        """Add gradients in half precision to their sums in float32, and drop them."""
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.element_size() < 4:
                parameter.grad = None
                gradient = _dense(gradient).float()
                if name in wide:
                    gradient = wide[name] + gradient
                wide[name] = gradient

    def _totals(self, wide: dict[str, Tensor]) -> Gradients:
        return {name: wide.get(name, p.grad) for name, p in self.module.named_parameters()}

    def _hooked(self, name: str, gradient: Tensor) -> Tensor:
        """``gradient`` after the user's hooks of its parameter, which run once per batch."""
        gradient = _dense(gradient)
        for hook in self._hooks.get(name, ()):
            with torch.no_grad(), self._alone():
                changed = hook(gradient)
            if changed is not None:
                gradient = changed
        return gradient

    def _after_backward(self, gradients: Gradients) -> Gradients:
        """Gradients after the module's ``on_after_backward``. The parameters keep none."""
        self.module.zero_grad()
        if not is_overridden("on_after_backward", self.module):
            return gradients
        return self._changed_by(self.module.on_after_backward, gradients)

    def before_optimizer_step(self, gradients: Gradients, optimizer: Optimizer) -> Gradients:
        """Gradients after the module's ``on_before_optimizer_step``."""
        return self._changed_by(lambda: self.module.on_before_optimizer_step(optimizer), gradients)

    def _changed_by(self, hook: Callable[[], None], gradients: Gradients) -> Gradients:
        self.set_gradients(gradients)
        with self._alone():
            hook()
        changed = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        self.module.zero_grad()
        return changed

    def set_gradients(self, gradients: Gradients) -> None:
        """Set the gradients of all parameters; None for those that have none in ``gradients``."""
        for name, parameter in self.module.named_parameters():
            gradient = gradients.get(name)
            if gradient is not None:
                gradient = gradient.to(parameter.device, parameter.dtype, copy=True)
            parameter.grad = gradient

    def _computing_in(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        if dtype is None:
            return self._plugin.train_step_context()
        if dtype == torch.float64:
            return DoublePrecision().train_step_context()
        return nullcontext()

    def _alone(self) -> AbstractContextManager[None]:
        return alone(self._trainer, self._run)


def wide(gradient: Tensor | None) -> Tensor:
    """``gradient`` in float64 on the host. A missing gradient is zero."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64)
    return gradient.double().cpu()


def distances(
    names: Iterable[str], first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """2-norms of the differences between ``first`` and ``second``, by parameter."""
    return {name: float((wide(first.get(name)) - wide(second.get(name))).norm()) for name in names}


def norm_of(distances: Mapping[str, float]) -> float:
    """2-norm over all parameters."""
    return math.hypot(*distances.values())


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient


def _sampled(gradients: Gradients, sample: dict[str, Tensor]) -> Tensor:
    """[k] the sampled entries, in float64 on the host; entries of missing gradients are 0."""
    parts = [torch.zeros(0, dtype=torch.float64)]
    for name, positions in sample.items():
        gradient = gradients.get(name)
        if gradient is None:
            parts.append(torch.zeros(len(positions), dtype=torch.float64))
        else:
            parts.append(_dense(gradient).flatten()[positions.to(gradient.device)].double().cpu())
    return torch.cat(parts)

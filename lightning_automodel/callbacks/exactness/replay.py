"""Computes the micro-batches of all ranks in this process, on a copy of the module, as parts of one batch."""

import copy
import math
import random
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_automodel.callbacks.exactness import module_copy
from lightning_automodel.callbacks.exactness.module_copy import ReplayError
from lightning_automodel.callbacks.exactness.recording import (
    Fingerprints,
    MicroBatch,
    Window,
    fingerprints,
    loss_of,
    whole_on_host,
)
from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.gradients.token_loss import TokenWeighting
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.resume.rng import global_states, set_global_states
from lightning_automodel.sharding.precision import FSDP2_PRECISIONS, HALF, cast_floating

_SAMPLED = 50_000  # entries of a gradient, at most, that micro-batches are told apart by
Gradients = dict[str, Tensor | None]
Modes = dict[str, bool]


@dataclass(frozen=True)
class Shares:
    """How much each micro-batch of a step counts, in the order of ranks and batches.

    Attributes:
        weighting: What a loss means, and how counts are made.
        counts: Label tokens, samples, or 1 for each micro-batch.
        denominator: Of the mean over all of them.
    """

    weighting: TokenWeighting
    counts: list[float]
    denominator: float


@dataclass
class Replayed:
    """One batch, replayed.

    Attributes:
        gradients: Of the loss of the batch, by parameter.
        losses: That of each micro-batch; None where the step returned none.
        contributions: What each micro-batch adds to the sampled entries of the gradients, [k] in float64.
        written: Weights that rank 0's steps have written, as they are after its window.
    """

    gradients: Gradients
    losses: list[float | None]
    contributions: list[Tensor]
    written: dict[str, Tensor]


class Replay:
    """Runs ``training_step`` and its backward on a copy of the module, without other ranks, logs or lasting effects.

    Args:
        copied: The copy, made before the module was sharded.
        module: The module of the run, which the replay must not reach.
        trainer: Of both.
        hooks: Hooks of parameters, which no copy has, by the parameter's name.
    """

    def __init__(
        self,
        copied: pl.LightningModule,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        hooks: dict[str, list[Callable[[Tensor], Tensor | None]]],
    ) -> None:
        self.module, self.device = copied, trainer.strategy.root_device
        self._run, self._trainer, self._hooks = module, trainer, hooks
        if any(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers())):
            copied.to_empty(device=self.device)
        copied.to(self.device)
        copied.trainer = trainer  # which copies lack
        self._plugin = trainer.precision_plugin
        self._plugin.convert_module(copied)
        for name in ("log", "log_dict"):
            vars(copied)[name] = lambda *_, **__: None
        vars(copied)["all_gather"] = _refuse_to_gather
        self._trainable: Modes = {}
        self._training: Modes = {}
        positional = [each for each in signature(copied.training_step).parameters.values() if each.kind <= 2]
        self._takes_index = len(positional) > 1

    def begin_step(self, trainable: Modes, training: Modes) -> None:
        """Take over which parameters train, and which modules are in training mode. ReplayError for others."""
        self._trainable, self._training = trainable, training
        own = {name for name, _ in self.module.named_parameters()}
        if own != set(trainable):
            changed = ", ".join(sorted(own ^ set(trainable))[:4])
            raise ReplayError(f"the module has got or lost parameters since its set-up ({changed})")

    def load(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Set all weights, in ``dtype`` or their own, and flags; drop gradients."""
        for name, parameter in self.module.named_parameters():
            wanted = weights[name].dtype if dtype is None or not parameter.is_floating_point() else dtype
            parameter.grad = None
            parameter.data = weights[name].to(self.device, wanted, copy=True)
            parameter.requires_grad_(self._trainable[name])
        for name, each in self.module.named_modules():
            each.training = self._training.get(name, each.training)

    def sample(self, names: set[str]) -> dict[str, Tensor]:
        """Positions of entries, by parameter: all if there are few, else spread over the parameters ``names``."""
        numel = {name: p.numel() for name, p in self.module.named_parameters() if name in names}
        share = min(1.0, _SAMPLED / max(1, sum(numel.values())))
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(n, (max(1, round(n * share)),), generator=generator) if share < 1 else torch.arange(n)
            for name, n in numel.items()
            if n
        }

    @property
    def sharded_dtype(self) -> torch.dtype | None:
        """The dtype that FSDP2 units of this strategy compute in instead of autocast; None for other engines."""
        strategy = automodel(self._trainer)
        if strategy is None or strategy.data_parallel != "fsdp2":
            return None
        policy = strategy.describe()["options"]["mp_policy"]
        if policy is not None:
            return policy.param_dtype
        return FSDP2_PRECISIONS[self._plugin.precision] if isinstance(self._plugin, MixedPrecision) else None

    def one_batch(
        self,
        windows: list[Window],
        shares: Shares,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        sample: dict[str, Tensor],
        alike: bool = False,
    ) -> Replayed:
        """Gradients of all micro-batches as one batch, from the loaded weights. ``dtype`` None: as the Trainer.

        ``weights`` has those before the window that steps may write: each rank begins with them. In half precision the
        size of a loss decides on rounding: its backward has the factor of ``AutomodelStrategy``, but for a power of
        two. With ``alike`` it has that of Lightning's strategies; only contributions are right then.
        """
        found = Replayed({}, [], [], {})
        wide: dict[str, Tensor] = {}  # sums of gradients of parameters in half precision
        before, total = fingerprints(self.module), _sampled({}, sample)
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
                found.losses.append(loss_of(output))
                objective = None if output is None else self._objective(output, used_count, shares)
                if objective is not None:
                    with self._alone():
                        (objective * scale).backward()
                    self._widen(wide)
                previous, total = total, _sampled(self._totals(wide), sample)
                found.contributions.append((total - previous) * (count / used_count if used_count else 1.0) / scale)
            written = self._take_back(before, weights)
            found.written = written if window is windows[0] else found.written
        gradients = {name: None if g is None else g / scale for name, g in self._totals(wide).items()}
        gradients = {name: None if g is None else self._hooked(name, g) for name, g in gradients.items()}
        found.gradients = self._after_backward(gradients)
        return found

    def _take_back(self, before: Fingerprints, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo what steps have written to weights, and return it."""
        now, written = fingerprints(self.module), {}
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

    def set_tensors(self, window: Window, dtype: torch.dtype | None) -> None:
        """Set buffers, and tensors that modules keep as attributes, to what a rank had before its window."""
        is_wide = dtype == torch.float64
        values = {
            key: None
            if tensor is None
            else tensor.to(self.device, torch.float64 if is_wide and tensor.dtype == torch.float32 else None, copy=True)
            for key, tensor in window.tensors.items()
        }
        module_copy.set_tensors(self.module, values)

    def call(self, record: MicroBatch, batch: Any, dtype: torch.dtype | None, seed: int | None = None) -> Any:
        """Run ``training_step`` on ``batch`` with the random states and counters of ``record``, or those of a seed."""
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
        rest = record.arguments[1:] if self._takes_index else ()
        with self._computing_in(dtype), self._alone():
            return self.module.training_step(batch, *rest)

    def losses_of(self, output: Any, weighting: TokenWeighting) -> tuple[Tensor, Tensor | None]:
        """[] the loss that is weighed by the count, and [] an auxiliary one, which every micro-batch has alike."""
        loss = output["loss"] if hasattr(output, "keys") else output
        aux = None if automodel(self._trainer) is None else weighting.aux_loss(output, is_counted_ahead=True)
        return (loss, None) if aux is None else (loss - aux, aux)

    def _scale(self, dtype: torch.dtype | None, denominator: float) -> float:
        dtypes = {each.dtype for each in self.module.parameters()} if dtype is None else {dtype}
        precision = str(self._plugin.precision)
        is_half = not dtypes.isdisjoint(HALF) or (dtype is None and precision.endswith("-mixed"))
        if not is_half or not denominator:
            return 1.0
        # Gradients of single micro-batches are small for float16.
        reserve = 1024.0 if torch.float16 in dtypes or precision.startswith("16") else 1.0
        return reserve * denominator / 2.0 ** round(math.log2(denominator))

    def _objective(self, output: Any, count: float, shares: Shares) -> Tensor | None:
        """[] what a micro-batch adds to the loss of one batch; None if that is nothing."""
        weighting, part = shares.weighting, None
        loss, aux = self.losses_of(output, weighting)
        if count or weighting.loss_reduction == "sum":
            part = weighting.objective(loss, count) / max(shares.denominator, 1e-30)
        if aux is None:
            return part
        aux = aux / len(shares.counts)
        return aux if part is None else part + aux

    def _widen(self, wide: dict[str, Tensor]) -> None:
        """Move gradients in half precision to their sums, in float32."""
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.element_size() < 4:
                parameter.grad = None
                gradient = _dense(gradient).float()
                wide[name] = wide[name] + gradient if name in wide else gradient

    def _totals(self, wide: dict[str, Tensor]) -> Gradients:
        return {name: wide.get(name, p.grad) for name, p in self.module.named_parameters()}

    def _hooked(self, name: str, gradient: Tensor) -> Tensor:
        """``gradient`` after the user's hooks of its parameter: those of one batch see its gradient once."""
        gradient = _dense(gradient)
        for hook in self._hooks.get(name, ()):
            with torch.no_grad(), self._alone():
                changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def _after_backward(self, gradients: Gradients) -> Gradients:
        """What the module's ``on_after_backward`` makes of gradients. None are left at the parameters."""
        self.module.zero_grad()
        if not is_overridden("on_after_backward", self.module):
            return gradients
        return self._changed_by(self.module.on_after_backward, gradients)

    def before_optimizer_step(self, gradients: Gradients, optimizer: Optimizer) -> Gradients:
        """What the module's ``on_before_optimizer_step`` makes of gradients."""
        return self._changed_by(lambda: self.module.on_before_optimizer_step(optimizer), gradients)

    def _changed_by(self, hook: Callable[[], None], gradients: Gradients) -> Gradients:
        self.set_gradients(gradients)
        with self._alone():
            hook()
        found = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        self.module.zero_grad()
        return found

    def set_gradients(self, gradients: Gradients) -> None:
        """Set the gradients of all parameters, None where there is none."""
        for name, parameter in self.module.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)

    def _computing_in(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        if dtype is None:
            return self._plugin.train_step_context()
        return DoublePrecision().train_step_context() if dtype == torch.float64 else nullcontext()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context of user code that thinks it is alone, and ends with ReplayError if it reaches others or the run."""
        own_thread, is_initialized, loggers = threading.get_ident(), dist.is_initialized, self._trainer.loggers
        with PatchStack() as patches, warnings.catch_warnings(), _Isolation(self._run):
            warnings.simplefilter("ignore")
            # Other threads, as those that send heartbeats, go on.
            for each in (dist, dist.distributed_c10d):  # the second refuses barriers
                patches.set(each, "is_initialized", lambda: threading.get_ident() != own_thread and is_initialized())
            patches.callback(setattr, self._trainer, "loggers", loggers)
            self._trainer.loggers = [DummyLogger() for _ in loggers]
            modules = set(self._run.modules())
            patches.callback(register_module_forward_pre_hook(lambda each, _: _refuse_module(each, modules)).remove)
            yield


class _Isolation(TorchFunctionMode):
    """Refuses collectives, which other ranks would never answer, and operations on the run's own weights.

    A dispatch mode would see more, but under it no tensor becomes one of a subclass.
    """

    def __init__(self, run: nn.Module) -> None:
        super().__init__()
        own = [tensor for each in run.parameters() for tensor in (each, each.grad) if tensor is not None]
        self._of_run = {_address(tensor.detach()) for tensor in own} - {0}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in (getattr(func, "__module__", None) or ""):
            raise ReplayError(f"training_step communicates with other ranks ({func.__name__})")
        is_read = func.__name__ in ("__get__", "size", "numel", "dim")
        if not is_read and any(_address(each) in self._of_run for each in tensors_in((args, kwargs))):
            raise ReplayError("training_step uses weights past the attributes of its module, as by a global variable")
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    """Of the memory of this rank's part; 0 if it has none of its own."""
    try:
        return torch_internals.local_tensor(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # sparse, or a wrapper as of torch.func
        return 0


def wide(gradient: Tensor | None) -> Tensor:
    """In float64 on the host. A missing gradient is zero."""
    return torch.zeros((), dtype=torch.float64) if gradient is None else gradient.double().cpu()


def distances(
    names: Iterable[str], first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """2-norms of the differences, by parameter."""
    return {name: float((wide(first.get(name)) - wide(second.get(name))).norm()) for name in names}


@contextmanager
def random_states_kept(device: torch.device) -> Generator[None, None, None]:
    """Context after which the run draws the random numbers that it would have drawn."""
    states = global_states(device)
    try:
        yield
    finally:
        set_global_states(states, device)


def _refuse_to_gather(*_: Any, **__: Any) -> Any:
    raise ReplayError("training_step communicates with other ranks (all_gather)")


def _refuse_module(module: nn.Module, of_run: set[nn.Module]) -> None:
    if module in of_run:
        raise ReplayError(
            f"training_step calls the {type(module).__name__} of the run past the attributes of its module, as by a"
            " global variable"
        )


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def _sampled(gradients: Gradients, sample: dict[str, Tensor]) -> Tensor:
    """[k] the sampled entries, in float64 on the host; those of missing gradients are 0."""
    parts = []
    for name, positions in sample.items():
        gradient = gradients.get(name)
        if gradient is None:
            parts.append(torch.zeros(len(positions), dtype=torch.float64))
        else:
            parts.append(_dense(gradient).flatten()[positions.to(gradient.device)].double().cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

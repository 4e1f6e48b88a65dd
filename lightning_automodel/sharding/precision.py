"""Trainer precision -> dtypes of parameters, computation, reductions and outputs."""

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import metrics as metrics_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.sharding.containers import CHANGES_A_COPY, Contents, containers_in

HALF = (torch.float16, torch.bfloat16)
FSDP2_PRECISIONS = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
"""The dtype of computation for each Trainer precision that FSDP2 supports; under 32-true the module's own counts."""


def check_precision(plugin: Precision, data_parallel: str) -> None:
    """Raise ValueError for a plugin of another strategy, and under FSDP2 for one that replaces layers or parameters."""
    foreign = isinstance(plugin, (DeepSpeedPrecision, FSDPPrecision, XLAPrecision))
    replacing = isinstance(plugin, (BitsandbytesPrecision, TransformerEnginePrecision))
    is_known = plugin.precision in FSDP2_PRECISIONS and not replacing
    if not foreign and (data_parallel == "ddp" or is_known):
        return
    way_out = "." if foreign else ", or data_parallel='ddp'."
    raise ValueError(
        f"data_parallel={data_parallel!r} does not work with {type(plugin).__name__}: choose"
        f" Trainer(precision=...) from {', '.join(FSDP2_PRECISIONS)}{way_out}"
    )


def convert_metrics(plugin: Precision, module: "pl.LightningModule") -> None:
    """Give TorchMetrics states in float64 under 64-true.

    Otherwise they become so when a metric is first logged, and ranks with unequal numbers of batches would reduce
    states of two dtypes.
    """
    if isinstance(plugin, DoublePrecision):
        for metric in metrics_internals.metrics_in(module).values():
            metric.to(torch.float64)


def resolve_policy(
    plugin: Precision, mp_policy: MixedPrecisionPolicy | None, parameters: Iterable[Tensor]
) -> MixedPrecisionPolicy:
    """The policy of FSDP2 units for a Trainer precision: the user's ``mp_policy`` if it agrees, or the default.

    Units return float32 under mixed precisions: losses are not rounded, and a sum over tokens does not
    overflow. True precisions cast nothing. Gradients are reduced in float32 at least.
    """
    if mp_policy is not None:
        _check_agreement(plugin, mp_policy)
        return mp_policy
    if isinstance(plugin, MixedPrecision):
        computes_in = FSDP2_PRECISIONS[plugin.precision]
        return MixedPrecisionPolicy(
            param_dtype=computes_in, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    trainable = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    in_half = trainable.intersection(HALF) and torch.float64 not in trainable
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if in_half else None, cast_forward_inputs=False)


def _check_agreement(plugin: Precision, policy: MixedPrecisionPolicy) -> None:
    valid: list[torch.dtype | None] = [FSDP2_PRECISIONS[plugin.precision]]
    if not isinstance(plugin, MixedPrecision):
        valid.append(None)
    if plugin.precision == "32-true":
        valid += [torch.bfloat16, torch.float64]
    if policy.param_dtype not in valid:
        raise ValueError(
            f"precision={plugin.precision!r} beside mp_policy with param_dtype={policy.param_dtype}: pass"
            f" param_dtype={' or '.join(map(str, valid))}, or a precision that computes in it (torch.float16"
            " needs the gradient scaler of '16-mixed'; under '32-true' mp_policy alone decides)."
        )


def unit_policy(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of a unit inside of a root: tensors that pass between modules keep their dtype."""
    return replace(policy, output_dtype=None)


def step_policy(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of a root whose forward is a Lightning step: a rounded count or target would be silently wrong."""
    return replace(policy, cast_forward_inputs=False, output_dtype=None)


def outermost_calls(
    run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what wraps methods, so that the outermost of nested calls runs through ``run(method, args, kwargs)``."""
    is_running = False

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_running
            if is_running:
                return method(*args, **kwargs)
            is_running = True
            try:
                return run(method, args, kwargs)
            finally:
                is_running = False

        return call

    return around


def cast_around(modules: Iterable[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Let these modules cast floating-point inputs and outputs as an FSDP2 root with this policy does."""

    def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
            contents = Contents(containers_in((args, *kwargs.values())))
            output = forward(*args, **kwargs)
            if contents.has_changed():
                raise RuntimeError(CHANGES_A_COPY)
        else:
            output = forward(*args, **kwargs)
        if policy.output_dtype is None:
            return output
        return cast_floating(output, policy.output_dtype)

    casting = outermost_calls(run)
    for module in modules:
        module.forward = casting(module.forward)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in nested containers, as FSDP2 casts what enters and leaves its units."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(values, Tensor, cast, allow_frozen=True)


def check_conversion(plugin: Precision, model: nn.Module) -> None:
    """Refuse to convert sharded parameters that were gathered: FSDP2 keeps the dtype of the first all-gather."""
    wanted = FSDP2_PRECISIONS[plugin.precision]
    if plugin.precision == "32-true" or isinstance(plugin, MixedPrecision):
        return
    found = {p.dtype for p in model.parameters() if p.is_floating_point()} - {wanted}
    if found and any(map(fsdp2.was_unsharded, fsdp2.groups_of(fsdp2.fsdp_units(model)))):
        raise ValueError(
            f"precision={str(plugin.precision)!r} would convert the module to {wanted}, but an earlier run"
            f" has sharded it in {_names(found)}, which stays: pass the precision of that run, or a module"
            " that was not sharded before."
        )


def leave_casting_to_units(plugin: Precision, dtypes: "Dtypes", patches: PatchStack) -> None:
    """Switch the plugin's autocast off if FSDP2 units cast already: both together would cast twice."""
    if isinstance(plugin, MixedPrecision) and dtypes.computed:
        patches.set(plugin, "forward_context", nullcontext)


def enabled_scaler(plugin: Precision) -> GradScaler | None:
    """The plugin's gradient scaler; None where it has none or a disabled one."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        return scaler
    return None


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a distributed model: of its parameters, of its units' computation, and of gradients' reductions."""

    held: set[torch.dtype]
    computed: set[torch.dtype]
    reduced: set[torch.dtype]

    @classmethod
    def of(cls, parameters: Collection[nn.Parameter]) -> "Dtypes":
        """Those of a distributed model with these ``parameters``."""
        params = [parameter.fsdp_param for parameter in parameters if hasattr(parameter, "fsdp_param")]
        with plain_access():
            held = {parameter.dtype for parameter in parameters}
            reduced = {p.dtype for p in parameters if p.requires_grad and not isinstance(p, DTensor)}
            trained = [param for param in params if param.sharded_param.requires_grad]
        reduced.update(map(fsdp2.unsharded_gradient_dtype, trained))
        return cls(held, {param.mp_policy.param_dtype for param in params} - {None}, reduced)

    def pass_float16(self, plugin: Precision) -> bool:
        """Whether gradients may pass through float16 (range 65504): in layers, also frozen ones, or in reductions."""
        found = self.held | self.computed | self.reduced
        return plugin.precision in ("16-mixed", "16-true") or torch.float16 in found


def is_overruled(policy: MixedPrecisionPolicy, asked: MixedPrecisionPolicy | None, model: nn.Module) -> bool:
    """Whether ``model`` was sharded before, with another policy than was ``asked``, or for another precision."""
    groups = fsdp2.groups_of(fsdp2.fsdp_units(model))
    applied = {param.mp_policy for group in groups for param in group.fsdp_params}
    if asked is None:
        return not {each.param_dtype for each in applied} <= {None, policy.param_dtype}
    return bool(applied) and applied.isdisjoint([policy, unit_policy(policy), step_policy(policy)])


def describe_dtypes(plugin: Precision, dtypes: Dtypes) -> dict[str, str]:
    """The Trainer's precision, and the dtypes that result."""
    held = {dtype for dtype in dtypes.held if dtype.is_floating_point}  # others are codes
    computed = dtypes.computed
    if not computed and isinstance(plugin, MixedPrecision):
        computed = {FSDP2_PRECISIONS[plugin.precision]}
    return {
        "trainer": str(plugin.precision),
        "parameters": _names(held),
        "computation": _names(computed or held),
        "reduction": _names(dtypes.reduced),
    }


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes))) or "none"

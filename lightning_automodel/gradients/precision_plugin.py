"""The Trainer's precision plugin, through which clipping and stepping run, and what is replaced on it meanwhile."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from lightning_automodel.gradients.windows import GradientFinisher

_REPLACED = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "_after_closure")


def adapt_plugin(plugin: Precision, finisher: GradientFinisher) -> None:
    """Let all ways of clipping rescale first and know sharded gradients; measure norms after hooks and clipping.

    The plugin stays the user's object: :func:`give_back_plugin` undoes this.
    """
    give_back_plugin(plugin)  # of a run that Lightning did not tear down, since an `on_exception` hook raised
    # Lightning 2.6.6 refuses to clip for fused optimizers, which unscale for themselves; here that is done before.
    plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]
    plugin.clip_grad_by_norm = finisher.clip_norm  # type: ignore[assignment,method-assign]
    plugin.clip_grad_by_value = finisher.clip_value  # type: ignore[method-assign]
    after_closure = plugin._after_closure

    def after_closure_and_measure(model: pl.LightningModule, optimizer: Any) -> None:
        after_closure(model, optimizer)
        finisher.measure_if_asked(optimizer)

    plugin._after_closure = after_closure_and_measure  # type: ignore[method-assign]


def replaced_clipping(plugin: Precision) -> list[str]:
    """Ways of clipping that a class of the user's overrides, and that nobody will call."""
    own = (name for name in _REPLACED if not getattr(type(plugin), name).__module__.startswith("lightning."))
    return [name for name in own if name != "_after_closure"]


def give_back_plugin(plugin: Precision) -> None:
    """Undo :func:`adapt_plugin`."""
    for method in _REPLACED:
        plugin.__dict__.pop(method, None)

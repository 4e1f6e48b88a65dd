"""Patches on the Trainer's precision plugin, which runs clipping and optimizer steps."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision

from lightning_automodel.gradients.clipping import GradientClipper
from lightning_automodel.patching import PatchStack


def patch_clipping(plugin: Precision, clipper: GradientClipper, patches: PatchStack) -> None:
    """Make all of the plugin's clipping work on sharded gradients, and measure norms after hooks and clipping.

    Lightning's own clipping calls torch's, which refuses a mixture of plain tensors and DTensors.
    """
    # Lightning refuses to clip for fused optimizers, as they unscale in the step; here gradients are unscaled before.
    patches.set(plugin, "clip_gradients", partial(Precision.clip_gradients, plugin))
    patches.set(plugin, "clip_grad_by_norm", clipper.clip_by_norm)
    patches.set(plugin, "clip_grad_by_value", clipper.clip_by_value)
    after_closure = plugin._after_closure

    def after_closure_and_measure(model: pl.LightningModule, optimizer: Any) -> None:
        after_closure(model, optimizer)
        clipper.measure_if_asked(optimizer)

    patches.set(plugin, "_after_closure", after_closure_and_measure)

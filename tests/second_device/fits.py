"""Fits on the second device, to be compared between its two kinds of collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.trainer.exactness import full_weights, micro_batches
from tests.trainer.runs import CASE, LabelledModule, make_trainer


def trained(**options: Any) -> dict[str, Tensor]:
    """Full weights after a fit with accumulation, clipping and validation."""
    trainer = make_trainer(
        AutomodelStrategy(**options),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=2,
    )
    module = LabelledModule()
    data = micro_batches(CASE)[dist.get_rank()]
    trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(data, batch_size=None))
    return full_weights(module)

"""The optimizer and learning-rate schedule of the fine-tuning examples."""

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler


def adamw_one_cycle(module: L.LightningModule, learning_rate: float) -> OptimizerLRScheduler:
    """Returns AdamW on all trainable parameters, with a schedule, for `configure_optimizers` of `module`.

    Args:
        module: LightningModule whose Trainer knows the number of optimizer steps.
        learning_rate: Peak of the schedule, reached after a tenth of the optimizer steps.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        learning_rate,
        total_steps=module.trainer.estimated_stepping_batches,
        pct_start=0.1,
        cycle_momentum=False,
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

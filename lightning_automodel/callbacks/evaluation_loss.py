"""The callback that logs the mean loss per label token of validation and test."""

from collections import defaultdict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric
from typing_extensions import override

from lightning_automodel.callbacks.running_strategy import automodel
from lightning_automodel.gradients.token_loss import TokenWeighting, has_count, wide_dtype


class _TokenMean(Metric):
    """A sum of losses over its denominator. Tensor-parallel peers add to both alike; the ratio stays right.

    TorchMetrics 1.9's ``MeanMetric`` sums in float32 (moving it to a device undoes ``set_dtype``), and
    copies each batch's value to the host to drop NaN.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2, dtype=wide_dtype(device)), dist_reduce_fx="sum")
        self.to(device)

    @override
    def update(self, sums: Tensor) -> None:
        self.sums = self.sums + sums

    @override
    def compute(self) -> Tensor:
        return self.sums[0] / self.sums[1]


class EvaluationLoss(Callback):
    """Logs the mean loss per label token of validation and test, over all ranks, counting each token once.

    This is the value that one process would get on the whole set. (``self.log("val_loss", loss,
    sync_dist=True)`` logs a mean of batch means.) ``validation_step`` and ``test_step`` return the same
    values as ``training_step``, and label tokens are counted in the same ways. Under strategies other than
    ``AutomodelStrategy`` the steps must return ``{"loss": mean, "num_label_tokens": n}``.

    ``ModelCheckpoint`` and ``EarlyStopping`` can monitor the value. With several loaders each has its own
    value, whose name ends in ``/dataloader_idx_0`` and so on. A set without any label token gives NaN.

    TorchMetrics makes the end of a loader a collective over all ranks (two numbers per rank), so each rank
    must have a batch of each loader. If a rank has failed, the others raise under ``AutomodelStrategy``;
    under other strategies they wait until the timeout of the process group.

    Args:
        name: Name of the logged value; ``{stage}`` in it becomes ``val`` or ``test``.
        perplexity: Name under which to log ``exp(loss)``, for a cross-entropy in nats. None does not log it.

    Raises:
        ValueError: In the first batch, if a step returns no loss, or its label tokens cannot be counted.

    Examples:
        >>> callbacks = [EvaluationLoss(perplexity="{stage}_perplexity")]  # val_loss, val_perplexity, test_loss, ...
    """

    def __init__(self, name: str = "{stage}_loss", perplexity: str | None = None) -> None:
        self._name = name
        self._perplexity = perplexity
        self._means: defaultdict[int | None, _TokenMean] = defaultdict()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._means = defaultdict(partial(_TokenMean, trainer.strategy.root_device))

    @override
    def on_validation_batch_end(  # Lightning passes a loader's index only if there are several
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int | None = None,
    ) -> None:
        if trainer.testing:
            step = "test_step"
        else:
            step = "validation_step"
        strategy = automodel(trainer)
        if strategy is None and not has_count(outputs):
            raise ValueError(
                f"EvaluationLoss found no 'num_label_tokens' in what {step} returned, and"
                f" {type(trainer.strategy).__name__} does not count them (AutomodelStrategy does). Return"
                f" {{'loss': mean, 'num_label_tokens': n}}."
            )
        counter = strategy or TokenWeighting()
        self._means[dataloader_idx].update(counter.evaluated(batch, outputs, step))
        if dataloader_idx is not None:
            self._log(trainer, pl_module, dataloader_idx)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A single loader is logged here, so that a rank without any batch joins the collective.
        if set(self._means) <= {None}:
            self._means[None].update(torch.zeros(2, device=trainer.strategy.root_device))
            self._log(trainer, pl_module, None)

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: int | None) -> None:
        """Log the mean. Lightning computes it at the end of the loader and adds the loader's index to its name."""
        mean = self._means[loader]
        metrics: dict[str, Metric] = {self._name: mean}
        if self._perplexity is not None:
            metrics[self._perplexity] = CompositionalMetric(torch.exp, mean, None)
        for name, metric in metrics.items():
            name = name.replace("{stage}", "test" if trainer.testing else "val")
            pl_module.log(name, metric, prog_bar=True, metric_attribute=type(self).__name__)

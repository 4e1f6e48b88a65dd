"""Samplers that share one data set out between ranks: which samples they repeat, and loaders that repeat none."""

import copy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DistributedSampler

from lightning_automodel.data.batches import unwrap_loader


class Ranks(int):
    """``num_replicas`` in ``distributed_sampler_kwargs``: samplers that have it were made by the Trainer."""


def distributed_sampler(loader: Any) -> Any:
    """The ``DistributedSampler`` by which ``loader`` repeats samples, so that all ranks have equally many, or None."""
    sampler = innermost_sampler(unwrap_loader(loader))
    if isinstance(sampler, DistributedSampler) and num_repeated(sampler) > 0:
        return sampler
    return None


def innermost_sampler(loader: Any) -> Any:
    """The sampler of single samples, or None."""
    sampler = getattr(loader, "sampler", None)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)
    return getattr(sampler, "innermost", sampler)  # recorded, to resume


def num_repeated(sampler: Any) -> int:
    """How many samples an epoch of a ``DistributedSampler`` repeats over all ranks."""
    total = sized_len(sampler.dataset)
    if total is None:
        return 0
    return max(sampler.total_size - total, 0)


def repeats(sampler: Any) -> str:
    """What to say of samples that count twice, and what repeats them."""
    return (
        f"{num_repeated(sampler)} of {len(sampler.dataset)} samples of the train data count twice in each"
        " epoch, so that all ranks have equally many. They are repeated by a"
        f" {type(sampler).__name__}"
    )


def sharing_out(loader: Any, sampler: Any, total: int) -> Any:
    """A copy of ``loader`` whose ``sampler`` shares out ``total`` samples of an epoch, and repeats none."""
    own = copy.copy(sampler)
    own.drop_last = total < len(sampler.dataset)
    own.total_size = total
    own.num_samples = len(range(own.rank, total, own.num_replicas))
    return _with_sampler(loader, sampler, own)


def _with_sampler(holder: Any, sampler: Any, own: Any) -> Any:
    """A copy of ``holder`` (a loader or, in recursion, a batch sampler) with ``own`` instead of ``sampler``."""
    holder = copy.copy(holder)
    for name, value in vars(holder).items():
        # Through vars(), since DataLoader refuses to set a sampler after its __init__.
        if value is sampler:
            vars(holder)[name] = own
        elif getattr(value, "sampler", None) is sampler:
            vars(holder)[name] = _with_sampler(value, sampler, own)
    return holder

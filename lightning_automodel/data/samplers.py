"""What loaders and samplers promise: how long they are, which samples they repeat, and loaders that repeat none."""

import copy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_automodel.data.batches import unwrap_loader

_KEEP_THEIR_LENGTH = ("torch", "torchdata", "lightning", "pytorch_lightning", "builtins")


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


def may_end_early(loader: Any) -> bool:
    """Whether ``loader`` may yield fewer batches than its length says, if it has one.

    Such a loader reads a stream, or it, its batch sampler or its sampler iterates by code that is not
    torch's: a loader that leaves batches out, or a sampler that fills batches up to a number of tokens and
    estimates how many.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return True
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(loader, "sampler", None))
    return not all(keeps_its_length(iterated) for iterated in (loader, *samplers) if iterated is not None)


def keeps_its_length(iterated: Any) -> bool:
    """Whether the code that iterates is torch's, Lightning's or Python's own, which yields as many as ``len()``."""
    cls = type(iterated)
    definer = next((base for base in cls.__mro__ if "__iter__" in vars(base)), cls)
    return definer.__module__.partition(".")[0] in _KEEP_THEIR_LENGTH

"""What the length of a loader promises."""

from typing import Any

from torch.utils.data import IterableDataset

_KEEP_THEIR_LENGTH = ("torch", "torchdata", "lightning", "pytorch_lightning", "builtins")


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

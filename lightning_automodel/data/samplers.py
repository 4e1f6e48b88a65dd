"""What loaders and samplers promise: how long they are, which samples they repeat, and loaders that repeat none."""

import copy
import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from typing_extensions import override

from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.torch import iterate_anew

_KEEP_THEIR_LENGTH = (
    "torch",
    "torchdata",
    "lightning",
    "pytorch_lightning",
    "lightning_automodel",
    "builtins",
)


class Ranks(int):
    """``num_replicas`` in ``distributed_sampler_kwargs``: samplers that have it were made by the Trainer."""


class DrawnAlike(DistributedSamplerWrapper):
    """Shares out what a sampler of the user's draws, which is the same on all ranks: their random states differ.

    Attributes:
        order: A number of what the Trainer has drawn last, if these are integers. Where a sampler draws by more than
            global random states, ranks may differ in it.
    """

    dataset: Any
    order = 0

    @override
    def __iter__(self) -> Iterator[Any]:
        seed = self.seed + self.epoch
        with isolate_rng(include_cuda=False):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            own_part = super().__iter__()
        drawn = list(self.dataset)
        if len(drawn) < len(self.dataset):
            raise ValueError(
                f"A sampler has drawn {len(drawn)} samples, and its len() is {len(self.dataset)}, by which ranks take"
                " turns: let __len__ return how many it draws, or pass Trainer(use_distributed_sampler=False) and"
                " share the data out yourself."
            )
        if lightning_internals.is_trainer_drawing():
            try:
                self.order = zlib.crc32(array("q", drawn))
            except (TypeError, OverflowError):  # pairs or hashes, for example
                self.order = 0
        return own_part


def share_own_samplers(resolve: Callable[..., Any], loader: Any, shuffle: bool, mode: Any = None) -> Any:
    """The sampler that the Trainer puts into ``loader`` by ``resolve``: ranks take turns in what the user's draws.

    That holds in every stage, for samplers that draw alone or in a batch sampler. Lightning itself replaces each
    ``RandomSampler`` and ``SequentialSampler``, also one that draws a part of the data or repeats it, a subclass with
    an ``__iter__`` of its own, and any sampler in a batch sampler. If a sampler draws all the data once, Lightning's
    replacement draws alike, except in prediction.
    """
    sampler = resolve(loader, shuffle, mode)
    own = innermost_sampler(loader)
    if not _is_of_trainer(sampler) or isinstance(own, DistributedSampler):
        return sampler
    if mode != RunningStage.PREDICTING:
        if type(loader.batch_sampler) is BatchSampler and loader.batch_size is None:
            raise ValueError(
                "Lightning makes a DataLoader anew around the Trainer's sampler, and drops a batch_sampler of"
                " torch's own class BatchSampler, with its batch size: pass DataLoader(sampler=..., batch_size=...,"
                " drop_last=...)."
            )
        draws_alike = type(own) is RandomSampler and not own.replacement
        if type(own) is SequentialSampler:
            # What `shuffle=False` makes is shuffled in training, as the Trainer's documentation has it.
            draws_alike = own is loader.sampler
        if draws_alike and len(own) == len(loader.dataset):
            return sampler
    return DrawnAlike(
        own, num_replicas=sampler.num_replicas, rank=sampler.rank, seed=sampler.seed, shuffle=False
    )


def _is_of_trainer(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "num_replicas", None), Ranks)


def sampler_of_trainer(loader: Any) -> Any:
    """The sampler that the Trainer has put into ``loader`` to share its data out, or None."""
    sampler = innermost_sampler(loader)
    return sampler if _is_of_trainer(sampler) else None


def drawn_order(loaders: Iterable[Any]) -> int:
    """A number of the order that samplers of the user's have drawn for all ranks in the last epoch of ``loaders``."""
    return sum(getattr(sampler_of_trainer(loader), "order", 0) for loader in loaders)


def subset_number(dataset: Any) -> int:
    """A number that differs between two subsets of a data set, by their first indices; 0 of a whole data set."""
    first: list[int] = []
    while isinstance(dataset, Subset):
        first += [int(index) for index in dataset.indices[:1000]]
        dataset = dataset.dataset
    return hash(tuple(first)) % 2**52 if first else 0


def distributed_sampler(loader: Any) -> Any:
    """The ``DistributedSampler`` by which ``loader`` repeats samples, so that all ranks have equally many, or None."""
    sampler = innermost_sampler(loader)
    if isinstance(sampler, DistributedSampler) and num_repeated(sampler) > 0:
        return sampler
    return None


def innermost_sampler(loader: Any) -> Any:
    """The sampler of single samples, or None."""
    sampler = getattr(loader, "sampler", None)
    return getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """The batch sampler of ``loader``, its sampler, and that of single samples; None for what it lacks."""
    return (
        lightning_internals.unindexed(getattr(loader, "batch_sampler", None)),
        getattr(loader, "sampler", None),
        innermost_sampler(loader),
    )


def num_repeated(sampler: Any) -> int:
    """How many samples an epoch of a ``DistributedSampler`` repeats over all ranks."""
    return max(sampler.total_size - len(sampler.dataset), 0)


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
    iterate_anew(holder)
    return holder


def may_end_early(loader: Any) -> bool:
    """Whether ``loader`` may yield fewer batches than its length says, if it has one.

    Such a loader reads a stream, or it, its batch sampler or its sampler iterates by code that is not
    torch's: a loader that leaves batches out, or a sampler that fills batches up to a number of tokens and
    estimates how many.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return True
    iterated = (loader, *samplers_of(loader))
    return not all(keeps_its_length(each) for each in iterated if each is not None)


def keeps_its_length(iterated: Any) -> bool:
    """Whether the code that iterates is torch's, Lightning's or Python's own, which yields as many as ``len()``."""
    cls = iterated.__class__  # that of what a sampler records
    definer = next((base for base in cls.__mro__ if "__iter__" in vars(base)), cls)
    return definer.__module__.partition(".")[0] in _KEEP_THEIR_LENGTH


def check_counted_ranks(loader: Any, rank: int, size: int) -> None:
    """Raise ValueError if a data set of litdata takes this rank for another one. Not a collective.

    Ranks would read the same rows, or leave some out, in silence.

    Args:
        loader: Any loader; only those of such data sets are checked.
        rank: This rank's number among those with data of their own.
        size: How many ranks have data of their own.
    """
    counted: Any = getattr(getattr(loader, "dataset", None), "distributed_env", None)
    numbers = getattr(counted, "global_rank", rank), getattr(counted, "world_size", size)
    if numbers != (rank, size):
        raise ValueError(
            f"The data set of a loader, litdata's {type(loader.dataset).__name__}, counts this rank as"
            f" {numbers}, and the run as {(rank, size)} (number of the rank, ranks with data of their own):"
            " ranks would read the same rows, or leave some out. Make the data set once the ranks have"
            " started, in train_dataloader() or in setup() of the data module."
        )

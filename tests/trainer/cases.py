"""The space of training runs over which exactness is checked, and a seeded, balanced draw from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

T = TypeVar("T")

Engine = Literal["fsdp2", "ddp"]
Telling = Literal[
    "returned_int", "returned_tensor", "callable_int", "callable_tensor", "labels", "label_key"
]
Gap = Literal["none", "micro_batches", "rank", "window", "everything"]
Clipping = Literal["none", "norm", "value"]
Layout = Literal["fsdp2", "hsdp", "tensor_parallel", "own_mesh", "offload", "ddp"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run.

    Attributes:
        seed: of the initial weights and of the data.
        layout: how the ranks hold the model; `engine`, `replicas` and `tensor` say what that means.
        accumulation: micro-batches a window, for each epoch; different values bring a
            `GradientAccumulationScheduler`.
        num_batches: micro-batches of an epoch on each rank; not a multiple of `accumulation`: the last
            window is short.
        ragged: shapes and label counts differ by rank, step and row; otherwise all are equal and fully
            labelled.
        gap: what has no label token at all: some micro-batches, one rank, one window, the whole run.
        telling: how the strategy learns the number of label tokens.
        loss_reduction: what `training_step` returns.
        label_shift: leading label positions of each row that the loss drops.
        ignore_index: label of a position that the loss ignores.
        per_token_loss: False weighs every micro-batch the same.
        defer: `defer_fsdp_grad_sync`; "all_reduce" has an effect of its own with replicas only.
        recompute: `activation_checkpointing`.
        reshard_after_forward: between forward and backward of a unit, where parameters are not kept for the
            window.
        reshard: `reshard_during_accumulation`, where there is something to reshard.
        clipping: the Trainer's gradient clipping.
        clip_val: its threshold, small enough to change the gradients of most windows.
        precision: the Trainer's; with "32-true" the module makes itself double.
        num_ranks: data-parallel ranks.
        tensor: ranks that compute each micro-batch together.
        ahead: `count_window_ahead`.
    """

    seed: int
    layout: Layout = "fsdp2"
    accumulation: tuple[int, ...] = (1,)
    num_batches: int = 3
    ragged: bool = True
    gap: Gap = "none"
    telling: Telling = "returned_int"
    loss_reduction: Literal["mean", "sum"] = "mean"
    label_shift: int = 0
    ignore_index: int = -100
    per_token_loss: bool = True
    defer: bool | Literal["all_reduce"] = True
    reshard_after_forward: bool = True
    recompute: bool = False
    reshard: bool | Literal["auto"] = "auto"
    clipping: Clipping = "none"
    clip_val: float | None = None
    precision: Literal["64-true", "32-true"] = "64-true"
    num_ranks: int = 2
    tensor: int = 1
    ahead: bool = False

    @property
    def engine(self) -> Engine:
        """What `AutomodelStrategy(data_parallel=...)` gets."""
        return "ddp" if self.layout == "ddp" else "fsdp2"

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.num_ranks * self.tensor

    @property
    def label_key(self) -> str:
        """Only a strategy that is to count from the batch finds labels under the name that it looks for."""
        return "labels" if self.telling == "labels" else "targets"

    def used_labels(self, batch: dict[str, Tensor]) -> Tensor:
        """The labels at the positions that the loss looks at, [b, s - label_shift]."""
        return batch[self.label_key][:, self.label_shift :]

    def num_label_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """How many label tokens the loss really uses."""
        return (self.used_labels(batch) != self.ignore_index).sum()

    def __str__(self) -> str:
        words = [
            self.layout,
            "k" + "".join(map(str, self.accumulation)),
            f"n{self.num_batches}",
            self.telling,
        ]
        words += [
            self.loss_reduction,
            f"shift{self.label_shift}",
            f"gap_{self.gap}",
            f"clip_{self.clipping}",
        ]
        words += [] if self.per_token_loss else ["per_micro_batch"]
        words += {True: [], False: ["undeferred"], "all_reduce": ["all_reduce"]}[self.defer]
        words += [f"reshard_{self.reshard}"] if self.engine == "fsdp2" else []
        words += ["ahead"] if self.ahead else []
        return "-".join(words).lower()


def draw_cases(seed: int, count: int) -> list[Case]:
    """Draw `count` cases; every option takes each of its values about equally often, independently of the others."""
    rng = random.Random(seed)

    def column(values: Sequence[T]) -> list[T]:
        column = [values[index % len(values)] for index in range(count)]
        rng.shuffle(column)
        return column

    columns = zip(
        column(["fsdp2", "ddp", "hsdp", "tensor_parallel", "offload", "own_mesh"]),
        column([1, 2, 3, 4, 5]),
        column(["one_epoch", "two_epochs", "scheduler"]),
        column(["none", "micro_batches", "rank", "window", "none", "micro_batches", "window", "everything"]),
        column(
            ["returned_int", "callable_int", "labels", "returned_tensor", "callable_tensor", "label_key"]
        ),
        column(["mean", "sum"]),
        column([0, 1]),
        column([-100, -1]),
        column([True, True, True, True, True, False]),
        column([True, False, True, "all_reduce"]),
        column(["auto", False, True]),
        column([True, False]),
        column([False, True]),
        column(["none", "norm", "value", "norm"]),
        column(["64-true", "32-true"]),
        column([False, True]),
        strict=True,
    )
    cases = []
    for (
        layout,
        window,
        epochs,
        gap,
        telling,
        reduction,
        shift,
        ignored,
        weighted,
        defer,
        reshard,
        reshard_after_forward,
        recompute,
        clipping,
        bits,
        ahead,
    ) in columns:
        cases.append(
            Case(
                seed=rng.randrange(2**31),
                layout=layout,
                accumulation=_accumulation(rng, window, epochs),
                num_batches=_num_batches(rng, window),
                gap=gap if weighted else "none",
                telling=telling,
                loss_reduction=reduction if weighted else "mean",
                label_shift=shift,
                ignore_index=ignored,
                per_token_loss=weighted,
                defer=defer,
                reshard=reshard,
                reshard_after_forward=reshard_after_forward,
                recompute=recompute,
                clipping=clipping,
                clip_val={"none": None, "norm": rng.choice([0.05, 0.2]), "value": rng.choice([0.005, 0.02])}[
                    clipping
                ],
                precision=bits,
                num_ranks=4 if layout == "hsdp" else 2,
                tensor=2 if layout in ("tensor_parallel", "own_mesh") else 1,
                ahead=ahead,
            )
        )
    return cases


def _accumulation(rng: random.Random, window: int, epochs: str) -> tuple[int, ...]:
    if epochs == "one_epoch":
        return (window,)
    if epochs == "two_epochs":
        return (window, window)
    return (window, rng.choice([other for other in range(1, 6) if other != window]))


def _num_batches(rng: random.Random, window: int) -> int:
    """One or two whole windows and a short one, where a window of that size can be short."""
    whole = window * rng.randint(1, 2)
    return whole + rng.randint(1, window - 1) if window > 1 else whole + 1

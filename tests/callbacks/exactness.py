"""Trainings for ExactnessCheck: what it must report, what it must not, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_automodel import AutomodelStrategy, ExactnessCheck, context_parallel_attention
from tests.trainer.runs import make_trainer

WORDS = 17
WIDTH = 8
LENGTH = 8
Batches = list[Any]


class Net(nn.Module):
    def __init__(
        self, depth: int = 2, width: int = WIDTH, dropout: float = 0.0, max_norm: float | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, max_norm=max_norm)
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth)
        ]
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        for layer in self.layers:
            states = states + layer(states)
        return self.head(states)


class Writer(LightningModule):
    """A language model on rows of unequal length."""

    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __init__(self, **net: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(**net)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return type(self).optimizer(self.parameters(), lr=3e-3)


class Classifier(LightningModule):
    """On (x, y) batches of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WORDS))
        self.register_buffer("weight", torch.linspace(0.2, 3, WORDS))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sentences(rank: int, num_batches: int = 6, rows: int = 2, equal: bool = False) -> Batches:
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(num_batches):
        ids, labels = (torch.randint(0, WORDS, (rows, LENGTH), generator=generator) for _ in range(2))
        for row in labels:
            length = 4 if equal else int(torch.randint(1, LENGTH, (1,), generator=generator))
            row[length:] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def images(rank: int, num_batches: int = 6) -> Batches:
    generator = torch.Generator().manual_seed(rank)
    sizes = [2 + (index + rank) % 4 for index in range(num_batches)]
    return [
        (torch.randn(n, WIDTH, generator=generator), torch.randint(0, WORDS, (n,), generator=generator))
        for n in sizes
    ]


def graphs(rank: int) -> Batches:
    return [
        {"nodes": x.argmax(dim=1), "kinds": kinds, "edges": torch.zeros(2, 3 * len(x))}
        for x, kinds in images(rank)
    ]


@dataclass(frozen=True)
class Training:
    """A training, and what is said of it."""

    module: Callable[[], LightningModule] = Writer
    data: Callable[[int], Batches] = sentences
    strategy: str = "fsdp2"
    options: dict[str, Any] = field(default_factory=dict)  # of the strategy
    check: dict[str, Any] = field(default_factory=dict)  # options of the callback
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    verdict: str = "exact"
    says: str = ""

    def under(self, strategy: str, verdict: str = "exact", says: str = "", **changed: Any) -> Training:
        return replace(self, strategy=strategy, verdict=verdict, says=says, **changed)


def make_strategy(training: Training) -> Any:
    if training.strategy in ("fsdp2", "ddp"):
        return AutomodelStrategy(data_parallel=training.strategy, **training.options)
    if training.strategy == "sharded by hand":
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return {"lightning": "ddp", "one": "auto"}[training.strategy]


def run(training: Training, checked: bool = True) -> tuple[ExactnessCheck, LightningModule]:
    """Fit on the ranks of the pool."""
    steps = training.check.get("steps", 1)
    check = ExactnessCheck(**{**training.check, "steps": steps})
    rank = dist.get_rank() if dist.is_initialized() else 0
    module = training.module()
    trainer = make_trainer(
        make_strategy(training),
        callbacks=[*training.callbacks(), *([check] if checked else [])],
        **{"accumulate_grad_batches": 2, "max_steps": steps + 1, "max_epochs": 3, **training.trainer},
    )
    trainer.fit(module, DataLoader(training.data(rank), batch_size=None))
    return check, module


# --- What has been tried with kinds of trainings ----------------------------------------------------------------------


class Dropping(Writer):
    """Draws from every generator that the replay sets."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.generator = torch.Generator().manual_seed(7)
        self.calls = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        moved = batch["input_ids"] + torch.randint(
            0, WORDS, batch["input_ids"].shape, generator=self.generator
        )
        moved = moved + random.randrange(WORDS)
        return super().loss({**batch, "input_ids": moved % WORDS}) * (
            1 + 0.1 * self.calls + self.trainer.global_step
        )


class Unrepeatable(Writer):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * random.SystemRandom().uniform(1, 2)


class Stateful(Writer):
    """Keeps an average where nobody looks, which hardly changes the loss but the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] = {}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["input_ids"])
        mean = logits.detach().mean()
        mean = self.state["mean"] = 0.9 * self.state.get("mean", mean) + 0.1 * mean
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return loss + mean * (logits - logits.detach()).mean()


class Averaging(Stateful):
    """The same in a private attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._mean: Tensor | None = None

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.state = {} if self._mean is None else {"mean": self._mean}
        loss = super().loss(batch)
        self._mean = self.state["mean"]
        return loss


class Clamping(Writer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.net.head.weight.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class ByRank(Writer):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) * (1 + self.global_rank)


class Uncopyable(Writer):
    """Holds what cannot be copied, and functions that hold the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (number for number in range(3))
        self.apply_net = lambda ids: self.net(ids)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.apply_net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class UsesStream(Uncopyable):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        next(self.stream, None)
        return super().loss(batch)


class Hooked(Writer):
    """Masks a gradient by a hook of its parameter, changes all by a hook of the module."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(WORDS)[:, None] % 2
        self.net.head.weight.register_hook(lambda gradient: gradient * mask)

    def on_after_backward(self) -> None:
        for parameter in self.net.embedding.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ClippingHook(Writer):
    """Not linear, so that it sees something else in each micro-batch than in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight.register_hook(lambda gradient: gradient / gradient.norm())


def whole(tensor: Tensor) -> Tensor:
    """What one process sees."""
    return tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds, taken for the whole."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


class ZeroingRows(Writer):
    """Zeroes rows of a gradient; the norm that it logs must not matter."""

    seen: Callable[[Tensor], Tensor] = staticmethod(whole)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net.embedding.weight.grad
        self.seen(gradient)[:3].zero_()
        self.log("norm", gradient.norm())


class ZeroingLocalRows(ZeroingRows):
    seen = staticmethod(local_part)


class Caching(Writer):
    """Makes a mask in its first step, of the dtype that it computes in then."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self._num_calls = 0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, dtype=self.net.head.weight.dtype)
        if not hasattr(self, "bias"):
            self.bias = torch.zeros(WORDS, dtype=self.net.head.weight.dtype)
        self._num_calls += 1
        states = self.net.embedding(batch["input_ids"]) @ torch.diag(self.mask)
        logits = F.linear(states, self.net.head.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) * self._num_calls


class Named(Tensor):
    """As torchvision's and pina's tensors, whose operations make others of their class."""


class Wrapped(Writer):
    """Its own ``forward`` is a function that has closed over the method, and over a wrapper of it."""

    def __init__(self) -> None:
        super().__init__()
        method = self.forward

        def doubled(ids: Tensor) -> Tensor:
            return 2 * method(ids)

        def forward(ids: Tensor) -> Tensor:
            return 1 + doubled(ids).as_subclass(Named)

        self.forward = forward

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.forward(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class Graphs(Writer):
    """A batch with nothing that could be counted: tensors have other numbers of rows, and labels another name."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["nodes"]), batch["kinds"])


class GraphsWithAHook(Graphs):
    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight.register_hook(lambda gradient: gradient / gradient.norm())


class OfAllRanks(Classifier):
    """As nequip: a metric over all ranks is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.error(self.net(batch[0])[:, 0], batch[0][:, 0]) * self.trainer.world_size


class Contrastive(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = F.normalize(self.net(batch[0]))
        return F.cross_entropy(3 * features @ features.T, torch.arange(len(features)))


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        means = self.all_gather(self.net(batch[0]).square().mean(), sync_grads=True)
        return means.mean()


class Waiting(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dist.barrier()
        return super().training_step(batch, batch_idx)


class Weighted(Classifier):
    """Class weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=self.weight)


class WeightedAndTold(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "num_label_tokens": self.weight[batch[1]].sum()}


class Summed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class TwoDenominators(Writer):
    """As energies by molecule and forces by atom: a mean over rows, and one over tokens."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.net(batch["input_ids"]).mean(dim=(1, 2)).square().mean()


class Attending(Writer):
    """Attends across slices of sequences, under context parallelism or alone."""

    def __init__(self, **net: Any) -> None:
        super().__init__(**net)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(LENGTH))
        states = (self.net.embedding(batch["input_ids"]) + self.positions(positions))[:, None]
        mixed = context_parallel_attention(states * self.scale, states, states)[:, 0]
        for layer in self.net.layers:
            mixed = mixed + layer(mixed)
        return self.net.head(mixed)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.get("shift_labels", batch["labels"])
        return F.cross_entropy(self(batch).flatten(0, 1), labels.flatten())


class AttendingWithAHook(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.scale.register_hook(torch.sign)


class Manual(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ByTensor(torch.optim.SGD):
    """Layer-wise adaptive rates."""

    seen: Callable[[Tensor], Tensor] = staticmethod(whole)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        output = closure() if closure is not None else None
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                gradient = self.seen(parameter.grad)
                self.seen(parameter).sub_(0.01 * gradient / (gradient.norm() + 1e-8))
        return output


class ByPart(ByTensor):
    seen = staticmethod(local_part)


class SteppedByTensor(Writer):
    optimizer = ByTensor


class SteppedByPart(Writer):
    optimizer = ByPart


class Changing(Callback):
    """Changes gradients on purpose."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.net.head.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)


class ClampingBetween(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.net.head.parameters():
                parameter.clamp_(-0.2, 0.2)


SAMPLES = {"count": "samples"}
SLICED = {"context_parallel_size": 2}
of_images = Training(Classifier, images, options=SAMPLES)
WEIGH = "Every micro-batch weighs 25 %, though they hold"
TRAININGS: dict[str, Training] = {
    "fsdp2": Training(says="agrees with the loss.", check={"steps": 2}),
    "ddp": Training(strategy="ddp", check={"steps": 2}),
    "one process": Training(strategy="one", data=lambda _: sentences(0, equal=True), says="were not seen"),
    "random numbers": Training(Dropping, says="draws random numbers"),
    "half precision": Training(trainer={"precision": "bf16-mixed"}),
    "clipping": Training(trainer={"gradient_clip_val": 0.05}),
    "uneven": Training(
        data=lambda rank: sentences(rank, 5 if rank else 3), options={"uneven_inputs": "pad"}
    ),
    "attributes": Training(Uncopyable),
    "hooks": Training(Hooked, strategy="ddp"),
    "samples": of_images,
    "class weights, told": replace(of_images, module=WeightedAndTold, options={}),
    "a sum": replace(of_images, module=Summed, options={**SAMPLES, "loss_reduction": "sum"}),
    "contrastive": replace(of_images, module=Contrastive, says="EXACT for the count given"),
    "clamped under DDP": Training(Clamping, strategy="ddp"),
    "slices": Training(Attending, data=lambda _: sentences(0), options=SLICED, says="agrees with the loss."),
    "slices, shifted": Training(
        Attending, data=lambda _: sentences(0), options={**SLICED, "label_shift": 1}
    ),
    "an early cache": Training(Caching),
    "a private state": Training(Averaging, verdict="not checked", says="no single count is right"),
    "a wrapped forward": Training(Wrapped),
    "rows of a gradient": Training(ZeroingRows, trainer={"gradient_clip_val": 0.1}),
    "rows of a gradient, ddp": Training(ZeroingRows, strategy="ddp", trainer={"gradient_clip_val": 0.1}),
    "an optimizer of tensors": Training(SteppedByTensor, says="The optimizer's steps are"),
    # What is wrong, and why.
    "lightning": Training(strategy="lightning", verdict="wrong", says=WEIGH),
    "lightning, half": Training(
        strategy="lightning", trainer={"precision": "bf16-mixed"}, verdict="wrong", says=WEIGH
    ),
    "lightning, samples": of_images.under("lightning", "wrong", WEIGH, options={}),
    "lightning, equal": Training(strategy="lightning", data=lambda rank: sentences(rank, equal=True)),
    "one process, unequal": Training(
        strategy="one", verdict="wrong", says="Every micro-batch weighs 50 %, though"
    ),
    "a wrong shift": Training(options={"label_shift": 1}, verdict="wrong", says="Right is label_shift=0."),
    "class weights": replace(of_images, module=Weighted, verdict="wrong", says="Right is num_label_tokens"),
    "a sum, not told": replace(
        of_images, module=Summed, verdict="wrong", says="Right is loss_reduction='sum'"
    ),
    "rows, counted by labels": Training(
        lambda: RowMeans(),
        verdict="wrong",
        says="Right is count='samples', as the loss is a mean over rows.",
    ),
    "max_norm": Training(
        lambda: Writer(max_norm=0.5),
        strategy="lightning",
        verdict="wrong",
        says="Ranks hold different weights",
        check={"steps": 2},
    ),
    "a hook that clips": Training(
        ClippingHook, strategy="ddp", verdict="wrong", says="off: net.head.weight"
    ),
    "rows of a local part": Training(
        ZeroingLocalRows, verdict="wrong", says="on_before_optimizer_step and clipping make"
    ),
    "an optimizer of local parts": Training(SteppedByPart, verdict="wrong", says="The optimizer's step is"),
    "slices, a hook": Training(
        AttendingWithAHook,
        data=lambda _: sentences(0),
        strategy="ddp",
        options=SLICED,
        verdict="wrong",
        says="off: scale",
    ),
    # What nothing can be said of.
    "slices, random numbers": Training(
        lambda: Attending(dropout=0.2),
        data=lambda _: sentences(0),
        options=SLICED,
        verdict="not checked",
        says="as by random numbers that each draws for its slice",
    ),
    "synchronised metric": of_images.under(
        "ddp", "not checked", "the metric error takes values of all ranks", module=OfAllRanks
    ),
    "no count": Training(
        Graphs,
        graphs,
        strategy="lightning",
        verdict="not checked",
        says="By this count, gradients are 0.0000",
    ),
    "no count, and a hook": Training(
        GraphsWithAHook, graphs, strategy="lightning", verdict="wrong", says="off: net.head.weight"
    ),
    "manual": Training(
        Manual, trainer={"accumulate_grad_batches": 1}, verdict="not checked", says="Manual optim"
    ),
    "gathering": replace(
        of_images, module=Gathering, verdict="not checked", says="communicates with other ranks"
    ),
    "waiting": replace(
        of_images, module=Waiting, verdict="not checked", says="process group has not been initialized"
    ),
    "unrepeatable": Training(Unrepeatable, verdict="not checked", says="is not repeatable"),
    "a hidden state": Training(
        Stateful, verdict="not checked", says="keeps a state that is no attribute of a module"
    ),
    "by rank": Training(ByRank, verdict="not checked", says="training_step depends on the rank"),
    "a stream": Training(UsesStream, verdict="not checked", says="self.stream, which cannot be copied"),
    "two denominators": Training(TwoDenominators, verdict="not checked", says="no single count is right"),
    "a callback": Training(
        callbacks=lambda: [Changing()], verdict="not checked", says="the callback Changing may"
    ),
    "a write between": Training(
        strategy="ddp",
        callbacks=lambda: [ClampingBetween()],
        verdict="not checked",
        says="a hook changes weights",
    ),
}


class RowMeans(Writer):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(
            self.net(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none"
        )
        used = batch["labels"] != -100
        return (losses.sum(1) / used.sum(1).clamp(min=1)).mean()


def verdict_of(name: str) -> tuple[str | None, str]:
    check, _ = run(TRAININGS[name])
    return check.verdict, check.report


def bits_of(name: str, checked: bool) -> dict[str, bytes]:
    """Weights and the random state at the end of a fit."""
    _, module = run(TRAININGS[name], checked)
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in module.named_parameters()}
    found = {name: tensor.detach().numpy().tobytes() for name, tensor in whole.items()}
    return {**found, "random": torch.get_rng_state().numpy().tobytes()}


# --- Random trainings -------------------------------------------------------------------------------------------------


class RandomNet(LightningModule):
    """Layers of random width and kind, and an attention whose key bias has no gradient but rounding."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        draw = random.Random(number)
        width = draw.choice([5, 16, 33, 64])
        depth = draw.choice([1, 3, 8])
        activation = draw.choice([nn.Tanh, nn.ReLU, nn.GELU])
        dropout = draw.choice([0.0, 0.0, 0.2])
        self.is_residual = draw.random() < 0.6
        self.width = width
        self.rate = draw.choice([1e-3, 1e-2])
        self.is_adaptive = draw.random() < 0.5
        self.embedding = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), activation(), nn.Dropout(dropout))
            for _ in range(depth)
        )
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        scale = draw.choice([0.5, 1.0, 3.0])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(scale)
        self.embedding.weight.requires_grad_(draw.random() < 0.8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        states = self.embedding(batch["input_ids"])
        for layer in self.layers:
            states = states + layer(states) if self.is_residual else layer(states)
        scores = self.query(states) @ self.key(states).mT / self.width**0.5
        logits = self.head(torch.softmax(scores, dim=-1) @ states + states)
        return F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            batch["labels"].flatten(),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.is_adaptive else torch.optim.SGD
        return kind([p for p in self.parameters() if p.requires_grad], self.rate)


def random_training(number: int, strategy: str, precision: str, equal: bool = False) -> Training:
    draw = random.Random(-number)
    accumulate = draw.choice([1, 2, 3, 4])
    rows = draw.choice([1, 2, 3])
    return Training(
        lambda: RandomNet(number),
        lambda rank: sentences(1000 * rank + number, 3 * accumulate, rows, equal),
        strategy,
        {"auto_wrap_policy": {RandomNet}} if strategy == "fsdp2" and draw.random() < 0.3 else {},
        {"steps": 1},
        trainer={
            "max_steps": 1,
            "precision": precision,
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": draw.choice([None, None, 0.1, 1.0]),
        },
    )


def random_verdicts(numbers: list[int], *training: Any) -> list[tuple[int, str | None, str]]:
    found = []
    for number in numbers:
        check, _ = run(random_training(number, *training))
        found.append((number, check.verdict, check.report))
    return found

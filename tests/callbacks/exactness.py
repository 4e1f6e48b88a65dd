"""Trainings for ExactnessCheck: what it must report, and what it must not."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
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


def mean_loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(module.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class Writer(LightningModule):
    """A language model on rows of unequal length, which may have a loss of its own."""

    def __init__(self, own_loss: Callable[[Any, Any], Any] = mean_loss, **net: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own_loss = own_loss
        self.net = Net(**net)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.own_loss(self, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Classifier(LightningModule):
    """On (x, y) batches of unequal size, with a loss that may be its own."""

    def __init__(self, own_loss: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own_loss = own_loss
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WORDS))
        self.register_buffer("weight", torch.linspace(0.2, 3, WORDS))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.own_loss is not None:
            return self.own_loss(self, batch)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def means_of_rows(module: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = module.net(batch["input_ids"]).transpose(1, 2)
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    return (losses.sum(1) / (batch["labels"] != -100).sum(1).clamp(min=1)).mean()


def unrepeatable(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return mean_loss(module, batch) * random.SystemRandom().uniform(1, 2)


def two_denominators(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """As energies by molecule and forces by atom: a mean over rows, and one over tokens."""
    return mean_loss(module, batch) + module.net(batch["input_ids"]).mean(dim=(1, 2)).square().mean()


def partly_detached(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """On purpose."""
    loss = mean_loss(module, batch)
    return loss + loss.detach() / 2


def of_graphs(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A batch with nothing that could be counted: tensors have other numbers of rows, and labels another name."""
    return F.cross_entropy(module.net(batch["nodes"]), batch["kinds"])


def hidden(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """The graph does not tell what it divides by."""
    return of_graphs(module, batch).exp().log()


def clipped_backward(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Not linear, so that it sees something else in each micro-batch than in one batch."""
    logits = module.net(batch["input_ids"])
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient / gradient.norm())
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def scaled_sum(module: Any, batch: dict[str, Tensor], penalises: bool = False) -> Tensor:
    """A sum by a constant, to which some micro-batches may add another sum."""
    logits = module.net(batch["input_ids"]).transpose(1, 2)
    used = batch["labels"] != -100
    total = (F.cross_entropy(logits, batch["labels"], reduction="none") * used).sum()
    if penalises and batch["labels"].sum() % 2 == 0:
        total = total + (logits.square().sum(1) * used).sum()
    return total / 100


class Named(Tensor):
    """As torchvision's tensors, whose operations make others of their class."""


def contrastive(module: Any, batch: Any) -> Tensor:
    features = F.normalize(module.net(batch[0])).as_subclass(Named)
    return F.cross_entropy(3 * features @ features.T, torch.arange(len(features)))


def gathered(module: Any, batch: Any) -> Tensor:
    return module.all_gather(module.net(batch[0]).square().mean(), sync_grads=True).mean()


def summed(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1], reduction="sum")


def weighted(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1], weight=module.weight)


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
    says: str = ""
    data: Callable[[int], Batches] = sentences
    strategy: str = "fsdp2"
    options: dict[str, Any] = field(default_factory=dict)  # of the strategy
    check: dict[str, Any] = field(default_factory=dict)  # options of the callback
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    verdict: str = "exact"


def make_strategy(training: Training) -> Any:
    if training.strategy in ("fsdp2", "ddp"):
        return AutomodelStrategy(data_parallel=training.strategy, **training.options)
    if training.strategy == "sharded by hand":
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return {"lightning": "ddp_find_unused_parameters_true", "one": "auto"}[training.strategy]


def run(training: Training, checked: bool = True, more: int = 0) -> tuple[ExactnessCheck, LightningModule]:
    """Fit on the ranks of the pool, for some steps more than are checked."""
    steps = training.check.get("steps", 1)
    check = ExactnessCheck(**{**training.check, "steps": steps})
    rank = dist.get_rank() if dist.is_initialized() else 0
    module = training.module()
    trainer = make_trainer(
        make_strategy(training),
        callbacks=[*training.callbacks(), *([check] if checked else [])],
        **{"accumulate_grad_batches": 2, "max_steps": steps + more, "max_epochs": 3, **training.trainer},
    )
    trainer.fit(module, DataLoader(training.data(rank), batch_size=None))
    return check, module


# --- What has been tried with kinds of trainings ----------------------------------------------------------------------


class Augmentation:
    """No module: an object with a generator and a number."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0

    def __call__(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return (ids + self.calls + torch.randint(0, WORDS, ids.shape, generator=self.generator)) % WORDS


class Remembering(Writer):
    """Keeps state and draws from generators in all places, of which the loss depends on each."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.augmentation = Augmentation()
        self.net.augmentation = self.augmentation  # held twice
        self.generators = {"numpy": np.random.default_rng(3), "legacy": np.random.RandomState(4)}
        self.python = random.Random(5)
        self.phases = {"names": ["a"], "counts": {"a": 0}}
        self.outputs: list[Any] = [lambda: None]  # which no other rank could get
        self.net.outputs = self.outputs
        self.total = np.zeros(2)
        self.register_buffer("made", None)
        self.__dict__["teacher"] = nn.Linear(1, 1)  # no part of this module
        self.constants = np.frombuffer(bytes(8))  # read-only

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = self.net.augmentation(self.augmentation(batch["input_ids"])) + self.python.randrange(WORDS)
        ids = (
            ids
            + random.randrange(WORDS)
            + int(self.generators["numpy"].integers(WORDS))
            + self.generators["legacy"].randint(WORDS)
        )
        self.phases["names"].append(self.phases["names"][-1] + "b")
        self.phases["counts"]["a"] += 1
        self.outputs.append(ids)
        self.total += 1
        self.made = torch.ones(()) if self.made is None else self.made + 1
        if not hasattr(self, "cached"):
            self.cached = float(batch["input_ids"].sum())
        weight = self.cached + float(self.total.sum() + self.made)
        weight += len(self.phases["names"][-1]) + self.phases["counts"]["a"] + self.trainer.global_step
        return super().loss({**batch, "input_ids": ids % WORDS}) * weight

    def remembered(self) -> bytes:
        """All of it."""
        held = (
            len(self.outputs),
            self.augmentation.calls,
            self.python.getstate(),
            self.phases["names"],
            self.phases["counts"],
            list(self.state_dict()),
        )
        drawn = (self.generators["numpy"].random(), self.generators["legacy"].rand())
        return repr((held, drawn, self.total, self.made, self.augmentation.generator.get_state())).encode()


class Clamping(Writer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.net.head.weight.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class UsesStream(Writer):
    """Draws from what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (number for number in range(3))

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


class OfAllRanks(Classifier):
    """As nequip: a metric over all ranks is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.error(self.net(batch[0])[:, 0], batch[0][:, 0]) * self.trainer.world_size


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


class Manual(Writer):
    """Manual optimization, in windows of ``accumulate`` micro-batches."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        ends = (batch_idx + 1) % self.accumulate == 0
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(self.loss(batch))
        if ends:
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()


class ManualByHand(Manual):
    """Clips gradients past Lightning, steps the optimizer itself, and by a closure; may read gradients in between."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        if self.reads:
            self.log("norm", self.net.head.weight.grad.norm())
        optimizer.step()
        self.optimizers().step(closure=lambda: self.backward_again(batch))

    def backward_again(self, batch: Any) -> None:
        self.zero_grad()
        self.manual_backward(2 * self.loss(batch), **self.counted(batch))

    def counted(self, batch: Any) -> dict[str, Any]:
        if isinstance(self.trainer.strategy, AutomodelStrategy):
            return {"num_label_tokens": (batch["labels"] != -100).sum()}
        return {}


class Writing(Manual):
    """Writes weights between the micro-batches of a window."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.net.head.weight.mul_(0.9)


class SteppingAgain(Manual):
    """Steps its optimizer twice, but not in the run."""

    def __init__(self) -> None:
        super().__init__()
        steps = iter(range(100))
        self.count_steps = lambda: next(steps)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self.count_steps() > 0:
            self.optimizers().step()


class Gan(Classifier):
    """Two optimizers, stepped one after the other in a step, whose losses depend on each other's weights.

    Options: windows of ``accumulate`` micro-batches; ``toggles`` parameters.
    """

    def __init__(self, accumulate: int = 1, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.toggles = toggles
        self.critic = nn.Sequential(nn.Linear(WORDS, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.random = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        schedule = self.lr_schedulers()
        ends = (batch_idx + 1) % self.accumulate == 0
        fake = self.net(batch[0] + torch.randn(batch[0].shape, generator=self.random))
        real = F.one_hot(batch[1], WORDS).float()

        with judging.toggle_model(sync_grad=ends) if self.toggles else nullcontext():
            loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
            self.manual_backward(loss)
        if ends:
            judging.step()
            judging.zero_grad()
            schedule.step()
            with torch.no_grad():
                for parameter in self.critic.parameters():
                    parameter.clamp_(-0.3, 0.3)

        with generating.toggle_model(sync_grad=ends) if self.toggles else nullcontext():
            loss = F.softplus(-self.critic(fake)).mean()
            self.manual_backward(loss)
        self.log("generator", loss)
        if ends:
            generating.step()
            generating.zero_grad()
        if not self.toggles:
            self.zero_grad()

    def configure_optimizers(self) -> Any:
        generating = torch.optim.Adam(self.net.parameters(), lr=0.05)
        judging = torch.optim.SGD(self.critic.parameters(), lr=0.3)
        return [generating, judging], [torch.optim.lr_scheduler.ExponentialLR(judging, 0.9)]


class GeneratorFirst(Gan):
    """The critic's loss takes samples of before the generator's step, and gradients are read in between."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        fake = self.net(batch[0] + torch.randn(batch[0].shape, generator=self.random))
        with generating.toggle_model():
            self.manual_backward(F.softplus(-self.critic(fake)).mean())
        generating.step()
        generating.zero_grad()
        with judging.toggle_model():
            self.manual_backward(F.softplus(self.critic(fake.detach())).mean())
        judging.step()
        self.norms = [p.grad.norm() for p in self.critic.parameters() if p.grad is not None]
        judging.zero_grad()


class ClampingBetween(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.net.head.parameters():
                parameter.clamp_(-0.2, 0.2)


class Clipping(Writer):
    """Changes gradients wherever Lightning lets it, and keeps what stood in them before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_train_start(self) -> None:
        self.norms = [torch.zeros(())]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self._clip()

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._clip()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure)
        self._clip()

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Keeps them, for the next step to add to."""


class Halving(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.on_after_backward(trainer, pl_module)


class CountsWrongly(Writer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "num_label_tokens": 5}


class DetachedWeight(Writer):
    """As one that an engine never reduces: the loss depends on it, and it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(WORDS))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.net(batch["input_ids"]) + F.embedding(batch["input_ids"], self.table.detach())
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class ByClosures(Writer):
    """Computes gradients several times in a step, each of which is a window."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Alone(Writer):
    """The first training step of the replay, after two of the run, raises on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = iter(range(1, 100))
        steps = self.steps
        self.count_steps = lambda: next(steps)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.count_steps() == 3 and self.global_rank == 1:
            raise OSError("this rank's disk is full")
        return loss


class Within(Writer):
    """The first training step of the replay raises on rank 1 alone, within a forward, as others gather a unit."""

    def __init__(self) -> None:
        super().__init__()
        forward = self.net.layers[0].forward
        calls = iter(range(1, 100))

        def failing(states: Tensor) -> Tensor:
            if next(calls) == 3 and self.global_rank == 1:
                raise OSError("this rank's disk is full")
            return forward(states)

        self.net.layers[0].forward = failing  # type: ignore[method-assign]


def manual(trainings: dict[str, Training]) -> dict[str, Training]:
    """Without windows of the Trainer's, and two checked, or four of two optimizers."""
    return {
        name: replace(
            training,
            check={"steps": 4 if name.startswith("gan") else 2},
            trainer={"accumulate_grad_batches": 1},
        )
        for name, training in trainings.items()
    }


wrong = partial(Training, verdict="wrong")
unchecked = partial(Training, verdict="not checked")
SAMPLES = {"count": "samples"}
SLICED = {"context_parallel_size": 2}
SINGLE = {"accumulate_grad_batches": 1}
OF_SLICES: dict[str, Any] = {"data": lambda _: sentences(0), "options": SLICED}
OF_IMAGES: dict[str, Any] = {"data": images, "options": SAMPLES}
REPLICATED: dict[str, Any] = {
    "data": images,
    "strategy": "ddp",
    "options": {**SAMPLES, "ddp_kwargs": {"find_unused_parameters": True}},
}
OVERRIDDEN: dict[str, Any] = {"callbacks": lambda: [Halving()], "check": {"steps": 2}}
WEIGH = "Micro-batches weigh 25 % in the gradients, where"
EACH = "EXACT if each"
ON_SHARDS = "EXACT as far as a replay on shards can tell (along the gradients"
BY_ITSELF = "EXACT for each manual_backward by itself"
DIFFER = "losses differ in the replay"
OTHER_PARTS = "losses differ in their parts"
DISK = "OSError: this rank's disk is full"
MANUAL: dict[str, Training] = {
    "manual": Training(Manual, f"{BY_ITSELF} as far as a replay"),
    "manual, ddp": Training(lambda: Manual(2), f"{BY_ITSELF} in 2 windows", strategy="ddp"),
    "manual, by hand": Training(ManualByHand, "agrees with the loss"),
    "manual, reading": unchecked(lambda: ManualByHand(reads=True), "has no attribute 'norm'"),
    "manual, writing": unchecked(lambda: Writing(2), "weights are written within", strategy="ddp"),
    "manual, stepping again": unchecked(SteppingAgain, "has stepped optimizers more often than in the run"),
    "manual, lightning": unchecked(Manual, "DDPStrategy does not tell which", strategy="lightning"),
    "gan, generator first": Training(GeneratorFirst, "in 4 windows", **REPLICATED),
    "gan, accumulated": Training(lambda: Gan(2), "in 4 windows", **OF_IMAGES),
    "gan, not toggled": Training(lambda: Gan(toggles=False), "in 4 windows", **REPLICATED),
}
"""Windows of manual optimization, one by one."""
TRAININGS: dict[str, Training] = {
    "fsdp2": Training(says="agrees with the loss", check={"steps": 2}),
    "ddp": Training(strategy="ddp", check={"steps": 2}),
    "one process": Training(says="were not seen", data=lambda _: sentences(0, equal=True), strategy="one"),
    "half precision": Training(trainer={"precision": "bf16-mixed"}),
    "uneven": Training(
        data=lambda rank: sentences(rank, 5 if rank else 3), options={"uneven_inputs": "pad"}
    ),
    "a hook": unchecked(Hooked, "net.head.weight has a hook", strategy="ddp"),
    "a backward that clips": unchecked(
        partial(Writer, clipped_backward), "a hook of the backward that is not linear"
    ),
    "contrastive": Training(partial(Classifier, contrastive), **OF_IMAGES),
    "clamped under DDP": Training(Clamping, strategy="ddp"),
    "states": Training(Remembering, EACH),
    # Gradients are judged as autograd leaves them, whatever is done to them later.
    "overrides": Training(Clipping, **OVERRIDDEN),
    "overrides, one process": Training(Clipping, strategy="one", trainer=SINGLE, **OVERRIDDEN),
    "a wrong count, lightning": wrong(CountsWrongly, WEIGH, strategy="lightning"),
    "detached": Training(partial(Writer, partly_detached), f"{ON_SHARDS} the loss changes by 1.5 of"),
    "a detached weight": Training(DetachedWeight, ON_SHARDS),
    "raises alone": unchecked(Alone, DISK),
    "several closures in a step": Training(
        ByClosures,
        data=lambda _: sentences(0, equal=True),
        strategy="one",
        trainer=SINGLE,
        check={"steps": 3},
    ),
    **manual(MANUAL),
    # What is wrong, and why.
    "lightning": wrong(says=WEIGH, strategy="lightning"),
    **{
        f"lightning, {precision}": wrong(
            says="is right, their share", strategy="lightning", trainer={"precision": precision}
        )
        for precision in ("bf16-mixed", "bf16-true")
    },
    "one process, unequal": wrong(says="Micro-batches weigh 50 % in the gradients, where", strategy="one"),
    "a wrong shift": wrong(says="label_shift=", strategy="ddp", options={"label_shift": 1}),
    "class weights": wrong(
        partial(Classifier, weighted), "give weight[labels].sum() as num_label_tokens", **REPLICATED
    ),
    "a sum, not told": wrong(partial(Classifier, summed), "pass loss_reduction='sum'", **REPLICATED),
    "rows, counted by labels": wrong(
        partial(Writer, means_of_rows), "If it is a mean over rows, count='samples' is right"
    ),
    "a sum by a constant, counted by labels": wrong(
        partial(Writer, scaled_sum), "The loss divides by 100 in every micro-batch", strategy="ddp"
    ),
    "a sum by a constant, told": Training(
        partial(Writer, scaled_sum),
        "agrees with the loss",
        strategy="ddp",
        options={"loss_reduction": "sum"},
    ),
    "sums with other parts": Training(
        partial(Writer, partial(scaled_sum, penalises=True)), OTHER_PARTS, options={"loss_reduction": "sum"}
    ),
    "max_norm": wrong(
        lambda: Writer(max_norm=0.5),
        "Ranks hold different weights",
        strategy="lightning",
        check={"steps": 2},
    ),
    # What nothing can be said of.
    "slices, random numbers": Training(lambda: Attending(dropout=0.2), **OF_SLICES),
    "synchronised metric": unchecked(OfAllRanks, DIFFER, strategy="ddp", **OF_IMAGES),
    "no count": unchecked(partial(Writer, hidden), "no count was given", graphs, "lightning"),
    "counted by the loss": wrong(
        partial(Writer, of_graphs),
        f"{WEIGH} 16.7 % to 33.3 % is right, their share of the loss terms",
        graphs,
        "lightning",
    ),
    "gathering": wrong(
        partial(Classifier, gathered), "The loss of Classifier is gathered from all ranks", **OF_IMAGES
    ),
    "unrepeatable": unchecked(partial(Writer, unrepeatable), "is not repeatable", strategy="ddp"),
    "a stream": unchecked(UsesStream, "without iterators that modules hold"),
    "two denominators": Training(partial(Writer, two_denominators), EACH),
    "a write between": unchecked(says=DIFFER, strategy="ddp", callbacks=lambda: [ClampingBetween()]),
}


GO_ON = ("fsdp2", "ddp", "one process", "half precision", "manual", "manual, ddp", "lightning", "a hook")
"""Those that train after their check: each kind of strategy and optimization, and one that cannot be checked."""


def verdict_of(name: str) -> tuple[str | None, str]:
    check, _ = run(TRAININGS[name], more=int(name in GO_ON))
    return check.verdict, check.report


def bits_of(name: str, checked: bool) -> dict[str, bytes]:
    """Weights and the random state at the end of a fit."""
    _, module = run(TRAININGS[name], checked, more=1)
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in module.named_parameters()}
    found = {name: tensor.detach().numpy().tobytes() for name, tensor in whole.items()}
    remembered = getattr(module, "remembered", bytes)()
    return {**found, "remembered": remembered, "random": torch.get_rng_state().numpy().tobytes()}

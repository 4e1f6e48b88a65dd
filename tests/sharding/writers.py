"""What users write to weights while they train, run by the strategy on ranks and by one plain process.

A module's hooks and `training_step` are the same code in both. Its batch holds the rows of all ranks in one
process, and a loss is a mean over rows.

Shapes: n rows, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.trainer.exactness import full_weights
from tests.trainer.runs import make_trainer

WIDTH = 5  # odd, so that shards on two ranks are uneven
NUM_BATCHES = 6
ACCUMULATE = 2
MOMENTUM = 0.9


class Block(nn.Module):
    """A residual block, which becomes a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Net(nn.Module):
    """Two blocks, which become units, and a head, which is left to the root."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features)  # [n, 3]


class Writer(LightningModule):
    """A student, and a teacher that starts elsewhere; subclasses write weights, most of them at one place."""

    def __init__(self, place: str = "") -> None:
        super().__init__()
        self.student = Net(1)
        self.teacher = Net(2).requires_grad_(False)
        self.double()
        self.place = place

    def write(self) -> None:
        """What is done at its place."""

    def reach(self, place: str) -> None:
        """Write, if this is the place."""
        if place == self.place:
            self.write()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.step(batch, batch_idx)
        return {"loss": loss, "num_label_tokens": len(batch)}

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A mean over rows."""
        self.reach("start")
        loss = self.distance(batch)
        self.reach("end")
        return loss

    def distance(self, batch: Tensor) -> Tensor:
        """How far the student is from the teacher."""
        predicted = self.student(batch)
        self.reach("middle")
        with torch.no_grad():
            target = self.teacher(batch.flip(1))
        return F.mse_loss(predicted, target, reduction="sum") / len(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reach("batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reach("batch_end")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.reach("before_zero_grad")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)


# --- Teachers ---------------------------------------------------------------------------------------------------------


def dino_update_momentum(model: nn.Module, model_ema: nn.Module, m: float = MOMENTUM) -> None:
    """As in DINO's train_one_epoch."""
    with torch.no_grad():
        for param_q, param_k in zip(model.parameters(), model_ema.parameters(), strict=True):
            param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)


@torch.no_grad()
def timm_ema(model: nn.Module, model_ema: nn.Module, m: float = MOMENTUM) -> None:
    """As timm.utils.ModelEmaV3.apply_update_."""
    ema = []
    current = []
    for ema_v, model_v in zip(model_ema.state_dict().values(), model.state_dict().values(), strict=True):
        ema.append(ema_v)
        current.append(model_v)
    torch._foreach_lerp_(ema, current, weight=1.0 - m)


def hard_update(model: nn.Module, model_ema: nn.Module, m: float = MOMENTUM) -> None:
    """As deep Q-learning's target network."""
    model_ema.load_state_dict(model.state_dict())


def swap(model: nn.Module, model_ema: nn.Module, m: float = MOMENTUM) -> None:
    """Weights change places, as for a validation with averages."""
    for s, t in zip(model.parameters(), model_ema.parameters(), strict=True):
        kept = s.data
        s.data = t.data
        t.data = kept


UPDATES = {update.__name__: update for update in (dino_update_momentum, timm_ema, hard_update, swap)}
PLACES = ("start", "end", "batch_start", "batch_end", "before_zero_grad", "middle")


class Teaches(Writer):
    """Moves the teacher towards the student."""

    def __init__(self, update: str, place: str) -> None:
        super().__init__(place)
        self.update = UPDATES[update]

    def write(self) -> None:
        self.update(self.student, self.teacher)


class TeachesInParallel(Teaches):
    """The same with blocks that are split over tensor-parallel ranks, where these are several."""

    def configure_model(self) -> None:
        if dist.is_initialized() and self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"blocks.*.linear": ColwiseParallel(output_layouts=Replicate())}
            for net in (self.student, self.teacher):
                parallelize_module(net, self.device_mesh["tensor_parallel"], plan)


# --- What is written to the trained weights themselves --------------------------------------------------------------


@torch.no_grad()
def swav(head: nn.Linear) -> None:
    """As SwAV normalises its prototypes."""
    w = head.weight.data.clone()
    w = F.normalize(w, dim=1, p=2)
    head.weight.copy_(w)


WAYS: dict[str, Callable[[nn.Linear], Any]] = {
    "swav": swav,
    "read": lambda head: [p.data.norm() for p in head.parameters()],
    "counted": lambda head: head.weight.data[1:].clamp_(-0.01, 0.01),
    # These raise no version counter of what has been gathered.
    "slice": lambda head: head.weight[1:].data.clamp_(-0.01, 0.01),
    "function": lambda head: torch.narrow(head.weight, 0, 1, 2).data.mul_(0.9),
    "read as an array": lambda head: head.weight.detach().numpy().mean(),
    "array": lambda head: np.add(head.weight.detach().numpy(), 0.1, out=head.weight.detach().numpy()),
}


class WritesHead(Writer):
    """Writes its head, in one of `WAYS`."""

    def __init__(self, way: str, place: str) -> None:
        super().__init__(place)
        self.way = WAYS[way]

    def write(self) -> None:
        self.way(self.student.head)


class WritesHeld(Writer):
    """Writes shards, which a list holds, in its step."""

    def on_fit_start(self) -> None:
        self.held = list(self.student.head.parameters())

    @torch.no_grad()
    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for parameter in self.held:
            parameter.mul_(0.9)
        with torch.enable_grad():
            return self.distance(batch)


class KeepsView(Writer):
    """Decays rows of a weight by a view that was taken before it was sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.student.head.weight[1:]

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.distance(batch) + self.rows.square().sum()


class NormalisesInForward(Block):
    """Writes its weight in its own forward, as a cosine classifier does."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.linear.weight.data = F.normalize(self.linear.weight.data, dim=1)
        return super().forward(hidden)


class InForward(Writer):
    def __init__(self) -> None:
        super().__init__()
        for net in (self.student, self.teacher):
            for index, block in enumerate(net.blocks):
                written = NormalisesInForward()
                written.load_state_dict(block.state_dict())
                net.blocks[index] = written
        self.teacher.requires_grad_(False)
        self.double()


class AveragesIntoBuffers(Writer):
    """Keeps means of weights in plain buffers, as stochastic weight averaging of Gaussians does."""

    def __init__(self, how: str) -> None:
        super().__init__("batch_end")
        self.how = how
        for index, parameter in enumerate(self.student.parameters()):
            self.register_buffer(f"mean_{index}", parameter.detach().clone().double())

    def write(self) -> None:
        for index, parameter in enumerate(self.student.parameters()):
            mean = self.get_buffer(f"mean_{index}")
            weight = parameter.data
            if self.how == "recipe" and isinstance(parameter, DTensor):
                weight = parameter.full_tensor().detach()
            mean.mul_(0.5).add_(weight, alpha=0.5)
        with torch.no_grad():  # where the test looks
            self.teacher.head.weight[:, 0] = self.mean_0[:3, 0]


def clamp(net: nn.Module) -> None:
    """As a Wasserstein GAN does with its critic."""
    for p in net.parameters():
        p.data.clamp_(-0.3, torch.inf).clamp_(-torch.inf, 0.3)


class Clamps(Writer):
    """Clamps all weights, in automatic optimization."""

    def write(self) -> None:
        clamp(self.student)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_before_zero_grad(optimizer)
        self.reach("before_hooks_forward")
        if self.place == "before_hooks_forward":
            self.student(torch.zeros(1, WIDTH, dtype=torch.float64))


class WritesUntrained(Writer):
    """Between a forward and its backward, writes what gets no gradient of it: trainable or frozen within the graph."""

    def __init__(self, what: str) -> None:
        super().__init__("before_zero_grad")
        self.what = what
        self.written.requires_grad_(what == "teacher")

    @property
    def written(self) -> nn.Module:
        """The part that is written."""
        return self.teacher if self.what == "teacher" else self.student.head

    def write(self) -> None:
        for p in self.written.parameters():
            p.data.mul_(0.9)


class WassersteinGAN(Writer):
    """Manual optimization: the critic is clamped before or after its step, and is used once more in the same step."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.automatic_optimization = False
        self.teacher.requires_grad_(True)

    def write(self) -> None:
        clamp(self.teacher)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        self.reach("start")
        real = F.pad(batch[:, :3], (0, 2))
        fake = F.pad(self.student(batch), (0, 2))
        loss = (self.teacher(fake.detach()).sum() - self.teacher(real).sum()) / len(batch)
        self.reach("forward")
        critic.zero_grad()
        self.manual_backward(loss, num_label_tokens=len(batch))
        critic.step()
        self.reach("step")
        generator.zero_grad()
        self.manual_backward(-self.teacher(fake).sum() / len(batch), num_label_tokens=len(batch))
        generator.step()

    def configure_optimizers(self) -> Any:
        nets = (self.student, self.teacher)
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]


class StepsBetweenForwards(Writer):
    """Manual optimization: a forward has gathered the weights that an optimizer then steps, and another one follows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.distance(batch), num_label_tokens=len(batch))
            with torch.no_grad():
                self.student(batch)
            optimizer.step()


# --- Running them -----------------------------------------------------------------------------------------------------


def rows(rank: int, step: int) -> Tensor:
    """[n, d] rows of one rank; n differs."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(1 + (rank + 2 * step) % 4, WIDTH, generator=generator, dtype=torch.float64)


def train(
    module: LightningModule,
    options: dict[str, Any],
    num_batches: int = NUM_BATCHES,
    accumulate: int = ACCUMULATE,
    **settings: Any,
) -> None:
    """Runs on every rank; `settings` are the Trainer's."""
    rank = dist.get_rank() // options.get("tensor_parallel_size", 1)
    settings = {"precision": "64-true", "accumulate_grad_batches": accumulate, **settings}
    batches = [rows(rank, step) for step in range(num_batches)]
    if settings["precision"] != "64-true":
        module.float()
        batches = [batch.float() for batch in batches]
    loader = DataLoader(batches, batch_size=None)
    is_validated = "val_check_interval" in settings
    make_trainer(AutomodelStrategy(**options), **settings).fit(
        module, loader, loader if is_validated else None
    )


def fit(
    options: dict[str, Any], make: Callable[..., Writer], args: Iterable[Any], **settings: Any
) -> dict[str, Tensor]:
    """Weights of a new module that was trained on the ranks."""
    module = make(*args)
    train(module, options, accumulate=ACCUMULATE if module.automatic_optimization else 1, **settings)
    return full_weights(module)


def train_plainly(
    module: Any, num_ranks: int, num_batches: int = NUM_BATCHES, accumulate: int = ACCUMULATE
) -> None:
    """The same in one process, whose batches hold the rows of all ranks."""
    batches = [torch.cat([rows(rank, step) for rank in range(num_ranks)]) for step in range(num_batches)]
    optimizers = module.configure_optimizers()
    module.__dict__["optimizers"] = lambda: optimizers
    module.__dict__["manual_backward"] = lambda loss, **kwargs: loss.backward()
    for index, batch in enumerate(batches):
        if not module.automatic_optimization:
            module.training_step(batch, index)
            continue
        start = index - index % accumulate
        num_rows = sum(map(len, batches[start : start + accumulate]))
        module.on_train_batch_start(batch, index)
        loss = module.training_step(batch, index)["loss"]
        if index == start:
            module.on_before_zero_grad(optimizers)
            module.optimizer_zero_grad(0, index, optimizers)
        (loss * len(batch) / num_rows).backward()
        if index + 1 in (start + accumulate, num_batches):
            module.on_before_optimizer_step(optimizers)
            optimizers.step()
        module.on_train_batch_end(SimpleNamespace(), batch, index)


def fit_plainly(make: Callable[..., Writer], args: Iterable[Any], num_ranks: int = 2) -> dict[str, Tensor]:
    """Weights of a new module that was trained in one process."""
    module = make(*args)
    train_plainly(module, num_ranks)
    return full_weights(module)


def fit_or_refusal(
    options: dict[str, Any], make: Callable[..., Writer], *args: Any
) -> dict[str, Tensor] | str:
    """The weights of a fit, or the message that has refused it."""
    try:
        return fit(options, make, args)
    except (RuntimeError, ValueError) as error:
        return str(error)

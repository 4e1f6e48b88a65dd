"""What cannot be trained is refused with its reason, by every rank, and how models are prepared for sharding."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.sharding.apply import broadcast_tensors
from tests.rank_pool import RankPool
from tests.sharding.fits import ACCUMULATE, check_exact, fit, fit_module
from tests.trainer.exactness import (
    LEARNING_RATE,
    MOMENTUM,
    VOCABULARY,
    WIDTH,
    Outcome,
    TinyDecoder,
    assert_exact,
    full_weights,
)
from tests.trainer.plain import ModelModule, fill, filled_decoder, plain_weights, prefixed
from tests.trainer.refusals import Refused, check_refused
from tests.trainer.runs import STRATEGIES, by_default, loader, make_trainer

DDP: dict[str, Any] = {"data_parallel": "ddp"}


class Net(LightningModule):
    """A small regression; every case below changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PenaltyInHook(Net):
    """In a step it is right."""

    def on_train_batch_end(self, *_: Any) -> None:
        batch = torch.ones(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(self.net(batch).sum(), batch, create_graph=True)
        gradient.square().sum().backward(inputs=[batch])


class TooLarge(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class InOneMemory(Net):
    """As autoencoders of tutorials are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.data = self.net[0].weight.data.T


class AsksForAddresses(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD({p.data_ptr(): p for p in self.parameters()}.values(), lr=0.1)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class FreezesLater(Net):
    """Names of parameters must be those of the time when DDP was set up."""

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False)


class CopiesItself(Net):
    """A teacher, as it is often made."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.net)


class PicklesItself(Net):
    def on_train_start(self) -> None:
        torch.save(self.net, io.BytesIO())


class Assigns(Net):
    """Replaces its parameters instead of writing to them: FSDP2 would train shards that the module does not have."""

    def on_train_start(self) -> None:
        self.load_state_dict(Net().state_dict(), assign=True)


class SparseBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(4).to_sparse())


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = torch.arange(len(batch), device=batch.device)
        return self.net(batch + self.embedding(rows)).pow(2).mean()


class SeveralDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.net[:2](batch)
        return self.net[2](hidden.double()).pow(2).mean()


class MeetsATable(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch)[None] @ torch.eye(4).bfloat16()[None]).pow(2).mean()


class FreesMemory(Net):
    """As operators of a new device may return tensors without memory: nothing of FSDP2's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        positions = torch.arange(4.0)
        positions.untyped_storage().resize_(0)
        return self.net(batch + positions.expand(2, 4)).pow(2).mean()


class StepsByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))


STATIC_GRAPH = "ddp_kwargs: static_graph=True works under automatic optimization without accumulation alone"
UNREDUCED = (
    "DistributedDataParallel did not reduce all gradients of this window: some parameters took no part in its"
    " last micro-batch (unused, frozen since set-up, or not toggled), so ranks would step with different gradients."
    " Pass AutomodelStrategy(data_parallel='ddp', ddp_kwargs={'find_unused_parameters': True})."
)


def batches() -> list[Tensor]:
    return [torch.linspace(-1, 1, 4).repeat(2, 1) * (index + 1) for index in range(4)]


def refused(make: type[Net], message: str, options: dict[str, Any], **settings: Any) -> Refused:
    return Refused(make, (message,), batches, {"per_token_loss": False, **options}, settings)


REFUSED = {
    "too-large": refused(TooLarge, "parameters stay gathered and gradients unsharded until a", {}),
    "penalty-in-a-hook": refused(PenaltyInHook, "A backward with create_graph=True in a hook, or", {}),
    "copies-itself": refused(
        CopiesItself, "copy.deepcopy() of a sharded module, which torch refuses. Make", {}
    ),
    "pickles-itself": refused(
        PicklesItself, "PicklingError: A sharded module, of which this rank holds a", {}
    ),
    "in-one-memory": refused(InOneMemory, "net.0.weight and net.2.weight lie in one memory", {}),
    "asks-for-addresses": refused(AsksForAddresses, "data_ptr() of net.0.weight, which is sharded", {}),
    "assigns": refused(Assigns, "AttributeError: load_state_dict(..., assign=True), or an initialiser", {}),
    "sparse": refused(Sparse, "FSDP2 cannot reduce sparse gradients, such as those of nn.Embedding", {}),
    "sparse-buffer": refused(SparseBuffer, "ValueError: neighbours is sparse, and cannot be sent", {}),
    "several-dtypes": refused(
        SeveralDtypes,
        "Trainable parameters of one FSDP unit have several dtypes, and FSDP2 reduces their gradients in one.",
        {"auto_wrap_policy": set()},
    ),
    "meets-a-table": refused(
        MeetsATable,
        "Under a mixed precision FSDP2 casts parameters of its units",
        {},
        precision="bf16-mixed",
    ),
    "unused": refused(Unused, UNREDUCED, DDP, accumulate_grad_batches=2),
    "frozen-later": refused(FreezesLater, UNREDUCED, DDP),
    "memory-that-ddp-never-freed": refused(FreesMemory, "setStorage: sizes [2, 4]", DDP),
    "static-graph-by-hand": refused(
        StepsByHand, STATIC_GRAPH, {**DDP, "ddp_kwargs": {"static_graph": True}}
    ),
    "static-graph-accumulating": refused(
        Net, STATIC_GRAPH, {**DDP, "ddp_kwargs": {"static_graph": True}}, accumulate_grad_batches=2
    ),
}


def test_refused(pool2: RankPool) -> None:
    check_refused(pool2, __name__)


def _fit_by_ddp(make: type[Net]) -> None:
    trainer = make_trainer(AutomodelStrategy(per_token_loss=False, **DDP))
    trainer.fit(make(), DataLoader(batches(), batch_size=None))


@pytest.mark.every_case
@pytest.mark.parametrize("make", [PenaltyInHook, Sparse, SeveralDtypes])
def test_what_the_messages_advise(pool2: RankPool, make: type[Net]) -> None:
    """Trains."""
    pool2.run(_fit_by_ddp, make)


# --- Before sharding: what is sent to every rank, tags, hooks and strides of parameters -------------------------------


def _broadcast() -> list[complex]:
    tensors = [torch.tensor(values) for values in ([1.5], [True, False], [1 + 2j], [])]
    if dist.get_rank() > 0:
        tensors = list(map(torch.zeros_like, tensors))
    tensors += [torch.tensor([3 + 4j]).conj(), torch.tensor([5 - 6j]).conj().imag, torch.arange(2.0)[::2]]
    broadcast_tensors(tensors, dist.group.WORLD)
    return [complex(value) for tensor in tensors for value in tensor]


def test_tensors_of_any_dtype_are_sent(pool2: RankPool) -> None:
    assert pool2.run(_broadcast) == [[1.5, 1.0, 0.0, 1 + 2j, 3 - 4j, 6.0, 0.0]] * 2


class Complex(nn.Module):
    """A decoder beside complex weights, in the model and in a block of it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(seed=1)
        fill(self)
        self.turn = nn.Parameter(torch.linspace(-1, 1, VOCABULARY).add(0.5j).to(torch.complex128))
        self.decoder.blocks[0].turn = nn.Parameter(torch.linspace(-1, 1, WIDTH).to(torch.complex128))

    def forward(self, input_ids: Tensor) -> Tensor:
        turned = self.decoder(input_ids) * self.turn
        return turned.real + turned.imag * self.decoder.blocks[0].turn.abs().sum()


def _real(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.view_as_real(w) if w.is_complex() else w for name, w in weights.items()}


def test_complex_parameters_stay_whole(pool2: RankPool) -> None:
    found = pool2.run(fit, Complex, STRATEGIES["kept"])
    expected = prefixed(plain_weights(Complex(), ACCUMULATE))
    assert_exact([_real(each.weights) for each in found], _real(expected))
    assert found[0].described["replicated"] == ["model.turn", "model.decoder.blocks.0.turn"]


DIFFERENT = {"shape": "(12, 7) and trainable", "requires_grad": "(11, 7) and not trainable"}


def _differ() -> list[str]:
    """What is raised of each difference, under each engine."""
    messages = []
    for by in DIFFERENT:
        for options in ({}, STRATEGIES["ddp"]):
            module = ModelModule(filled_decoder())
            if by == "shape":
                module.model.head = nn.Linear(WIDTH, VOCABULARY + dist.get_rank()).double()
            else:
                module.model.head.weight.requires_grad_(dist.get_rank() == 0)
            with pytest.raises(ValueError, match="different models") as raised:
                fit_module(module, options)
            messages.append(str(raised.value))
    return messages


def test_ranks_with_different_models_raise(pool2: RankPool) -> None:
    for messages in pool2.run(_differ):
        assert messages == [
            f"Ranks hold different models: model.head.weight is (11, 7) and trainable on rank 0 and {second}"
            " on rank 1. Build and freeze the same model on every rank."
            for second in DIFFERENT.values()
            for _ in range(2)
        ]


ENGINES = {"fsdp2": STRATEGIES["kept"], "ddp": STRATEGIES["ddp"]}


class Unusual(nn.Module):
    """A decoder beside a transposed matrix, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TinyDecoder(seed=1)
        self.across = nn.Parameter(torch.empty(VOCABULARY, WIDTH).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids) + self.decoder.embedding(input_ids) @ self.across + self.nothing.sum()


def _sgd_over_lists(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, foreach=True)


class StepsOverLists(ModelModule):
    """Steps with all parameters at once, as optimizers do by default on accelerators."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd_over_lists(self)


def _fit_and_resume(folder: str) -> Outcome:
    path = f"{folder}/one.ckpt"
    trainer = make_trainer(AutomodelStrategy(), accumulate_grad_batches=ACCUMULATE, max_steps=1)
    trainer.fit(StepsOverLists(Unusual()), loader())
    trainer.save_checkpoint(path)
    module = StepsOverLists(Unusual())
    trainer = make_trainer(AutomodelStrategy(), accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader(), ckpt_path=path)
    outcome = Outcome(full_weights(module))
    outcome.pop("model.nothing")
    return outcome


def test_steps_over_lists_take_shards_and_whole_parameters(pool2: RankPool, tmp_path: Path) -> None:
    """Torch refuses lists of both: in a step of the fit, and in the one that makes an optimizer's state for loading."""
    weights = plain_weights(Unusual(), ACCUMULATE, make_optimizer=_sgd_over_lists)
    weights.pop("nothing")
    expected = prefixed(weights)
    assert_exact(pool2.run(_fit_and_resume, str(tmp_path)), expected)


class HasItsOptimizer(ModelModule):
    """Its optimizer and schedule are made before it is sharded, as LightningCLI makes those of its configuration."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=2 * LEARNING_RATE, momentum=MOMENTUM)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=100)

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [self.schedule]


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_optimizers_made_before_the_fit(pool2: RankPool, options: dict[str, Any]) -> None:
    """They hold the parameters that sharding replaces."""
    check_exact(pool2, filled_decoder, options, HasItsOptimizer)


class LooksAtTags(ModelModule):
    """Finds out which parameters are tagged once they are sharded, and while they are gathered."""

    def training_step(self, *args: Any) -> Any:
        self.in_step = self.tagged()
        return super().training_step(*args)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.in_hook = self.tagged()
        return super().configure_optimizers()

    def tagged(self) -> list[str]:
        return [name for name, parameter in self.named_parameters() if getattr(parameter, "no_decay", False)]


def _tags(options: dict[str, Any]) -> list[list[str]]:
    module = LooksAtTags(filled_decoder())
    module.model.head.bias.no_decay = module.model.blocks[0].norm.weight.no_decay = True
    fit_module(module, options)
    return [module.in_hook, module.in_step, module.tagged()]


@pytest.mark.parametrize("options", by_default(ENGINES, "fsdp2"))
def test_attributes_stay_with_parameters(pool2: RankPool, options: dict[str, Any]) -> None:
    """Optimizers are often built by such tags: without them everything would decay."""
    for tagged in pool2.run(_tags, options):
        assert tagged == [["model.blocks.0.norm.weight", "model.head.bias"]] * 3

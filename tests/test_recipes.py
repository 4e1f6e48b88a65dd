"""examples/recipes.py: each of its modules, on two ranks with unequal batches, has the weights of one process."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from tests.processes import ROOT
from tests.rank_pool import RankPool
from tests.trainer.exactness import SILENT, assert_exact, full_weights, weight_error
from tests.trainer.runs import make_trainer

VOCABULARY = 7
WIDTH = 6
LENGTH = 9
SIZES = [[3, 1, 2, 2], [2, 4, 1, 3]]
"""Samples of each micro-batch, by rank."""
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0])
WITHOUT_ACCUMULATION = {"Potential"}
"""Whose page says so."""
Rows = dict[str, Tensor]


def language_model() -> nn.Module:
    """Ids [b, s] to logits [b, s, v]."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))


class Rewards(nn.Module):
    """Ids [b, s] to one number each, [b]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh().mean(1)).squeeze(-1)


class Boxes(nn.Module):
    """An image [3, h, w] to a box for each of its targets, [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return self.linear(image.mean((1, 2))).expand(len(target), 4)


class Decoder(nn.Module):
    """Ids [b, s] to logits [b, s, v], by a wide and a tall matrix between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)


def ids(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)


def ragged(rows: int, generator: torch.Generator) -> Tensor:
    """Whether each position counts: 1 to 8 of a row."""
    return torch.arange(LENGTH) < torch.randint(1, LENGTH, (rows, 1), generator=generator)


def pairs(rows: int, generator: torch.Generator) -> Rows:
    return {
        name: value
        for answer in ("better", "worse")
        for name, value in (
            (answer, ids(rows, generator)),
            (f"{answer}_is_answer", ragged(rows, generator).double()),
        )
    }


def labelled(rows: int, generator: torch.Generator) -> Rows:
    return {
        "input_ids": ids(rows, generator),
        "labels": ids(rows, generator).masked_fill(~ragged(rows, generator), -100),
    }


def pictures(rows: int, generator: torch.Generator) -> Rows:
    mask = torch.randint(4, (rows, 5, 5), generator=generator)
    is_outside = torch.rand(rows, 5, 5, generator=generator) < torch.rand(rows, 1, 1, generator=generator)
    return {"image": random(rows, 3, 5, 5, generator=generator), "mask": mask.masked_fill(is_outside, 255)}


def boxes(rows: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    numbers = torch.randint(0, 4, (rows,), generator=generator).tolist()
    images = [random(3, 4 + row % 2, 5, generator=generator) for row in range(rows)]
    return images, [random(number, 4, generator=generator) for number in numbers]


def graphs(rows: int, generator: torch.Generator) -> Rows:
    sizes = torch.randint(1, 6, (rows,), generator=generator)
    x = random(int(sizes.sum()), WIDTH, generator=generator)
    return {
        "x": x,
        "batch": torch.arange(rows).repeat_interleave(sizes),
        "y": random(rows, generator=generator),
    }


def molecules(rows: int, generator: torch.Generator) -> Rows:
    batch = graphs(rows, generator)
    return {**batch, "force": random(len(batch["x"]), 3, generator=generator)}


def mixed(rows: int, generator: torch.Generator) -> Rows:
    soft = torch.rand(rows, len(CLASS_WEIGHTS), generator=generator, dtype=torch.float64)
    return {"image": random(rows, WIDTH, generator=generator), "soft": soft / soft.sum(1, keepdim=True)}


def rollout(rows: int, generator: torch.Generator) -> Rows:
    numbers = {name: random(rows, generator=generator) for name in ("log_prob", "advantage", "return")}
    action = torch.randint(3, (rows,), generator=generator)
    return {"state": random(rows, WIDTH, generator=generator), "action": action, **numbers}


def random(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def merged(batches: list[Any]) -> Any:
    """One batch of all of their samples."""
    if isinstance(batches[0], tuple):
        return tuple([each for part in parts for each in part] for parts in zip(*batches, strict=True))
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    if "batch" in whole:
        first = torch.tensor([0, *(len(batch["y"]) for batch in batches)]).cumsum(0)
        whole["batch"] = torch.cat(
            [batch["batch"] + start for batch, start in zip(batches, first, strict=False)]
        )
    return whole


RECIPES: dict[str, tuple[Callable[[type], L.LightningModule], Callable[..., Any]]] = {
    "Preferences": (lambda module: module(language_model(), language_model()), pairs),
    "Reward": (lambda module: module(Rewards()), pairs),
    "Student": (lambda module: module(language_model(), language_model()), labelled),
    "SoftLabels": (
        lambda module: module(nn.Linear(WIDTH, len(CLASS_WEIGHTS)), CLASS_WEIGHTS.clone()),
        mixed,
    ),
    "Segmentation": (lambda module: module(nn.Conv2d(3, 4, 1)), pictures),
    "Detector": (lambda module: module(Boxes()), boxes),
    "Graphs": (lambda module: module(WIDTH, 5), graphs),
    "Potential": (lambda module: module(WIDTH, 5), molecules),
    "PotentialByGraph": (lambda module: module(WIDTH, 5, 3.0), molecules),
    "ActorCritic": (lambda module: module(nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)), rollout),
    "Truncated": (lambda module: module(VOCABULARY, WIDTH, 4), labelled),
    "ByMuon": (lambda module: module(Decoder()), labelled),
}


def recipe(name: str) -> tuple[L.LightningModule, dict[str, Any]]:
    """The module as users copy it, but for its optimizer, and the strategy's options; float64."""
    source = (ROOT / "examples" / "recipes.py").read_text()
    (text,) = [
        ast.unparse(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    # Adam would hide a factor; a small rate, everything.
    text = re.sub(r"AdamW\((.+), lr=.+?\)", r"SGD(\1, lr=0.5)", text)
    scope: dict[str, Any] = {"L": L, "torch": torch, "F": F, "AutomodelStrategy": dict}
    exec(text, scope)
    torch.manual_seed(0)
    return RECIPES[name][0](scope[name]).double(), scope[name].make_strategy()


def batches(name: str) -> list[list[Any]]:
    """Of both ranks."""
    generator = torch.Generator().manual_seed(1)
    return [[RECIPES[name][1](size, generator) for size in sizes] for sizes in SIZES]


def train(name: str, options: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    module, given = recipe(name)
    trainer = make_trainer(AutomodelStrategy(**given, **options), accumulate_grad_batches=accumulate)
    number = len(SIZES[0]) - (dist.get_rank() if "uneven_inputs" in options else 0)
    trainer.fit(module, DataLoader(batches(name)[dist.get_rank()][:number], batch_size=None))
    return full_weights(module)


def train_alone(module: L.LightningModule, whole: list[Any]) -> dict[str, Tensor]:
    """One process, which takes all batches of a step as one, under Lightning alone."""
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **SILENT)
    trainer.fit(module, DataLoader(whole, batch_size=None))
    return full_weights(module)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, "fsdp2") for name in RECIPES]
    + [pytest.param(name, "ddp", marks=pytest.mark.sweep) for name in RECIPES],
)
def test_trains_like_one_process(
    pool2: RankPool, name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `train_alone`."""
    monkeypatch.setattr(L.LightningModule, "backward", lambda self, loss, **count: loss.backward())
    module, _ = recipe(name)
    before = full_weights(module)
    accumulate = 2 if module.automatic_optimization and name not in WITHOUT_ACCUMULATION else 1
    first, second = batches(name)
    steps = range(0, len(first), accumulate)
    whole = [merged([*first[at : at + accumulate], *second[at : at + accumulate]]) for at in steps]
    expected = train_alone(module, whole)
    assert weight_error(before, expected) > 1e-3
    options: dict[str, Any] = {"data_parallel": engine}
    if engine == "ddp" and not module.automatic_optimization:
        options["ddp_kwargs"] = {"find_unused_parameters": True}
    assert_exact(pool2.run(train, name, options, accumulate), expected)


def test_the_mean_by_which_a_loss_is_divided_leaves_padding_out(pool2: RankPool) -> None:
    """Rank 1 has a batch less."""
    first, second = batches("Potential")
    whole = [merged(parts) for parts in zip(first[:-1], second[:-1], strict=True)] + first[-1:]
    expected = train_alone(recipe("Potential")[0], whole)
    assert_exact(pool2.run(train, "Potential", {"uneven_inputs": "pad"}, 1), expected)

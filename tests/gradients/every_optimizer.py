"""Every optimizer of ``torch.optim`` and of the package ``pytorch_optimizer``, trained sharded and in one process.

`python -m tests.gradients.every_optimizer --ranks 2` prints the table of `docs/optimizers.md`; the package is no
dependency of the tests. An optimizer is made by its own constructor, with what it asks for.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankError, RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import full_weights, micro_batches
from tests.trainer.plain import ModelModule, filled_decoder, windows
from tests.trainer.runs import CASE, loader, make_trainer, mean_loss

ACCUMULATE = 3  # windows of 3, 3 and 2
SCALE = 1e-9
"""Of the largest deviation of a weight, relative to the largest change that training has made."""

RIGHT, REFUSED, OWN_ERROR = "right", "refused", "own error"
REFUSALS = ("cannot train sharded parameters", "chooses its step from the loss")


def names() -> list[str]:
    """Of all optimizers, with their package."""
    of_torch = [
        f"torch.optim.{name}"
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    try:
        import pytorch_optimizer  # noqa: PLC0415
    except ModuleNotFoundError:
        return of_torch
    return of_torch + [f"pytorch_optimizer.{name}" for name in pytorch_optimizer.get_supported_optimizers()]


def make(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer called ``name``, of all parameters of ``module``, or of its matrices if it takes no others."""
    package, _, kind = name.rpartition(".")
    if package == "torch.optim":
        constructor = getattr(torch.optim, kind)
    else:
        import pytorch_optimizer  # noqa: PLC0415

        constructor = pytorch_optimizer.load_optimizer(kind)
    everything = list(module.parameters())
    matrices = [each for each in everything if each.ndim == 2]
    rest = [each for each in everything if each.ndim != 2]
    forms: list[Callable[[], Any]] = [
        lambda: constructor(everything),
        lambda: constructor(everything, lr=0.01),
        lambda: constructor([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]),
        lambda: constructor(matrices),
        lambda: constructor(module),
        lambda: constructor(everything, num_iterations=10),
        lambda: constructor(everything, num_data=100),
        lambda: constructor(everything, 1),
    ]
    errors: list[Exception] = []
    for form in forms:
        try:
            return form()
        except Exception as error:  # the next form is tried
            errors.append(error)
    raise errors[0]


class AnyOptimizer(ModelModule):
    """Trains a small decoder with an optimizer of the packages."""

    def __init__(self, name: str) -> None:
        super().__init__(filled_decoder())
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        return make(self.name, self)


def train_alone(name: str, case: Case) -> dict[str, Tensor]:
    """Weights of one process, whose optimizer gets closures as Lightning's do."""
    module = AnyOptimizer(name)
    optimizer = module.configure_optimizers()
    for window in windows(case, ACCUMULATE):

        def closure(window: list[int] = window) -> Tensor:
            optimizer.zero_grad()
            batches = [by_rank[index] for by_rank in micro_batches(case) for index in window]
            count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            loss = torch.stack([mean_loss(module.model, batch, "sum") for batch in batches]).sum() / count
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    return full_weights(module)


def train_sharded(name: str, case: Case) -> dict[str, Tensor]:
    """Runs on every rank: weights of a fit with FSDP2."""
    warnings.simplefilter("ignore")
    module = AnyOptimizer(name)
    trainer = make_trainer(AutomodelStrategy(), precision="64-true", accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader(case))
    return full_weights(module)


def outcome(pool: RankPool, name: str) -> tuple[str, str]:
    """What becomes of an optimizer, and a note."""
    case = dataclasses.replace(CASE, num_ranks=pool.num_ranks)
    start = full_weights(AnyOptimizer(name))
    try:
        torch.manual_seed(0)
        expected = train_alone(name, case)
    except Exception as error:
        return OWN_ERROR, f"{type(error).__name__}: {error}"
    try:
        found = pool.run(train_sharded, name, case)
    except RankError as error:
        text = next(iter(error.failures.values())).strip()
        refusal = next((text[text.index(each) :] for each in REFUSALS if each in text), None)
        return ("raises", text[-2000:]) if refusal is None else (REFUSED, refusal)
    change = max(float((expected[key] - start[key]).abs().max()) for key in start)
    error = max(float((weights[key] - expected[key]).abs().max()) for weights in found for key in expected)
    error /= change or 1  # some do nothing in so few steps
    is_right = math.isfinite(error) and error <= SCALE
    return RIGHT if is_right else "SILENTLY OFF", f"{error:.1e} of the largest change"


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and how many there are of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names")
    chosen = parser.parse_args(arguments)
    pool = RankPool(chosen.ranks)
    counts: Counter[str] = Counter()
    try:
        for name in chosen.only or names():
            verdict, note = outcome(pool, name)
            counts[verdict] += 1
            print(f"| `{name}` | {verdict} | {' '.join(note.split())} |", flush=True)
    finally:
        pool.stop()
    print(dict(counts))
    return 0 if counts.keys() <= {RIGHT, REFUSED, OWN_ERROR} else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())

"""Every optimizer of ``torch.optim`` and of the package ``pytorch_optimizer``, trained sharded and in one process.

`python -m tests.gradients.every_optimizer --ranks 2` prints the table of `docs/optimizers.md`; the package
is no dependency of the tests. An optimizer is made by its own constructor, with what it asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import math
import sys
import warnings
from collections import Counter, defaultdict
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

RIGHT = "right"
REFUSED = "refused"
OWN_ERROR = "own error"
REFUSALS = ("cannot train sharded parameters", "chooses its step from the loss")


def names() -> list[str]:
    """Of all optimizers, with their package."""
    of_torch = [
        f"torch.optim.{name}"
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]
    try:
        import pytorch_optimizer
    except ModuleNotFoundError:
        return of_torch
    return of_torch + [f"pytorch_optimizer.{name}" for name in pytorch_optimizer.get_supported_optimizers()]


def make(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer called ``name``, of all parameters of ``module``, or of its matrices if it takes no others."""
    package, _, kind = name.rpartition(".")
    if package == "torch.optim":
        constructor = getattr(torch.optim, kind)
    else:
        import pytorch_optimizer

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


class EachAlone(torch.optim.Optimizer):
    """An optimizer of its own for each parameter, by which those are known that multiply several matrices at once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([each for group in optimizer.param_groups for each in group["params"]], {"lr": 1.0})
        self.inner = []
        for group in optimizer.param_groups:
            for each in group["params"]:
                inner = object.__new__(type(optimizer))
                vars(inner).update(vars(optimizer))
                inner.state = defaultdict(dict)
                inner.param_groups = [{**group, "params": [each]}]
                self.inner.append(inner)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for inner in self.inner:
            inner.step(lambda: loss)
        return loss


class AnyOptimizer(ModelModule):
    """Trains a small decoder with an optimizer of the packages."""

    def __init__(self, name: str) -> None:
        super().__init__(filled_decoder())
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        return make(self.name, self)


def train_alone(
    name: str, case: Case, seed: int = 0, rounding: float = 0.0, each_alone: bool = False
) -> dict[str, Tensor]:
    """Weights of one process, whose optimizer gets closures as Lightning's do.

    Args:
        name: Of the optimizer.
        case: Makes the data.
        seed: Of what the optimizer draws.
        rounding: Relative size of a change of all weights before training.
        each_alone: Give each parameter an optimizer of its own.
    """
    module = AnyOptimizer(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + rounding * torch.randn_like(parameter))
    torch.manual_seed(seed)
    optimizer = make(name, module)
    if each_alone:
        optimizer = EachAlone(optimizer)
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
        expected = train_alone(name, case)
    except Exception as error:
        return OWN_ERROR, f"{type(error).__name__}: {error}"
    try:
        found = pool.run(train_sharded, name, case)
    except RankError as error:
        text = next(iter(error.failures.values())).strip()
        refusal = next((text[text.index(each) :] for each in REFUSALS if each in text), None)
        return ("raises", text[-2000:]) if refusal is None else (REFUSED, refusal)
    change = deviation(start, expected) or 1  # some do nothing in so few steps
    error = max(deviation(weights, expected) for weights in found) / change
    if error <= SCALE:
        return RIGHT, f"{error:.0e}"
    if deviation(train_alone(name, case, seed=1), expected) / change > SCALE:
        return RIGHT, "random by itself: one process differs as much with another seed"
    if (moved := deviation(train_alone(name, case, rounding=1e-15), expected) / change) > error / 10:
        return (
            RIGHT,
            f"unstable by itself: rounding (1e-15) moves one process by {moved:.0e}, shards by {error:.0e}",
        )
    with contextlib.suppress(Exception):
        alone = train_alone(name, case, each_alone=True)
        if max(deviation(weights, alone) for weights in found) / change <= SCALE:
            return (
                RIGHT,
                f"as one process that multiplies each matrix by itself; {error:.0e} from all in one product",
            )
    return "SILENTLY OFF", f"{error:.0e}"


def deviation(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight; infinite if one is not finite."""
    found = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    return found if math.isfinite(found) else math.inf


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

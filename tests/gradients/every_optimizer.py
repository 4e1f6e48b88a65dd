"""Every optimizer of ``torch.optim`` and of the package ``pytorch_optimizer``, trained sharded and in one process.

`python -m tests.gradients.every_optimizer --ranks 2` prints the table of `docs/optimizers.md`; the package
is no dependency of the tests. An optimizer is made by its own constructor, with what it asks for. It trains
an epoch on shards, is saved, and resumes for another one.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy
from lightning_automodel.data.tensors import tensors_in
from tests.rank_pool import RankError, RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import full_weights, micro_batches
from tests.trainer.plain import ModelModule, filled_decoder, windows
from tests.trainer.runs import CASE, loader, make_trainer, mean_loss

ACCUMULATE = 3  # windows of 3, 3 and 2
NUM_EPOCHS = 2
SCALE = 1e-9
"""Of the largest deviation of a weight, relative to the largest change that training has made."""

RIGHT = "right"
REFUSED = "refused"
OWN_ERROR = "own error"
SEVERAL_CLOSURES = ("torch.optim.LBFGS", "pytorch_optimizer.lbfgs")
"""Their windows have one micro-batch of each rank."""
REFUSALS = ("is an object that holds sharded tensors",)


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


class AnyOptimizer(ModelModule):
    """Trains a small decoder with an optimizer of the packages."""

    def __init__(self, name: str) -> None:
        super().__init__(filled_decoder())
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        return make(self.name, self)


def accumulate(name: str) -> int:
    """Micro-batches of each rank in a window."""
    return 1 if name in SEVERAL_CLOSURES else ACCUMULATE


def train_alone(
    name: str, case: Case, resumes: bool, seed: int = 0, rounding: float = 0.0
) -> tuple[dict[str, Tensor], float]:
    """Weights of one process, whose optimizer gets closures as Lightning's do, and the rounding of its states.

    If it ``resumes``, the second epoch begins with a new optimizer that has loaded the state of the first. All
    weights are changed by ``rounding``, relative to them, before training.
    """
    module = AnyOptimizer(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + rounding * torch.randn_like(parameter))
    torch.manual_seed(seed)
    optimizer = make(name, module)
    for epoch in range(NUM_EPOCHS if resumes else 1):
        if epoch > 0:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(name, module)
            optimizer.load_state_dict(state)
            keep_dtypes(optimizer, state)
        for window in windows(case, accumulate(name)):
            step_alone(module, optimizer, case, window)
    dtypes = {state.dtype for state in tensors_in(dict(optimizer.state)) if state.ndim > 0}
    return full_weights(module), 1e-7 if torch.float32 in dtypes else 1e-15


def keep_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put tensors of the ``saved`` state back, which torch has cast to the dtype of their parameter."""
    ids = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(ids, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][name] = value


def step_alone(module: ModelModule, optimizer: Any, case: Case, window: list[int]) -> None:
    """One step of one process, on the data of all ranks."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        batches = [by_rank[index] for by_rank in micro_batches(case) for index in window]
        count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        losses = torch.stack([mean_loss(module.model, batch, "sum") for batch in batches])
        loss = losses.sum() / max(count, 1)
        loss.backward()
        return loss.detach()

    optimizer.step(closure)


def train_sharded(
    name: str, case: Case, step: str, path: str, num_epochs: int = NUM_EPOCHS
) -> dict[str, Tensor]:
    """Runs on every rank: weights of a fit with FSDP2 that saves to ``path``, or resumes from it."""
    warnings.simplefilter("ignore")
    module = AnyOptimizer(name)
    trainer = make_trainer(
        AutomodelStrategy(optimizer_step=step),
        precision="64-true",
        accumulate_grad_batches=accumulate(name),
        max_epochs=num_epochs,
    )
    resumes = num_epochs == NUM_EPOCHS
    # The states of some hold objects of their own classes.
    trainer.fit(
        module,
        loader(case),
        ckpt_path=path if resumes else None,
        weights_only=False if resumes else None,
    )
    if not resumes:
        trainer.save_checkpoint(path)
    return full_weights(module)


def train_and_resume(pool: RankPool, name: str, case: Case, step: str, resumes: bool) -> Any:
    """Weights on each rank: of a fit, or of the one that resumes it."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/saved.ckpt"
        found = pool.run(train_sharded, name, case, step, path, 1)
        return pool.run(train_sharded, name, case, step, path) if resumes else found


def outcome(pool: RankPool, name: str, step: str) -> tuple[str, str]:
    """What becomes of an optimizer, and a note."""
    case = dataclasses.replace(CASE, num_ranks=pool.num_ranks)
    start = full_weights(AnyOptimizer(name))
    try:
        expected, epsilon = train_alone(name, case, resumes=False)
    except Exception as error:
        return OWN_ERROR, f"{type(error).__name__}: {error}"
    resumes = True
    try:
        expected, epsilon = train_alone(name, case, resumes)
    except Exception:
        resumes = False
    try:
        found = train_and_resume(pool, name, case, step, resumes)
    except RankError as error:
        text = next(iter(error.failures.values())).strip()
        refusal = next((text[text.index(start) :] for start in REFUSALS if start in text), None)
        return ("raises", text[-600:]) if refusal is None else (REFUSED, refusal)
    note = "" if resumes else ", does not resume in one process either"
    change = deviation(start, expected) or 1  # some do nothing in so few steps
    error = max(deviation(weights, expected) for weights in found) / change
    if error <= SCALE:
        return RIGHT, f"{error:.0e}{note}"
    if deviation(train_alone(name, case, resumes, seed=1)[0], expected) / change > SCALE:
        return RIGHT, f"random by itself: one process differs as much with another seed{note}"
    moved = deviation(train_alone(name, case, resumes, rounding=epsilon)[0], expected) / change
    if moved > error / 10:
        return (
            RIGHT,
            f"rounding ({epsilon:.0e}) moves one process by {moved:.0e}, and shards by {error:.0e}{note}",
        )
    return "SILENTLY OFF", f"{error:.0e}{note}"


def deviation(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight; infinite if one is not finite."""
    found = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    return found if math.isfinite(found) else math.inf


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and how many there are of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step", choices=["auto", "shards", "whole"], default="auto", help="optimizer_step")
    parser.add_argument("--only", nargs="*", help="names")
    chosen = parser.parse_args(arguments)
    pool = RankPool(chosen.ranks)
    counts: Counter[str] = Counter()
    try:
        for name in chosen.only or names():
            verdict, note = outcome(pool, name, chosen.step)
            counts[verdict] += 1
            print(f"| `{name}` | {verdict} | {' '.join(note.split())} |", flush=True)
    finally:
        pool.stop()
    print(dict(counts))
    return 0 if counts.keys() <= {RIGHT, REFUSED, OWN_ERROR} else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())

"""Optimizers that look at whole tensors train sharded models as one process does, stepped on shards or by owners."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from lightning_automodel import AutomodelStrategy, ExactnessCheck
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.gradients.whole_tensors import OPTION, is_stepped_whole
from tests.checkpoint.checkpoints import resume, save, uninterrupted
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    PLAN,
    VOCABULARY,
    TinyDecoder,
    assert_exact,
    full_weights,
    weight_error,
)
from tests.trainer.plain import ModelModule, fill, plain_weights, prefixed, train_model_plainly
from tests.trainer.runs import CASE, TOLERANCE, by_default, loader, make_trainer, sampled, warnings_of

# --- Optimizers that look at a whole tensor: on a part, they compute something else -----------------------------------


class Looking(torch.optim.Optimizer):
    """Steps each parameter along the direction that a subclass finds."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(group, parameter, loss), alpha=group["lr"])
        return loss

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        return parameter.grad


class Muon64(Looking):
    """Muon with its Newton-Schulz iteration in the dtype of the weights; torch's is in bfloat16, which hides errors.

    Groups with ``is_elementwise`` have momentum alone.
    """

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 0.1)
        return momentum if group.get("is_elementwise") else _orthogonal(momentum)


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, by Newton-Schulz; other tensors divided by their norm."""
    scaled = matrix / (matrix.norm() + 1e-7)
    if matrix.ndim != 2:
        return scaled
    is_tall = matrix.size(0) > matrix.size(1)
    wide = scaled.T if is_tall else scaled
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide.T if is_tall else wide


class NestedShampoo(Looking):
    """Preconditions each dimension; its state is nested, comes late, and has other shapes than its parameter."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        direction = parameter.grad
        if state["step"] == 1:
            return direction
        factors = state.setdefault("factors", {"of": [None] * parameter.ndim, "note": None})["of"]
        for dim in range(parameter.ndim):
            rows = direction.transpose(0, dim).flatten(1) if parameter.ndim > 1 else direction[:, None]
            if factors[dim] is None:
                factors[dim] = 0.1 * torch.eye(len(rows), dtype=rows.dtype)
            factors[dim] = factors[dim] + rows @ rows.T
            values, vectors = torch.linalg.eigh(factors[dim])
            root = vectors @ torch.diag(values.clamp(min=1e-3) ** -0.25) @ vectors.T
            direction = torch.tensordot(root, direction, dims=([1], [dim])).transpose(0, dim)
        return direction


class ByLoss(Looking):
    """Scales its steps by the loss that the closure returns."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        return parameter.grad * (1 + loss)


class Coupled(Looking):
    """One step size for all parameters, which it keeps in its group."""

    def direction(self, group: dict[str, Any], parameter: Tensor, loss: Any) -> Tensor:
        group["seen"] = group.get("seen", 0.0) + parameter.grad.abs().sum().item()
        return parameter.grad / (1 + group["seen"])


def muon_and_momentum(model: nn.Module) -> Muon64:
    """Matrices of blocks, and the rest, as Muon is used; the vectors of the blocks are frozen in one group."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "blocks" in name]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "blocks" not in name]
    return Muon64([{"params": matrices}, {"params": rest, "is_elementwise": True, "lr": 0.05}])


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": muon_and_momentum,
    "shampoo": lambda model: NestedShampoo(_trained(model)),
    "adafactor": lambda model: torch.optim.Adafactor(_trained(model), lr=0.02),
    "by loss": lambda model: ByLoss(_trained(model)),
    "coupled": lambda model: Coupled(_trained(model)),
}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class OneRow(TinyDecoder):
    """A decoder with a matrix of one row, of which all ranks but one hold nothing."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.row = nn.Parameter(torch.empty(1, VOCABULARY))
        fill(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + self.row


class WholeModule(ModelModule):
    """Trains a small decoder with one of the `KINDS`; ``tensor`` shares it between tensor-parallel ranks."""

    def __init__(self, kind: str, tensor: bool = False) -> None:
        super().__init__(OneRow())
        self.kind = kind
        self.tensor = tensor

    def configure_model(self) -> None:
        if self.tensor:
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KINDS[self.kind](self)


# --- Trained with them, whole or on shards --------------------------------------------------------------------------

ACCUMULATE = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "offload": (2, {"cpu_offload": True}),
    "four ranks": (4, {"defer_fsdp_grad_sync": False}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "tensor parallel": (4, {"tensor_parallel_size": 2}),
}
BY_DEFAULT = [("fsdp2", "whole"), ("fsdp2", "shards"), ("four ranks", "whole"), ("tensor parallel", "whole")]
OF_STEP = {"whole": ["muon", "shampoo", "by loss"], "shards": ["muon", "adafactor", "coupled"]}
"""Owners would each find a step size of their own for "coupled", which is refused."""


def _fit(kinds: Sequence[str], options: dict[str, Any], case: Case) -> list[tuple[dict[str, Tensor], Any]]:
    """Runs on every rank: weights after a fit with each kind, and elements by parameter that this rank owns."""
    found = []
    for kind in kinds:
        tensor = options.get("tensor_parallel_size", 1)
        module = WholeModule(kind, tensor > 1)
        checks = [ExactnessCheck(steps=1)] if kind == "muon" and dist.get_world_size() == 2 else []
        look = Look()
        trainer = make_trainer(
            AutomodelStrategy(**options),
            precision="64-true",
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=0.1,
            callbacks=[look, *checks],
        )
        trainer.fit(module, loader(case, tensor))
        assert [check.verdict for check in checks if dist.get_rank() == 0] in ([], ["exact"]), checks[
            0
        ].report
        found.append((full_weights(module), look.groups, look.num_owned))
    return found


class Look(Callback):
    """Reads how the groups of the optimizer are stepped, and how many elements this rank owns."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        [described] = trainer.strategy.describe()["optimizer_step"]
        self.groups = described["groups"]
        owned = trainer.strategy._required_run.steps.whole.of(trainer.optimizers[0])
        self.num_owned = sum(parameter.numel() for parameter, is_own in owned.items() if is_own)


@pytest.mark.parametrize(("layout", "step"), sampled(itertools.product(LAYOUTS, OF_STEP), BY_DEFAULT))
def test_steps_are_those_of_one_process(layout: str, step: str, request: pytest.FixtureRequest) -> None:
    """Two groups of one optimizer, nested late state, the loss of the closure; ragged windows, clipping."""
    num_ranks, options = LAYOUTS[layout]
    pool: RankPool = request.getfixturevalue(f"pool{num_ranks}")
    case = dataclasses.replace(
        CASE, num_ranks=num_ranks // options.get("tensor_parallel_size", 1), num_batches=5
    )
    kinds = OF_STEP[step] if num_ranks == 2 else ["muon"]
    by_rank = pool.run(_fit, kinds, {"optimizer_step": step, **options}, case)
    for number, kind in enumerate(kinds):
        expected = prefixed(
            plain_weights(OneRow(), ACCUMULATE, case, clip=_clip, make_optimizer=KINDS[kind])
        )
        owned = []
        for found in by_rank:
            weights, groups, num_owned = found[number]
            assert weight_error(weights, expected) <= TOLERANCE, kind
            assert set(groups) == {step}
            owned.append(num_owned)
        num_elements = sum(weight.numel() for weight in expected.values())
        if step == "shards":
            assert owned == [0] * num_ranks
        else:
            assert sum(owned) >= num_elements
            assert max(owned) < 0.8 * num_elements


def _clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)


# --- Which are stepped whole ------------------------------------------------------------------------------------------


def test_a_group_with_an_unknown_value() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], OPTION: "other"}], lr=0.1)
    with pytest.raises(ValueError, match="optimizer_step='other'; valid are 'auto', 'shards', 'whole'"):
        is_stepped_whole(optimizer, optimizer.param_groups[0], "auto")


def _advice(kinds: list[str]) -> list[list[str]]:
    """Runs on every rank: what is said of each kind on shards."""
    found = []
    for kind in kinds:
        trainer = make_trainer(AutomodelStrategy(optimizer_step="shards"))
        found.append(warnings_of("optimizer_step='whole'", trainer.fit, WholeModule(kind), loader()))
    return found


def test_optimizers_that_gather_are_told_of_once(pool2: RankPool) -> None:
    """With the number of tensors: Adafactor takes the norm and the means of each; an elementwise one none."""
    (of_adafactor, of_elementwise), *others = pool2.run(_advice, ["adafactor", "by loss"])
    [message] = of_adafactor
    assert re.match(r"Adafactor looks at whole tensors: its step took \d+ of them", message)
    assert of_elementwise == []
    assert others == [[[], []]]


# --- What changes while it trains, and what is saved ------------------------------------------------------------------


class Growing(WholeModule):
    """Freezes a block, trains it from the second epoch on in a group of its own, and averages all weights."""

    def __init__(self) -> None:
        super().__init__("")
        self.model.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NestedShampoo([p for p in self.parameters() if p.requires_grad])

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers().optimizer
        if self.current_epoch == 1:
            grow(self.model, optimizer)


def grow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train the first block too."""
    model.blocks[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 0.01})


def _grow() -> dict[str, Tensor]:
    module = Growing()
    strategy = AutomodelStrategy(optimizer_step="whole")
    trainer = make_trainer(strategy, precision="64-true", accumulate_grad_batches=4, max_epochs=2)
    trainer.fit(module, loader())
    return full_weights(module)


def test_a_group_that_comes_later(pool2: RankPool) -> None:
    """Frozen parameters have no owner until they are trained."""
    model = OneRow()
    model.blocks[0].requires_grad_(False)
    optimizer = NestedShampoo([p for p in model.parameters() if p.requires_grad])
    train_model_plainly(model, 4, make_optimizer=lambda _: optimizer)
    grow(model, optimizer)
    train_model_plainly(model, 4, make_optimizer=lambda _: optimizer)
    assert_exact(pool2.run(_grow), prefixed(full_weights(model)))


@torch.no_grad()
def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Shrinks weights by the norm of all of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = sum(parameter.norm() for parameter in parameters)
    for parameter in parameters:
        parameter.mul_(1 - 0.01 * norm)


def decaying_muon(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = muon_and_momentum(model)
    optimizer.register_step_post_hook(decay)
    return optimizer


class Wraps(torch.optim.Optimizer):
    """Steps another optimizer, whose groups are its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.inner.step()
        return loss


class OwnList(Looking):
    """Steps what it was given, whatever its groups hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.own:
            parameter.sub_(parameter.grad, alpha=0.1)
        return loss


MORE: list[type[Looking]] = [
    # Has other weights in evaluations, which its states tell.
    type("ScheduleFree", (Looking,), {"eval": lambda self: None, "train": lambda self: None}),
    # Saves its states in another form than torch's, as Lookahead does.
    type("OwnForm", (Looking,), {"state_dict": lambda self: {"base": Looking.state_dict(self)}}),
    # Looks at its parameters after the step of its base class.
    type("MoreThanMuon", (Muon64,), {"step": lambda self, closure=None: Muon64.step(self, closure)}),
]
"""Optimizers that do more than a step."""


AROUND: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "hook within": (
        lambda model: Wraps(decaying_muon(model)),
        "decay: hooks of a step of Wraps that would see",
    ),
    "own list": (
        lambda model: OwnList(_trained(model)),
        "OwnList has written sharded parameters, which it did not",
    ),
    "coupled": (KINDS["coupled"], "Ranks step with different options of their optimizers: seen of "),
    **{
        each.__name__: (
            lambda model, each=each: each(_trained(model)),
            f"{each.__name__} has train() and eval(), does more",
        )
        for each in MORE
    },
}
"""What an optimizer does around its own arithmetic, with shards or parameters of this rank: what is raised."""


class AroundModule(WholeModule):
    def __init__(self, around: str) -> None:
        super().__init__("muon")
        self.around = around

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.around == "hook":
            return decaying_muon(self)
        Muon64(_trained(self))  # torch hooks the steps of classes that have had instances
        return AROUND[self.around][0](self)


def _fit_around(around: str, step: str) -> Any:
    """Runs on every rank: weights, or what is raised."""
    module = AroundModule(around)
    trainer = make_trainer(
        AutomodelStrategy(optimizer_step=step), precision="64-true", accumulate_grad_batches=ACCUMULATE
    )
    try:
        trainer.fit(module, loader())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return full_weights(module)


def test_what_an_optimizer_does_around_its_step(pool2: RankPool) -> None:
    """Hooks after it see shards. What would see parts of this rank alone is refused for owners, and right on shards."""
    expected = prefixed(plain_weights(OneRow(), ACCUMULATE, make_optimizer=decaying_muon))
    for around in ("hook", "hook within"):
        assert_exact(pool2.run(_fit_around, around, "shards"), expected)
    assert_exact(pool2.run(_fit_around, "hook", "whole"), expected)
    for around, (_, message) in AROUND.items():
        for found in pool2.run(_fit_around, around, "whole"):
            assert str(found).startswith(message), around


def test_no_owners_within_a_wrapper(pool2: RankPool) -> None:
    """Unless its group asks for them: it may look at all parameters."""
    assert pool2.run(_choices_within) == [[False, True]] * 2


def _choices_within() -> list[bool]:
    module = nn.Linear(4, 6)
    fully_shard(module)
    wrapper = Wraps(torch.optim.Muon([module.weight]))
    [group] = wrapper.param_groups
    return [is_stepped_whole(wrapper, each, "auto") for each in (group, {**group, OPTION: "whole"})]


WHOLE = {"optimizer_step": "whole"}
RESUMED = {
    "owners": (2, WHOLE),
    "one file of owners": (2, {"save_distributed_checkpoint": False, **WHOLE}),
    "shards": (2, {"optimizer_step": "shards"}),
    "replicated": (2, {"data_parallel": "ddp"}),
    "one rank": (1, {}),
}


@pytest.mark.parametrize(
    "saved", by_default(dict(list(RESUMED.items())[:4]), "owners", "one file of owners", "shards")
)
def test_states_of_owners_are_saved(
    pool1: RankPool, pool2: RankPool, saved: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    """Nested, late and of other shapes: into shards (bit for bit), replicas and one rank, and back."""
    path = tmp_path / "last.ckpt"
    made = (WholeModule, ("shampoo",))
    expected = pool2.run(uninterrupted, saved[1], *made)[0]
    pool2.run(save, saved[1], str(path), *made)
    for name, (num_ranks, options) in RESUMED.items():
        pool = {1: pool1, 2: pool2}[num_ranks]
        for weights in pool.run(resume, options, str(path), *made):
            error = weight_error(weights, expected)
            assert error == 0 if options == saved[1] and num_ranks == 2 else error <= TOLERANCE, name
    if path.is_dir():
        main(["consolidate", str(path), str(tmp_path / "whole.ckpt")])
        state = torch.load(tmp_path / "whole.ckpt")["optimizer_states"][0]["state"]
        factors = state["model.blocks.0.linear.weight"]["factors"]
        assert [list(each.shape) for each in factors["of"]] == [[7, 7], [7, 7]]
        assert factors["note"] is None

"""Optimizers that look at whole tensors train sharded models as one process does. The reference knows no shards."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, ExactnessCheck
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.gradients.owner_exchange import Holders, Owned, Split
from lightning_automodel.gradients.step_choice import OPTION
from lightning_automodel.gradients.whole_tensors import WholeSteps
from tests.gradients import whole_steps
from tests.gradients.whole_steps import KINDS, WholeModule
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import Outcome, full_weights, micro_batches, weight_error
from tests.trainer.plain import filled_decoder, plain_weights, prefixed, train_model_plainly
from tests.trainer.runs import CASE, TOLERANCE, by_default, loader, make_trainer

ACCUMULATE = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "offload": (2, {"cpu_offload": True}),
    "four ranks": (4, {"defer_fsdp_grad_sync": False}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "tensor parallel": (4, {"tensor_parallel_size": 2}),
}


def _fit(kinds: Sequence[str], options: dict[str, Any], case: Case) -> list[tuple[dict[str, Tensor], Any]]:
    """Runs on every rank: weights after a fit with each kind, and how the strategy says that it steps."""
    found = []
    for kind in kinds:
        tensor = options.get("tensor_parallel_size", 1)
        module = WholeModule(kind, tensor > 1)
        seen: list[Any] = []

        class Look(Callback):
            def on_train_end(self, trainer: Any, module: Any, seen: list[Any] = seen) -> None:
                seen.append(trainer.strategy.describe()["optimizer_step"])

        checks = [ExactnessCheck()] if kind in ("muon", "shampoo") else []
        trainer = make_trainer(
            AutomodelStrategy(**options),
            precision="64-true",
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=0.1,
            callbacks=[Look(), *checks],
        )
        batches = micro_batches(case)[dist.get_rank() // tensor]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        assert [check.verdict for check in checks if dist.get_rank() == 0] in ([], ["exact"]), checks[
            0
        ].report
        found.append((full_weights(module), seen[0]))
    return found


@pytest.mark.parametrize("layout", by_default(LAYOUTS, "fsdp2", "tensor parallel"))
def test_steps_are_those_of_one_process(
    layout: tuple[int, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """Two groups of one optimizer, nested late state, the loss of the closure; ragged windows, clipping."""
    num_ranks, options = layout
    pool: RankPool = request.getfixturevalue(f"pool{num_ranks}")
    case = dataclasses.replace(CASE, num_ranks=num_ranks // options.get("tensor_parallel_size", 1))
    kinds = list(KINDS) if num_ranks == 2 else ["muon", "adafactor"]
    by_rank = pool.run(_fit, kinds, options, case)
    for number, kind in enumerate(kinds):
        expected = prefixed(
            plain_weights(filled_decoder(), ACCUMULATE, case, clip=_clip, make_optimizer=KINDS[kind])
        )
        for found in by_rank:
            weights, described = found[number]
            assert weight_error(Outcome(weights, None), expected) <= TOLERANCE, kind
            starts = [group.split()[0] for group in described[0]["groups"]]
            assert starts == {"muon": ["whole", "shards"], "by loss": ["shards"]}.get(kind, ["whole"])
            if starts == ["whole"]:
                owned = described[0]["elements_by_owner"]
                assert sum(owned) == sum(weight.numel() for weight in expected.weights.values())
                assert max(owned) < 0.8 * sum(owned)


def _clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_layouts(rows: int) -> None:
    """Rows that tensor parallelism splits in two and FSDP2 then in three, uneven and empty parts; columns too."""
    splits = (Split(2, 0, 2), Split(0, 0, 3), Split(1, 1, 2))
    coordinates = tuple(
        (tensor, shard, column) for shard in range(3) for column in range(2) for tensor in range(2)
    )
    holders = Holders(tuple(range(12)), splits, coordinates)
    whole = torch.arange(rows * 5).view(rows, 5)
    parts = [holders.part(whole, rank) for rank in range(12)]
    assert [part.shape for part in parts] == Owned(holders, (rows, 5), owner=0).part_shapes
    assert sum(part.numel() for part in parts) == whole.numel()
    assert torch.equal(holders.join(parts), whole)


# --- Bits -------------------------------------------------------------------------------------------------------------

SHAPES = ((5, 24), (1, 16), (3, 3), (33, 7), (24, 5))


def _steps(dtype: torch.dtype, replicas: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Runs on every rank: weights and momentum of torch's Muon on shards with owners, and in one process."""
    mesh_shape = (replicas, dist.get_world_size() // replicas) if replicas > 1 else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    sharded = _model(dtype)
    whole = _model(dtype)
    fully_shard(sharded, mesh=mesh)
    optimizers = [
        torch.optim.Muon(model.parameters(), lr=0.05, weight_decay=0.1) for model in (sharded, whole)
    ]
    steps = WholeSteps(torch.device("cpu"))
    steps.take(optimizers[0], {0})
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for index, (mine, reference) in enumerate(
            zip(sharded.parameters(), whole.parameters(), strict=True)
        ):
            gradient = torch.randn(reference.shape, generator=generator).to(dtype)
            is_used = number % 2 == 0 or index != 1  # one has a gradient every second step
            reference.grad = gradient if is_used else None
            mine.grad = _sharded_like(mine, gradient) if is_used else None
        steps.begin(optimizers[0])
        optimizers[0].step()
        steps.end(optimizers[0])
        optimizers[1].step()
    weights = full_weights(sharded)
    owned = steps.of(optimizers[0])
    momentum = {
        name: optimizers[0].state[parameter]["momentum_buffer"]
        for name, parameter in sharded.named_parameters()
        if owned[parameter]
    }
    assert all(parameter not in optimizers[0].state for parameter, is_own in owned.items() if not is_own)
    expected = dict(
        zip(weights, (optimizers[1].state[p]["momentum_buffer"] for p in whole.parameters()), strict=True)
    )
    return [(weights, full_weights(whole)), (momentum, {name: expected[name] for name in momentum})]


def _sharded_like(parameter: Tensor, gradient: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES))


@pytest.mark.parametrize(
    ("num_ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.sweep), (4, 1)]
)
def test_the_same_bits(num_ranks: int, replicas: int, request: pytest.FixtureRequest) -> None:
    """The same function of the same gradients: fewer rows than ranks, uneven rows, wide and tall, in two dtypes."""
    pool: RankPool = request.getfixturevalue(f"pool{num_ranks}")
    for dtype in (torch.float32, torch.bfloat16):
        for pairs in pool.run(_steps, dtype, replicas):
            for found, expected in pairs:
                assert found.keys() == expected.keys()
                for name in found:
                    assert torch.equal(found[name], expected[name]), (dtype, name)


# --- What is tried before the first batch -----------------------------------------------------------------------------


class Choosing(WholeModule):
    """Trains with an optimizer of the given class."""

    def __init__(self, make: Any) -> None:
        super().__init__("")
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = self.make(self)
        return self.optimizer


def _all_of(kind: str) -> Any:
    return lambda module: getattr(whole_steps, kind)(module.parameters())


def _group_of(option: str) -> Any:
    return lambda module: torch.optim.SGD([{"params": module.parameters(), OPTION: option}], lr=0.1)


def _frozen(module: nn.Module) -> torch.optim.Optimizer:
    module.requires_grad_(False)
    module.model.head.requires_grad_(True)
    return whole_steps.ShardNorm(
        [{"params": module.model.blocks.parameters()}, {"params": module.model.head.parameters()}]
    )


VERDICTS: dict[str, tuple[str, str]] = {
    "ShardNorm": ("whole", "on shards: "),
    "LateMatrices": ("whole", "on shards: "),
    "Noisy": ("shards", "each element alone"),
    "OneStepSizeOverRanks": ("shards", "sums over all parameters"),
    "Untried": ("shards", "could not be tried"),
    "OneStepSize": ("refused", "With an owner that steps each parameter alone"),
    "Lazy": ("refused", "seen is"),
}


def _choose(kinds: list[str], options: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Runs on every rank: what is decided for each optimizer before the first batch, and what is said."""
    found: dict[str, tuple[str, list[str]]] = {}
    for kind in kinds:
        make = _frozen if kind == "frozen" else _all_of(kind)
        if kind.startswith("group "):
            make = _group_of(kind.removeprefix("group "))
        module = Choosing(make)
        trainer = make_trainer(AutomodelStrategy(**options), precision="64-true", max_steps=1)
        before = torch.random.get_rng_state()
        seen: list[str] = []

        class Look(Callback):
            def on_fit_start(self, trainer: Any, module: Any, seen: list[str] = seen) -> None:
                seen.extend(trainer.strategy.describe()["optimizer_step"][0]["groups"])
                raise KeyboardInterrupt

        trainer.callbacks.append(Look())
        with warnings.catch_warnings(record=True) as said, contextlib.suppress(SystemExit):
            warnings.simplefilter("always")
            try:
                trainer.fit(module, loader())
            except ValueError as error:
                seen.append(f"refused ({error})")
        assert torch.equal(before, torch.random.get_rng_state())
        assert not module.optimizer.state, "the trial has left a state behind"
        found[kind] = seen[0], [str(each.message) for each in said]
    return found


def test_the_trial(pool2: RankPool) -> None:
    """By what an optimizer does with a small tensor, in words that name it; nothing else is touched."""
    for rank, by_kind in enumerate(pool2.run(_choose, list(VERDICTS), {})):
        for kind, (decided, reason) in VERDICTS.items():
            group, said = by_kind[kind]
            assert group.startswith(decided), (kind, group)
            assert reason in group, (kind, group)
            assert any("could not be tried" in each for each in said) == (kind == "Untried" and rank == 0)
        assert "data_parallel='ddp'" in by_kind["OneStepSize"][0]


def test_the_option(pool2: RankPool) -> None:
    """Of a group, or of all; "shards" is left where it is wrong, and says so. What is frozen may be trained later."""
    assert pool2.run(_choose, ["frozen"], {})[0]["frozen"][0].startswith("whole")
    by_kind = pool2.run(_choose, ["group whole", "group other"], {"optimizer_step": "shards"})[0]
    assert by_kind["group whole"][0] == "whole (optimizer_step='whole')"
    assert "optimizer_step='other'; valid are 'auto', 'shards', 'whole'" in by_kind["group other"][0]
    group, said = pool2.run(_choose, ["ShardNorm"], {"optimizer_step": "shards"})[0]["ShardNorm"]
    assert group == "shards (optimizer_step='shards')"
    assert any("computes something else on shards" in each for each in said)
    refused = pool2.run(_choose, ["OneStepSize"], {"optimizer_step": "whole"})[0]["OneStepSize"][0]
    assert refused.startswith("refused (OneStepSize (group 0) cannot train sharded parameters")


# --- What changes while it trains, and what is saved ------------------------------------------------------------------


class Growing(WholeModule):
    """Freezes a block, trains it from the second epoch on in a group of its own, and averages all weights."""

    def __init__(self) -> None:
        super().__init__("")
        self.model.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return whole_steps.NestedShampoo([p for p in self.parameters() if p.requires_grad])

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
    trainer = make_trainer(AutomodelStrategy(), precision="64-true", accumulate_grad_batches=4, max_epochs=2)
    trainer.fit(module, loader())
    return full_weights(module)


def test_a_group_that_comes_later(pool2: RankPool) -> None:
    """Frozen parameters have no owner until they are trained."""
    model = filled_decoder()
    model.blocks[0].requires_grad_(False)
    optimizer = whole_steps.NestedShampoo([p for p in model.parameters() if p.requires_grad])
    train_model_plainly(model, 4, make_optimizer=lambda _: optimizer)
    grow(model, optimizer)
    train_model_plainly(model, 4, make_optimizer=lambda _: optimizer)
    for weights in pool2.run(_grow):
        assert weight_error(Outcome(weights, None), prefixed(full_weights(model))) <= TOLERANCE


def _save(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    """Weights of a run that is not stopped, of which a checkpoint is saved half-way."""
    for epochs in (1, 2):
        module = WholeModule("shampoo")
        trainer = make_trainer(
            AutomodelStrategy(**options),
            precision="64-true",
            accumulate_grad_batches=ACCUMULATE,
            max_epochs=epochs,
        )
        trainer.fit(module, loader())
        if epochs == 1:
            trainer.save_checkpoint(path)
    return full_weights(module)


def _resume(options: dict[str, Any], path: str) -> dict[str, Tensor]:
    module = WholeModule("shampoo")
    trainer = make_trainer(
        AutomodelStrategy(**options),
        precision="64-true",
        accumulate_grad_batches=ACCUMULATE * 2 // dist.get_world_size(),
        max_epochs=2,
    )
    batches = micro_batches(CASE)[dist.get_rank()] if dist.get_world_size() == 2 else _batches_of_both()
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)
    return full_weights(module)


def _batches_of_both() -> list[dict[str, Tensor]]:
    """The micro-batches of two ranks for one that has windows twice as long: the last window of an epoch is short."""
    return [batch for pair in zip(*micro_batches(CASE), strict=True) for batch in pair]


RESUMED = {
    "shards": (2, {}),
    "one file of shards": (2, {"save_distributed_checkpoint": False}),
    "replicated": (2, {"data_parallel": "ddp"}),
    "one rank": (1, {}),
}


@pytest.mark.parametrize(
    "saved", by_default(dict(list(RESUMED.items())[:3]), "shards", "one file of shards")
)
def test_states_of_owners_are_saved(
    pool1: RankPool, pool2: RankPool, saved: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    """Nested, late and of other shapes: into shards (bit for bit), replicas and one rank, and back."""
    path = tmp_path / "last.ckpt"
    expected = pool2.run(_save, saved[1], str(path))[0]
    for name, (num_ranks, options) in RESUMED.items():
        pool = {1: pool1, 2: pool2}[num_ranks]
        for weights in pool.run(_resume, options, str(path)):
            error = weight_error(Outcome(weights, None), Outcome(expected, None))
            assert error == 0 if options == saved[1] and num_ranks == 2 else error <= TOLERANCE, name
    if path.is_dir():
        main(["consolidate", str(path), str(tmp_path / "whole.ckpt")])
        state = torch.load(tmp_path / "whole.ckpt")["optimizer_states"][0]["state"]
        factors = state["model.blocks.0.linear.weight"]["factors"]
        assert [list(each.shape) for each in factors["of"]] == [[7, 7], [7, 7]]
        assert factors["note"] is None

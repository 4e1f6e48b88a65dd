"""The plan: numbers against sizes counted by hand, refusals on one line; as a sweep against real runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.__main__ import _parser, _plans, main
from lightning_automodel.plan.layouts import Plan
from lightning_automodel.plan.recording import CannotPlanError, PlannedBatch, run
from tests.processes import ROOT

WIDTH = 64
ROWS = 32
BLOCKS = 3
BLOCK = WIDTH * WIDTH * 4  # bytes of a weight in float32


class Chain(pl.LightningModule):
    """Linear blocks, one FSDP unit each, and a loss that reads no values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ReadsValues(Chain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


class Fused(Chain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Manual(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def build(kind: type[Chain] = Chain) -> tuple[pl.LightningModule, Tensor]:
    return kind(), torch.zeros(ROWS, WIDTH)


reads_values = partial(build, ReadsValues)
fused = partial(build, Fused)
manual = partial(build, Manual)


def _run(**options: Any) -> PlannedBatch:
    return run(build, "32-true", StrategyOptions(**options))


def _plan(accumulate: int = 1, **options: Any) -> Plan:
    return Plan(_run(), StrategyOptions(**options), 2, accumulate, 2, is_host=True)


def _by_kind(plan: Plan) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for (_, kind, size), number in plan.sent.items():
        times, total = found.get(kind, (0, 0))
        found[kind] = times + number, total + size * number
    return found


@pytest.mark.parametrize("size", ["tensor_parallel_size", "context_parallel_size"])
def test_layouts_that_cannot_be_planned(size: str) -> None:
    """A module without a tensor-parallel plan, and one whose attention stays within a slice."""
    options: dict[str, Any] = {size: 2}
    with pytest.raises(CannotPlanError, match="parallel"):
        Plan(_run(**options), StrategyOptions(**options), 2, 1, 2, is_host=True)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reshards", [True, False])
def test_shards(reshards: bool, accumulate: int) -> None:
    """Two ranks hold a half each; blocks are gathered once a window, or for each forward and backward."""
    plan = _plan(accumulate, reshard_during_accumulation=reshards)
    assert {plan.memory[name] for name in ("parameters", "optimizer")} == {BLOCKS * BLOCK // 2}
    sent = _by_kind(plan)
    gathers = 2 * BLOCKS * accumulate if reshards else BLOCKS
    assert sent["all_gather"] == (gathers, gathers * BLOCK)
    assert sent["reduce_scatter"] == (BLOCKS, BLOCKS * BLOCK)
    assert sent["all_reduce"] == (1, 8 * (11 + BLOCKS))


@pytest.mark.parametrize(
    ("defer", "scatters", "all_reduces"), [(True, 1, 1), ("auto", 1, 1), (False, 3, 3), ("all_reduce", 3, 1)]
)
def test_deferral(defer: Any, scatters: int, all_reduces: int) -> None:
    """What is not deferred is reduced with each of three micro-batches, and holds the shards of gradients between."""
    options = {"data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": defer}
    plan = Plan(_run(), StrategyOptions(**options), 4, 3, 4, is_host=True)
    sent = _by_kind(plan)
    assert sent["reduce_scatter"] == (scatters * BLOCKS, scatters * BLOCKS * BLOCK)
    assert sent["all_reduce"][0] == all_reduces * BLOCKS + 1
    assert ("undeferred" in str(plan)) == (scatters > 1)
    # Where most is held, in the second micro-batch: all gradients, or the shards of those that wait, and one
    # that is reduced, as a gradient and twice in gloo's buffers.
    held = BLOCKS * BLOCK if scatters == 1 else (BLOCKS - 1) * BLOCK // 2 + BLOCK + BLOCK // 2
    assert plan.memory["gradients"] - 2 * BLOCK <= held <= plan.memory["gradients"]


def test_layouts_that_defer_or_not() -> None:
    """Both are weighed where micro-batches accumulate, with replicas by one all-reduce of the window."""
    options = ["", "--world-size", "4", "--ranks-per-node", "2", "--precision", "32-true", "--tensor", "1"]
    for micro_batches, expected in (
        ("4", {(True, 1), (True, 2)}),
        ("8", {(True, 1), (False, 1), (True, 2), ("all_reduce", 2)}),
    ):
        parsed = _parser().parse_args([*options, "--context", "1", "--micro-batches", micro_batches])
        options_of_plans = [plan.options for plan in _plans(parsed, build)]
        assert {
            (each.defer_fsdp_grad_sync, each.data_parallel_replicate_size) for each in options_of_plans
        } == expected


def test_activations_are_those_kept() -> None:
    """At the forward's end: the outputs of the blocks (inputs of the next, and of the square), and the loss."""
    events = _run().events
    kinds = [kind for kind, *_ in events]
    batch = ROWS * WIDTH * 4
    assert events[0][-1] == batch
    assert sum(net for *_, net in events[: kinds.index("loss") + 1]) == (1 + BLOCKS) * batch + 4
    # The loss, its gradient, and the weight's that came last.
    assert sum(net for *_, net in events) <= batch + 8 + BLOCK


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("no_such_module:build", (), "No module named 'no_such_module'"),
        ("tests.test_plan:nothing", (), "has no attribute 'nothing'"),
        ("tests.test_plan:reads_values", (), "training_step does not run on the meta device"),
        ("tests.test_plan:fused", (), "no kernels for fused=True"),
        ("tests.test_plan:manual", (), "manual optimization is not planned"),
        ("tests.test_plan:build", ("--micro-batches", "7"), "pass another --micro-batches"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], target: str, options: tuple[str, ...], said: str
) -> None:
    """Lines with the remedy, and status 1."""
    assert main([target, "--world-size", "4", *options]) == 1
    told = capsys.readouterr()
    assert said in told.err
    *progress, error = told.err.splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith(("Planning ", "left out: ")) for line in progress)
    assert told.out == ""


def test_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world-size", "2", "--precision", "32-true", "--context", "1", "--tensor", "1"]
    assert main(["tests.test_plan:build", *options, "--memory", "1e-5"]) == 1
    assert "Nothing fits in 1e-05 GiB. The least is 1 x 2" in capsys.readouterr().out


def test_the_plainest_comes_first() -> None:
    """No parallelism before any, activations kept before recomputed, then what sends least between nodes."""
    options = ["", "--world-size", "8", "--ranks-per-node", "2", "--precision", "32-true", "--tensor", "1"]
    plans = _plans(_parser().parse_args([*options, "--context", "1"]), build)
    added = [(each.options.cpu_offload, each.options.activation_checkpointing) for each in plans]
    assert added == sorted(added)
    plain = [each.bytes_by_link()[1] for each, adds in zip(plans, added, strict=True) if not any(adds)]
    assert plain == sorted(plain)


@pytest.mark.parametrize("model", ["8B", pytest.param("70B", marks=pytest.mark.sweep)])
def test_the_page_of_scale_is_of_this_plan(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The rows of docs/scale.md that `benchmarks/scale.py` computes for this model are those that the page has."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale

    lines = [line.strip("|").split("|") for line in scale.PAGE.read_text().splitlines()]
    written = [[cell.strip() for cell in line] for line in lines if len(line) == len(scale.HEADER)]
    assert scale.rows((model,)) == [row for row in written if row[0] == model]


def test_tensor_and_context_parallel_layouts_of_transformers() -> None:
    """Each gradient is an event: the cast to half precision replaces DTensors, and hooks that they had."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Language(Chain):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
            self.blocks = LlamaForCausalLM(
                LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
            )

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.blocks(input_ids=batch, labels=batch).loss
            return loss

    class Slices(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            loss: Tensor = self.blocks(**inputs).logits.square().mean()
            return loss

    tokens = torch.zeros(1, 16, dtype=torch.int64)
    micro = run(lambda: (Language(), tokens), "bf16-mixed", StrategyOptions(tensor_parallel_size=2))
    assert [kind for kind, *_ in micro.events].count("gradient") == len(micro.parameters)
    # Attention across context peers has a bias that torch cannot make under a mode.
    batch = {"input_ids": tokens, "labels": tokens}
    sliced = run(lambda: (Slices(), batch), "bf16-mixed", StrategyOptions(context_parallel_size=2))
    assert sum(number for (group, *_), number in sliced.messages.items() if group == "context") > 0


@pytest.mark.sweep
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_runs(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Every layout that runs on a CPU: memory within a tenth, and all collectives and bytes the same."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_check

    chosen: list[Any] = [case for case in plan_check.cases() if case.ranks == ranks]
    for case, found in zip(chosen, plan_check.measure(chosen), strict=True):
        row = plan_check.compare(case, found)
        assert (float(row[4]), row[7]) == (pytest.approx(1.0, abs=0.1), "yes"), row

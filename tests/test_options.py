"""Every message about options, sizes and timeouts, word for word: what was given, and what is valid."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel import AutomodelStrategy
from lightning_automodel.advice import Advice, BackwardHooks, summary
from lightning_automodel.distributed.mesh import MeshSizes, resolve_sizes
from lightning_automodel.distributed.process_group import parse_timeout
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples
from lightning_automodel.options import StrategyOptions

LEAST = "must be an integer of at least"
SIZE = f"{LEAST} 1 or 'auto', got"
RESHARD = f"reshard_after_forward {LEAST} 2 or True or False, got"
RECOMPUTED = (
    "activation_checkpointing must be True, False, 'selective', 'offload', a set of nn.Module classes or a"
    " policy of torch.utils.checkpoint, got"
)
POLICY = "auto_wrap_policy must be a set of nn.Module classes or a function of a module, got"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data_parallel": "fsdp"}, ValueError, "data_parallel must be one of 'fsdp2', 'ddp', got 'fsdp'."),
        ({"data_parallel_size": "two"}, ValueError, f"data_parallel_size {SIZE} 'two'."),
        ({"tensor_parallel_size": 0}, ValueError, f"tensor_parallel_size {LEAST} 1, got 0."),
        ({"prefetch": -1}, ValueError, f"prefetch {LEAST} 0 or 'auto', got -1."),
        ({"label_shift": True}, ValueError, f"label_shift {LEAST} 0, got True."),
        ({"reshard_after_forward": 1}, ValueError, f"{RESHARD} 1."),
        ({"device_mesh": (2, 2)}, TypeError, "device_mesh must be DeviceMesh or None, got (2, 2)."),
        ({"mp_policy": "bf16"}, TypeError, "mp_policy must be MixedPrecisionPolicy or None, got 'bf16'."),
        ({"ddp_comm_hook": 3}, TypeError, "ddp_comm_hook must be Callable or None, got 3."),
        ({"ignore_index": True}, TypeError, "ignore_index must be int, got True."),
        ({"compile": "yes"}, TypeError, "compile must be bool or dict, got 'yes'."),
        ({"auto_wrap_policy": nn.Linear}, TypeError, f"{POLICY} <class 'torch.nn.modules.linear.Linear'>."),
        ({"auto_wrap_policy": {"Linear"}}, TypeError, f"{POLICY} {{'Linear'}}."),
        ({"activation_checkpointing": "all"}, TypeError, f"{RECOMPUTED} 'all'."),
        ({"activation_checkpointing": {"Linear"}}, TypeError, f"{RECOMPUTED} {{'Linear'}}."),
    ],
)
def test_wrong_values(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """An error before anything runs, with the value and the valid ones."""
    with pytest.raises(error, match="must be") as raised:
        AutomodelStrategy(**options)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("timeout", "parsed"),
    [(30, timedelta(minutes=30)), (0.5, timedelta(seconds=30)), (timedelta(hours=2), timedelta(hours=2))],
)
def test_timeout_is_in_minutes(timeout: timedelta | float, parsed: timedelta) -> None:
    """Numbers are minutes, as in NeMo Automodel."""
    assert parse_timeout(timeout) == parsed


@pytest.mark.parametrize(
    "timeout",
    [0, -1, timedelta(0), timedelta(seconds=-1), 1e-12, float("nan"), float("inf"), 1e18, "30", None],
)
def test_timeout_that_is_none(timeout: Any) -> None:
    """Nothing can be done in no time, and no clock counts for ever."""
    expected = (
        f"timeout must be a positive and finite timedelta or number of minutes, got {timeout!r}, e.g. 30."
    )
    for parse in (parse_timeout, lambda given: AutomodelStrategy(timeout=given)):
        with pytest.raises(ValueError, match="timeout must be a positive") as raised:
            parse(timeout)
        assert str(raised.value) == expected


AUTO = {"data_parallel_replicate_size": "auto"}


def _resolve(**sizes: Any) -> MeshSizes:
    """Sizes of a mesh of one node, where ``sizes`` say nothing else."""
    defaults: dict[str, Any] = {
        "data_parallel": "fsdp2",
        "data_parallel_size": "auto",
        "data_parallel_replicate_size": 1,
        "tensor_parallel_size": 1,
        "num_nodes": 1,
    }
    return resolve_sizes(**{**defaults, **sizes})


@pytest.mark.parametrize(
    ("options", "world_size", "sizes"),
    [
        ({"num_nodes": 2}, 8, MeshSizes(replicate=1, shard=8)),
        ({"data_parallel_size": 8, "data_parallel_replicate_size": 2}, 8, MeshSizes(replicate=2, shard=4)),
        ({**AUTO, "num_nodes": 2}, 8, MeshSizes(replicate=2, shard=4)),
        (AUTO, 1, MeshSizes(replicate=1, shard=1)),
        ({"tensor_parallel_size": 2}, 8, MeshSizes(replicate=1, shard=4, tensor=2)),
        (
            {**AUTO, "data_parallel_size": 4, "tensor_parallel_size": 2, "num_nodes": 2},
            8,
            MeshSizes(replicate=2, shard=2, tensor=2),
        ),
        ({"data_parallel": "ddp", "num_nodes": 2}, 4, MeshSizes(replicate=4, shard=1)),
    ],
)
def test_sizes(options: dict[str, Any], world_size: int, sizes: MeshSizes) -> None:
    """`auto` and numbers become sizes that multiply to the world; replicas hold different data too."""
    resolved = _resolve(world_size=world_size, **options)
    assert resolved == sizes
    assert resolved.data_parallel * resolved.tensor == world_size


@pytest.mark.parametrize(("size", "tensor"), [(3, 1), ("auto", 3)])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_sizes_that_are_not_the_world(engine: Any, size: Any, tensor: int) -> None:
    """The message says both ways out."""
    with pytest.raises(ValueError, match="does not") as raised:
        _resolve(data_parallel=engine, data_parallel_size=size, tensor_parallel_size=tensor, world_size=4)
    assert str(raised.value) == (
        f"data_parallel_size={1 if size == 'auto' else size} times tensor_parallel_size={tensor} times"
        " context_parallel_size=1 does not match the world size 4: start 3 processes, or pass sizes that multiply"
        " to 4; 'auto' finds data_parallel_size where the others divide it."
    )


@pytest.mark.parametrize(("replicas", "num_nodes", "shown"), [(4, 1, 4), ("auto", 5, 5), (12, 1, 12)])
def test_replicas_that_do_not_divide(replicas: Any, num_nodes: int, shown: int) -> None:
    """The message names both numbers."""
    with pytest.raises(ValueError, match="does not divide") as raised:
        _resolve(data_parallel_replicate_size=replicas, world_size=6, num_nodes=num_nodes)
    assert str(raised.value) == (
        f"data_parallel_replicate_size={shown} does not divide the 6 data-parallel ranks: valid sizes are 1,"
        " 2, 3, 6."
    )


def _without_effect(**options: Any) -> list[str]:
    return StrategyOptions(**{**AutomodelStrategy().describe()["options"], **options}).without_effect()


PADS = "uneven_inputs='pad'"
UNREPLICATED = (
    "defer_fsdp_grad_sync='all_reduce' reduces after every micro-batch, as False does, without replicas"
    " (data_parallel_replicate_size=1)."
)


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({}, []),
        (
            {"data_parallel": "ddp", "cpu_offload": True, "defer_fsdp_grad_sync": False},
            [
                "defer_fsdp_grad_sync has no effect with data_parallel='ddp'.",
                "cpu_offload has no effect with data_parallel='ddp'.",
            ],
        ),
        ({"data_parallel": "ddp", "activation_checkpointing": True, "auto_wrap_policy": {nn.Linear}}, []),
        (
            {"data_parallel": "ddp", "auto_wrap_policy": {nn.Linear}},
            ["auto_wrap_policy has no effect with data_parallel='ddp'."],
        ),
        ({"ddp_kwargs": {"bucket_cap_mb": 1}}, ["ddp_kwargs has no effect with data_parallel='fsdp2'."]),
        ({"defer_fsdp_grad_sync": "all_reduce"}, [UNREPLICATED]),
        (
            {
                "per_token_loss": False,
                "loss_reduction": "sum",
                "label_key": "y",
                "label_shift": 1,
                "ignore_index": 0,
                "count_label_tokens": len,
            },
            [
                f"{name} has no effect with per_token_loss=False."
                for name in (
                    "loss_reduction",
                    "label_key",
                    "ignore_index",
                    "label_shift",
                    "count_label_tokens",
                )
            ],
        ),
        ({"count": "samples", "label_key": "y"}, ["label_key has no effect beside count='samples'."]),
    ],
)
def test_options_without_effect(options: dict[str, Any], notes: list[str]) -> None:
    """One sentence for each choice that changes nothing, and none for one that does."""
    assert _without_effect(**options) == notes


def test_hook_that_would_see_sums_over_tokens() -> None:
    with pytest.raises(ValueError, match="ddp_comm_hook needs count_window_ahead=True"):
        AutomodelStrategy(data_parallel="ddp", ddp_comm_hook=print)


@pytest.mark.parametrize(
    ("beside", "options", "named"),
    [
        (
            "context",
            {"uneven_inputs": "pad", "count_window_ahead": True},
            f"count_window_ahead=True, {PADS}",
        ),
        (
            "context",
            {"per_token_loss": False},
            "per_token_loss=False (means of slices are not the mean of a batch)",
        ),
        ("context", {"count": "samples"}, "count='samples' (a slice is not a sample)"),
        (
            "expert",
            {"data_parallel": "ddp"},
            "data_parallel='ddp' (which copies whole parameters to every rank: pass 'fsdp2')",
        ),
        (
            "expert",
            {"device_mesh": Mock(spec=DeviceMesh)},
            "device_mesh (whose ranks the strategy would have to split: pass the sizes)",
        ),
    ],
)
def test_beside_parallelism(beside: str, options: dict[str, Any], named: str) -> None:
    """What slices of sequences make wrong; DDP copies whole parameters, and a caller's mesh has no experts."""
    message = f"{beside}_parallel_size=2 does not work with {named}"
    with pytest.raises(ValueError, match="does not work with") as raised:
        AutomodelStrategy(**{f"{beside}_parallel_size": 2}, **options)
    assert str(raised.value) == f"{message}: leave one of them out."


def test_an_unknown_keyword() -> None:
    with pytest.raises(
        TypeError, match=r"AutomodelStrategy.__init__\(\) got an unexpected keyword argument 'lable_key'"
    ):
        AutomodelStrategy(lable_key="y")  # type: ignore[call-arg]


class Named(AutomodelStrategy):
    """Adds a keyword and hands on the others."""

    def __init__(self, name: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name


def test_subclass_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It takes the keywords of both, each with its documentation."""
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=AutomodelStrategy)
    given = {"class_path": f"{__name__}.Named", "init_args": {"name": "mine", "label_key": "y"}}
    parsed = parser.parse_object({"strategy": given}).strategy.init_args
    assert (parsed.name, parsed.label_key) == ("mine", "y")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--strategy.help={__name__}.Named"])
    assert "Key of the labels in a batch that is a mapping." in " ".join(capsys.readouterr().out.split())


# --- What a user is told in one line when a run starts ----------------------------------------------------------------


def test_summary_is_one_line() -> None:
    """Engine, ranks, dtypes, denominator, and where the rest is."""
    described = {
        "data_parallel": "fsdp2",
        "mesh": {
            "data_parallel_replicate": 1,
            "data_parallel_shard": 4,
            "data_parallel": 4,
            "tensor_parallel": 2,
        },
        "precision": {"trainer": "bf16-mixed"},
        "gradient_denominator": "label token",
    }
    assert summary(described) == (
        "AutomodelStrategy: fsdp2 over data_parallel_shard=4, tensor_parallel=2, precision bf16-mixed,"
        " gradients per label token; trainer.strategy.describe() has the details."
    )


def test_what_gradients_are_divided_by() -> None:
    """One of them, in words that need no plural."""
    assert TokenWeighting().unit == "label token"
    assert TokenWeighting(count_label_tokens=count_samples).unit == "sample"
    assert TokenWeighting(per_token_loss=False).unit == "micro-batch"


@pytest.mark.parametrize(
    ("weight", "weighting", "output", "warns"),
    [
        (torch.ones(3), TokenWeighting(count_label_tokens=count_samples), None, True),
        (torch.ones(3), TokenWeighting(), None, True),
        (torch.ones(3), TokenWeighting(), {"num_label_tokens": 1}, False),
        (torch.ones(3), TokenWeighting(count_label_tokens=len), None, False),
        (torch.ones(3), TokenWeighting(per_token_loss=False), None, False),
        (None, TokenWeighting(), None, False),
        ("sum", TokenWeighting(), None, False),
    ],
)
def test_class_weights_are_no_count_of_labels(
    weight: Any, weighting: TokenWeighting, output: Any, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nn.CrossEntropyLoss(weight=...)` beside a count that weighs every label alike is wrong by a third, silently."""
    said: list[str] = []
    advice = Advice()
    monkeypatch.setattr(advice, "say_once", said.append)
    is_sum = isinstance(weight, str)
    loss = nn.CrossEntropyLoss(torch.ones(3) if is_sum else weight, reduction="sum" if is_sum else "mean")
    model = nn.Sequential(nn.Linear(2, 3), loss)
    for _ in range(2):
        advice.about_class_weights(model, weighting, output)
    assert len(set(said)) == warns
    assert all("Sequential.1 divides by the class weights of its labels" in message for message in said)


class Early(pl.LightningModule):
    def on_fit_start(self) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "callback", "named"),
    [
        (Early(), Timer(), ["Early.on_fit_start"]),
        (pl.LightningModule(), ModelCheckpoint(), []),
    ],
)
def test_hooks_before_a_checkpoint_is_loaded(
    module: pl.LightningModule, callback: Callback, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's own read their states once these are loaded."""
    said: list[str] = []
    advice = Advice()
    monkeypatch.setattr(advice, "say_once", said.append)
    module.trainer = SimpleNamespace(callbacks=[callback])
    advice.about_late_loading(module)
    assert [text.partition(":")[0] for text in said] == named


def test_hooks_are_named_by_what_has_them() -> None:
    """Also what the root holds itself."""
    module = nn.Sequential(nn.Linear(2, 2))
    module.gain = nn.Parameter(torch.ones(2))
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient)
    said: list[str] = []
    with BackwardHooks(module, 2, False, said.append).noting():
        pass
    [message] = said
    assert "(parameter gain, parameter 0.weight, parameter 0.bias)" in message

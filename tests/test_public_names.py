"""What users write: names, registered strategies, the constructor's keywords, and signatures that Lightning calls."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_automodel
from lightning_automodel import AutomodelStrategy, destroy_global_state
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding.checks import check_callbacks

TYPED_PROGRAM = (Path(__file__).parent / "typed_program.py").read_text()
PUBLIC_NAMES = re.findall(
    r"^    (\w+),$", TYPED_PROGRAM.partition("from lightning_automodel import (")[2].partition(")")[0], re.M
)
LIGHTNINGS = dict.fromkeys(
    ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
)
KEYWORDS: dict[str, Any] = {
    "data_parallel": "fsdp2",
    "data_parallel_size": "auto",
    "data_parallel_replicate_size": 1,
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "device_mesh": None,
    "ddp_kwargs": None,
    "ddp_comm_hook": None,
    "ddp_comm_state": None,
    "ddp_comm_wrapper": None,
    "per_token_loss": True,
    "loss_reduction": "mean",
    "label_key": "labels",
    "ignore_index": -100,
    "label_shift": 0,
    "count_label_tokens": None,
    "defer_fsdp_grad_sync": "auto",
    "reshard_during_accumulation": "auto",
    "auto_wrap_policy": None,
    "reshard_after_forward": True,
    "mp_policy": None,
    "cpu_offload": False,
    "activation_checkpointing": False,
    "compile": False,
    "prefetch": "auto",
    "optimizer_step": "auto",
    "track_grad_norm": False,
    "error_if_nonfinite": False,
    "process_group_backend": None,
    "init_method": None,
    "timeout": 30,
    "heartbeat_timeout": 2,
    "start_method": "popen",
    "first_rank_setup": False,
    "save_distributed_checkpoint": None,
    "uneven_inputs": "error",
    "count_window_ahead": False,
    "count": None,
    "async_checkpoint": False,
}
REGISTERED: dict[str, dict[str, Any]] = {
    "automodel": {},
    "automodel_fsdp2": {"data_parallel": "fsdp2"},
    "automodel_ddp": {"data_parallel": "ddp"},
    "automodel_hsdp": {"data_parallel_replicate_size": "auto"},
    "automodel_fsdp2_offload": {"cpu_offload": True},
}
FUNCTIONS = {
    "reduce_loss": "(loss_store, total_num_tokens, per_token_loss=True, dp_group=None)",
    "get_sync_ctx": "(model, is_optim_step, defer_fsdp_grad_sync=True)",
    "rescale_gradients": "(model, num_tokens_for_grad_scaling, dp_group=None)",
    "clip_gradients": "(model, clip_norm, foreach=True)",
    "token_loss": "(hidden, head, labels, *, ignore_index=-100, label_shift=0, weight=None, label_smoothing=0.0,"
    " chunk_elements=None)",
    "barrier_and_log": "(message='', *, string='')",
    "dp_eval_sample_shard": "(strategy=None, dp_rank=0, dp_size=1, *, distributed_config=None)",
}


def test_public_names_are_frozen() -> None:
    """A name that comes or goes is a decision; so is one of the registry, and that annotations are read."""
    assert lightning_automodel.__all__ == PUBLIC_NAMES
    assert {name for name in StrategyRegistry if "automodel" in name} == set(REGISTERED)
    assert importlib.resources.files("lightning_automodel").joinpath("py.typed").is_file()


def test_functions_have_their_arguments() -> None:
    """Names, order, kinds and defaults of the functions' arguments; each public name says what it is."""
    empty = inspect.Signature.empty
    for name, expected in FUNCTIONS.items():
        signature = inspect.signature(getattr(lightning_automodel, name))
        bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
        assert str(signature.replace(parameters=bare, return_annotation=empty)) == expected
    for name in PUBLIC_NAMES:
        assert (getattr(lightning_automodel, name).__doc__ or "").strip(), name


def test_modules_are_attributes_of_the_package() -> None:
    """`import lightning_automodel` is enough to write them out; `.ci/wheel` runs a program that does."""
    assert lightning_automodel.callbacks.StepMonitor is lightning_automodel.StepMonitor
    assert lightning_automodel.checkpoint.CheckpointError.__mro__[1] is RuntimeError


def test_typed_program_uses_every_name() -> None:
    """What `mypy --strict` reads as a user's."""
    used = Counter(re.findall(r"\w+", TYPED_PROGRAM))
    assert [name for name in PUBLIC_NAMES if used[name] < 2] == []  # imported, and used


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_names(name: str) -> None:
    """`Trainer(strategy=name)` builds the strategy with the options that the name stands for."""
    strategy = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, AutomodelStrategy)
    assert strategy.strategy_name == f"automodel_{strategy.data_parallel}"
    assert strategy.describe()["options"] == {**KEYWORDS, **REGISTERED[name]}
    assert StrategyRegistry[name]["description"].startswith("AutomodelStrategy(")


def test_keywords_and_their_defaults() -> None:
    """Every argument is a keyword with a default that works."""
    parameters = inspect.signature(AutomodelStrategy).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == KEYWORDS | LIGHTNINGS
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert AutomodelStrategy().describe() == {"options": KEYWORDS}


def test_keywords_are_those_of_the_options() -> None:
    """With the same types and defaults: the constructor writes them out, and hands each on to the one of its name."""
    hints = get_type_hints(AutomodelStrategy.__init__)
    assert {field.name: hints[field.name] for field in fields(StrategyOptions)} == get_type_hints(
        StrategyOptions
    )
    given: dict[str, Any] = {"label_key": "y", "timeout": 3, "async_checkpoint": True, "prefetch": 2}
    assert AutomodelStrategy(**given)._options == StrategyOptions(**given)


def test_arguments_of_every_lightning_strategy() -> None:
    """A Trainer takes them from the strategy, as from its own."""
    assert set(LIGHTNINGS) == set(inspect.signature(ParallelStrategy).parameters)
    given = {
        "accelerator": CPUAccelerator(),
        "parallel_devices": [torch.device("cpu")] * 2,
        "cluster_environment": LightningEnvironment(),
        "checkpoint_io": TorchCheckpointIO(),
        "precision_plugin": DoublePrecision(),
    }
    made = AutomodelStrategy(
        **{**given, "accelerator": None}
    )  # Lightning asks for devices or an accelerator
    trainer = Trainer(strategy=made, logger=False, enable_checkpointing=False)
    assert trainer.strategy is made
    assert trainer.world_size == 2
    alone = AutomodelStrategy(**given)
    assert {name: getattr(alone, name) for name in given} == given
    with pytest.raises(
        MisconfigurationException, match="precision set through both strategy class and plugins"
    ):
        Trainer(strategy=AutomodelStrategy(precision_plugin=DoublePrecision()), plugins=[DoublePrecision()])


def test_fabric_is_told() -> None:
    """It takes strategies of its own alone."""
    with pytest.raises(ValueError, match=r"<AutomodelStrategy, for lightning\.pytorch\.Trainer alone>"):
        Fabric(strategy=AutomodelStrategy(), accelerator="cpu")  # type: ignore[arg-type]


def test_keywords_have_their_meaning() -> None:
    """Each in the docstring, which the site and `help()` show."""
    arguments = (inspect.getdoc(AutomodelStrategy) or "").partition("Args:")[2].partition("Raises:")[0]
    assert sorted(re.findall(r"^    (\w+): ", arguments, flags=re.M)) == sorted(KEYWORDS | LIGHTNINGS)


def _overridden_methods() -> list[str]:
    return [
        name
        for name, attribute in vars(AutomodelStrategy).items()
        if inspect.isfunction(inspect.unwrap(getattr(attribute, "__func__", attribute)))
        and name != "__init__"
        and hasattr(ParallelStrategy, name)
    ]


@pytest.mark.parametrize("name", _overridden_methods())
def test_overrides_keep_the_parameters_of_lightning(name: str) -> None:
    """Lightning may pass any argument by name: names and order stay, more may follow only with a default."""
    theirs = list(inspect.signature(getattr(ParallelStrategy, name)).parameters.values())
    ours = list(inspect.signature(getattr(AutomodelStrategy, name)).parameters.values())
    assert [parameter.name for parameter in ours[: len(theirs)]] == [parameter.name for parameter in theirs]
    assert [p for p in ours[len(theirs) :] if p.default is inspect.Parameter.empty] == []
    positional_only = [
        parameter.name for parameter in ours if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    # `manual_backward(loss, optimizer=...)` reaches it as a keyword that is not Lightning's `optimizer`.
    assert positional_only == (["self", "closure_loss", "optimizer"] if name == "backward" else [])


# --- The package pytorch_lightning, which lightning installs beside itself, in place of lightning ---------------------

ALONE = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_checkpointing": False}

WITH_ALIASES = """
import lightning_automodel.alias_pytorch_lightning
import lightning.pytorch
import lightning_fabric.utilities.seed
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel

assert pl is lightning.pytorch and pl.__spec__.name == "lightning.pytorch"
assert lightning_fabric.utilities.seed is lightning.fabric.utilities.seed
try:
    import pytorch_lightning.absent
except ModuleNotFoundError:
    strategy = lightning_automodel.AutomodelStrategy(per_token_loss=False)
    callbacks = [ModelCheckpoint(monitor="train_loss", save_top_k=0)]
    pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, logger=False, callbacks=callbacks).fit(
        BoringModel()
    )
    print(int(strategy.last_step.num_micro_batches))
"""
"""What a library does, once its user has imported the aliases."""


class StepCounter(pytorch_lightning.Callback):
    """A callback of another library, written for either package."""


def test_its_trainer_says_whose_strategy_it_got() -> None:
    """It refuses the strategy before that could say anything; docs/troubleshooting.md has the message."""
    with pytest.raises(ValueError, match=r"<AutomodelStrategy, for lightning\.pytorch\.Trainer alone>"):
        pytorch_lightning.Trainer(strategy=AutomodelStrategy(), **ALONE)


@pytest.mark.parametrize("name", ["ModelCheckpoint", "EarlyStopping"])
def test_its_callbacks_are_refused(name: str) -> None:
    """Before set-up: nothing tells what they are for, and a checkpoint would come before the step's end."""
    callback = getattr(pytorch_lightning.callbacks, name)(monitor="loss")
    trainer = pl.Trainer(strategy=AutomodelStrategy(per_token_loss=False), callbacks=[callback], **ALONE)
    with pytest.raises(
        TypeError, match=rf"{name} comes from pytorch_lightning .* import it from lightning\.pytorch"
    ):
        trainer.fit(BoringModel())
    destroy_global_state()


def test_others_that_derive_from_its_base_are_taken() -> None:
    """Nobody asks what they are: they have hooks, and that is all."""
    check_callbacks([StepCounter()])


@pytest.mark.sweep
def test_aliases() -> None:
    """A library's Trainer, callbacks and modules are then those of `lightning`, each loaded once."""
    ended = subprocess.run([sys.executable, "-c", WITH_ALIASES], capture_output=True, text=True, check=False)
    assert ended.stdout.strip().endswith("1"), ended.stderr


def test_aliases_come_first() -> None:
    """Who has imported the package holds classes that no alias can replace."""
    with pytest.raises(
        ImportError, match=r"pytorch_lightning is already imported: import lightning_automodel\.alias"
    ):
        importlib.import_module("lightning_automodel.alias_pytorch_lightning")

"""Exports are read by `from_pretrained`, hold what was trained, and are never in memory as a whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import CheckpointError, export_hugging_face
from lightning_automodel.checkpoint import export, hugging_face
from lightning_automodel.checkpoint.__main__ import main
from tests.rank_pool import RankError, RankPool
from tests.sharding.test_hf_tensor_parallel import CASE as TENSOR_PARALLEL
from tests.sharding.test_hf_tensor_parallel import make_model as make_logits_model
from tests.sharding.test_tensor_parallel import data_rank
from tests.trainer.exactness import TinyDecoder, full_weights, micro_batches
from tests.trainer.hugging_face import CAUSAL, OwnLoss, lora_llama, mixtral, t5, tied_llama, untied_gpt2, vera_llama
from tests.trainer.plain import ModelModule
from tests.trainer.runs import loader, make_trainer

ENGINES: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}
SMALL, TINY = "2KB", 700


class ExportsAtTheEnd(Callback):
    """In the middle of things: while the model is sharded."""

    def __init__(self, path: str, **options: Any) -> None:
        self.path, self.options = path, options

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        export_hugging_face(pl_module, self.path, **self.options)


def _train(options: dict[str, Any], make_model: Any, folder: str, **export_options: Any) -> dict[str, Tensor]:
    """Train a step, export `live` and save `run.ckpt`; whole weights."""
    module = OwnLoss(make_model())
    trainer = make_trainer(
        AutomodelStrategy(label_shift=1, **options),
        max_steps=1,
        callbacks=[ExportsAtTheEnd(f"{folder}/live", **export_options)],
    )
    trainer.fit(module, loader(CAUSAL))
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    return full_weights(module.model)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_from_pretrained_reads_what_was_trained(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Several files with an index, the tie restored; from memory and from a checkpoint byte for byte the same."""
    from transformers import AutoModelForCausalLM

    weights, same = pool2.run(_train, options, tied_llama, str(tmp_path), max_shard_size=SMALL)
    assert main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--max-shard-size", SMALL]) == 0
    assert _contents(tmp_path / "live") == _contents(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert "lm_head.weight" not in index["weight_map"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float64
    started = tied_llama().state_dict()
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name])
        assert torch.equal(value, same[name])
        assert not torch.equal(value, started[name])


def _train_shared_by_two(path: str) -> dict[str, Tensor]:
    module = ModelModule(make_logits_model("Llama-tied"))
    trainer = make_trainer(
        AutomodelStrategy(tensor_parallel_size=2), max_steps=1, callbacks=[ExportsAtTheEnd(path, max_shard_size=SMALL)]
    )
    trainer.fit(module, DataLoader(micro_batches(replace(TENSOR_PARALLEL, num_ranks=2))[data_rank()], batch_size=None))
    return full_weights(module.model.model)


@pytest.mark.sweep
def test_tensor_parallel_ranks(pool4: RankPool, tmp_path: Path) -> None:
    """Four ranks, two of which share each layer; the model lies deeper in the module."""
    from transformers import AutoModelForCausalLM

    (weights, *_) = pool4.run(_train_shared_by_two, str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("make_model", [tied_llama, untied_gpt2, t5, mixtral])
def test_every_kind_of_model_comes_back(tmp_path: Path, make_model: Any) -> None:
    """Ties of several names, none at all, and experts, which are kept in another form on the hub."""
    model = make_model()
    export_hugging_face(OwnLoss(model), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    loaded, problems = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(problems.values())
    expected = model.state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_dtype(tmp_path: Path) -> None:
    """Of floating-point tensors, and of the configuration, which from_pretrained goes by."""
    model = tied_llama()
    export_hugging_face(OwnLoss(model), tmp_path / "out", dtype=torch.bfloat16)
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


class Twice(nn.Module):
    """One matrix under two names, which nothing but the object itself tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(3, 3)


def test_ties_that_no_configuration_tells_of_are_written_twice(tmp_path: Path) -> None:
    """Else whoever reads them would have random weights under one of the names."""
    export_hugging_face(ModelModule(Twice()), tmp_path / "out", prefix="model")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert torch.equal(written["first.weight"], written["second.weight"])


@pytest.mark.parametrize(
    ("options", "adapted"),
    [
        (ENGINES["fsdp2"], lora_llama),
        (ENGINES["ddp"], lora_llama),
        (ENGINES["fsdp2"], partial(lora_llama, modules_to_save=["norm"])),
        (ENGINES["fsdp2"], vera_llama),
    ],
    ids=["fsdp2", "ddp", "beside a module trained whole", "vera"],
)
def test_adapters_alone(pool2: RankPool, tmp_path: Path, options: dict[str, Any], adapted: Any) -> None:
    """As PEFT itself writes them; the trained model answers as the base with them does."""
    from peft import PeftModel

    weights, _ = pool2.run(_train, options, adapted, str(tmp_path), adapter_only=True)
    assert main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--adapter-only"]) == 0
    assert _contents(tmp_path / "live") == _contents(tmp_path / "out")
    trained = adapted()
    trained.load_state_dict(weights, strict=False)  # which lack the second name of what is tied
    trained.save_pretrained(tmp_path / "peft")
    names = "adapter_config.json", "adapter_model.safetensors"
    config, theirs = (json.loads((tmp_path / folder / names[0]).read_text()) for folder in ("out", "peft"))
    assert config == {**theirs, "target_modules": sorted(theirs["target_modules"])}
    ours, theirs = load_file(tmp_path / "out" / names[1]), load_file(tmp_path / "peft" / names[1])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    loaded = PeftModel.from_pretrained(tied_llama(), tmp_path / "out").double()
    ids = torch.tensor([[1, 3, 5, 7]])
    assert torch.equal(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)
    assert not torch.equal(loaded(input_ids=ids).logits, tied_llama()(input_ids=ids).logits)


def test_refusals(tmp_path: Path) -> None:
    """Each says what to do instead, and leaves nothing behind."""
    decoder = ModelModule(TinyDecoder(seed=1))
    with pytest.raises(CheckpointError, match=r"Give the prefix of what to export, such as model\.,"):
        export_hugging_face(decoder, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"no tensor's name begins with 'other\.'; there are, for example, model"):
        export_hugging_face(decoder, tmp_path / "out", prefix="other")
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM with PEFT adapters.*adapter_only.*merge_and_unload"):
        export_hugging_face(OwnLoss(lora_llama()), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"model\. has no PEFT adapters"):
        export_hugging_face(OwnLoss(tied_llama()), tmp_path / "out", adapter_only=True)
    teacher = OwnLoss(tied_llama())
    teacher.teacher = untied_gpt2()
    with pytest.raises(CheckpointError, match=r"model\. \(LlamaForCausalLM\), teacher\. \(GPT2LMHeadModel\)"):
        export_hugging_face(teacher, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not local"):
        export_hugging_face(decoder, "memory://out", prefix="model")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists: remove it, or choose another path"):
        export_hugging_face(decoder, tmp_path / "out", prefix="model")
    export_hugging_face(teacher, tmp_path / "teacher", prefix="teacher.")
    assert json.loads((tmp_path / "teacher" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def _fail_to_write(folder: str) -> str:
    def failing_write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_write", failing_write)
        with pytest.raises(CheckpointError) as raised:
            export_hugging_face(ModelModule(TinyDecoder(seed=1)), f"{folder}/out", max_shard_size=TINY, prefix="model")
    return str(raised.value)


def test_a_rank_that_cannot_write(pool2: RankPool, tmp_path: Path) -> None:
    """All ranks raise, naming rank 0, and nothing is left."""
    for message in pool2.run(_fail_to_write, str(tmp_path)):
        assert message.startswith(
            f"Cannot export to {tmp_path}/out: rank 0: OSError: [Errno 28] No space left on device"
        )
    assert not list(tmp_path.iterdir())


def _export_on_rank_zero(path: str) -> None:
    if dist.get_rank() == 1:
        time.sleep(1)
        return
    with mock.patch.object(export, "_PATIENCE", timedelta(seconds=0.5)):
        export_hugging_face(OwnLoss(tied_llama()), path)


def test_every_rank_must_export(pool2: RankPool, tmp_path: Path) -> None:
    """`if trainer.is_global_zero:` is right before `save_pretrained`, and wrong here."""
    with pytest.raises(RankError) as caught:
        pool2.run(_export_on_rank_zero, str(tmp_path / "model"))
    message = caught.value.failures[0].splitlines()[-1]
    assert "barrier 'export_hugging_face', which every rank must reach" in message
    assert "Ranks 1 failed to pass" in message
    assert not list(tmp_path.iterdir())


def test_description_is_plain_data(pool2: RankPool, tmp_path: Path) -> None:
    """What the strategy adds to a checkpoint loads without running code, and tells classes that FSDP2 has changed."""
    pool2.run(_train, {}, lora_llama, str(tmp_path), adapter_only=True)
    rest = torch.load(tmp_path / "run.ckpt" / "meta.pt", weights_only=True)
    (described,) = rest["hugging_face"]
    assert (described["prefix"], described["class"], described["tied"]) == (
        "model.",
        "LlamaForCausalLM",
        ["lm_head.weight"],
    )
    assert len(described["peft"]["names"]) == 8


class CannotBeDescribed(nn.Module):
    """Looks like a Hugging Face model."""

    config = mock.Mock()
    config.to_diff_dict.side_effect = KeyError("no such name")
    save_pretrained = None


def test_what_cannot_be_described_is_saved() -> None:
    """Without a description, which a warning tells."""
    module = nn.ModuleDict({"odd": CannotBeDescribed(), "known": tied_llama()})
    with pytest.warns(UserWarning, match=r"do not describe the Hugging Face model odd\. \(.*no such name"):
        (described,) = hugging_face.describe_models(module)["hugging_face"]
    assert described["prefix"] == "known."


SCRIPT = """
import re, sys, threading
from pathlib import Path
from lightning_automodel.checkpoint.__main__ import main

def own_memory():
    # Not of mapped files, which the system takes out of memory where it needs to.
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def grown_by(*arguments):
    before, most, done = own_memory(), 0, threading.Event()

    def sample():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, own_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    assert main(list(arguments)) == 0
    done.set()
    thread.join()
    return most - before

folder = sys.argv[1]
split = ["--key", "model.", "--max-shard-size"]
for command, *options in (["export", *split, "5MB"], ["consolidate"]):
    grown_by(command, f"{folder}/small.ckpt", f"{folder}/small.{command}", *options)
    print(grown_by(command, f"{folder}/large.ckpt", f"{folder}/large.{command}", *options))
print(grown_by("export", f"{folder}/large.ckpt", f"{folder}/whole", *split, "1GB"))
"""


def _save_shards(path: Path, num_tensors: int, rows: int) -> None:
    import torch.distributed.checkpoint as dcp

    state = {f"model.layer{index}": torch.full((rows, 1024), float(index)) for index in range(num_tensors)}
    moments = {name: {"exp_avg": value.clone()} for name, value in state.items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    dcp.save({"state_dict": state, "optimizer_0": optimizer}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1, "global_step": 2}, path / "meta.pt")


@pytest.mark.sweep
def test_memory(tmp_path: Path) -> None:
    """A state of 200 MB, of which half is the model, in 4 MB tensors: far less than that is held at once."""
    _save_shards(tmp_path / "small.ckpt", 2, 8)
    _save_shards(tmp_path / "large.ckpt", 25, 1024)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    by_export, by_consolidate, of_whole_model = map(int, re.findall(r"^-?\d+$", ran.stdout, re.M))
    assert max(by_export, by_consolidate) <= 50e6
    assert of_whole_model >= 60e6  # the model in one file: this measures something
    with safe_open(next((tmp_path / "large.export").glob("*-00002-*")), framework="pt") as file:
        assert torch.equal(file.get_tensor("layer1"), torch.ones(1024, 1024))
    written = torch.load(tmp_path / "large.consolidate", weights_only=True, mmap=True)
    last = written["optimizer_states"][0]["state"]["model.layer24"]["exp_avg"]
    assert torch.equal(last, torch.full((1024, 1024), 24.0))

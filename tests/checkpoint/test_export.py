"""Exports are read by `from_pretrained`, hold what was trained, and are never in memory as a whole."""

from __future__ import annotations

import json
import resource
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
from lightning.pytorch.callbacks import Callback, WeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, ModelExport
from lightning_automodel.checkpoint import CheckpointError, export, export_hugging_face, hugging_face, paths
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.safetensors_files import SafetensorsFile
from tests.rank_pool import RankError, RankPool
from tests.sharding.test_hf_tensor_parallel import CASE as TENSOR_PARALLEL
from tests.sharding.test_hf_tensor_parallel import make_model as make_logits_model
from tests.sharding.test_tensor_parallel import data_rank
from tests.trainer.exactness import TinyDecoder, full_weights, micro_batches
from tests.trainer.hugging_face import (
    CAUSAL,
    OwnLoss,
    lora_llama,
    mixtral,
    t5,
    tied_llama,
    untied_gpt2,
    vera_llama,
)
from tests.trainer.plain import ModelModule
from tests.trainer.runs import CASE, LabelledModule, loader, make_trainer

ENGINES: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}
SMALL = "2KB"
TINY = 700


def _train(
    options: dict[str, Any], make_model: Any, folder: str, **export_options: Any
) -> dict[str, Tensor]:
    """Train a step, export `live` as the fit ends, and save `run.ckpt`; whole weights."""
    module = OwnLoss(make_model())
    trainer = make_trainer(
        AutomodelStrategy(label_shift=1, **options),
        max_steps=1,
        callbacks=[ModelExport(f"{folder}/live", **export_options)],
    )
    trainer.fit(module, loader(CAUSAL))
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    return full_weights(module.model)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_from_pretrained_reads_what_was_trained(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Several files with an index, the tie restored; from memory and from a checkpoint byte for byte the same."""
    from transformers import AutoModelForCausalLM

    weights, same = pool2.run(_train, options, tied_llama, str(tmp_path), max_shard_size=SMALL)
    assert (
        main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--max-shard-size", SMALL]) == 0
    )
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


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "hsdp": {"data_parallel_replicate_size": 2},
    "hsdp, offloaded": {"data_parallel_replicate_size": 2, "cpu_offload": True},
}


def _train_on_four(path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    module = ModelModule(make_logits_model("Llama-tied"))
    trainer = make_trainer(
        AutomodelStrategy(**options), max_steps=1, callbacks=[ModelExport(path, max_shard_size=SMALL)]
    )
    num_ranks = 4 // options.get("tensor_parallel_size", 1)
    batches = micro_batches(replace(TENSOR_PARALLEL, num_ranks=num_ranks))
    rank = data_rank() if "tensor_parallel_size" in options else dist.get_rank()
    trainer.fit(module, DataLoader(batches[rank], batch_size=None))
    return full_weights(module.model.model)


@pytest.mark.sweep
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_four_ranks(pool4: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """The model lies deeper in the module."""
    from transformers import AutoModelForCausalLM

    (weights, *_) = pool4.run(_train_on_four, str(tmp_path / "out"), options)
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
    ours = load_file(tmp_path / "out" / names[1])
    theirs = load_file(tmp_path / "peft" / names[1])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    loaded = PeftModel.from_pretrained(tied_llama(), tmp_path / "out").double()
    ids = torch.tensor([[1, 3, 5, 7]])
    assert torch.equal(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)
    assert not torch.equal(loaded(input_ids=ids).logits, tied_llama()(input_ids=ids).logits)


class SavesPretrained(Callback):
    """Saves by the model's own method as the fit ends, as scripts do: on all ranks, or on the first alone."""

    def __init__(self, folder: str, on_all_ranks: bool) -> None:
        self.folder = folder
        self.on_all_ranks = on_all_ranks
        self.told: list[str] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.on_all_ranks or trainer.is_global_zero:
            try:
                pl_module.model.save_pretrained(self.folder)
            except RuntimeError as error:
                self.told.append(str(error))


def _save_pretrained(make_model: Any, folder: str, on_all_ranks: bool) -> tuple[list[str], bool]:
    """What it was told in the hook and after the fit, and whether what that says to do writes what was trained."""
    saves = SavesPretrained(folder, on_all_ranks)
    module = OwnLoss(make_model())
    trainer = make_trainer(AutomodelStrategy(label_shift=1), max_steps=1, callbacks=[saves])
    trainer.fit(module, loader(CAUSAL))
    saves.on_train_end(trainer, module)
    weights = full_weights(module.model)
    state = {name: p.full_tensor() for name, p in module.model.state_dict().items()}
    module.model.save_pretrained(f"{folder}/whole", state_dict=state)
    if not trainer.is_global_zero:
        return saves.told, True
    written = load_file(next(Path(folder, "whole").glob("*.safetensors")))
    return saves.told, all(torch.equal(written[name], value.cpu()) for name, value in weights.items())


@pytest.mark.parametrize("on_all_ranks", [False, True])
@pytest.mark.parametrize("make_model", [tied_llama, untied_gpt2], ids=["tied", "untied"])
def test_save_pretrained_would_write_parts(
    pool2: RankPool, tmp_path: Path, make_model: Any, on_all_ranks: bool
) -> None:
    """It is refused, also where the first rank alone calls it, with a remedy; whole tensors are written."""
    by_rank = pool2.run(_save_pretrained, make_model, str(tmp_path), on_all_ranks)
    assert len(by_rank[0][0]) == 2  # transformers writes nothing on other ranks
    for told, is_written in by_rank:
        assert is_written
        for message in told:
            assert "is sharded" in message
            assert "export_hugging_face(module, path) in place of save_pretrained" in message


def test_refusals(tmp_path: Path) -> None:
    """Each says what to do instead, and leaves nothing behind."""
    decoder = ModelModule(TinyDecoder(seed=1))
    with pytest.raises(CheckpointError, match=r"Give the prefix of what to export, such as model\.,"):
        export_hugging_face(decoder, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"no tensor's name begins with 'other\.'; there are, for example, model"
    ):
        export_hugging_face(decoder, tmp_path / "out", prefix="other")
    with pytest.raises(
        CheckpointError, match=r"LlamaForCausalLM with PEFT adapters.*adapter_only.*merge_and_unload"
    ):
        export_hugging_face(OwnLoss(lora_llama()), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"model\. has no PEFT adapters"):
        export_hugging_face(OwnLoss(tied_llama()), tmp_path / "out", adapter_only=True)
    teacher = OwnLoss(tied_llama())
    teacher.teacher = untied_gpt2()
    with pytest.raises(
        CheckpointError, match=r"model\. \(LlamaForCausalLM\), teacher\. \(GPT2LMHeadModel\)"
    ):
        export_hugging_face(teacher, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not local"):
        export_hugging_face(decoder, "memory://out", prefix="model")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists: remove it, or choose another path"):
        export_hugging_face(decoder, tmp_path / "out", prefix="model")
    export_hugging_face(teacher, tmp_path / "teacher", prefix="teacher.")
    assert json.loads((tmp_path / "teacher" / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]


class Watched(LabelledModule):
    """Has running statistics and a number, which differ by rank, as DDP lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double().requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.0))

    def on_train_start(self) -> None:
        self.norm.running_mean.fill_(dist.get_rank() + 1.0)
        self.scale.fill_(dist.get_rank() + 0.5)


def _share_out(options: dict[str, Any], folder: str, sees_folder: bool = True) -> dict[str, Any]:
    """Train with averaged weights, export, and tell what this rank wrote."""
    written: list[str] = []
    append = SafetensorsFile.append

    def noting(file: SafetensorsFile, *args: Any) -> None:
        written.append(file.name)
        append(file, *args)

    module = Watched()
    averages = WeightAveraging(
        use_buffers=False, avg_fn=lambda averaged, current, _: averaged * 0.5 + current * 0.5
    )
    # The callback stands first, and the weights' averages come into their place after its other hooks.
    callbacks = [ModelExport(f"{folder}/out", prefix="", max_shard_size=TINY), averages]
    trainer = make_trainer(AutomodelStrategy(**options), max_steps=2, callbacks=callbacks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsFile, "append", noting)
        patch.setattr(paths, "is_seen", lambda *_: sees_folder)
        trainer.fit(module, loader(CASE))
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }
    return {"written": sorted(set(written)), "state": state}


@pytest.mark.parametrize("how", ["sharded", "one disk", "ddp"])
def test_ranks_share_the_files(pool2: RankPool, tmp_path: Path, how: str) -> None:
    """Each writes about half; buffers are rank 0's, and weights the averages that `fit` leaves.

    On another node's disk nothing would be found again: rank 0 then writes all, as under DDP.
    """
    options = ENGINES["ddp" if how == "ddp" else "fsdp2"]
    first, second = pool2.run(_share_out, options, str(tmp_path), sees_folder=how == "sharded")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(first["written"] + second["written"]) == files
    sizes = {name: (tmp_path / "out" / name).stat().st_size for name in files}
    of_second = sum(sizes[name] for name in second["written"])
    assert of_second == 0 or how == "sharded"
    if how == "sharded":
        assert abs(of_second / sum(sizes.values()) - 0.5) < 0.1
    found: dict[str, Tensor] = {}
    for name in files:
        found.update(load_file(tmp_path / "out" / name))
    assert found.keys() == first["state"].keys()
    assert all(torch.equal(found[name], value) for name, value in first["state"].items())
    assert float(found["scale"]) == 0.5
    assert found["scale"].dim() == 0


def _fail_to_write(folder: str, failing: int) -> str:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, limits[1]))
    try:
        decoder = ModelModule(TinyDecoder(seed=1))
        fully_shard(decoder, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(CheckpointError) as raised:
            export_hugging_face(decoder, f"{folder}/out", max_shard_size=TINY, prefix="model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(raised.value)


@pytest.mark.parametrize("failing", [1, 0])
def test_a_rank_that_cannot_write(pool2: RankPool, tmp_path: Path, failing: int) -> None:
    """All ranks raise, naming it and the file, and nothing is left."""
    for message in pool2.run(_fail_to_write, str(tmp_path), failing):
        start = f"Cannot export to {tmp_path}/out: rank {failing}: model-"
        assert message.startswith(start)
        assert message.endswith(".safetensors: OSError: [Errno 27] File too large")
    assert not list(tmp_path.iterdir())


def _begin_with_a_folder_in_the_way(path: str) -> int:
    module = LabelledModule()
    trainer = make_trainer(AutomodelStrategy(), max_steps=1, callbacks=[ModelExport(path, prefix="model")])
    with pytest.raises(CheckpointError, match=r"rank 0: .*exists: remove it, or choose another path"):
        trainer.fit(module, loader(CASE))
    return trainer.global_step


def test_a_fit_that_could_not_export_does_not_begin(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(_begin_with_a_folder_in_the_way, str(tmp_path)) == [0, 0]


def test_dtypes_by_name() -> None:
    assert ModelExport("out", dtype="bfloat16")._options["dtype"] == torch.bfloat16
    with pytest.raises(ValueError, match="its name, such as 'bfloat16', not 'bf16'"):
        ModelExport("out", dtype="bf16")


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

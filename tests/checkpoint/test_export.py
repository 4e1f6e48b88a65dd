"""Exports are read by `from_pretrained`, hold what was trained, come about together, and need memory for one tensor."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_automodel import AutomodelStrategy, ModelExport
from lightning_automodel.checkpoint import CheckpointError, export, export_hugging_face
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.checkpoint.loading import load_any
from lightning_automodel.checkpoint.shard_directory import prepare_shards
from lightning_automodel.checkpoint.tree import model_state
from tests.checkpoint.checkpoints import no_space_for_files
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import TinyDecoder, full_weights
from tests.trainer.hugging_face import (
    CAUSAL,
    OwnLoss,
    llama,
    lora_llama,
    mixtral,
    t5,
    untied_gpt2,
    vera_llama,
)
from tests.trainer.plain import ModelModule
from tests.trainer.runs import loader, make_trainer

ENGINES: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}
SMALL = "2KB"


class TiedLlama(OwnLoss):
    def __init__(self) -> None:
        super().__init__(llama())


class Adapted(OwnLoss):
    """The same with adapters; `beside` it, modules are trained whole."""

    def __init__(self, kind: str, beside: list[str] | None = None) -> None:
        super().__init__(vera_llama() if kind == "vera" else lora_llama(modules_to_save=beside))
        self.save_hyperparameters()


def export_from(folder: Path, module_class: type, *options: str) -> int:
    """Status of the command that exports `run.ckpt` to `out`."""
    name = f"{module_class.__module__}.{module_class.__qualname__}"
    paths = [str(folder / "run.ckpt"), str(folder / "out")]
    return main(["export", *paths, "--class", name, *options])


def _train(
    options: dict[str, Any], module_class: Any, args: tuple[Any, ...], folder: str, **export_options: Any
) -> dict[str, Tensor]:
    """Train a step, export `live` as the fit ends, and save `run.ckpt`; whole weights."""
    module = module_class(*args)
    trainer = make_trainer(
        AutomodelStrategy(label_shift=1, **options),
        max_steps=1,
        callbacks=[ModelExport(f"{folder}/live", **export_options)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "MAX_SHARD_SIZE", SMALL)
        trainer.fit(module, loader(CAUSAL))
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    return full_weights(module.model)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _of_adapter(folder: Path) -> dict[str, Any]:
    """The contents; PEFT writes a set of names in the order of the process."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return {
        **_contents(folder),
        "adapter_config.json": {**config, "target_modules": sorted(config["target_modules"])},
    }


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_from_pretrained_reads_what_was_trained(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several files with an index, the tie restored; from memory and from a checkpoint byte for byte the same."""
    from transformers import AutoModelForCausalLM

    weights, same = pool2.run(_train, options, TiedLlama, (), str(tmp_path))
    module = TiedLlama.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    monkeypatch.setattr(export, "MAX_SHARD_SIZE", SMALL)
    export_hugging_face(module, tmp_path / "out")
    assert _contents(tmp_path / "live") == _contents(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert "lm_head.weight" not in index["weight_map"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float64
    started = llama().state_dict()
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name])
        assert torch.equal(value, same[name])
        assert not torch.equal(value, started[name])


@pytest.mark.parametrize("make_model", [llama, untied_gpt2, t5, mixtral])
def test_every_kind_of_model_comes_back(tmp_path: Path, make_model: Any) -> None:
    """Ties of several names, none at all, and experts, which get the names that they have on the hub."""
    model = make_model()
    export_hugging_face(OwnLoss(model), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    names = " ".join(load_file(tmp_path / "out" / "model.safetensors"))
    assert ("experts.3.w2" in names) == (make_model is mixtral)
    loaded, problems = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(problems.values())
    expected = model.state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_dtype(tmp_path: Path) -> None:
    """Of floating-point tensors, and of the configuration, which from_pretrained goes by."""
    model = llama()
    model.register_buffer("counted", torch.tensor(2**40 + 1))
    export_hugging_face(model, tmp_path / "out", dtype=torch.bfloat16)
    assert model.dtype == torch.float64
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["counted"], model.counted)
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert ModelExport("out", dtype="bfloat16")._options["dtype"] == torch.bfloat16
    with pytest.raises(AttributeError, match="has no attribute 'bf16'"):
        ModelExport("out", dtype="bf16")


@pytest.mark.parametrize(
    ("options", "args"),
    [
        (ENGINES["fsdp2"], ("lora",)),
        (ENGINES["ddp"], ("lora",)),
        (ENGINES["fsdp2"], ("lora", ["norm"])),
        (ENGINES["fsdp2"], ("vera",)),
    ],
    ids=["fsdp2", "ddp", "beside a module trained whole", "vera"],
)
def test_adapters_alone(
    pool2: RankPool, tmp_path: Path, options: dict[str, Any], args: tuple[Any, ...]
) -> None:
    """As PEFT itself writes them; the trained model answers as the base with them does."""
    from peft import PeftModel

    weights, _ = pool2.run(_train, options, Adapted, args, str(tmp_path), adapter_only=True)
    assert export_from(tmp_path, Adapted, "--adapter-only") == 0
    assert _of_adapter(tmp_path / "live") == _of_adapter(tmp_path / "out")
    trained = Adapted(*args).model
    trained.load_state_dict(weights, strict=False)  # which lack the second name of what is tied
    trained.save_pretrained(tmp_path / "peft")
    assert _of_adapter(tmp_path / "out") == _of_adapter(tmp_path / "peft")

    loaded = PeftModel.from_pretrained(llama(), tmp_path / "out").double()
    ids = torch.tensor([[1, 3, 5, 7]])
    assert torch.equal(loaded(input_ids=ids).logits, trained(input_ids=ids).logits)
    assert not torch.equal(loaded(input_ids=ids).logits, llama()(input_ids=ids).logits)


def test_adapters_that_transformers_has_added(tmp_path: Path) -> None:
    """Its own `save_pretrained` writes them alone, too."""
    from peft import LoraConfig, PeftModel

    model = llama()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), "mine")
    export_hugging_face(OwnLoss(model), tmp_path / "out", adapter_only=True)
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "out").double()
    ids = torch.tensor([[1, 3, 5, 7]])
    assert torch.equal(loaded(input_ids=ids).logits, model.double()(input_ids=ids).logits)


def test_refusals(tmp_path: Path) -> None:
    """Each says what to do instead, and leaves nothing behind."""
    from peft import PromptTuningConfig, get_peft_model

    teacher = OwnLoss(llama())
    teacher.teacher = untied_gpt2()
    which = r": model\. \(LlamaForCausalLM\), teacher\. \(GPT2LMHeadModel\)\. .*--key"
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompted = get_peft_model(llama(), prompts)
    plain = ModelModule(TinyDecoder(seed=1))
    out = tmp_path / "out"
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (plain, out, {}, "PEFT in ModelModule are: none.*consolidate"),
        (
            OwnLoss(lora_llama()),
            out,
            {},
            "PeftModelForCausalLM has .*default.*adapter_only.*merge_and_unload",
        ),
        (OwnLoss(llama()), out, {"adapter_only": True}, "LlamaForCausalLM has no PEFT adapters"),
        (prompted, out, {"adapter_only": True}, "computes the parameters of prompt tuning"),
        *((teacher, out, {"prefix": prefix}, which) for prefix in (None, "other", "model.model")),
    ]
    for module, path, options, message in cases:
        with pytest.raises(CheckpointError, match=message):
            export_hugging_face(module, path, **options)
    assert not list(tmp_path.iterdir())
    export_hugging_face(teacher, tmp_path / "teacher", prefix="teacher.")
    assert json.loads((tmp_path / "teacher" / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]


@pytest.mark.parametrize("what", ["hf_quantizer", "distributed_config"])
def test_what_transformers_would_gather_by_itself(tmp_path: Path, what: str) -> None:
    """On rank 0 alone, which would wait for the others; PEFT leaves a quantised base as it is."""
    model = llama()
    setattr(model if what == "hf_quantizer" else model.config, what, mock.Mock())
    with pytest.raises(CheckpointError, match=r"has a quantization_config or a distributed_config"):
        export_hugging_face(OwnLoss(model), tmp_path / "out")
    adapted = OwnLoss(lora_llama())
    adapted.model.get_base_model().hf_quantizer = mock.Mock()
    export_hugging_face(adapted, tmp_path / "adapter", adapter_only=True)
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 8


class Watched(TiedLlama):
    """Has a number that differs by rank, as DDP lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("scale", torch.tensor(0.0))

    def on_train_start(self) -> None:
        self.model.scale.fill_(dist.get_rank() + 0.5)


def _export_averages(options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    module = Watched()
    averages = WeightAveraging(
        use_buffers=False, avg_fn=lambda averaged, current, _: averaged * 0.5 + current * 0.5
    )
    # The callback stands first, and the weights' averages come into their place after its other hooks.
    callbacks = [ModelExport(f"{folder}/out"), averages]
    strategy = AutomodelStrategy(label_shift=1, **options)
    make_trainer(strategy, max_steps=2, callbacks=callbacks).fit(module, loader(CAUSAL))
    return full_weights(module.model)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_averages_and_buffers(pool2: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Weights are the averages that `fit` leaves, and buffers rank 0's, numbers without a dimension too."""
    (weights, _) = pool2.run(_export_averages, options, str(tmp_path))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in weights.items() if name in found)
    assert found.keys() == weights.keys() | {"scale"}
    assert torch.equal(found["scale"], torch.tensor(0.5))


def _fail_to_write(folder: str, num_bytes: int) -> str:
    module = TiedLlama()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    limit = no_space_for_files(num_bytes) if dist.get_rank() == 0 else nullcontext()
    with pytest.raises(CheckpointError) as raised, limit:
        export_hugging_face(module, f"{folder}/out")
    return str(raised.value)


@pytest.mark.parametrize("num_bytes", [900, 4000], ids=["a gathered tensor", "the file of all"])
def test_rank_zero_cannot_write(pool2: RankPool, tmp_path: Path, num_bytes: int) -> None:
    """All ranks raise, naming it, and nothing is left."""
    for message in pool2.run(_fail_to_write, str(tmp_path), num_bytes):
        assert message.startswith(f"Cannot export to {tmp_path}/out: rank 0: ")
        assert "File too large" in message
    assert not list(tmp_path.iterdir())


def _begin(path: str, samples: bool) -> tuple[int, str]:
    module = TiedLlama()
    if samples:
        module.model.generation_config.temperature = 0.5  # without do_sample
    trainer = make_trainer(
        AutomodelStrategy(label_shift=1), max_steps=1, callbacks=[ModelExport(path, prefix="model")]
    )
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(module, loader(CAUSAL))
    return trainer.global_step, str(raised.value)


def test_a_fit_that_could_not_export_does_not_begin(pool2: RankPool, tmp_path: Path) -> None:
    """A folder is in the way; transformers would refuse the configuration for generation."""
    for step, message in pool2.run(_begin, str(tmp_path), False):
        assert step == 0
        assert "rank 0: " in message
        assert "exists: remove it, or choose another path" in message
    for step, message in pool2.run(_begin, str(tmp_path / "new"), True):
        assert step == 0
        assert "rank 0, rank 1: " in message
        assert "temperature" in message


def _export_on_rank_zero(path: str) -> None:
    if dist.get_rank() == 1:
        time.sleep(1)
        return
    with mock.patch.object(export, "_PATIENCE", timedelta(seconds=0.5)):
        export_hugging_face(TiedLlama(), path)


def test_every_rank_must_export(pool2: RankPool, tmp_path: Path) -> None:
    """`if trainer.is_global_zero:` is right before `save_pretrained`, and wrong here."""
    with pytest.raises(RankError) as caught:
        pool2.run(_export_on_rank_zero, str(tmp_path / "model"))
    message = caught.value.failures[0].splitlines()[-1]
    assert "('export_hugging_face') for ranks 1: stopped, dead" in message
    assert not list(tmp_path.iterdir())


# --- Memory: one tensor at a time, beside what is mapped to files -----------------------------------------------------


ROWS = 4352
NUM_LAYERS = 6
TENSOR_BYTES = 4 * ROWS * 2048  # 36 MB: malloc gives such memory back at once when it is freed
FIXED_BYTES = 45_000_000


def _grown_by(call: Callable[[], object], name: str) -> int:
    """Peak bytes of the process above those before: "VmRSS", or "RssAnon", which the system cannot drop."""
    has_ended = threading.Event()
    peak = before = _status(name)

    def watch() -> None:
        nonlocal peak
        while not has_ended.wait(0.002):
            peak = max(peak, _status(name))

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    has_ended.set()
    watcher.join()
    return peak - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def _sharded_llama(num_layers: int, rows: int) -> nn.Module:
    """Nearly all of it is in feed-forward matrices of `rows`; each is filled with its number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 2048, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, head_dim=2, intermediate_size=rows, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, index)
    return model


def _export_measured(folder: str, num_layers: int, rows: int) -> dict[str, int]:
    """How much the memory of this rank grows, by what it does."""
    model = _sharded_llama(num_layers, rows)
    path = f"{folder}/run.ckpt"
    live = partial(export_hugging_face, model, f"{folder}/live")
    grown = {"live": _grown_by(live, "RssAnon")}
    prepare_shards({"epoch": 1, "global_step": 2, "state_dict": model_state(model)}, path)(None)
    if dist.get_rank() == 0:
        consolidate = partial(main, ["consolidate", path, f"{folder}/consolidate"])
        grown["consolidate"] = _grown_by(consolidate, "RssAnon")
        grown["all of it"] = _grown_by(partial(load_any, path, None, None), "VmRSS")
    return grown


def _export_twice(folder: str) -> dict[str, int]:
    _export_measured(f"{folder}/small", 1, 8)  # which imports what is needed
    return _export_measured(folder, NUM_LAYERS // 3, ROWS)


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in /proc")
def test_memory(pool2: RankPool, tmp_path: Path) -> None:
    """A model of 214 MB in tensors of 36 MB, by both ranks, and by one process from the shards."""
    first, second = pool2.run(_export_twice, str(tmp_path))
    of_everything = first.pop("all of it")
    # To gather a tensor, gloo holds it two or three times.
    assert max(first["live"], second["live"]) <= 3 * TENSOR_BYTES + FIXED_BYTES, (first, second)
    # The tensor, and while it is read its parts, twice.
    assert first["consolidate"] <= 3 * TENSOR_BYTES + FIXED_BYTES, first
    assert of_everything >= NUM_LAYERS * TENSOR_BYTES / 2  # this measures something
    exported = load_file(tmp_path / "live" / "model.safetensors")
    assert len(exported) == 3 + 9 * NUM_LAYERS // 3
    matrix = exported["model.layers.1.mlp.down_proj.weight"]
    assert matrix.shape == (2048, ROWS)
    assert (matrix == matrix[0, 0]).all()
    assert exported["model.layers.0.mlp.down_proj.weight"][0, 0] != matrix[0, 0] != 0
    written = torch.load(tmp_path / "consolidate", weights_only=True, mmap=True)
    assert torch.equal(written["state_dict"]["model.layers.1.mlp.down_proj.weight"], matrix)

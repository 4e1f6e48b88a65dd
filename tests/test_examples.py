"""What the examples print is what docs/examples.md says of them: in small, on the ranks that tests share."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import runpy
import sys
import sysconfig
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel import token_loss
from lightning_automodel.checkpoint.__main__ import main
from lightning_automodel.gradients.token_loss import TokenWeighting
from tests.processes import ROOT, run_anew
from tests.rank_pool import RankPool
from tests.trainer.exactness import VOCABULARY, Batch, relative_error
from tests.trainer.hugging_face import llama

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
from packing import Document, Packer  # noqa: E402

NUM_VAL_EXAMPLES = 16


def _run(folder: str, script: str, arguments: list[str]) -> str:
    """Runs a script on this rank as if it had been started with these arguments; what it prints."""
    logger = logging.getLogger("lightning.pytorch")
    before = os.getcwd()
    path = list(sys.path)
    level = logger.level
    try:
        os.chdir(folder)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(sys, "argv", [script, *arguments])
            patch.syspath_prepend(str(EXAMPLES))
            from docstrings import DocstringData

            *defaults, _ = DocstringData.__init__.__defaults__
            patch.setattr(DocstringData.__init__, "__defaults__", (*defaults, NUM_VAL_EXAMPLES))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                handler = logging.StreamHandler(printed)
                logging.getLogger("lightning_automodel").addHandler(handler)
                runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        logging.getLogger("lightning_automodel").removeHandler(handler)
        os.chdir(before)
        logger.setLevel(level)
        sys.path[:] = path
    dist.barrier()
    return printed.getvalue()


def _parse_library(folder: str) -> None:
    """Parses the parts of the library whose names begin with a or e, for short functions: all takes ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import docstrings

        others = {
            path.name for path in Path(sysconfig.get_paths()["stdlib"]).iterdir() if path.name[0] not in "ae"
        }
        patch.setattr(docstrings, "SKIPPED_FOLDERS", docstrings.SKIPPED_FOLDERS | others)
        if dist.get_rank() == 0:
            whole = docstrings.DocstringData(f"{folder}/outputs/corpus")
            short = docstrings.DocstringData(
                f"{folder}/outputs/corpus", max_prompt_bytes=64, max_docstring_bytes=96
            )
            short.corpus_file = whole.corpus_file
            short.prepare_data()
    dist.barrier()


needs_plotly = pytest.mark.skipif(find_spec("plotly") is None, reason="TrainingReport draws with plotly")


class Folder:
    """A folder that examples run in, two ranks together."""

    def __init__(self, pool: RankPool, path: Path) -> None:
        self.pool = pool
        self.path = path

    def run(self, script: str, *arguments: str) -> str:
        """What the first rank prints; the second prints nothing but a progress bar, if that."""
        return self.pool.run(_run, str(self.path), script, list(arguments), timeout_s=200)[0]

    def run_anew(self, script: str, *arguments: str, status: int = 0) -> str:
        """What a program of its own prints, on both streams."""
        ended, printed = run_anew([sys.executable, str(EXAMPLES / script), *arguments], self.path, 280)
        assert ended == status, printed
        return printed


@pytest.fixture(scope="module")
def folder(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """One for all tests: a part of the standard library is parsed once."""
    made = Folder(pool2, tmp_path_factory.mktemp("examples"))
    pool2.run(_parse_library, str(made.path), timeout_s=200)
    return made


def numbers(pattern: str, printed: str) -> list[float]:
    """The groups of the only place that matches."""
    [found] = re.findall(pattern, printed)
    return [float(each) for each in ([found] if isinstance(found, str) else found)]


MAIN = "finetune_docstrings.py"
HELD_BACK = r"held-back functions, nats a byte\n  step 0    ([\d.]+)\n  step \d+ +([\d.]+)\n"


@needs_plotly
def test_main_job(folder: Folder) -> None:
    """The loss falls; only this strategy has the gradients and weights of one process; a report and a picture."""
    printed = folder.run(MAIN, "--max-steps", "2")
    assert printed.startswith("Training 853,888 parameters on ")
    before, after = numbers(HELD_BACK, printed)
    assert before - 0.3 > after
    ours = numbers(r"\n  AutomodelStrategy +([\d.]+)% +([\d.]+)%\n", printed)
    lightnings = numbers(r"\n  Lightning DDPStrategy +([\d.]+)% +([\d.]+)%\n", printed)
    assert ours[0] <= 1e-3
    assert ours[1] <= 0.1
    assert min(lightnings) > 10
    outputs = folder.path / "outputs/finetune_docstrings"
    assert matplotlib.image.imread(outputs / "picture.png")[..., :3].std() > 0.05  # 0 where it is blank
    assert "plotly" in (outputs / "report.html").read_text()


@needs_plotly
@pytest.mark.sweep
def test_main_job_resumes(folder: Folder) -> None:
    """Half of it once more, from a checkpoint; then one process has the same model."""
    _, after = numbers(HELD_BACK, folder.run(MAIN, "--max-steps", "2"))
    resumed = folder.run(MAIN, "--max-steps", "2", "--ckpt-path", "outputs/finetune_docstrings/step=1.ckpt")
    assert numbers(r"  step 2    ([\d.]+)\n", resumed) == [after]
    alone = folder.run_anew("load_checkpoint.py", "outputs/finetune_docstrings/step=2.ckpt")
    assert numbers(r"held-back functions: ([\d.]+) nats", alone) == [after]


@needs_plotly
@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "verdict"), [("ddp", "WRONG"), ("automodel_ddp", "EXACT")])
def test_main_job_under_another_strategy(folder: Folder, strategy: str, verdict: str) -> None:
    """As its first lines offer, and with the verdict that docs/examples.md promises."""
    printed = folder.run(MAIN, "--max-steps", "2", "--strategy", strategy, "--check")
    before, after = numbers(HELD_BACK, printed)
    assert before - 0.3 > after
    assert f"ExactnessCheck: {verdict} in 2 windows on 2 ranks" in printed


def test_image_classifier(folder: Folder) -> None:
    """Better than guessing after a few steps, on fonts of which it has seen none."""
    printed = folder.run("classify_images.py", "--epochs", "1", "--copies", "4")
    assert numbers(r"Accuracy on these: ([\d.]+)%", printed)[0] > 12


def test_muon(folder: Folder) -> None:
    """Matrices have owners, the rest stays on shards."""
    printed = folder.run("muon.py", "--max-steps", "2")
    assert "Matrices of blocks: whole" in printed
    assert "The rest: shards" in printed
    before, after = numbers(HELD_BACK, printed)
    assert before > after


OFF = r"gradients off by ([\d.]+)%\n  weights off by +([\d.]+)% of their way"


@pytest.mark.sweep  # tests/expert_parallel trains such models by default
def test_mixture_of_experts(folder: Folder) -> None:
    """The loss falls, and gradients and weights are those of one process."""
    pytest.importorskip("transformers")
    printed = folder.run("mixture_of_experts.py", "--max-steps", "2")
    before, after = numbers(HELD_BACK, printed)
    assert before > after
    gradients, weights = numbers(OFF, printed)
    assert gradients <= 1e-3
    assert weights <= 0.1


@pytest.mark.sweep
def test_gan_finds_the_ring(folder: Folder) -> None:
    """As docs/examples.md shows it."""
    printed = folder.run("gan.py")
    [distance, spread] = numbers(r"([\d.]+) \+- ([\d.]+) generated", printed)
    assert abs(distance - 1) < 0.1
    assert spread < 0.3
    assert numbers(r"(\d) of 8", printed)[0] >= 7


PERPLEXITIES = r"  ([\d.]+) by two ranks in training\n  ([\d.]+) by one process"


@pytest.mark.sweep
def test_hugging_face(folder: Folder) -> None:
    """The export has the perplexity of the run, and the documented command writes the same from the checkpoint."""
    ranks, alone = numbers(PERPLEXITIES, folder.run("hugging_face.py", "--rows", "40", "--epochs", "1"))
    assert alone == pytest.approx(ranks, rel=1e-4)
    outputs = folder.path / "outputs/hugging_face"
    again = folder.path / "again"
    command = ["export", str(outputs / "best.ckpt"), str(again), "--class", "examples.hugging_face.Writer"]
    assert main(command) == 0
    written = [(path / "model.safetensors").read_bytes() for path in (again, outputs / "model")]
    assert written[0] == written[1]


@pytest.mark.sweep
def test_hugging_face_adapters(folder: Folder) -> None:
    """The export of adapters, on an exported model."""
    pytest.importorskip("peft")
    small = ("--rows", "160", "--epochs", "1")
    ranks, _ = numbers(PERPLEXITIES, folder.run("hugging_face.py", *small))
    adapted = folder.run("hugging_face.py", *small, "--lora", "2", "--model", "outputs/hugging_face/model")
    adapted_ranks, adapted_alone = numbers(PERPLEXITIES, adapted)
    assert adapted_alone == pytest.approx(adapted_ranks, rel=1e-4)
    assert adapted_ranks < ranks
    assert (folder.path / "outputs/hugging_face/adapter/adapter_config.json").exists()


@pytest.mark.sweep
def test_preemption(folder: Folder) -> None:
    """Stopped and gone on: the weights of the run that nothing has disturbed."""
    weights = r"Weights after step 40: (\w+)"
    stopped = folder.run_anew("preemption.py", "--preempt-at", "6", status=143)
    assert not re.search(weights, stopped)
    resumed = folder.run_anew("preemption.py")
    undisturbed = folder.run_anew("preemption.py", "--output-dir", "outputs/undisturbed")
    assert numbers(r"Training starts after step (\d+)", resumed)[0] >= 5
    assert "Training starts after step 0\n" in undisturbed
    assert re.findall(weights, resumed) == re.findall(weights, undisturbed) != []


@needs_plotly
@pytest.mark.parametrize("config", ["fsdp2", pytest.param("ddp", marks=pytest.mark.sweep)])
def test_cli(folder: Folder, config: str) -> None:
    """The same training from a YAML file, with what the command line says instead."""
    overridden = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "8"]
    file = str(EXAMPLES / "configs" / f"{config}.yaml")
    printed = folder.run("cli.py", "fit", "--config", file, *overridden)
    before, after = numbers(HELD_BACK, printed)
    assert before > after


# Two ranks that import everything anew take half a minute.
@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("--mixed",)], ids=["docstrings", "mixed"])
def test_why_token_weighting(folder: Folder, options: tuple[str, ...]) -> None:
    """Only this strategy has the truth's gradients, in each step; Lightning's are off by more than a hundredth."""
    printed = folder.run_anew("why_token_weighting.py", "--quick", "--output", "picture.png", *options)
    table = [
        [cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")
    ]
    medians, largest = ({row[1]: float(row[column]) for row in table[2:]} for column in (2, 3))
    assert largest["AutomodelStrategy"] <= 1e-5
    assert medians["Lightning DDPStrategy"] > 0.01
    assert medians["Lightning ModelParallelStrategy"] > 0.01
    assert matplotlib.image.imread(folder.path / "picture.png")[..., :3].std() > 0.05


# --- Packed documents are as apart, and count as much, as in rows of their own ----------------------------------------

LENGTH = 16
SIZES = [3, 7, 5, 2, 6, 1, 4]


def documents(seed: int = 0) -> list[Document]:
    """Random tokens, of which a prompt of one to three carries no label."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in SIZES:
        input_ids = torch.randint(VOCABULARY, (size,), generator=generator)
        labels = input_ids.clone()
        labels[: 1 + size % 3] = -100
        if size > 4:
            labels[0] = input_ids[0]  # which nothing predicts
        made.append({"input_ids": input_ids, "labels": labels})
    return made


def sums(model: Any, batch: Batch, use_cache: bool = False) -> tuple[Tensor, Tensor]:
    """[] loss and count, as README has it."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=use_cache).last_hidden_state
    return token_loss(hidden, model.lm_head, labels, label_shift=1)


def test_rows() -> None:
    """Every document once, whole, at positions of its own; rows are full but for the last ones."""
    batch = Packer(LENGTH, pad_token=9)(documents())
    assert batch["input_ids"].shape == (2, 16)
    assert batch["position_ids"].tolist() == [
        [*range(7), *range(6), *range(3)],
        [*range(5), *range(4), *range(2), *range(1), *range(4)],
    ]
    assert batch["input_ids"][1, 12:].tolist() == [9] * 4
    found = sorted(batch["input_ids"][batch["position_ids"] == 0].tolist())
    assert found == sorted([*(int(document["input_ids"][0]) for document in documents()), 9])
    assert (batch["labels"][batch["position_ids"] == 0] == -100).all()


def test_a_document_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="A document of 7 tokens does not fit into rows of 6"):
        Packer(6)(documents())


def test_as_in_rows_of_their_own() -> None:
    """Loss, count and gradients; with a cache, documents would see those before them."""
    packed_model = llama(is_tied=False)
    model = llama(is_tied=False)
    packed = Packer(LENGTH)(documents())
    loss, count = sums(packed_model, packed)
    alone = [sums(model, {name: value[None] for name, value in each.items()}) for each in documents()]
    assert count == sum(int(each_count) for _, each_count in alone)
    assert count == TokenWeighting(label_shift=1).count(packed)
    expected = torch.stack([each for each, _ in alone]).sum()
    assert relative_error(loss, expected) <= 1e-7  # norms compute in float32
    assert relative_error(sums(model, packed, use_cache=True)[0], expected) > 1e-4
    loss.backward()
    expected.backward()
    for actual, wanted in zip(packed_model.parameters(), model.parameters(), strict=True):
        assert relative_error(actual.grad, wanted.grad) <= 1e-6

"""Fine-tunes a Hugging Face model, keeps the checkpoint with the best perplexity, and exports it for `from_pretrained`.

    python examples/hugging_face.py                                        # a small Llama with random weights
    python examples/hugging_face.py --model outputs/hugging_face/model --lora 8  # adapters on its export

The loss is the model's own: `label_shift=1` says that it drops the first label of each row. At the end the
export is loaded in one process, without this package, and its perplexity is printed beside the one that the
ranks computed. The data is made here: names of the standard library are prompts, their docstrings answers,
byte by byte. `finetune_smollm2.py` trains real weights.
"""

import argparse
import importlib
import inspect
import math
import shutil
from pathlib import Path

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers import get_cosine_schedule_with_warmup as cosine_schedule

from lightning_automodel import AutomodelStrategy, EvaluationLoss, StepMonitor
from lightning_automodel.checkpoint import export_hugging_face

MODULES = (
    "argparse",
    "asyncio",
    "datetime",
    "email.message",
    "http.client",
    "inspect",
    "logging",
    "os",
    "random",
)
Row = dict[str, Tensor]  # input_ids and labels, both [s]


def rows() -> list[Row]:
    """Returns a row for each name that has a docstring, cut at 200 bytes; the prompt has no labels."""
    found = []
    for module in map(importlib.import_module, MODULES):
        for name, member in inspect.getmembers(module, callable):
            prompt = f"{module.__name__}.{name}: ".encode()
            answer = (inspect.getdoc(member) or "").encode()[:200]
            if answer:
                ids = torch.tensor(list(prompt + answer))
                found.append(
                    {"input_ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) < len(prompt), -100)}
                )
    return found


def padded(batch: list[Row]) -> Row:
    """Pads rows at their ends, to [b, s]; so a causal model needs no attention mask."""
    values = {"input_ids": 0, "labels": -100}
    return {key: pad_sequence([row[key] for row in batch], True, value) for key, value in values.items()}


def load(model: str | None) -> PreTrainedModel:
    """Loads a model in float32, or makes a small one with random weights."""
    if model is not None:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layers = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **layers))


class Writer(L.LightningModule):
    """A causal language model, or adapters on one."""

    def __init__(self, model: str | None, lora: int) -> None:
        super().__init__()
        self.save_hyperparameters()  # so that load_from_checkpoint, and the command `export`, need no arguments
        self.model = load(model).train()
        if lora:
            self.model = get_peft_model(self.model, LoraConfig(r=lora, target_modules="all-linear"))

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    validation_step = training_step  # `EvaluationLoss` weighs it by its label tokens

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 3e-3)
        steps = int(self.trainer.estimated_stepping_batches)  # optimizer steps
        schedule = cosine_schedule(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def perplexity_alone(model: PreTrainedModel | PeftModel, held_back: list[Row]) -> float:
    """Returns the perplexity in this process, one row at a time."""
    counts = [int((row["labels"][1:] != -100).sum()) for row in held_back]
    losses = [float(model.eval()(**padded([row])).loss) for row in held_back]
    return math.exp(sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of the model to start from")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train only adapters, of this rank"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of the data; by default all")
    parser.add_argument("--output", type=Path, help="folder of the export, which is replaced")
    args = parser.parse_args()
    if args.lora and args.model is None:
        parser.error(
            "--lora needs --model: an export of adapters holds no base model, and a random one is lost"
        )
    args.output = args.output or Path("outputs/hugging_face", "adapter" if args.lora else "model")
    shutil.rmtree(args.output, ignore_errors=True)  # an export replaces nothing
    L.seed_everything(0, verbose=False)
    data = rows()[: args.rows]
    held_back, train = data[::10], [row for index, row in enumerate(data) if index % 10]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutomodelStrategy(label_shift=1),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_epochs=args.epochs,
        logger=False,
        callbacks=[
            EvaluationLoss(perplexity="{stage}_perplexity"),
            StepMonitor(),
            ModelCheckpoint(args.output.parent, "best", monitor="val_loss", enable_version_counter=False),
        ],
    )
    module = Writer(args.model, args.lora)
    loader = DataLoader(held_back, batch_size=4, collate_fn=padded)
    trainer.fit(module, DataLoader(train, batch_size=4, shuffle=True, collate_fn=padded), loader)
    trainer.validate(module, loader, ckpt_path="best")
    # On every rank: each holds a part. A tokenizer goes into the same folder, by its save_pretrained on rank
    # 0.
    export_hugging_face(module, args.output, adapter_only=bool(args.lora))
    if trainer.is_global_zero:
        alone = (
            PeftModel.from_pretrained(load(args.model), args.output) if args.lora else load(str(args.output))
        )
        print(f"\nPerplexity of {len(held_back)} held-back docstrings, a byte")
        print(f"  {trainer.callback_metrics['val_perplexity']:.5f} by two ranks in training")
        print(f"  {perplexity_alone(alone, held_back):.5f} by one process from {args.output}")


if __name__ == "__main__":
    main()

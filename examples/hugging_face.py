"""Fine-tunes a Hugging Face model, keeps the checkpoint with the best perplexity, and exports it for `from_pretrained`.

    python examples/hugging_face.py                                        # a small Llama with random weights
    python examples/hugging_face.py --model outputs/hugging_face/model --lora 8  # adapters on that exported model

The loss is the model's own: `label_shift=1` says that it drops the first label of each row. At the end the export is
loaded in one process, without this package, and its perplexity is printed beside the one that the ranks computed.
`finetune_smollm2.py` trains real weights.
"""

import argparse
import math
import shutil
from pathlib import Path

import lightning as L  # noqa: N812
import torch
from docstrings import IGNORE_INDEX, VOCABULARY_SIZE, DocstringData
from lightning.pytorch.callbacks import ModelCheckpoint
from packing import Document, document_of, padded
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_automodel import AutomodelStrategy, EvaluationLoss
from lightning_automodel.checkpoint import export_hugging_face


def load(model: Path | None) -> PreTrainedModel:
    """Loads a model in float32, or makes a small one with random weights."""
    if model is not None:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layers = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY_SIZE, **layers))


class Writer(L.LightningModule):
    """A causal language model, or adapters on one."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.model = load(args.model).train()
        if args.lora:
            self.model = get_peft_model(self.model, LoraConfig(r=args.lora, target_modules="all-linear"))

    def training_step(self, batch: Document, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    validation_step = training_step  # `EvaluationLoss` weighs it by its label tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 3e-3)


@torch.no_grad()
def perplexity_alone(args: argparse.Namespace, documents: list[Document]) -> float:
    """Loads the exported model, and computes its perplexity one document at a time."""
    model = PeftModel.from_pretrained(load(args.model), args.output) if args.lora else load(args.output)
    counts = [int((document["labels"][1:] != IGNORE_INDEX).sum()) for document in documents]
    losses = [float(model.eval()(**padded([document])).loss) for document in documents]
    return math.exp(sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model to start from")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train only adapters, of this rank")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="folder of the export, which is replaced")
    args = parser.parse_args()
    args.output = args.output or Path("outputs/hugging_face", "adapter" if args.lora else "model")
    shutil.rmtree(args.output, ignore_errors=True)
    L.seed_everything(0, verbose=False)
    data = DocstringData(num_val_examples=64)
    data.prepare_data()
    data.setup("fit")
    train, held_back = ([document_of(example) for example in part.examples] for part in (data.train_set, data.val_set))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutomodelStrategy(label_shift=1),
        accumulate_grad_batches=2,
        max_steps=args.max_steps,
        limit_train_batches=2 * args.max_steps,
        val_check_interval=args.max_steps,  # batches: twice
        logger=False,
        callbacks=[
            EvaluationLoss(perplexity="{stage}_perplexity"),
            ModelCheckpoint(args.output.parent, "best", monitor="val_loss", enable_version_counter=False),
        ],
    )
    loaders = [DataLoader(each, batch_size=4, shuffle=each is train, collate_fn=padded) for each in (train, held_back)]
    module = Writer(args)
    trainer.fit(module, *loaders)
    trainer.validate(module, loaders[1], ckpt_path="best")
    export_hugging_face(module, args.output, adapter_only=bool(args.lora))  # on every rank: each holds a shard
    if trainer.is_global_zero:
        print(f"\nPerplexity of {len(held_back)} held-back docstrings, a byte")
        print(f"  {trainer.callback_metrics['val_perplexity']:.5f} by two ranks in training")
        print(f"  {perplexity_alone(args, held_back):.5f} by one process from {args.output}")


if __name__ == "__main__":
    main()

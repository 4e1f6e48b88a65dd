"""Fine-tunes SmolLM2-135M-Instruct on whole files of the standard library, at lengths that would not fit otherwise.

    python examples/long_context.py
    python examples/long_context.py --length 8192 --max-steps 2
    python examples/long_context.py --plain  # for comparison: without the three things below

Three things make the sequences fit. Two ranks share each sequence and hold a slice of it
(`context_parallel_size=2`); the loss never holds all logits (`token_loss`); and the activations of each
block are computed again in the backward (`activation_checkpointing=True`). The gradients equal those of one
process that holds the whole sequence. At the end it prints the peak memory of a rank.
"""

import argparse
import resource
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from one_cycle import adamw_one_cycle
from smollm2 import load_model, load_tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy, token_loss

FOLDERS = ("", "asyncio", "email", "importlib", "json", "logging", "multiprocessing", "unittest", "xml/dom")
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class SourceFiles(L.LightningDataModule):
    """Files of the standard library that are at least `length` tokens long, cut there.

    Args:
        cache_dir: Folder of the unpacked model.
        length: Tokens of a sequence.
    """

    def __init__(self, cache_dir: Path, length: int) -> None:
        super().__init__()
        self.cache_dir = cache_dir
        self.length = length

    def setup(self, stage: str) -> None:
        tokenizer = load_tokenizer(self.cache_dir)
        library = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for folder in FOLDERS for path in sorted((library / folder).glob("*.py"))]
        # Encoding the short ones takes time.
        long = [path for path in paths if path.stat().st_size > 5 * self.length]
        self.files = [
            torch.tensor(tokens[: self.length + 1])
            for tokens in tokenizer([path.read_text(encoding="utf-8") for path in long], verbose=False)[
                "input_ids"
            ]
            if len(tokens) > self.length
        ]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.files, shuffle=True, collate_fn=collate)


def collate(files: list[Tensor]) -> dict[str, Tensor]:
    """`input_ids` and `labels`, both [1, s]; labels are shifted here."""
    (tokens,) = files
    return {"input_ids": tokens[None, :-1], "labels": tokens[None, 1:]}


class LongContextModel(L.LightningModule):
    """SmolLM2 with a loss that never holds all logits.

    Args:
        cache_dir: Folder of the unpacked model.
        keeps_logits: Whether it holds all of them after all, for comparison.
    """

    def __init__(self, cache_dir: Path, keeps_logits: bool) -> None:
        super().__init__()
        self.cache_dir = cache_dir
        self.keeps_logits = keeps_logits
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = load_model(self.cache_dir)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"]
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if self.keeps_logits:
            logits = self.model(**inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            n = (labels >= 0).sum()
        else:
            hidden = self.model.model(**inputs, use_cache=False).last_hidden_state
            loss, n = token_loss(hidden, self.model.lm_head, labels)
        return loss / n.clamp(min=1)

    def configure_optimizers(self) -> dict:
        return adamw_one_cycle(self, 1e-4)


class Progress(L.Callback):
    """Prints each optimizer step, and at the end the largest peak memory of a rank."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        step = trainer.strategy.last_step
        if trainer.is_global_zero:
            seconds = time.perf_counter() - self.started
            tokens = int(step.num_label_tokens)
            print(
                f"Step {trainer.global_step}: loss {float(step.loss):.3f}, {tokens:,} tokens, {seconds:.0f}"
                " s",
                flush=True,
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30)
        peak = trainer.strategy.reduce(peak, reduce_op="max")
        if trainer.is_global_zero:
            print(f"Most memory that a rank held: {float(peak):.1f} GiB", flush=True)


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0, verbose=False)
    strategy = AutomodelStrategy(
        context_parallel_size=1 if args.plain else args.devices, activation_checkpointing=not args.plain
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=strategy,
        accumulate_grad_batches=1,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        default_root_dir=args.output_dir,
        callbacks=[Progress()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LongContextModel(args.output_dir, args.plain), SourceFiles(args.output_dir, args.length))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, default=4096, help="tokens of a sequence, at most 8192 (%(default)s)"
    )
    parser.add_argument(
        "--plain", action="store_true", help="without the three things, to see what they save"
    )
    parser.add_argument("--devices", type=int, default=2, help="CPU processes (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=4, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/finetune_smollm2"), help="(%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Trains a tiny Qwen3 mixture of experts to write docstrings, its experts spread over two or four CPU processes.

    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --ranks 4 --expert-parallel-size 2  # each expert on two ranks

Each rank holds some of the experts, and each layer sends the tokens of all ranks to them: nothing in the
model's code says so, since Hugging Face's models have a plan for it. At the end the first steps are repeated
and compared with one process, which holds all experts and takes each window as one batch.
"""

import argparse
import logging
import warnings
from copy import deepcopy

import lightning as L  # noqa: N812
from docstrings import VOCABULARY_SIZE, DocstringData, DocstringDataset
from one_process import ACCUMULATE, Writer, draw_windows, relative_distance, train, train_alone, whole
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_automodel import AutomodelStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # that whole weights take two gathers
warnings.filterwarnings("ignore", ".*(LeafSpec|many workers|is not empty|no `val_dataloader`).*")

CONFIG = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


class MixtureWriter(Writer):
    """The writer of docstrings with another model: labels are the docstrings' bytes, so counts differ by rank."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(0, num_steps)
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))

    def forward(self, input_ids: Tensor) -> Tensor:
        # Padding is at the end, where a causal mask already hides it from every real position.
        logits: Tensor = self.model(input_ids, use_cache=False).logits
        return logits


def compare_first_steps(
    size: int, dataset: DocstringDataset, num_ranks: int, num_steps: int, rank: int
) -> None:
    """Train a few steps on the strategy and in one process, and print how far apart they are."""
    writer = MixtureWriter(num_steps)
    start = whole(writer.parameters())
    windows = draw_windows(0, num_steps, len(dataset), num_ranks)
    expected = train_alone(deepcopy(writer), dataset, windows)
    measured = train(
        AutomodelStrategy(expert_parallel_size=size), writer, dataset, windows, rank, measure=True
    )
    if rank == 0:
        print(
            f"The first {num_steps} steps once more, against one process that takes each window as one batch"
        )
        print(f"  gradients off by {max(measured.errors):.5%}")
        print(
            f"  weights off by   {relative_distance(measured.weights - start, expected - start):.5%} of"
            " their way"
        )


def main() -> None:
    args = parse_arguments()
    size = args.ranks if args.expert_parallel_size is None else args.expert_parallel_size
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=AutomodelStrategy(expert_parallel_size=size),
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        max_epochs=1000,  # max_steps decides
        limit_train_batches=args.max_steps * ACCUMULATE,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    writer = MixtureWriter(args.max_steps)
    in_all = sum(parameter.numel() for parameter in writer.parameters())
    in_experts = sum(p.numel() for name, p in writer.named_parameters() if "experts" in name)
    data = DocstringData()
    [before] = trainer.validate(writer, data, verbose=False)
    trainer.fit(writer, data)
    [after] = trainer.validate(writer, data, verbose=False)
    if trainer.is_global_zero:
        print(
            f"{in_all:,} parameters, {in_experts:,} of them in experts, of which each rank computes 1 /"
            f" {size}"
        )
        print(f"Loss on {len(data.val_set)} held-back functions, nats a byte")
        print(f"  step 0    {before['val/loss']:.3f}")
        print(f"  step {args.max_steps:<4} {after['val/loss']:.3f}")
    compare_first_steps(size, data.train_set, args.ranks, 3, trainer.global_rank)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--expert-parallel-size", type=int, help="ranks that each hold other experts (all of them)"
    )
    parser.add_argument("--max-steps", type=int, default=60, help="optimizer steps (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

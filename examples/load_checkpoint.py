"""Loads a checkpoint of two ranks in one process, without importing `lightning_automodel`.

    python examples/finetune_docstrings.py                                           # trains and saves
    python examples/load_checkpoint.py outputs/finetune_docstrings/step=120.ckpt

A checkpoint of a sharded model is a directory. `torch.distributed.checkpoint` fills a model from it in
place; its README.txt says what else can be done with it. The printed loss is on the held-back functions, and
equals the one that the training has printed.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from docstring_writer import DocstringWriter
from docstrings import DocstringData


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()

    writer = DocstringWriter()
    state = {"state_dict": writer.state_dict()}  # its tensors are the model's own: they are overwritten
    dcp.load(state, checkpoint_id=args.checkpoint, no_dist=True)
    assert "lightning_automodel" not in sys.modules

    data = DocstringData()
    data.prepare_data()
    data.setup("validate")
    losses, counts = zip(*(writer.token_loss(batch) for batch in data.val_dataloader()), strict=True)
    loss = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    print(f"Loss on {len(data.val_set)} held-back functions: {loss:.3f} nats a byte")


if __name__ == "__main__":
    main()

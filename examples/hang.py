"""Hangs on purpose, for `docs/debugging.md`: rank 0 waits in an all-gather, and rank 1 is already in its backward.

    python examples/hang.py                                            # ends by itself when the timeout has passed
    TORCH_DISTRIBUTED_DEBUG=DETAIL python examples/hang.py             # ends at once, and says why
    python examples/hang.py --flight-recorder                          # writes what `torchfrtrace` reads
    python examples/hang.py --debug-server 25999 --timeout 40          # meanwhile shows what every rank is doing

Everything is written below `outputs/hang`.
"""

import argparse
import os
import pickle
from datetime import timedelta
from pathlib import Path

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _dump_fr_trace  # with gloo, nothing else writes what was recorded
from torch.distributed.debug import start_debug_server
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy


class Model(L.LightningModule):
    """Two layers, and the mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        if batch_idx == 3 and self.trainer.is_global_zero:
            # The mistake: a collective on one rank only.
            print("loss on each rank:", self.all_gather(loss.detach()))
        return {"loss": loss, "num_label_tokens": torch.tensor(labels.numel())}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FlightRecorder(L.Callback):
    """On an exception, writes the newest collectives of this rank to `folder/rank_<rank>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups: dict[str, dict[str, str]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for group in (dist.group.WORLD, *trainer.strategy.device_mesh.get_all_groups()):
            ranks = str(dist.get_process_group_ranks(group))
            self.groups[group.group_name] = {
                "name": group.group_name,
                "desc": group.group_desc,
                "ranks": ranks,
            }

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        recorded = pickle.loads(_dump_fr_trace())
        recorded["pg_config"] = self.groups  # gloo records no names and ranks; `torchfrtrace` needs both
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank_{trainer.global_rank}").write_bytes(pickle.dumps(recorded))


class DebugServer(L.Callback):
    """Serves pages about all ranks at `port`, and writes their stacks to `folder` every two seconds."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self.folder = folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # torchrun sets it, Lightning's own launcher does not.
        os.environ.setdefault("RANK", str(trainer.global_rank))
        start_debug_server(
            self.port,
            start_method="spawn",
            dump_dir=str(self.folder),
            dump_interval=2,
            enabled_dumps={"stacks"},
        )


def main() -> None:
    args = parse_arguments()
    callbacks: list[L.Callback] = []
    if args.flight_recorder:
        callbacks.append(FlightRecorder(args.output_dir / "flight_recorder"))
    if args.debug_server is not None:
        callbacks.append(DebugServer(args.debug_server, args.output_dir / "stacks"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutomodelStrategy(timeout=timedelta(seconds=args.timeout)),
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader([(torch.randn(8), 0) for _ in range(64)], batch_size=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--timeout", type=float, default=10, help="seconds that a collective may wait (%(default)s)"
    )
    parser.add_argument(
        "--flight-recorder", action="store_true", help="write what was recorded, on an exception"
    )
    parser.add_argument(
        "--debug-server", type=int, metavar="PORT", help="start torch's debug server; 0: any free port"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/hang"), help="(%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

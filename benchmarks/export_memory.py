"""Peak memory and time of exports and consolidations, above what each process held before.

Two ranks train a step of a Llama with random weights, export it as training ends, and save a checkpoint.
Then the command line makes one file of that, in a process of its own. Of exports the peak is of memory that
the system cannot drop (`RssAnon`, looked at every few milliseconds); consolidations' is `VmHWM`, with mapped files.

    python benchmarks/export_memory.py --megabytes 2000 --output report.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from time import perf_counter, process_time

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import LightningEnvironment
from peak_memory import MALLOC
from report import describe_environment, publish, table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import AutomodelStrategy
from lightning_automodel.checkpoint import export, export_hugging_face

MEGABYTE = 1_000_000
WIDTH = 2048
VOCABULARY = 32_000
RANKS = 2
export.MAX_SHARD_SIZE = "500MB"

COMMAND = """
import json, sys
from time import perf_counter, process_time
import lightning_automodel.checkpoint.__main__ as command_line
from peak_memory import peak, start_peak

before = start_peak("cpu")
start, start_cpu = perf_counter(), process_time()
assert command_line.main(sys.argv[1:]) == 0
print(json.dumps([peak("cpu") - before, perf_counter() - start, process_time() - start_cpu]))
"""


class Module(pl.LightningModule):
    """Trains a step, then exports, and measures that."""

    def __init__(self, megabytes: int, folder: str) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 16}
        layer_bytes = 4 * 16 * WIDTH * WIDTH
        rest = megabytes * MEGABYTE - 2 * 4 * VOCABULARY * WIDTH
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=max(1, rest // layer_bytes), **sizes)
        self.model = LlamaForCausalLM(config)
        self.folder = folder
        self.measured: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor | int]:
        return {"loss": self.model(batch).logits.square().mean(), "num_label_tokens": 1}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        self.zero_grad()
        start = perf_counter()
        start_cpu = process_time()
        with AnonymousPeak() as peak:
            export_hugging_face(self, f"{self.folder}/live")
        self.measured = [peak.num_bytes, perf_counter() - start, process_time() - start_cpu]


class AnonymousPeak:
    """Context that measures how much the process's anonymous memory grows: `num_bytes`."""

    def __enter__(self) -> "AnonymousPeak":
        self._before = self._peak = _anonymous()
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._watcher.join()
        self.num_bytes = self._peak - self._before

    def _watch(self) -> None:
        while not self._has_ended.wait(0.005):
            self._peak = max(self._peak, _anonymous())


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def run(rank: int, folder: str, megabytes: int, results: "mp.SimpleQueue[object]") -> None:
    """One rank: train, export, save."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731", GLOO_SOCKET_IFNAME="lo")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Module(megabytes, folder)
    sizes = [each.numel() * each.element_size() for each in module.state_dict().values()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=AutomodelStrategy(),
        plugins=[LightningEnvironment()],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.arange(8).reshape(4, 2)))
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    results.put((rank, module.measured, sum(sizes), max(sizes)))


def measure(*arguments: str) -> list[float]:
    """Peak bytes, seconds and processor seconds of one command."""
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment["PYTHONPATH"] = path
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the model")
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: the folder for temporary files"
    )
    parser.add_argument("--output", type=Path, help="file for the report; default: standard output")
    arguments = parser.parse_args()
    os.environ.update(MALLOC)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run, (folder, arguments.megabytes, results), nprocs=RANKS)
        live = sorted(results.get() for _ in range(RANKS))
        measured = {f"export as training ends, rank {rank}": figures for rank, figures, _, _ in live}
        measured["consolidate"] = measure("consolidate", f"{folder}/run.ckpt", f"{folder}/one.ckpt")
    _, _, total, largest = live[0]
    rows = [
        [name, f"{num_bytes / MEGABYTE:.0f}", f"{num_bytes / largest:.2f}", f"{seconds:.1f}", f"{cpu:.1f}"]
        for name, (num_bytes, seconds, cpu) in measured.items()
    ]
    lines = [
        "# Peak memory of exports",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment().items()),
        f"- command: `python benchmarks/export_memory.py --megabytes {arguments.megabytes}`",
        f"- model: {total / MEGABYTE:.0f} MB in float32, largest tensor {largest / MEGABYTE:.0f} MB,"
        f" {RANKS} ranks",
        "",
        table(
            ["", "peak above the start, MB", "of the largest tensor", "seconds", "processor seconds"], rows
        ),
    ]
    publish("\n".join(lines), arguments.output)


if __name__ == "__main__":
    main()

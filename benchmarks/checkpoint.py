"""Speed of a save, what a save in the background costs the steps around it, and memory, on CPU ranks.

One run trains a model of which only the size matters. Between its steps it takes turns: each rank writes as
many raw bytes, a save that training waits for, a save in the background. Every turn ends when its files are
on disk, and they are removed before the next turn.

    python benchmarks/checkpoint.py --megabytes 1200 --rounds 6 --output report.md
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import LightningEnvironment
from report import describe_environment, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy

MEGABYTE = 1 << 20
BLOCK = 16 * MEGABYTE
WIDTH = 1024
QUIET_STEPS = 4
SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Layers(pl.LightningModule):
    """Square layers under AdamW: the state is three times the weights."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        layer_bytes = 3 * 4 * WIDTH * (WIDTH + 1)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) for _ in range(max(1, megabytes * MEGABYTE // layer_bytes))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor | int]:
        for layer in self.layers:
            batch = batch + layer(batch)
        return {"loss": batch.square().mean(), "num_label_tokens": 1}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Turns(pl.Callback):
    """Measures between the steps of a run, for some rounds, then stops it."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.raw: list[float] = []
        self.raw_cpu: list[float] = []
        self.at_once: list[float] = []
        self.in_background: list[float] = []
        self.slower: list[float] = []
        self.until_written: list[float] = []
        self.memory: dict[str, int] = {}
        self.state_bytes = 0
        self._stepped_at = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        if trainer.global_step == 1:
            self._measure_state(trainer)
        if trainer.global_step % (QUIET_STEPS + 1) or trainer.should_stop:
            return
        if len(self.raw) == self.rounds + 1:
            trainer.should_stop = True
            return
        self.raw.append(self._write_raw())
        self.at_once.append(self._save(trainer, in_background=False))
        self.in_background.append(self._save(trainer, in_background=True))

    def _measure_state(self, trainer: pl.Trainer) -> None:
        tensors = [*trainer.lightning_module.parameters()]
        tensors += [
            t for s in trainer.optimizers[0].state.values() for t in s.values() if isinstance(t, Tensor)
        ]
        self.state_bytes = sum(
            (t._local_tensor if hasattr(t, "_local_tensor") else t).nbytes for t in tensors
        )

    def _write_raw(self) -> float:
        path = self.folder / f"raw{dist.get_rank()}"
        block = memoryview(bytearray(os.urandom(MEGABYTE) * (BLOCK // MEGABYTE)))
        dist.barrier()
        start = perf_counter()
        start_cpu = process_time()
        with open(path, "wb", buffering=0) as file:
            for begin in range(0, self.state_bytes, BLOCK):
                file.write(block[: min(BLOCK, self.state_bytes - begin)])
            os.fsync(file.fileno())
        self.raw_cpu.append(process_time() - start_cpu)
        dist.barrier()
        seconds = perf_counter() - start
        path.unlink()
        return seconds

    def _save(self, trainer: pl.Trainer, in_background: bool) -> float:
        """Seconds that training waits for the call."""
        saver = trainer.strategy._saver
        path = self.folder / "saved.ckpt"
        saver._in_background = in_background
        with high_water() as used:
            dist.barrier()
            start = perf_counter()
            trainer.save_checkpoint(path)
            stall = perf_counter() - start
            if in_background:
                self.slower.append(self._train_beside(trainer, start))
        name = "save in the background" if in_background else "save"
        self.memory.setdefault(f"{name}, the first", used[0])
        self.memory[f"{name}, later"] = used[0]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()
        return stall

    def _train_beside(self, trainer: pl.Trainer, start: float) -> float:
        """How much longer forward and backward take until the save is on disk, compared with as many afterwards."""
        saver = trainer.strategy._saver
        seconds: list[float] = []
        while True:
            seconds.append(self._compute(trainer))
            done = torch.tensor(saver._pending.done(), dtype=torch.int32)
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                break
        self.until_written.append(perf_counter() - start)
        saver.poll()
        quiet = [self._compute(trainer) for _ in seconds]
        return max(0.0, sum(seconds) - sum(quiet))

    def _compute(self, trainer: pl.Trainer) -> float:
        """Seconds of one forward and backward, as a step of training has them."""
        start = perf_counter()
        module = trainer.lightning_module
        loss = module.training_step(torch.ones(8, WIDTH), 0)["loss"]
        loss.backward()
        module.zero_grad()
        return perf_counter() - start


@contextmanager
def high_water() -> Iterator[list[int]]:
    """Gives a list that holds, after the block, the bytes by which this process grew at most inside it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    used = [0]
    yield used
    used[0] = _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _trainer(strategy: AutomodelStrategy, devices: int, **kwargs: object) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        plugins=[LightningEnvironment()],
        max_epochs=-1,
        **SILENT,
        **kwargs,
    )


def run(rank: int, folder: str, ranks: int, megabytes: int, rounds: int, results: object) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    data = DataLoader([torch.ones(8, WIDTH)] * 10_000, batch_size=None)
    turns = Turns(Path(folder), rounds)
    trainer = _trainer(AutomodelStrategy(), ranks, callbacks=[turns])
    module = Layers(megabytes)
    trainer.fit(module, data)
    path = Path(folder) / "loaded.ckpt"
    trainer.save_checkpoint(path)
    for name, options in {"load": {}, "load as DDP (resharded)": {"data_parallel": "ddp"}}.items():
        fresh = Layers(megabytes)
        with high_water() as used:
            _trainer(AutomodelStrategy(**options), ranks, limit_val_batches=1).validate(
                fresh, data, ckpt_path=path, verbose=False
            )
        turns.memory[name] = used[0]
        del fresh
    if rank == 0:
        results.put(
            (
                turns.state_bytes,
                turns.raw,
                turns.raw_cpu,
                turns.at_once,
                turns.in_background,
                turns.slower,
                turns.until_written,
                turns.memory,
            )
        )


def consolidate(path: Path) -> int:
    """Peak bytes of the command line's process while it makes one file, above those of an idle one.

    Mapped temporary files count, though the system can evict them from memory.
    """
    measure = (
        "import sys, resource, runpy; import lightning_automodel.checkpoint.__main__ as m;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "m.main(sys.argv[1:]);"
        "print('HIGH', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)"
    )
    command = [sys.executable, "-c", measure, "consolidate", str(path), str(path.with_name("one.ckpt"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split("HIGH")[1])


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=1200, help="state of model and optimizer, all ranks together"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="with one per core, background saves compete for it"
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind, after one to warm up")
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: the folder for temporary files"
    )
    parser.add_argument("--output", type=Path, help="file for the report; default: standard output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(
            run,
            (folder, arguments.ranks, arguments.megabytes, arguments.rounds, results),
            nprocs=arguments.ranks,
        )
        state, raw, raw_cpu, at_once, in_background, slower, until_written, memory = results.get()
        memory["consolidate (one process)"] = consolidate(Path(folder) / "loaded.ckpt")
    raw, raw_cpu, at_once, in_background, slower = (
        x[1:] for x in (raw, raw_cpu, at_once, in_background, slower)
    )
    speed = [arguments.ranks * state / seconds / 1e6 for seconds in raw]
    rows = [
        ["raw writes, all ranks", f"{median(raw):.2f}", f"{median(speed):.0f}", "1"],
        [
            "processor time of a rank's raw writes",
            f"{median(raw_cpu):.2f}",
            "",
            _ratios([c / s for c, s in zip(raw_cpu, at_once, strict=True)]) + " of the save's",
        ],
        [
            "save",
            f"{median(at_once):.2f}",
            f"{median(arguments.ranks * state / s / 1e6 for s in at_once):.0f}",
            _ratios([r / s for r, s in zip(raw, at_once, strict=True)]),
        ],
        [
            "save in the background: the call",
            f"{median(in_background):.3f}",
            "",
            _ratios([b / s for b, s in zip(in_background, at_once, strict=True)]) + " of the save's",
        ],
        [
            "save in the background: steps beside it, longer by",
            f"{median(slower):.3f}",
            "",
            _ratios([b / s for b, s in zip(slower, at_once, strict=True)]) + " of the save's",
        ],
        ["save in the background: until on disk", f"{median(until_written[1:]):.2f}", "", ""],
    ]
    text = "\n\n".join(
        [
            "\n".join(f"- {name}: {value}" for name, value in describe_environment().items()),
            f"`{shlex.join(['python', *sys.argv])}`",
            f"State: {arguments.ranks * state / 1e6:.0f} MB on {arguments.ranks} rank(s);"
            f" {len(raw)} rounds after one to warm up.",
            table(["what", "seconds (median)", "MB/s", "ratio within a round, median (min to max)"], rows),
            table(
                ["what", "most memory above what was there, MB on rank 0", "of the rank's own state"],
                [[name, f"{used / 1e6:.0f}", f"{used / state:.2f}"] for name, used in memory.items()],
            ),
        ]
    )
    arguments.output.write_text(text + "\n") if arguments.output else print(text)


def _ratios(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()

"""What a user's program does, for tests of how its processes come about: it trains, and writes what came back.

The program runs in a process that is forked from one that has imported everything, so that it starts at
once, or as a script, which takes seconds for each rank. The processes that the strategy starts come about as
they do for a user.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_automodel import AutomodelStrategy
from tests.processes import NOT_FROM_OUTSIDE, ROOT, forked
from tests.trainer import exactness
from tests.trainer.exactness import SILENT, Batch, TinyDecoder, full_weights, micro_batches
from tests.trainer.plain import train_model_plainly
from tests.trainer.runs import CASE, LabelledModule, mean_loss

ACCUMULATE = 3
FAULT_AT_STEP = 3
FAILING_RANK = 1
PATIENCE_S = 250.0
TIMEOUT_S = 20.0
SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "accumulate_grad_batches": ACCUMULATE,
    "use_distributed_sampler": False,
    **SILENT,
}
"""Of every Trainer here."""


class Launched(LabelledModule):
    """Brings each rank its own data, and meets `fault` on one of them; ranks note their process ids in `folder`."""

    def __init__(
        self, folder: Path, fault: str | None = None, repeat: int = 1, pause_s: float = 0.0
    ) -> None:
        super().__init__()
        self.folder = folder
        self.fault = fault
        self.repeat = repeat
        self.pause_s = pause_s
        self.micro_batches = SumMetric()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(micro_batches(CASE)[self.global_rank] * self.repeat, batch_size=None)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(micro_batches(CASE)[self.global_rank], batch_size=None)

    def on_train_start(self) -> None:
        (self.folder / f"rank{self.global_rank}.pid").write_text(str(os.getpid()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.fault and batch_idx >= FAULT_AT_STEP and self.global_rank == FAILING_RANK:
            happen(self.fault)
        if batch_idx == FAULT_AT_STEP + 1:
            (self.folder / f"rank{self.global_rank}.on").touch()
        time.sleep(self.pause_s)
        use_threads()
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, batch_size=1, sync_dist=True)
        self.micro_batches.update(1)
        self.log("micro_batches", self.micro_batches, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss = mean_loss(self.model, batch, "sum")
        self.log("test_loss", loss, on_epoch=True, reduce_fx="sum", sync_dist=True)


def happen(fault: str) -> None:
    if fault == "slow":
        time.sleep(0.3)
        return
    if fault == "exception":
        raise ValueError("no labels here")
    if fault == "finish":
        sys.exit(0)
    if fault == "exit":
        sys.exit(3)
    if fault == "leave":
        os._exit(0)
    os.kill(os.getpid(), signal.Signals[fault])


def use_threads() -> None:
    """Compute what torch splits over its threads, if it has several."""
    torch.ones(100_000).exp()


def make_trainer(folder: Path, **options: Any) -> pl.Trainer:
    """A Trainer of two ranks; further options are the strategy's."""
    return pl.Trainer(
        strategy=AutomodelStrategy(**{"timeout": TIMEOUT_S / 60, **options}),
        devices=2,
        callbacks=[ModelCheckpoint(folder, monitor="loss", filename="best")],
        **{**SETTINGS, "enable_checkpointing": True},
    )


def fit_as_rank(module: Launched, options: dict[str, Any], **settings: Any) -> pl.Trainer:
    """Train in a process that something else has started; the first rank writes the whole weights."""
    strategy = AutomodelStrategy(timeout=1, **options)
    trainer = pl.Trainer(strategy=strategy, default_root_dir=module.folder, **SETTINGS, **settings)
    trainer.fit(module)
    weights = full_weights(module.model)
    if trainer.is_global_zero:
        torch.save(weights, module.folder / "weights.pt")
    return trainer


def is_launching() -> bool:
    """Whether this process is the one that the user has started."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def train(folder: Path, engines: Iterable[str], tests: bool, **options: Any) -> None:
    """Train under each engine; write what the launching process has of it."""
    found = {}
    torch.set_num_threads(2)
    use_threads()
    for index, engine in enumerate(engines):
        module = Launched(folder)
        trainer = make_trainer(folder / engine, data_parallel=engine, **options)
        trainer.fit(module)
        found[engine] = {
            "weights": full_weights(module.model),
            "loss": float(trainer.callback_metrics["loss"]),
            "micro_batches": float(trainer.callback_metrics["micro_batches"]),
            "best_model_path": trainer.checkpoint_callback.best_model_path,
        }
        if tests and index == 0:
            found[engine]["tested"] = _test(module, trainer)
            found[engine]["metrics"] = list(trainer.callback_metrics)
    if is_launching():
        torch.save(found, folder / "found.pt")


def _test(module: Launched, trainer: pl.Trainer) -> list[float]:
    """Loss of what the module holds, and of what was saved."""
    of_module = trainer.test(module, verbose=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return [
        found[0]["test_loss"] for found in (of_module, trainer.test(module, ckpt_path="best", verbose=False))
    ]


def fail(folder: Path, fault: str | None = None, **options: Any) -> None:
    """Train for long, unless a fault ends it; write the error that this process gets."""
    module = Launched(folder, fault, repeat=100000)
    trainer = make_trainer(folder, **options)
    if fault == "exception":
        trainer.callbacks.append(OnExceptionCheckpoint(folder, "raised"))
    try:
        trainer.fit(module)
    except BaseException as error:
        if is_launching():
            (folder / "error").write_text(f"{type(error).__name__}: {error}\n{error.__cause__}")
        raise


def train_and_fail(folder: Path, fault: str, **options: Any) -> None:
    """Train exactly, and then for long, in processes that exist by then."""
    train(folder, ["fsdp2"], tests=False, **options)
    fail(folder, fault, **options)


def tune(folder: Path) -> None:
    """Look for a learning rate in forked ranks; write the error."""
    module = Launched(folder, repeat=50)
    trainer = make_trainer(folder, start_method="fork")
    module.lr = 0.1
    try:
        Tuner(trainer).lr_find(module, num_training=4)
    except ProcessRaisedException as error:
        (folder / "error").write_text(str(error))


def reference() -> tuple[dict[str, torch.Tensor], float]:
    """Weights of one process that trains on whole windows, and its summed loss on the same data afterwards."""
    model = TinyDecoder(CASE.seed).double()
    train_model_plainly(model, ACCUMULATE)
    with torch.no_grad():
        loss = sum(mean_loss(model, batch, "sum").item() for rank in micro_batches(CASE) for batch in rank)
    return full_weights(model), loss


def assert_exact(found: dict[str, torch.Tensor]) -> None:
    """These are the weights of one process."""
    exactness.assert_exact([found], reference()[0])


def _as_program(
    function: Callable[..., None],
    folder: Path,
    options: dict[str, Any],
    terminal: str | None,
    is_script: bool,
) -> None:
    if terminal is not None:
        os.setsid()  # so that the terminal that is opened next becomes this program's
    # A terminal that is only written to would not.
    output = os.open(terminal or folder / "log", os.O_RDWR | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, closefd=False) for descriptor in (1, 2))
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    torch.set_num_threads(1)
    for name in NOT_FROM_OUTSIDE:
        os.environ.pop(name, None)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    if is_script:
        # What the other ranks run anew; this one has imported everything.
        (folder / "script.py").write_text(SCRIPT)
        sys.argv = ["script.py", function.__name__, json.dumps(options)]
    function(folder, **options)


@contextlib.contextmanager
def program(
    function: Callable[..., None],
    folder: Path,
    terminal: str | None = None,
    *,
    is_script: bool = False,
    **options: Any,
) -> Iterator[BaseProcess]:
    """Run `function(folder, **options)` as a program, or as a script that its ranks run too; killed at the end."""
    context = forked()
    process = context.Process(target=_as_program, args=(function, folder, options, terminal, is_script))
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def run(function: Callable[..., None], folder: Path, **options: Any) -> int | None:
    """Exit status of the program; None if it had to be killed."""
    with program(function, folder, **options) as process:
        process.join(PATIENCE_S)
        return process.exitcode


Runs = dict[tuple[str, str], Future]
"""By parameter and value: what came of a program, and its folder."""


def start_selected(
    request: pytest.FixtureRequest,
    factory: pytest.TempPathFactory,
    what: Mapping[str, Callable[[Path, str], Any]],
    at_once: int = 3,
) -> Iterator[Runs]:
    """Run `what[parameter](folder, value)` for those that the selected tests of a file have, some at once."""

    def start(parameter: str, value: str) -> tuple[Any, Path]:
        folder = factory.mktemp("program")
        return what[parameter](folder, value), folder

    items = [item for item in request.session.items if item.path == request.path]
    cases = [case for item in items if hasattr(item, "callspec") for case in item.callspec.params.items()]
    with ThreadPoolExecutor(max_workers=at_once) as executor:
        yield {case: executor.submit(start, *case) for case in cases if case[0] in what}


SCRIPT = """
import json, sys
from pathlib import Path
options = json.loads(sys.argv[2])
if options.get("fault") == "broken":
    raise ImportError("no such module")
from tests.launch import launched
if __name__ == "__main__":
    launched.torch.set_num_threads(1)
    getattr(launched, sys.argv[1])(Path.cwd(), **options)
"""


class Terminal:
    """A terminal in which one program runs, which opens `name`, with all that it prints."""

    def __init__(self) -> None:
        self._here, self.slave = os.openpty()
        self.name = os.ttyname(self.slave)
        self._printed = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # once nobody has it open any more
            while data := os.read(self._here, 65536):
                self._printed += data

    def press_ctrl_c(self) -> None:
        """Interrupt all processes in its foreground."""
        os.write(self._here, b"\x03")

    def close(self) -> str:
        """What was printed until every process has left it."""
        os.close(self.slave)
        self._reader.join(PATIENCE_S)
        os.close(self._here)
        return self._printed.decode().replace("\r\n", "\n")


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; TimeoutError if it does not within `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)


def ranks(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("rank*.pid")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(folder: Path) -> None:
    assert len(ranks(folder)) == 2
    assert not any(is_running(pid) for pid in ranks(folder))

"""The checks of a cluster's first hour, each a process of its own on every rank: `first_hour.py` starts them.

They print JSON lines, which the driver reads, and judge nothing.

    python benchmarks/first_hour_checks.py CHECK '{"device": "cpu", ...}'    # under torchrun's variables
"""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

MEBIBYTE = 1 << 20
FAULT_STEP = 3
CHOICES = ("defer_fsdp_grad_sync", "reshard_during_accumulation")  # of "auto", which the plan follows
STEPS = 3  # before the save, and after it
HEARTBEAT_S = 30.0  # after which a silent rank is missed; by default 120


@dataclass(frozen=True)
class Place:
    """Where this rank is."""

    rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Place":
        """As torchrun tells it."""
        if "RANK" not in os.environ:
            sys.exit("Start this by torchrun, as docs/first_hour.md shows: it sets RANK and WORLD_SIZE.")
        return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))


def say(**values: Any) -> None:
    """Print one JSON line, which the driver reads."""
    print(json.dumps(values), flush=True)


def links(arguments: dict[str, Any]) -> None:
    """Versions, and rates by torch alone: all-reduces in a node, across nodes and over all ranks; pairs of ranks."""
    place = Place.from_environment()
    device = arguments["device"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=collective_timeout(arguments["timeout"]))
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timeout)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "-"
    say(
        host=socket.gethostname(),
        versions={
            **{name: version(name) for name in ("torch", "lightning")},
            **{"python": sys.version.split()[0], "CUDA": str(torch.version.cuda), "NCCL": nccl},
        },
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
    )
    size = (256 if device == "cuda" else 4) * MEBIBYTE
    own = place.local_world_size
    nodes = [list(range(start, start + own)) for start in range(0, place.world_size, own)]
    between = [list(ranks) for ranks in zip(*nodes, strict=True)]
    groups = {"all": [list(range(place.world_size))], "node": nodes, "between": between}
    rates = {}
    for name, ranks in groups.items():
        if len(ranks[0]) == 1:
            continue
        made, _ = dist.new_subgroups_by_enumeration(ranks)
        tensor = torch.ones(size // 4, device=device)
        for repeat in range(4):
            if repeat == 1:  # the first connects
                _synchronize(device)
                started = time.perf_counter()
            dist.all_reduce(tensor, group=made)
        _synchronize(device)
        seconds = (time.perf_counter() - started) / 3
        n = len(ranks[0])
        rates[name] = 2 * (n - 1) / n * size / seconds / 1e9
    say(rates=rates)
    # The first two ranks of each node, and the ranks of each two nodes: all-reduces may hide one slow link.
    say(
        pairs_in_node=_pair_rates(device, [[(ranks[0], ranks[1]) for ranks in nodes if own > 1]]),
        pairs_of_nodes=_pair_rates(device, pairs_of_nodes(nodes)),
    )
    dist.destroy_process_group()


def _rounds(ranks: list[int]) -> list[list[tuple[int, int]]]:
    """Each two of ``ranks`` once, in rounds in which each is in one pair at most."""
    players = [*ranks, *([-1] if len(ranks) % 2 else [])]
    rounds = []
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], players[: half - 1 : -1], strict=True)
        rounds.append([pair for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def pairs_of_nodes(nodes: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Rounds of pairs, so that each rank meets its like on every other node, and all ranks of a node send at once."""
    rounds = []
    for met in _rounds(list(range(len(nodes)))):
        pairs: list[tuple[int, int]] = []
        for one, other in met:
            pairs += zip(nodes[one], nodes[other], strict=True)
        rounds.append(pairs)
    return rounds


def _pair_rates(device: str, rounds: list[list[tuple[int, int]]]) -> list[tuple[int, int, int, float]]:
    """Of each of this rank's pairs, for each size: both ranks, bytes, and GB/s in each direction while both send.

    A collective over all ranks. The pairs of a round exchange at the same time.
    """
    rank = dist.get_rank()
    sizes = [size * MEBIBYTE for size in ((1, 16, 256) if device == "cuda" else (1, 4))]
    tensors = [torch.ones(max(sizes) // 4, device=device) for _ in range(2)]
    found = []
    for pairs in rounds:
        own = next((pair for pair in pairs if rank in pair), None)
        dist.all_reduce(torch.ones(1, device=device))  # all begin together
        _synchronize(device)
        for size in sizes if own else []:
            sent, received = (tensor[: size // 4] for tensor in tensors)
            other = sum(own) - rank
            for repeat in range(4):
                if repeat == 1:  # the first connects
                    _synchronize(device)
                    started = time.perf_counter()
                exchange = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
                for work in dist.batch_isend_irecv(exchange):
                    work.wait()
            _synchronize(device)
            seconds = (time.perf_counter() - started) / 3
            found.append((*own, size, size / seconds / 1e9))
    return found


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Tokens(nn.Module):
    """A model of next to nothing, with blocks that FSDP2 shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden)


def ragged_batches(rank: int, number: int) -> list[dict[str, Tensor]]:
    """Batches of a rank: rows and lengths that differ between ranks, and positions without a label."""
    batches = []
    for index in range(number):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        shape = tuple(torch.randint(1, 9, (2,), generator=generator).tolist())
        ids, labels = (torch.randint(32, shape, generator=generator) for _ in range(2))
        labels[torch.rand(shape, generator=generator) < 0.4] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum of the losses of a batch."""
    return F.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )


def make_module(hook: Callable[[Any, int], None] | None = None) -> Any:
    """A LightningModule of `Tokens`, which calls ``hook`` at the start of each step."""
    import lightning as L  # noqa: N812

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Tokens()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if hook is not None:
                hook(self, batch_idx)
            return token_losses(self.model, batch) / (batch["labels"] != -100).sum().clamp(min=1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def collective_timeout(timeout: float) -> float:
    """Half of the seconds that the driver waits, so that a hang is named before its processes are killed."""
    return timeout / 2


def make_trainer(arguments: dict[str, Any], **options: Any) -> Any:
    """A Trainer of all ranks, with the options of the strategy under ``strategy``."""
    import lightning as L  # noqa: N812

    from lightning_automodel import AutomodelStrategy

    place = Place.from_environment()
    strategy = AutomodelStrategy(
        timeout=collective_timeout(arguments["timeout"]) / 60, **options.pop("strategy", {})
    )
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(
        accelerator="gpu" if arguments["device"] == "cuda" else "cpu",
        devices=place.local_world_size,
        num_nodes=place.world_size // place.local_world_size,
        strategy=strategy,
        use_distributed_sampler=False,
        **{**dict.fromkeys(off, False), **options},
    )


def loader(batches: list[dict[str, Tensor]]) -> Any:
    """A loader of whole batches."""
    from torch.utils.data import DataLoader

    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def whole(parameter: Tensor) -> Tensor:
    """A parameter's full value on the host. A collective where it is sharded."""
    if isinstance(parameter, dist.tensor.DTensor):
        parameter = parameter.full_tensor()
    return parameter.detach().cpu()


def exact(arguments: dict[str, Any]) -> None:
    """Weights of float64 after two windows of two micro-batches, beside those of one process with all the data."""
    place = Place.from_environment()
    layouts: dict[str, dict[str, Any]] = {"fsdp2": {}, "ddp": {"data_parallel": "ddp"}}
    if place.world_size >= 4 and place.world_size % 2 == 0:
        layouts["hsdp"] = {"data_parallel_replicate_size": 2}
    expected = Tokens().double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 2):
        window = [
            batch for rank in range(place.world_size) for batch in ragged_batches(rank, 4)[start : start + 2]
        ]
        optimizer.zero_grad()
        count = sum(int((batch["labels"] != -100).sum()) for batch in window)
        (torch.stack([token_losses(expected, batch) for batch in window]).sum() / count).backward()
        optimizer.step()
    for name, strategy in layouts.items():
        module = make_module()
        trainer = make_trainer(
            arguments, strategy=strategy, precision="64-true", accumulate_grad_batches=2, max_epochs=1
        )
        trainer.fit(module, loader(ragged_batches(place.rank, 4)))
        own, right, start = (
            torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
            for model in (module.model, expected, Tokens().double())
        )
        say(**{name: float((own - right).norm() / (right - start).norm())})


def speed(arguments: dict[str, Any]) -> None:
    """Seconds, memory, losses and first gradients of a Llama by one way; see `llama.py`."""
    import llama

    class HourMeter(llama.Meter):
        """Reads no number of the device before the last step, which would have to wait for it."""

        counts_collectives = False

        def __init__(self, case: llama.Case) -> None:
            super().__init__(case)
            self.clock = time.perf_counter
            self.totals: list[Tensor] = []
            self.counts: list[Tensor] = []
            self.squares: Tensor | None = None
            self.marks: list[Any] = []

        def see_losses(self, total: Tensor, count: Tensor) -> None:
            self.totals.append(total.double())
            self.counts.append(count.double())

        def see_gradients(self, model: nn.Module) -> None:
            if self.squares is None:  # in the first step, where all ways have the same weights
                self.squares = squared_norms(model)

        def start(self) -> None:
            say(began=time.time())
            if self.case.way == "automodel":
                described = self.strategy.describe()
                say(chosen={name: described[name] for name in CHOICES})
            super().start()
            self.mark()

        def mark(self) -> None:
            if self.case.device == "cuda":
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self.marks.append(event)
            else:
                self.marks.append(time.perf_counter())

        def end_step(self) -> None:
            if self.marks:
                self.mark()

        def stop(self) -> None:
            super().stop()
            totals = torch.stack(self.totals).view(-1, self.case.accumulate).sum(1)
            counts = torch.stack(self.counts).view(-1, self.case.accumulate).sum(1)
            assert self.squares is not None
            for tensor in (totals, counts, self.squares) if self.case.ranks > 1 else ():
                dist.all_reduce(tensor)
            say(
                losses=(totals / counts).tolist(),
                norms=self.squares.sqrt().tolist(),
                steps=[_seconds(*each) for each in pairwise(self.marks)],
            )

    llama.run(llama.Case.from_fields(arguments["case"]), HourMeter)


def _seconds(start: Any, end: Any) -> float:
    """Between two events of CUDA, or two times."""
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1000


def squared_norms(model: nn.Module) -> Tensor:
    """Of this rank's part of each parameter's gradient, whose sum over ranks is that of the whole: [parameters]."""
    squares = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            squares.append(torch.zeros((), dtype=torch.float64, device=parameter.device))
            continue
        if isinstance(gradient, dist.tensor.DTensor):
            gradient = gradient.to_local()
        squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
    return torch.stack(squares)


def fault(arguments: dict[str, Any]) -> None:
    """A run whose last rank gets a signal within a step."""
    place = Place.from_environment()

    def at_step(module: Any, index: int) -> None:
        say(step=index)
        if index == FAULT_STEP and place.rank == place.world_size - 1:
            say(signalled=time.time())
            os.kill(os.getpid(), getattr(signal, arguments["way"]))
        time.sleep(0.05)

    module = make_module(at_step)
    trainer = make_trainer(arguments, strategy={"heartbeat_timeout": HEARTBEAT_S / 60}, max_epochs=1)
    try:
        trainer.fit(module, loader(ragged_batches(place.rank, 10_000)))
    finally:
        say(stopped=trainer.global_step, left=time.time())


def digest(tensors: Iterable[Tensor]) -> list[float]:
    """Sums of all whole tensors. A collective."""
    sums = []
    for tensor in tensors:
        whole_tensor = tensor.detach()
        if isinstance(whole_tensor, dist.tensor.DTensor):
            whole_tensor = whole_tensor.full_tensor()
        sums.append(float(whole_tensor.sum(dtype=torch.float64)))
    return sums


def optimizer_tensors(trainer: Any) -> list[Tensor]:
    """The state of all optimizers, as moments, in an order that all ranks share."""
    found = []
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                found += [torch.as_tensor(state[name]) for name in sorted(state)]
    return found


def save(arguments: dict[str, Any]) -> None:
    """Train, and save."""
    module, trainer, path, data = _resumable(arguments, max_epochs=1)
    trainer.fit(module, data)
    say(weights=digest(module.parameters()), optimizer=digest(optimizer_tensors(trainer)))
    started = time.perf_counter()
    trainer.save_checkpoint(path)
    saved_s = time.perf_counter() - started
    files = [file for file in (path, *path.rglob("*")) if file.is_file()]  # one rank saves a file
    say(saved_s=saved_s, mebibytes=sum(file.stat().st_size for file in files) / MEBIBYTE)


def resume(arguments: dict[str, Any]) -> None:
    """Load on fewer ranks, and train on."""
    import lightning as L  # noqa: N812

    started = time.perf_counter()

    class Compares(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loaded_s = time.perf_counter() - started
            weights = digest(pl_module.parameters())
            say(loaded_s=loaded_s, weights=weights, optimizer=digest(optimizer_tensors(trainer)))

    module, trainer, path, data = _resumable(arguments, max_epochs=2, callbacks=[Compares()])
    trainer.fit(module, data, ckpt_path=path, weights_only=False)
    say(step=trainer.global_step, finite=all(map(math.isfinite, digest(module.parameters()))))


def _resumable(arguments: dict[str, Any], **options: Any) -> tuple[Any, Any, Path, Any]:
    import llama

    case = llama.Case.from_fields(arguments["case"])
    llama.torch.set_num_threads(1)
    trainer = make_trainer(arguments, precision=case.trainer_precision, limit_train_batches=STEPS, **options)
    return llama.LlamaModule(case), trainer, Path(arguments["output"]) / "checkpoint.ckpt", case.batches()


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "links": links,
    "exact": exact,
    "speed": speed,
    "fault": fault,
    "save": save,
    "resume": resume,
}


if __name__ == "__main__":
    CHECKS[sys.argv[1]](json.loads(sys.argv[2]))

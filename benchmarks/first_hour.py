"""A cluster's first hour: on any number of ranks, each check with what must be seen; docs/first_hour.md.

torchrun starts one of these for each rank, on one node or on several. It starts each check in a process of its
own, so that a rank that is killed or hangs ends its check alone, and the next one follows. The first rank writes
`report.md` into the output folder, which all nodes should see, after each check.

    torchrun --standalone --nproc-per-node 8 benchmarks/first_hour.py --output first_hour
    torchrun --standalone --nproc-per-node 8 benchmarks/first_hour.py --output dry --device cpu    # without a GPU
"""

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from report import describe_environment, table
from torch import Tensor, nn

MEBIBYTE = 1 << 20
EXACT = 1e-12  # distance of float64 weights from one process, as a share of how far training has moved them
FAULT_STEP = 3
LEAVE_S = 60.0  # within which all ranks must have left after one was killed
LINKS = {
    "node": "within a node",
    "between": "between nodes, each rank with its like",
    "all": "over all ranks",
}
MEMORY_RATIO = 1.15  # of the plan, plus what contexts take
STEPS = 3  # before the save, and after it


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


@dataclass(frozen=True)
class Ended:
    """How a rank's process of a check has ended, its JSON lines as one mapping, and other lines of it."""

    rank: int
    status: int
    started: float
    ended: float
    said: dict[str, Any]
    output: str


@dataclass(frozen=True)
class Row:
    """A line of the report. ``is_right`` is None where nothing is judged, as times of ranks that share few cores."""

    check: str
    expected: str
    seen: str
    is_right: bool | None

    def cells(self) -> list[str]:
        """For the table."""
        verdict = {True: "yes", False: "**no**", None: "not judged"}[self.is_right]
        return [self.check, self.expected, self.seen, verdict]


class Driver:
    """Runs checks on this rank, beside those of the other ranks: each check is a meeting of all of them in a store."""

    def __init__(self, place: Place, args: argparse.Namespace) -> None:
        self.place = place
        self.args = args
        self.is_judged = args.device == "cuda"  # by time and memory
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=place.rank == 0 and not is_hosted,
            timeout=timedelta(seconds=2 * args.timeout),
        )

    def run(self, check: str, num_ranks: int, **arguments: Any) -> list[Ended]:
        """Run ``check`` of `CHECKS` on the first ``num_ranks``, and tell how they ended. All drivers call it."""
        key = f"first_hour/{check}/{arguments.get('way', '')}"
        if self.place.rank == 0:
            self.store.set(f"{key}/port", str(_free_port()))
        port = self.store.get(f"{key}/port").decode()
        if self.place.rank < num_ranks:
            ended = self._run_own(check, num_ranks, port, arguments)
            self.store.set(f"{key}/{self.place.rank}", json.dumps(asdict(ended)))
        found = [Ended(**json.loads(self.store.get(f"{key}/{rank}"))) for rank in range(num_ranks)]
        return found

    def _run_own(self, check: str, num_ranks: int, port: str, arguments: dict[str, Any]) -> Ended:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        environment["LOCAL_WORLD_SIZE"] = str(min(num_ranks, self.place.local_world_size))
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        described = {**vars(self.args), "output": str(self.args.output), **arguments}
        command = [sys.executable, __file__, "--child", check, json.dumps(described)]
        log = self.args.output / f"{check}{arguments.get('way', '')}.rank{self.place.rank}.log"
        started = time.time()
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            try:
                status = process.wait(self.args.timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = 124
        ended = time.time()
        said: dict[str, Any] = {}
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith('{"'):
                said |= json.loads(line)
        # Stacks may follow the line that names a rank.
        names = [line for line in dict.fromkeys(lines) if re.search(r"rank \d+ on ", line)]
        output = "\n".join([*names[:10], *lines[-10:]])
        return Ended(self.place.rank, status, started, ended, said, output[-4000:])


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def say(**values: Any) -> None:
    """Print one JSON line, which the driver reads."""
    print(json.dumps(values), flush=True)


# --- What runs in processes of its own --------------------------------------------------------------------------------


def links(arguments: dict[str, Any]) -> None:
    """Versions of this rank; seconds of an all-reduce in its node, across nodes and over all ranks, by torch alone."""
    place = Place.from_environment()
    device = arguments["device"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
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
    dist.destroy_process_group()


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


def make_trainer(arguments: dict[str, Any], **options: Any) -> Any:
    """A Trainer of all ranks, with the options of the strategy under ``strategy``."""
    import lightning as L  # noqa: N812

    from lightning_automodel import AutomodelStrategy

    place = Place.from_environment()
    strategy = AutomodelStrategy(timeout=arguments["timeout"] / 60, **options.pop("strategy", {}))
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
    """Seconds and memory of a step of a Llama by one way; see `llama.py`."""
    import llama

    class WallMeter(llama.Meter):
        def __init__(self, case: llama.Case) -> None:
            super().__init__(case)
            self.clock = time.perf_counter

        def start(self) -> None:
            say(began=time.time())
            super().start()

    llama.run(llama.Case.from_fields(arguments["case"]), WallMeter)


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
    trainer = make_trainer(arguments, max_epochs=1)
    try:
        trainer.fit(module, loader(ragged_batches(place.rank, 10_000)))
    finally:
        say(stopped=trainer.global_step, left=time.time())


def digest(module: nn.Module) -> list[float]:
    """Sums of all whole parameters. A collective."""
    return [float(whole(parameter).double().sum()) for parameter in module.parameters()]


def save(arguments: dict[str, Any]) -> None:
    """Train, and save."""
    module, trainer, path, data = _resumable(arguments, max_epochs=1)
    trainer.fit(module, data)
    say(digest=digest(module))
    started = time.perf_counter()
    trainer.save_checkpoint(path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    say(saved_s=time.perf_counter() - started, mebibytes=size / MEBIBYTE)


def resume(arguments: dict[str, Any]) -> None:
    """Load on fewer ranks, and train on."""
    import lightning as L  # noqa: N812

    started = time.perf_counter()

    class Compares(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            say(loaded_s=time.perf_counter() - started, digest=digest(pl_module))

    module, trainer, path, data = _resumable(arguments, max_epochs=2, callbacks=[Compares()])
    trainer.fit(module, data, ckpt_path=path, weights_only=False)
    say(step=trainer.global_step, finite=all(map(math.isfinite, digest(module))))


def _resumable(arguments: dict[str, Any], **options: Any) -> tuple[Any, Any, Path, Any]:
    import llama

    case = llama.Case.from_fields(arguments["case"])
    llama.torch.set_num_threads(1)
    precision = "bf16-true" if case.device == "cuda" else "32-true"
    trainer = make_trainer(arguments, precision=precision, limit_train_batches=STEPS, **options)
    return llama.LlamaModule(case), trainer, Path(arguments["output"]) / "checkpoint.ckpt", case.batches()


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "links": links,
    "exact": exact,
    "speed": speed,
    "fault": fault,
    "save": save,
    "resume": resume,
}


# --- What is expected of them -----------------------------------------------------------------------------------------


def failed(ended: list[Ended]) -> list[Row]:
    """Rows of ranks that did not end with 0."""
    bad = [each for each in ended if each.status]
    if not bad:
        return []
    tail = " ".join(bad[0].output.split())[-300:].replace("|", "/")
    ranks = ", ".join(str(each.rank) for each in bad)
    return [
        Row("processes", "all end with 0", f"ranks {ranks} did not, with {bad[0].status}: ...{tail}", False)
    ]


def check_links(driver: Driver) -> list[Row]:
    ended = driver.run("links", driver.place.world_size)
    if bad := failed(ended):
        return bad
    first, *others = [each.said for each in ended]
    unlike = [each["host"] for each in others if each["versions"] != first["versions"]]
    devices = sorted({each.said["device"] for each in ended})
    hosts = {each.said["host"] for each in ended}
    shown = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    rows = [
        Row("versions", "the same on all ranks", f"{shown}; unlike on {unlike or 'none'}", not unlike),
        Row("devices", "one kind", f"{', '.join(devices)} on {len(hosts)} hosts", len(devices) == 1),
    ]
    for key, name in LINKS.items():
        rates = [each.said["rates"][key] for each in ended if key in each.said["rates"]]
        if rates:
            seen = f"{min(rates):.2f} to {max(rates):.2f} GB/s a rank"
            is_even = min(rates) >= max(rates) / 2 if driver.is_judged else None
            rows.append(Row(f"all-reduce {name}", "no rank below half of the fastest", seen, is_even))
    return rows


def check_exact(driver: Driver) -> list[Row]:
    ended = driver.run("exact", driver.place.world_size)
    rows = failed(ended)
    for name in ("fsdp2", "ddp", "hsdp"):
        errors = [each.said[name] for each in ended if name in each.said]
        if errors:
            expected = f"within {EXACT:g} of one process"
            rows.append(
                Row(f"weights of {name}, float64", expected, f"{max(errors):.1e}", max(errors) <= EXACT)
            )
    return rows


def check_speed(driver: Driver) -> list[Row]:
    measured: dict[str, dict[str, Any]] = {}
    rows = []
    base = case_of(driver)
    for way in ("loop", "model-parallel", "automodel"):
        ended = driver.run("speed", driver.place.world_size, way=way, case=asdict(replace(base, way=way)))
        rows += failed(ended)
        if "seconds" in ended[0].said:
            measured[way] = ended[0].said | {
                "start": max(each.said["began"] - each.started for each in ended)
            }
    for way, found in measured.items():
        seen = f"{found['seconds']:.3f} s, {found['peak']:,.0f} MiB, {found['start']:.0f} s from start to step 2"
        expected = "for comparison"
        is_right = None
        if way == "automodel" and "loop" in measured:
            ratio = found["seconds"] / measured["loop"]["seconds"]
            seen += f", {ratio:.2f} of the loop's time"
            expected = "at most 1.1 of the loop's time"
            is_right = ratio <= 1.1 if driver.is_judged else None
        rows.append(Row(f"a step by {way}", expected, seen, is_right))
    if "automodel" in measured:
        planned = planned_memory(driver, base) / MEBIBYTE
        ratio = measured["automodel"]["peak"] / planned
        is_right = ratio <= MEMORY_RATIO if driver.is_judged else None
        seen = f"{measured['automodel']['peak']:,.0f} of {planned:,.0f} MiB, {ratio:.2f}"
        rows.append(Row("memory beside the plan", f"at most {MEMORY_RATIO}", seen, is_right))
    return rows


def planned_memory(driver: Driver, case: Any) -> float:
    """What the plan says that a rank holds at its peak."""
    from llama import LlamaModule

    from lightning_automodel.options import StrategyOptions
    from lightning_automodel.plan.layouts import Plan
    from lightning_automodel.plan.recording import run

    options = StrategyOptions(activation_checkpointing=case.recompute, **dict(case.options))
    batch = list(case.batches())[-1]
    micro = run(
        lambda: (LlamaModule(case), batch), "bf16-true" if case.device == "cuda" else "32-true", options
    )
    place = driver.place
    is_host = case.device == "cpu"
    plan = Plan(micro, options, place.world_size, case.accumulate, place.local_world_size, is_host)
    return plan.high_water


def check_killed(driver: Driver) -> list[Row]:
    if driver.place.world_size == 1:
        return []
    *others, killed = driver.run("fault", driver.place.world_size, way="SIGKILL")
    if "signalled" not in killed.said:
        return failed([*others, killed])
    seconds = max(each.ended for each in others) - killed.said["signalled"]
    named = [each.rank for each in others if f"rank {killed.rank} " not in each.output]
    silent = [each.rank for each in others if each.status == 0]
    seen = f"{seconds:.1f} s; ended with 0: {silent or 'none'}; does not name it: {named or 'none'}"
    is_right = seconds <= LEAVE_S and not silent and not named
    return [Row("the last rank is killed", f"all leave within {LEAVE_S:.0f} s, and name it", seen, is_right)]


def check_terminated(driver: Driver) -> list[Row]:
    ended = driver.run("fault", driver.place.world_size, way="SIGTERM")
    steps = sorted({each.said.get("stopped", -1) for each in ended})
    if "signalled" not in ended[-1].said or -1 in steps:
        return failed(ended)
    seconds = max(each.ended for each in ended) - ended[-1].said["signalled"]
    is_right = len(steps) == 1 and seconds <= LEAVE_S
    expected = f"all stop after the same step, within {LEAVE_S:.0f} s"
    return [Row("SIGTERM to the last rank", expected, f"after steps {steps}, {seconds:.1f} s", is_right)]


def check_resumed(driver: Driver) -> list[Row]:
    place = driver.place
    case = asdict(replace(case_of(driver), warm_up=0, steps=STEPS, accumulate=1, recompute=False))
    saved = driver.run("save", place.world_size, case=case)
    if bad := failed(saved):
        return bad
    said = saved[0].said
    fewer = max(place.world_size // 2, 1)
    resumed = driver.run("resume", fewer, case={**case, "ranks": fewer})
    seen = f"{said['mebibytes']:,.0f} MiB in {max(each.said['saved_s'] for each in saved):.1f} s"
    rows = [Row("a save", "all ranks see it", seen, said["mebibytes"] > 0)]
    if bad := failed(resumed):
        return rows + bad
    loaded = resumed[0].said
    is_finite = all(each.said["finite"] for each in resumed)
    is_same = is_finite and loaded["step"] == 2 * STEPS and loaded["digest"] == said["digest"]
    seen = f"step {loaded['step']}, loaded in {max(each.said['loaded_s'] for each in resumed):.1f} s"
    return [*rows, Row(f"resumed on {fewer} ranks", f"the saved weights; step {2 * STEPS}", seen, is_same)]


STAGES: dict[str, Callable[[Driver], list[Row]]] = {
    "links": check_links,
    "exact": check_exact,
    "speed": check_speed,
    "killed": check_killed,
    "terminated": check_terminated,
    "resumed": check_resumed,
}


def case_of(driver: Driver) -> Any:
    """The Llama of `speed` and `resumed`."""
    from llama import Case

    args = driver.args
    is_cuda = args.device == "cuda"
    return Case(
        "automodel",
        args.shape or ("llama3-1b" if is_cuda else "narrow"),
        args.device,
        4096 if is_cuda else 32,
        accumulate=2,
        steps=8 if is_cuda else 2,
        ranks=driver.place.world_size,
        is_chunked=True,
        recompute=True,
    )


def write_report(driver: Driver, rows: list[Row], seconds: dict[str, float]) -> None:
    """Into the output folder."""
    place = driver.place
    lines = [
        f"# The first hour of {place.world_size} ranks, {place.local_world_size} on a node",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment("transformers").items()),
        f"- command: `benchmarks/first_hour.py {' '.join(sys.argv[1:])}`",
        f"- seconds: {', '.join(f'{name} {value:.0f}' for name, value in seconds.items())}",
        "",
        table(["check", "must be", "seen", "right"], [row.cells() for row in rows]),
    ]
    (driver.args.output / "report.md").write_text("\n".join(lines) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, required=True, help="folder that all nodes see")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(%(default)s)")
    made.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="in this order")
    made.add_argument("--shape", help="of the Llama, as in llama.py (llama3-1b)")
    made.add_argument("--timeout", type=float, default=600, help="seconds of one check (%(default)s)")
    return made


def main() -> int:
    args = parser().parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    driver = Driver(Place.from_environment(), args)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for stage in args.stages:
        started = time.monotonic()
        found = STAGES[stage](driver)
        rows += found
        seconds[stage] = time.monotonic() - started
        if driver.place.rank == 0:
            write_report(driver, rows, seconds)
            for row in found:
                print(" | ".join(row.cells()), flush=True)
    driver.store.set(f"first_hour/left/{driver.place.rank}", "")
    if driver.place.rank == 0:  # the others may still read what it hosts
        driver.store.wait([f"first_hour/left/{rank}" for rank in range(driver.place.world_size)])
    return 1 if any(row.is_right is False for row in rows) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        CHECKS[sys.argv[2]](json.loads(sys.argv[3]))
    else:
        sys.exit(main())

"""The plan of a run beside the run: high-water of a rank, collectives and bytes of an optimizer step.

Each case is a run of its own on gloo ranks. Memory is the most that a rank's process held in an optimizer
step, above what it held before the model was built (`peak_memory.py`); ranks' CPU memory takes shards,
activations, gathered parameters and gloo's copies alike. Collectives are counted at the dispatcher.

    python benchmarks/plan_check.py --output report.md
"""

import argparse
import ctypes
import gc
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from llama import SHAPES, Case, LlamaModule, Meter, run
from peak_memory import MEBIBYTE
from report import describe_environment, publish, table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.layouts import Plan
from lightning_automodel.plan.recording import run as run_micro_batch

SHAPES["plan"] = {
    **{"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 8000},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}
KINDS = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce"}


class Counted(TorchDispatchMode):
    """Collectives by kind, and their bytes: of each the larger of what a rank gives and what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and not func.overloadpacket.__name__.strip(
            "_"
        ).startswith(("wait", "wrap")):
            leaves = [
                each for each in torch.utils._pytree.tree_leaves((args, output)) if isinstance(each, Tensor)
            ]
            name = kind_of(func.overloadpacket.__name__)
            self.counts[name] += 1
            self.bytes[name] += max(leaf.nbytes for leaf in leaves)
        return output


def kind_of(name: str) -> str:
    """The kind of a collective, whatever torch calls the operator."""
    plain = name.replace("all_", "all")
    return next((kind for start, kind in KINDS.items() if start in plain), name.strip("_"))


class PlanMeter(Meter):
    """Also counts by kind. Fits that follow each other in one process start from what the last one has left."""

    def __init__(self, case: Case) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        super().__init__(case)
        self.kinds = Counted()

    def start(self) -> None:
        super().start()
        self.kinds.__enter__()

    def stop(self) -> None:
        self.kinds.__exit__(None, None, None)
        super().stop()
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"counts": self.kinds.counts, "bytes": self.kinds.bytes}), flush=True)


def measure(cases: list[Case]) -> list[dict[str, Any]]:
    """Run cases of one number of ranks, one after the other."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={cases[0].ranks}",
    ]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
    # The first fit of a process in a precision also brings code and libraries into memory.
    first = list({case.precision: case for case in reversed(cases)}.values())
    arguments = [__file__, "--cases", json.dumps([asdict(case) for case in (*first, *cases)])]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = lines[2 * len(first) :]
    return [memory | sent for memory, sent in zip(measured[::2], measured[1::2], strict=True)]


def plan(case: Case) -> Plan:
    """The same run by the plan."""
    chosen: dict[str, Any] = {
        "context_parallel_size": case.context,
        "activation_checkpointing": case.recompute,
    }
    options = StrategyOptions(**dict(case.options), **chosen)
    batch = list(case.batches())[-1]
    micro = run_micro_batch(lambda: (LlamaModule(case), batch), case.precision or "32-true", options)
    return Plan(micro, options, case.ranks, case.accumulate, ranks_per_node=case.ranks, is_host=True)


def cases() -> list[Case]:
    """Every layout and switch that runs on CPU ranks."""
    kept, freed = ({"reshard_during_accumulation": value} for value in (False, True))
    base = Case("automodel", "plan", "cpu", 256, ranks=2, warm_up=2)
    two: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (kept, {}),
        (kept, {"accumulate": 2}),
        (freed, {}),
        (freed, {"accumulate": 2}),
        ({**kept, "defer_fsdp_grad_sync": True}, {"accumulate": 3}),
        ({**kept, "defer_fsdp_grad_sync": False}, {"accumulate": 3}),
        ({**freed, "defer_fsdp_grad_sync": False}, {"accumulate": 2}),
        ({**freed, "defer_fsdp_grad_sync": False}, {"precision": "bf16-mixed", "accumulate": 2}),
        (freed, {"recompute": True}),
        (freed, {"recompute": True, "is_chunked": True}),
        (kept, {"context": 2}),
        ({**freed, "tensor_parallel_size": 2}, {}),
        ({**freed, "cpu_offload": True}, {}),
        (freed, {"precision": "bf16-mixed"}),
        (kept, {"precision": "bf16-mixed", "accumulate": 2}),
        (freed, {"precision": "bf16-mixed", "recompute": True}),
        (freed, {"precision": "bf16-true"}),
        (kept, {"precision": "bf16-true", "accumulate": 2}),
    ]
    four = [
        (freed, {}),
        ({**freed, "data_parallel_replicate_size": 2}, {}),
        ({**kept, "data_parallel_replicate_size": 2}, {"accumulate": 2}),
        ({**freed, "data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": False}, {"accumulate": 2}),
        (
            {**freed, "data_parallel_replicate_size": 2, "defer_fsdp_grad_sync": "all_reduce"},
            {"accumulate": 2},
        ),
        ({**freed, "tensor_parallel_size": 2}, {"recompute": True}),
        ({**freed, "data_parallel_replicate_size": 2}, {"context": 2}),
    ]
    return [
        replace(base, ranks=ranks, options=tuple(options.items()), **changed)
        for ranks, cases in ((2, two), (4, four))
        for options, changed in cases
    ]


def title(case: Case, planned: Plan) -> str:
    """The layout and what else differs between the cases."""
    parts = [str(planned), f"accumulation {case.accumulate}"]
    parts += [case.precision] if case.precision else []
    parts += ["`token_loss`"] * case.is_chunked
    return ", ".join(parts)


def compare(case: Case, found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    planned = plan(case)
    times = Counter[str]()
    num_bytes = Counter[str]()
    for (_, kind, size), number in planned.sent.items():
        times[kind] += number
        num_bytes[kind] += size * number
    is_same = (times, num_bytes) == (found["counts"], found["bytes"])
    high_water = planned.high_water / MEBIBYTE
    return [
        *(str(case.ranks), title(case, planned), f"{found['peak']:.0f}", f"{high_water:.0f}"),
        *(f"{high_water / found['peak']:.3f}", str(sum(times.values())), f"{sum(num_bytes.values()):,}"),
        "yes" if is_same else f"no: {found['counts']}, {found['bytes']}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parsed = parser.parse_args()
    rows = []
    for ranks in (2, 4):
        chosen = [case for case in cases() if case.ranks == ranks]
        rows += [compare(case, found) for case, found in zip(chosen, measure(chosen), strict=True)]
    header = [
        "ranks",
        "layout",
        "measured, MiB",
        "planned, MiB",
        "planned / measured",
        "collectives",
        "bytes",
        "equal",
    ]
    report = [
        "# The plan beside the run",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment("transformers").items()),
        f"- command: `python benchmarks/plan_check.py {shlex.join(sys.argv[1:])}`",
        f"- Llama of the shape {SHAPES['plan']}, 256 tokens a micro-batch, AdamW; float32 where not named",
        "- replicas x shards; kept: `reshard_during_accumulation=False`, else True. Collectives and bytes"
        " are those",
        "  planned, of one optimizer step; equal: the run's are the same, by kind",
        "",
        table(header, rows),
    ]
    publish("\n".join(report), parsed.output)


if __name__ == "__main__":
    if "--cases" in sys.argv:
        for fields in json.loads(sys.argv[sys.argv.index("--cases") + 1]):
            run(Case.from_fields(fields), PlanMeter)
    else:
        main()

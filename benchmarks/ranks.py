"""Starts the ranks of a benchmark: on this machine, or on two nodes (network namespaces) with a limited bandwidth."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from peak_memory import MALLOC

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.launch.two_nodes import connect_two_nodes


def launch(script: Path, case: dict[str, Any], ranks: int, rate: str | None) -> dict[str, Any]:
    """Run ``script --child CASE`` on each rank, and return what the first prints: a JSON object in one line.

    Args:
        script: What each rank runs.
        case: Its argument, as JSON.
        ranks: Number of processes.
        rate: What each of two nodes may send, such as ``1gbit``; None for this machine alone, over loopback.
    """
    arguments = ["--child", json.dumps(case)]
    if rate is not None:
        os.environ.update(MALLOC)
        with connect_two_nodes() as nodes:
            limit = ["root", "tbf", "rate", rate, "burst", "1mb", "latency", "400ms"]
            for namespace, device in zip(nodes.namespaces, nodes.devices, strict=True):
                command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *limit]
                subprocess.run(command, check=True)
            ended = nodes.torchrun(script, *arguments, ranks_per_node=ranks // 2, timeout_s=3000.0)
        printed = "\n".join(node.output for node in ended)
    else:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [*torchrun, str(script), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        printed = done.stdout + done.stderr
    lines = [line for line in printed.splitlines() if line.startswith('{"')]
    if not lines:
        raise RuntimeError(printed[-4000:])
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def sent_by_device() -> int:
    """Bytes that the device between the ranks has sent, with all headers: on loopback those of all ranks."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(
        int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{device}:")
    )

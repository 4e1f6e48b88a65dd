"""How processes come about; each runs the Trainer's function inside of a guard."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_automodel import _compat
from lightning_automodel.guard import RunGuard

LOOK_EVERY_S = 0.25


class SubprocessLauncher(_compat.SubprocessScriptLauncher):
    """Runs this script again, as a process of its own, for every further rank of the node.

    Lightning's launcher kills this process some seconds after another one ended badly, whatever it does then. Here the
    guard hears of it at once, and every rank leaves with the cause.
    """

    def __init__(
        self, guard: RunGuard, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._guard = guard

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._observe, name="lightning_automodel launcher", daemon=True).start()
        _compat.set_num_threads_if_needed(num_processes=self.num_processes)
        return self._guard.run(function, *args, **kwargs)

    def _observe(self) -> None:
        """Tell the guard of each process that ends, which knows whether it was done; end with the last one."""
        running = list(self.procs)
        while running:
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                self._report(process)
            if running:
                _wait_for_one(running)

    def _report(self, process: subprocess.Popen) -> None:
        local_rank = self.procs.index(process) + 1
        rank = self.cluster_environment.node_rank() * self.num_processes + local_rank
        if self._guard.report_end(rank, ended_with(process.returncode)):
            return
        print(f"rank {rank} {ended_with(process.returncode)} before it had joined the others.", file=sys.stderr)
        self.kill(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


class InPlaceLauncher(_compat.Launcher):
    """Starts nothing: something else, such as torchrun or SLURM, has started the processes."""

    def __init__(self, guard: RunGuard) -> None:
        self._guard = guard

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        return self._guard.run(function, *args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        pass


def ended_with(status: int) -> str:
    """What an exit status of a process says; negative is the number of a signal."""
    if status < 0:
        known = -status in {*signal.Signals}
        return f"was ended by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return f"ended with exit status {status}"


def _wait_for_one(processes: list[subprocess.Popen]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(LOOK_EVERY_S)

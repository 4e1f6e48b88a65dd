"""Starting the ranks' processes: Lightning's launchers, whose supervisor runs the Trainer's function."""

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_automodel.failure.supervisor import Supervisor
from lightning_automodel.gradients.token_loss import MissingCountError
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.launch.forks import ForkLauncher


class SubprocessLauncher(lightning_internals.SubprocessScriptLauncher):
    """Runs this script again for every other rank of the node, unless something else starts the processes.

    Lightning's launcher kills this process some seconds after another one has failed, whatever this one is
    doing. Here the supervisor asks how processes ended, and every rank leaves with the cause.
    """

    def __init__(
        self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, supervisor: Supervisor
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._supervisor = supervisor

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether no further process is needed, or something else has started them."""
        return (
            self.num_processes * self.num_nodes == 1 or self.cluster_environment.creates_processes_externally
        )

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        # A single process sets no variables: they would make a later Trainer in it wait for other ranks.
        if self.num_processes * self.num_nodes == 1:
            return self._run(function, *args, **kwargs)
        return super().launch(self._run, function, *args, trainer=trainer, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` in this rank, once the other processes have been started."""
        # Lightning has started a thread that kills this process once one of its list has failed.
        watched = self.procs
        self.procs = list(watched)
        watched.clear()
        first_rank = self.cluster_environment.node_rank() * self.num_processes
        _started.update(enumerate(self.procs, first_rank + 1))
        self._supervisor.find_ended = _find_ended
        try:
            return self._supervisor.run(function, *args, **kwargs)
        except MissingCountError as error:
            # The same on all ranks, and the thirty frames of Lightning below this one tell nothing of it.
            raise error.with_traceback(None) from None
        finally:
            if not dist.is_initialized():
                # They would wait for this rank for their whole timeout.
                self.kill(signal.SIGTERM)


_started: dict[int, subprocess.Popen[bytes]] = {}
"""The processes that this one has started and that have not ended, by rank; a later Trainer trains in them too."""


def _find_ended() -> dict[int, str]:
    """Ranks whose processes have ended since the last call, and how."""
    ended: dict[int, str] = {}
    for rank, process in list(_started.items()):
        status = process.poll()
        if status is None:
            continue
        del _started[rank]
        ended[rank] = f"ended with exit status {status}"
        if status < 0:
            ended[rank] = f"was ended by signal {-status} ({signal.strsignal(-status)})"
    return ended


def make_launcher(
    strategy: ParallelStrategy,
    start_method: str,
    num_processes: int,
    num_nodes: int,
    supervisor: Supervisor,
) -> SubprocessLauncher | ForkLauncher:
    """The launcher for the strategy's cluster environment and a start method; the classes explain the rest."""
    environment = strategy.cluster_environment
    assert environment is not None
    if start_method == "fork" and not environment.creates_processes_externally:
        return ForkLauncher(strategy, supervisor)
    launcher = SubprocessLauncher(environment, num_processes, num_nodes, supervisor)
    if (hasattr(sys, "ps1") or sys.flags.interactive) and not launcher.is_interactive_compatible:
        # Lightning's own message would recommend its own strategies.
        raise MisconfigurationException(
            "AutomodelStrategy(start_method='popen') runs a script again for each further rank, which a"
            " notebook or an interactive session does not have: pass"
            " Trainer(strategy=AutomodelStrategy(start_method='fork'), ...), or devices=1, or run your code"
            " as a script."
        )
    return launcher

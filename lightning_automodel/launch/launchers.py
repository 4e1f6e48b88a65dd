"""Starting the ranks' processes: Lightning's launchers, whose supervisor runs the Trainer's function."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import ProcessContext
from typing_extensions import override

from lightning_automodel.failure import supervisor
from lightning_automodel.failure.supervisor import Supervisor
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.launch.results import collect, restore
from lightning_automodel.launch.workers import describe_exit, share_cores, wait_for_workers, write_failure
from lightning_automodel.resume import rng

_RUN = "run.pt"


class SubprocessLauncher(lightning_internals.SubprocessScriptLauncher):
    """Runs this script again for every other rank of the node, unless something else starts the processes.

    Lightning's launcher kills this process some seconds after another one has failed, whatever this one is
    doing. Here the supervisor asks how processes ended, and every rank leaves with the cause.
    """

    def __init__(
        self, strategy: ParallelStrategy, supervisor: Supervisor, num_processes: int, num_nodes: int
    ) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, num_processes, num_nodes)
        self._strategy = strategy
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
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # A single process sets no variables: they would make a later Trainer in it wait for other ranks.
        if not self.is_interactive_compatible:
            lightning_internals.start_other_ranks(self)
            first_rank = self.cluster_environment.node_rank() * self.num_processes
            running = dict(enumerate(self.procs, first_rank + 1))

            def find_ended() -> list[tuple[int, str]]:
                """Ranks whose processes have ended since the last call, and how."""
                backend = _backend(self._strategy)
                ended = [rank for rank, process in running.items() if process.poll() is not None]
                return [(rank, describe_exit(running.pop(rank).returncode, backend)) for rank in ended]

            supervisor.watch_processes(find_ended)
        share_cores(self.num_processes)
        try:
            return self._supervisor.run(function, *args, **kwargs)
        finally:
            if not dist.is_initialized():
                # They would wait for this rank for their whole timeout.
                self.kill(signal.SIGTERM)


class WorkerLauncher(lightning_internals.MultiProcessingLauncher):
    """Starts every rank of the node as a worker of this process, which is not a rank, and gets the results.

    Lightning's launcher gathers no shards, calls no ``on_exception`` hooks in the workers, and terminates
    all of them when one fails. Here they leave together, each through its own hooks. In a worker, ``folder``
    is where it writes what the launching process reads.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        num_processes: int,
        num_nodes: int,
        supervisor: Supervisor,
    ) -> None:
        super().__init__(strategy, start_method)
        assert strategy.cluster_environment is not None
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._supervisor = supervisor
        self.environment = strategy.cluster_environment
        self.method = start_method
        self.folder: Path | None = None

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        assert trainer is not None
        if self.folder is not None:
            return self._run_in_worker(self.folder, trainer, function, args, kwargs)
        if self._already_fit and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"trainer.fit() ran already, in workers of start_method={self.method!r} that have ended,"
                " with their optimizer states and loops. To go on, make a new Trainer and call"
                " fit(ckpt_path=...)."
            )
        if self.method == "fork" and dist.is_initialized():
            raise RuntimeError(
                "start_method='fork' copies this process, which is in a process group, from a run on one"
                " device or one of your own: save what you need of the model there, call"
                " lightning_automodel.destroy_global_state() (for your own,"
                " torch.distributed.destroy_process_group()), and start again."
            )
        folder = Path(tempfile.mkdtemp(prefix="lightning_automodel-"))
        try:
            started = self._start(trainer, partial(function, *args, **kwargs), folder)
            first_rank = self.environment.node_rank() * self._num_processes
            wait_for_workers(started, folder, first_rank, _backend(self._strategy))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        # Raises if the module lacks trained weights, and their file is kept.
        returned = restore(trainer, folder)
        shutil.rmtree(folder, ignore_errors=True)
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        return returned

    def _run_in_worker(
        self, folder: Path, trainer: "pl.Trainer", function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        @wraps(function)
        def run_and_collect(*args: Any, **kwargs: Any) -> None:
            collect(trainer, function(*args, **kwargs), folder)

        try:
            self._supervisor.run(run_and_collect, *args, **kwargs)
        except BaseException as exception:
            # At once: this process may not live to the end of `on_exception` hooks, or of leaving its
            # groups.
            write_failure(folder, exception, trainer)
            raise

    def _start(self, trainer: "pl.Trainer", function: partial[Any], folder: Path) -> ProcessContext:
        self.environment.validate_settings(num_devices=self._num_processes, num_nodes=self._num_nodes)
        variables = {"MASTER_PORT": str(self.environment.main_port)}
        run: tuple[Any, ...] | None = self, trainer, function, None
        if self.method != "fork":
            run = None
            # Global state that affects results, which a process that is not a fork does not inherit.
            global_state = (
                torch.get_deterministic_debug_mode(),
                torch.backends.cudnn.benchmark,
                rng.global_states(torch.device("cpu")),
            )
            try:
                # Multiprocessing would put CPU tensors in memory that all workers share: they would train
                # one another's weights and add to one another's metrics.
                torch.save((self, trainer, function, global_state), folder / _RUN)
            except Exception as error:
                raise TypeError(
                    f"start_method={self.method!r} sends the Trainer, the module and its data to new"
                    f" processes, and something of them cannot be pickled: {str(error).rstrip('.')}. Define"
                    " that at the top level of a module that can be imported, make it in setup(), or pass"
                    " start_method='fork', or 'popen' in a script."
                ) from error
        return torch.multiprocessing.start_processes(
            _run_worker, (folder, variables, run), self._num_processes, join=False, start_method=self.method
        )


def _run_worker(
    local_rank: int, folder: Path, variables: Mapping[str, str], run: tuple[Any, ...] | None
) -> None:
    """Run the Trainer's function as a rank. On Linux, torch interrupts it if the launching process ends."""
    launcher, trainer, function, global_state = run or torch.load(folder / _RUN, weights_only=False)
    launcher.folder = folder
    os.environ.update(variables, LOCAL_RANK=str(local_rank))
    # The signal handler that a fork inherits is that of the launching process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if global_state is None:
        # OpenMP's threads do not survive a fork: this process would wait forever for those that its parent
        # used.
        torch.set_num_threads(1)
    else:
        deterministic, torch.backends.cudnn.benchmark, random_states = global_state
        torch.set_deterministic_debug_mode(deterministic)
        rng.set_global_states(random_states, torch.device("cpu"))
        share_cores(trainer.strategy.num_processes)
    # Calls the launcher, which runs the function and reports, and then `on_exception` hooks.
    lightning_internals.call_and_handle_interrupt(
        trainer, function.func, *function.args, **function.keywords
    )


def _backend(strategy: ParallelStrategy) -> str:
    """Backend of the process groups of ``AutomodelStrategy``, as it will be or is."""
    return str(strategy.process_group_backend)  # type: ignore[attr-defined]


def make_launcher(
    strategy: ParallelStrategy,
    start_method: Literal["popen", "spawn", "fork", "forkserver"],
    num_processes: int,
    num_nodes: int,
    supervisor: Supervisor,
) -> SubprocessLauncher | WorkerLauncher:
    """The launcher for the strategy's cluster environment and a start method; the classes explain the rest."""
    environment = strategy.cluster_environment
    assert environment is not None
    if start_method != "popen" and not environment.creates_processes_externally:
        return WorkerLauncher(strategy, start_method, num_processes, num_nodes, supervisor)
    launcher = SubprocessLauncher(strategy, supervisor, num_processes, num_nodes)
    if (hasattr(sys, "ps1") or sys.flags.interactive) and not launcher.is_interactive_compatible:
        # Lightning's own message would recommend its own strategies.
        raise MisconfigurationException(
            "AutomodelStrategy(start_method='popen') runs a script again for each further rank, which a"
            " notebook or an interactive session does not have: pass"
            " Trainer(strategy=AutomodelStrategy(start_method='fork'), ...), or devices=1, or run your code"
            " as a script."
        )
    return launcher

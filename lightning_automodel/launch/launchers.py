"""How the ranks' processes come about: Lightning's launchers, with the Trainer's function inside of the guard."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from multiprocessing.connection import Connection
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
import torch.multiprocessing
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_automodel import lightning_internals
from lightning_automodel.distributed import process_group, rendezvous
from lightning_automodel.distributed.failures import RankFailedError
from lightning_automodel.failure import supervisor
from lightning_automodel.failure.supervisor import Supervisor
from lightning_automodel.launch.pickling import ByValue, find_unpicklable
from lightning_automodel.launch.results import collect, restore
from lightning_automodel.launch.workers import (
    WorkerReport,
    Workers,
    describe_exit,
    follow_launching_process,
    tell_guard,
)

POLL_S = 0.25

# What decides what a run computes, and a process that is no fork begins without: how to get it, and how to set it.
GLOBAL_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: torch.backends.cudnn.benchmark, partial(setattr, torch.backends.cudnn, "benchmark")),
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


class SubprocessLauncher(lightning_internals.SubprocessScriptLauncher):
    """Runs this script again for every further rank of the node, unless something else starts the processes.

    Lightning's launcher kills this process some seconds after another one ended badly, whatever it does then. Here the
    guard hears of it at once, and every rank leaves with the cause.
    """

    def __init__(
        self, guard: Supervisor, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._guard = guard

    @property
    def starts_processes(self) -> bool:
        """Whether further processes are needed, and nothing else has started them."""
        return self.num_processes * self.num_nodes > 1 and not self.cluster_environment.creates_processes_externally

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return not self.starts_processes

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # Alone, no variables are left behind that would make a later Trainer of this process wait for other ranks.
        if self.starts_processes:
            if self.num_nodes == 1:
                rendezvous.share_secret()
            self._call_children_scripts()
            threading.Thread(target=self._observe, name="lightning_automodel launcher", daemon=True).start()
        share_cores(self.num_processes)
        return run_guarded(self._guard, function, *args, **kwargs)

    def _observe(self) -> None:
        """Tell the guard of each process that ends, which knows whether it was done; end with the last one."""
        running = dict(enumerate(self.procs, start=self.cluster_environment.node_rank() * self.num_processes + 1))
        while running:
            for rank, process in list(running.items()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(POLL_S / len(running))
                    del running[rank]
                    if not tell_guard(rank, describe_exit(status)):
                        self.kill(signal.SIGTERM)
                        os.kill(os.getpid(), signal.SIGTERM)


class WorkerLauncher(lightning_internals.MultiProcessingLauncher):
    """Starts every rank of the node as a worker of this process, which is no rank, waits, and gets the results.

    Lightning's launcher gathers no shards, calls no ``on_exception`` hooks in the workers, and ends them all when it
    misses one; here the ranks leave together as under any other launcher, each through its own hooks.

    Args:
        strategy: The strategy of the Trainer.
        start_method: How Python starts the workers.
        num_processes: Ranks on this node.
        num_nodes: Nodes, on each of which this launcher runs.
        guard: In which each rank runs.
        get_report: Tells in the first rank what the strategy wants to have in the launching process.
        set_report: Takes it there.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        num_processes: int,
        num_nodes: int,
        guard: Supervisor,
        get_report: Callable[[], Mapping[str, Any]],
        set_report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._num_processes, self._num_nodes = num_processes, num_nodes
        self._guard, self._get_report, self._set_report = guard, get_report, set_report
        self._is_worker = False

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        assert trainer is not None
        if self._is_worker:

            @wraps(function)
            def run_and_collect(*args: Any, **kwargs: Any) -> bytes | None:
                return collect(trainer, function(*args, **kwargs), self._get_report())

            return run_guarded(self._guard, run_and_collect, *args, **kwargs)
        if self._already_fit and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"trainer.fit() ran already, in workers of start_method={self._start_method!r} that have ended, and"
                " with them optimizer states and loops: make a new Trainer and pass fit(ckpt_path=...) to go on."
            )
        workers = self._start(trainer, partial(function, *args, **kwargs))
        try:
            results = workers.wait()
        finally:
            self.procs = []
        if results is None:
            raise RuntimeError(
                f"The Tuner found its value in workers of start_method={self._start_method!r}, where it stays: pass"
                " start_method='popen', or for a learning rate call fit with the callback LearningRateFinder()."
            )
        returned, report = restore(results, trainer)
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._set_report(report)
        return returned

    def _start(self, trainer: "pl.Trainer", function: partial) -> Workers:
        environment = self._strategy.cluster_environment
        assert environment is not None
        environment.validate_settings(num_devices=self._num_processes, num_nodes=self._num_nodes)
        if self._num_nodes == 1:
            rendezvous.share_secret()
        # A fork server has the environment of the time when it was started.
        variables = {**os.environ, "MASTER_PORT": str(environment.main_port)}
        context = torch.multiprocessing.get_context(self._start_method)
        ours, theirs = zip(*(context.Pipe() for _ in range(self._num_processes)), strict=True)
        global_state = None if self._start_method == "fork" else [get() for get, _ in GLOBAL_STATE]
        try:
            started = torch.multiprocessing.start_processes(
                _be_worker,
                args=(theirs, variables, ByValue((self, trainer, function, global_state))),
                nprocs=self._num_processes,
                start_method=self._start_method,
                join=False,
            )
        except Exception as error:
            self._explain(trainer, function, error)
            raise
        finally:
            for connection in theirs:
                connection.close()
        self.procs = list(started.processes)
        return Workers(self.procs, ours, environment.node_rank() * self._num_processes)

    def _explain(self, trainer: "pl.Trainer", function: partial, error: Exception) -> None:
        """Raise a TypeError that names the part of the run that cannot be pickled, if any."""
        data = [*function.args, *function.keywords.values()]
        parts = {"the module" if isinstance(value, pl.LightningModule) else "the data": value for value in data}
        parts |= {f"the callback {type(callback).__name__}": callback for callback in trainer.callbacks}  # type: ignore[attr-defined]
        parts |= {f"the logger {type(logger).__name__}": logger for logger in trainer.loggers}
        found = find_unpicklable({**parts, "the strategy": trainer.strategy, "the Trainer": trainer})
        if found is not None:
            where, value, cause = found
            raise TypeError(
                f"start_method={self._start_method!r} sends the Trainer, the module and its data to new processes, but"
                f" {where} ({type(value).__name__}) cannot be pickled: {str(cause).rstrip('.')}. Define it at the top"
                " level of a module that can be imported, make it in setup(), or pass start_method='fork', or 'popen'"
                " in a script."
            ) from error


def _be_worker(local_rank: int, connections: Sequence[Connection], variables: Mapping[str, str], run: ByValue) -> None:
    """Run the Trainer's function as a rank, and report to the launching process."""
    launcher, trainer, function, global_state = run.value
    launcher._is_worker = True
    # A handler that a fork inherits would speak for the launching process, and so would its runs and groups.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if global_state is None:
        process_group.forget_inherited_groups()
        supervisor.forget_inherited_runs()
    connection, status = connections[local_rank], 0
    threading.Thread(target=follow_launching_process, args=(connection,), daemon=True).start()
    os.environ.update(variables, LOCAL_RANK=str(local_rank))
    if global_state is None:
        # OpenMP's threads do not survive a fork: where the parent has used them, this process would wait for them.
        torch.set_num_threads(1)
    else:
        for (_, set_state), state in zip(GLOBAL_STATE, global_state, strict=True):
            set_state(state)
        share_cores(trainer.strategy.num_processes)
    try:
        # Calls `on_exception` hooks as well, and the launcher, which then runs the function.
        results = lightning_internals.call_and_handle_interrupt(
            trainer, function.func, *function.args, **function.keywords
        )
        report = WorkerReport(results)
    except BaseException as exception:
        report = WorkerReport.from_exception(exception, trainer.strategy.global_rank)
        code = exception.code if isinstance(exception, SystemExit) else 1
        status = code if isinstance(code, int) and code else 1
    with contextlib.suppress(OSError):
        connection.send(report)
    # Rather than the exception, whose traceback torch would print: the launching process does.
    sys.exit(status)


# --- In every rank ----------------------------------------------------------------------------------------------------


def run_guarded(guard: Supervisor, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run the Trainer's function inside of the guard.

    Ctrl-C reaches all ranks of a terminal, but one that waits for another in a collective hears of that one's
    interrupt first: on both it is the user's wish, not a failure with a traceback.
    """
    try:
        return guard.run(function, *args, **kwargs)
    except RankFailedError as error:
        if error.failure.error == KeyboardInterrupt.__name__:
            raise KeyboardInterrupt from error
        raise


def share_cores(num_processes: int) -> None:
    """Give each rank of the node its part of the cores, unless OMP_NUM_THREADS says how many threads it has."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // num_processes))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def make_launcher(
    strategy: ParallelStrategy,
    start_method: Literal["popen", "spawn", "fork", "forkserver"],
    num_processes: int,
    num_nodes: int,
    guard: Supervisor,
    get_report: Callable[[], Mapping[str, Any]],
    set_report: Callable[[Mapping[str, Any]], None],
) -> SubprocessLauncher | WorkerLauncher:
    """The launcher for the strategy's cluster environment and a start method; see the classes for the arguments.

    Raises:
        MisconfigurationException: In a notebook or an interactive session, which is no script that could run again.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    if start_method != "popen" and not environment.creates_processes_externally:
        return WorkerLauncher(strategy, start_method, num_processes, num_nodes, guard, get_report, set_report)
    launcher = SubprocessLauncher(guard, environment, num_processes, num_nodes)
    if (hasattr(sys, "ps1") or sys.flags.interactive) and not launcher.is_interactive_compatible:
        # Lightning would name its own strategies.
        raise MisconfigurationException(
            "AutomodelStrategy(start_method='popen') runs a script again for each further rank, which a notebook or an"
            " interactive session is not: pass Trainer(strategy=AutomodelStrategy(start_method='fork'), ...), or"
            " devices=1, or run your code as a script."
        )
    return launcher

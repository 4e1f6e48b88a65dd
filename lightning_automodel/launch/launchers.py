"""How processes come about; each runs the Trainer's function inside of a guard."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.multiprocessing
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_automodel import lightning_internals
from lightning_automodel.distributed import process_group, rendezvous
from lightning_automodel.distributed.failures import RankFailedError, RankFailure
from lightning_automodel.failure.supervisor import RunGuard
from lightning_automodel.launch.pickling import refuse_unpicklable, unshare_attributes
from lightning_automodel.launch.results import RunResults, collect, hand_over
from lightning_automodel.launch.workers import Children, Finished, Left, ended_with, listen_to_parent

LOOK_EVERY_S = 0.25


class SubprocessLauncher(lightning_internals.SubprocessScriptLauncher):
    """Runs this script again, as a process of its own, for every further rank of the node.

    Lightning's launcher kills this process some seconds after another one ended badly, whatever it does then. Here the
    guard hears of it at once, and every rank leaves with the cause.
    """

    def __init__(
        self, guard: RunGuard, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._guard = guard

    @property
    def _is_alone(self) -> bool:
        return self.num_processes * self.num_nodes == 1

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._is_alone

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # Alone, it also leaves no environment behind that would make a later Trainer of this process wait for others.
        if not self._is_alone and not self.cluster_environment.creates_processes_externally:
            if self.num_nodes == 1:
                rendezvous.share_secret()
            self._call_children_scripts()
            threading.Thread(target=self._observe, name="lightning_automodel launcher", daemon=True).start()
        lightning_internals.set_num_threads_if_needed(num_processes=self.num_processes)
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


class ChildrenLauncher(lightning_internals.MultiProcessingLauncher):
    """Starts every rank of the node as a child of this process, which is no rank, waits, and gets the results.

    Lightning's launcher does not run ``on_exception`` hooks in the ranks, and ends them all when it misses one; here
    the ranks leave together as under any other launcher, each through its own hooks.

    Args:
        strategy: The strategy of the Trainer.
        start_method: How Python starts the children.
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
        guard: RunGuard,
        get_report: Callable[[], Mapping[str, Any]],
        set_report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._num_processes, self._num_nodes = num_processes, num_nodes
        self._guard, self._get_report, self._set_report = guard, get_report, set_report
        self._is_in_rank = False

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        if self._is_in_rank:
            return self._guard.run(function, *args, **kwargs)
        assert trainer is not None
        self._check_can_launch(trainer)
        children = self._start(trainer, function, args, kwargs)
        try:
            results: RunResults | None = children.wait()
        finally:
            self.procs = []
        if results is None:
            raise RuntimeError(
                f"The Tuner found its value in processes of start_method={self._start_method!r}, where it stays: pass"
                " start_method='popen', or for a learning rate call fit with the callback LearningRateFinder()."
            )
        self._already_fit |= results.state.fn == TrainerFn.FITTING
        self._set_report(hand_over(results, trainer))
        return results.returned

    def _check_can_launch(self, trainer: "pl.Trainer") -> None:
        if self._start_method != "fork":
            lightning_internals.check_missing_main_guard()
        if self._already_fit and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"trainer.fit() ran already, in processes of start_method={self._start_method!r} that have ended, and"
                " with them optimizer states and loops: make a new Trainer and pass fit(ckpt_path=...) to go on."
            )

    def _start(self, trainer: "pl.Trainer", function: Callable, args: tuple, kwargs: dict[str, Any]) -> Children:
        environment = self._strategy.cluster_environment
        assert environment is not None
        environment.validate_settings(num_devices=self._num_processes, num_nodes=self._num_nodes)
        if self._num_nodes == 1:
            rendezvous.share_secret()
        variables = {**os.environ, "MASTER_PORT": str(environment.main_port)}
        states = None if self._start_method == "fork" else lightning_internals.GlobalStateSnapshot.capture()
        context = torch.multiprocessing.get_context(self._start_method)
        ours, theirs = zip(*(context.Pipe() for _ in range(self._num_processes)), strict=True)
        work = (trainer, function, args, kwargs)
        try:
            started = torch.multiprocessing.start_processes(
                self._be_rank,
                args=(theirs, variables, states, *work),
                nprocs=self._num_processes,
                start_method=self._start_method,
                join=False,
            )
        except Exception as error:
            if self._start_method != "fork":
                refuse_unpicklable(self._start_method, trainer, args, kwargs, error)
            raise
        finally:
            for line in theirs:
                line.close()
        self.procs = list(started.processes)
        return Children(self.procs, ours, environment.node_rank() * self._num_processes)

    # --- In a rank ----------------------------------------------------------------------------------------------------

    def _be_rank(
        self,
        local_rank: int,
        lines: Sequence[Connection],
        variables: Mapping[str, str],
        states: Any,
        trainer: "pl.Trainer",
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._start_method == "fork":
            process_group.forget_inherited_groups()
            RunGuard.forget_inherited_runs()
        line = lines[local_rank]
        listen_to_parent(line)
        os.environ.update(variables, LOCAL_RANK=str(local_rank))
        self._is_in_rank = True
        if states is not None:
            states.restore()
        try:
            results = self._run_as_rank(trainer, function, args, kwargs)
        except BaseException as exception:
            with contextlib.suppress(OSError):
                line.send(self._describe(exception))
            raise SystemExit(_status(exception)) from None
        with contextlib.suppress(OSError):
            line.send(Finished(results))

    def _run_as_rank(self, trainer: "pl.Trainer", function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not isinstance(trainer.accelerator, CPUAccelerator):
            # What it asks is known to a forked child alone.
            lightning_internals.check_bad_cuda_fork()
        elif self._start_method != "fork":
            # They would train one another's weights: tensors travel to other processes in shared memory.
            args, kwargs = lightning_internals.disable_module_memory_sharing((args, kwargs))
            unshare_attributes((*args, *kwargs.values(), *trainer.callbacks))  # type: ignore[attr-defined]
        if self._start_method == "fork":
            # OpenMP's threads do not survive a fork: where this process has used them, its child would wait for them.
            torch.set_num_threads(1)
        else:
            lightning_internals.set_num_threads_if_needed(num_processes=self._num_processes)
        return lightning_internals.call_and_handle_interrupt(
            trainer, partial(self._run_and_collect, trainer, function, *args, **kwargs)
        )

    def _run_and_collect(self, trainer: "pl.Trainer", function: Callable, *args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        return collect(trainer, returned, self._get_report())

    def _describe(self, exception: BaseException) -> Left:
        told = "".join(traceback.format_exception(exception))
        cause = exception.__context__ if isinstance(exception, SystemExit) else None
        if isinstance(exception, lightning_internals.SIGTERMException):
            return Left(None, told)
        if isinstance(exception, RankFailedError):
            return Left(exception.failure, told)
        where = lightning_internals.failing_hook(exception) or "set-up"
        return Left(RankFailure.from_exception(cause or exception, self._strategy.global_rank, where), told)


def _status(exception: BaseException) -> int:
    code = exception.code if isinstance(exception, SystemExit) else 1
    return code if isinstance(code, int) and code else 1


class InPlaceLauncher(lightning_internals.Launcher):
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


def make_launcher(
    strategy: ParallelStrategy,
    start_method: Literal["popen", "spawn", "fork", "forkserver"],
    num_processes: int,
    num_nodes: int,
    guard: RunGuard,
    get_report: Callable[[], Mapping[str, Any]],
    set_report: Callable[[Mapping[str, Any]], None],
) -> lightning_internals.Launcher:
    """The launcher for the strategy's cluster environment and a start method; see the classes for the arguments."""
    environment = strategy.cluster_environment
    assert environment is not None
    if environment.creates_processes_externally:
        return InPlaceLauncher(guard)
    if start_method != "popen":
        return ChildrenLauncher(strategy, start_method, num_processes, num_nodes, guard, get_report, set_report)
    launcher = SubprocessLauncher(guard, environment, num_processes, num_nodes)
    refuse_in_notebook(launcher)
    return launcher


def refuse_in_notebook(launcher: lightning_internals.Launcher) -> None:
    """Refuse to run a notebook or an interactive session again as if it were a script.

    Raises:
        MisconfigurationException: With the start method that works there; Lightning would name its own strategies.
    """
    if lightning_internals.IS_INTERACTIVE and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            "AutomodelStrategy(start_method='popen') runs a script again for each further rank, which a notebook or an"
            " interactive session is not: pass Trainer(strategy=AutomodelStrategy(start_method='fork'), ...), or"
            " devices=1, or run your code as a script."
        )


def _wait_for_one(processes: list[subprocess.Popen]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(LOOK_EVERY_S)

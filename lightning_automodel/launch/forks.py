"""Ranks as forks of a process that is no rank, as notebooks need them: Lightning's launcher, under the supervisor."""

import inspect
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing import ProcessExitedException
from typing_extensions import override

from lightning_automodel.checkpoint.tree import model_state, under_own_names, whole
from lightning_automodel.distributed.process_group import patched_signal
from lightning_automodel.failure.supervisor import SIGTERM_STATUS, Supervisor
from lightning_automodel.internals import lightning as lightning_internals

_OF_CHECKPOINT_CALLBACKS = ("best_model_path", "best_model_score", "last_model_path")
TIME_TO_END_S = 10.0  # after Ctrl-C; the user wants the prompt back


class ForkLauncher(lightning_internals.MultiProcessingLauncher):
    """Starts every rank of the node as a fork of this process, and gets the results.

    Lightning's launcher gathers no shards, and calls no ``on_exception`` hooks in the workers. In a worker,
    :meth:`launch` is called again, and runs the function.
    """

    def __init__(self, strategy: ParallelStrategy, supervisor: Supervisor) -> None:
        super().__init__(strategy, "fork")
        self._supervisor = supervisor
        self._is_worker = False
        self._returned: list[Any] = []  # by the Trainer's function, in a worker
        self._has_fitted = False

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Run ``function`` in every rank, and wait until all have ended: no limit, unless one has failed.

        SIGTERM to this process goes to the ranks, which agree on a last step. ProcessRaisedException with the
        traceback of the rank that failed first; ProcessExitedException if its process ended otherwise;
        SIGTERMException if SIGTERM stopped all.
        """
        if self._is_worker:
            self._returned = [self._supervisor.run(function, *args, **kwargs)]
            return self._returned[0]
        assert trainer is not None
        if self._has_fitted and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                "trainer.fit() ran already, in workers of start_method='fork' that have ended, with their"
                " optimizer states and loops. To go on, make a new Trainer and call fit(ckpt_path=...)."
            )
        if dist.is_initialized():
            raise RuntimeError(
                "start_method='fork' copies this process, which is in a process group, from a run on one"
                " device or one of your own: save what you need of the model there, call"
                " lightning_automodel.destroy_global_state() (for your own,"
                " torch.distributed.destroy_process_group()), and start again."
            )
        path = Path(tempfile.mkdtemp(prefix="lightning_automodel-")) / "results.pt"
        try:
            with patched_signal(signal.SIGTERM, lambda *_: self.kill(signal.SIGTERM)):
                super().launch(self._work, path, trainer, function, args, kwargs)
        except BaseException as error:
            self._end_workers()
            shutil.rmtree(path.parent, ignore_errors=True)
            if isinstance(error, ProcessExitedException) and error.exit_code == SIGTERM_STATUS:
                raise lightning_internals.SIGTERMException(SIGTERM_STATUS) from error
            raise
        # Raises if the module lacks trained weights, and their file is kept.
        returned = restore(trainer, path)
        shutil.rmtree(path.parent, ignore_errors=True)
        self._has_fitted |= trainer.state.fn == TrainerFn.FITTING
        return returned

    def _work(
        self, path: Path, trainer: "pl.Trainer", function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Run ``function`` as a rank. On Linux, torch interrupts it if the launching process ends."""
        self._is_worker = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler is that of the launching process
        # OpenMP's threads do not survive a fork: this process would wait forever for those of its parent.
        torch.set_num_threads(1)
        try:
            # `trainer.fit` or its like calls this launcher again, and `on_exception` hooks.
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            getattr(trainer, cast(TrainerFn, trainer.state.fn).value)(**given)
            if not self._returned:
                raise RuntimeError(
                    "What a Tuner finds stays in the ranks' processes, which end: use the callback"
                    " LearningRateFinder, which works within fit()."
                )
            collect(trainer, self._returned[0], path)
        except SystemExit as error:
            if error.code:
                raise
            raise RuntimeError("sys.exit(0) has ended the run, without results.") from error

    def _end_workers(self) -> None:
        """End those that still run, as this process leaves: after some seconds, at a second Ctrl-C at once."""
        self.kill(signal.SIGTERM)
        wait_until = time.monotonic() + TIME_TO_END_S
        try:
            for process in self.procs:
                process.join(max(0.0, wait_until - time.monotonic()))
        finally:
            self.kill(signal.SIGKILL)


def collect(trainer: "pl.Trainer", returned: Any, path: Path) -> None:
    """Write this run's results and whole weights for :func:`restore`, once on each node. A collective."""
    is_first = trainer.strategy.local_rank == 0  # type: ignore[attr-defined]
    weights = None
    if trainer.state.fn == TrainerFn.FITTING:
        weights = whole(model_state(trainer.lightning_module), keep=is_first)
    if not is_first:
        return
    results = {
        "returned": returned,
        "state": trainer.state,
        "metrics": dict(trainer.callback_metrics),
        "checkpoint_callbacks": [
            {name: getattr(callback, name) for name in _OF_CHECKPOINT_CALLBACKS if hasattr(callback, name)}
            for callback in trainer.checkpoint_callbacks
        ],
        "weights": weights,
    }
    torch.save(results, path)


def restore(trainer: "pl.Trainer", path: Path) -> Any:
    """Put the workers' results into the launching process's Trainer and module.

    Returns:
        What the Trainer's function returned.
    """
    results = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    trainer.state = results["state"]
    trainer.callback_metrics.clear()
    trainer.callback_metrics.update(results["metrics"])
    saved = results["checkpoint_callbacks"]
    for callback, attributes in zip(trainer.checkpoint_callbacks, saved, strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)
    if results["weights"] is not None:
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        load_trained_weights(trainer.lightning_module, results["weights"], path)
    return results["returned"]


def load_trained_weights(module: "pl.LightningModule", weights: dict[str, Any], path: Path) -> None:
    """Load whole weights into a module of this process alone; call ``configure_model`` if it lacks layers.

    RuntimeError that names their ``path`` if it still lacks some: otherwise the module would seem trained.
    """
    try:
        if not weights.keys() <= module.state_dict().keys():
            module.configure_model()
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise ValueError("some of its tensors are on the meta device")
        module.load_state_dict(under_own_names(module, weights))
    except Exception as error:
        raise RuntimeError(
            f"{type(module).__name__} is trained, but the module in this process cannot hold the trained"
            f" weights ({error}): they are in {path}, as torch.load(path, weights_only=False)['weights']."
            " Create its layers, as they are in training, in __init__ or in a configure_model that works"
            " without self.device_mesh, or load a checkpoint."
        ) from error

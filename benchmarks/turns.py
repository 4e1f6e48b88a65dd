"""Runs several trainings in one process in turn, one optimizer step at a time."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override


class CollectiveCounter(TorchDispatchMode):
    """Counts operators as they pass the dispatcher in this thread, and c10d collectives by name, also C++'s."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.operators = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operators += 1
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            self.counts[name.strip("_")] += 1
        return func(*args, **(kwargs or {}))


class PausedTraining:
    """A training in a thread of its own, which waits after each optimizer step until :meth:`step` is called.

    Only one thread of a process runs at a time, in the same order on all ranks, so that trainings can share
    a process group.

    Args:
        train: Runs the whole training, calls its argument at the end of each optimizer step, returns the
            weights.
    """

    def __init__(self, train: Callable[[Callable[[], None]], Tensor]) -> None:
        self._train = train
        self._may_move = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._counter: CollectiveCounter | None = None
        self._weights: Tensor | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._may_move.acquire()
        try:
            self._weights = self._train(self._pause)
        except BaseException as error:
            self._error = error
        self._stands.release()

    def _pause(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
        self._stands.release()
        self._may_move.acquire()
        if self._counter is not None:
            self._counter.__enter__()

    def step(self, counter: CollectiveCounter | None = None) -> None:
        """Run to the end of the next optimizer step on all ranks; the first call includes the set-up.

        A collective over the default group. Whatever the training raises is raised here.

        Args:
            counter: Counts the collectives of the step; not for the first step.
        """
        self._counter = counter
        self._move()
        dist.barrier()

    def finish(self) -> Tensor:
        """Run from the last optimizer step to the end, and return the weights."""
        self._counter = None
        self._move()
        assert self._weights is not None
        return self._weights

    def _move(self) -> None:
        self._may_move.release()
        self._stands.acquire()
        if self._error is not None:
            raise self._error

"""What a micro-batch runs of the package on its way from a loss to final gradients.

`python -m tests.gradients.spine` prints it, for a micro-batch that ends its window.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import lightning_automodel
from lightning_automodel import AutomodelStrategy
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.runs import LabelledModule, loader, make_trainer

PACKAGE = Path(lightning_automodel.__file__).parent
ACCUMULATE = 2
COUNTED = 2 * ACCUMULATE + 1
"""The last micro-batch of the third window: a run looks closer at its first one, and DDP settles its buckets
in the second."""
OPTIONS: dict[str, dict[str, Any]] = {"sharded": {}, "replicated": {"data_parallel": "ddp"}}
CASE = Case(seed=2, telling="labels", num_batches=3 * ACCUMULATE)


TORCH = Path(torch.__file__).parent
DECORATORS = TORCH / "utils" / "_contextlib.py"
"""What calls a function that is decorated with `torch.no_grad()`."""


@dataclass
class Route:
    """The functions of the package that Python enters, in their order.

    Whoever enters them counts: the package, Lightning, and torch, which calls hooks of parameters, callbacks of
    autograd and functions that are replaced.

    Attributes:
        entries: Function and file of every entry, also of each resumption of a generator.
        route: Their files. What torch calls for each unit or parameter is left out of it when it comes again.
    """

    entries: list[tuple[str, str]] = field(default_factory=list)
    route: list[str] = field(default_factory=list)
    _called_back: set[tuple[str, str]] = field(default_factory=set)  # by torch
    _repeated: FrameType | None = None  # what torch has called once more, while it runs

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """As the function of `sys.setprofile`: note the entry, if it is one into the package."""
        if event == "return" and frame is self._repeated:
            self._repeated = None
        path = Path(frame.f_code.co_filename)
        if event != "call" or PACKAGE not in path.parents:
            return
        file = str(path.relative_to(PACKAGE))
        entry = (frame.f_code.co_qualname, file)
        self.entries.append(entry)
        if self._repeated is None and _is_called_by_torch(frame):
            if entry in self._called_back:
                self._repeated = frame
            self._called_back.add(entry)
        if self._repeated is None:
            self.route.append(file)

    @property
    def functions(self) -> list[tuple[str, str]]:
        """The distinct functions and methods, with their files."""
        return list(dict.fromkeys(self.entries))

    @property
    def files(self) -> set[str]:
        """The files of these functions."""
        return {file for _, file in self.entries}

    @property
    def num_returns(self) -> int:
        """Entries into a file that was entered before, and left since by an entry into another file."""
        previous = [None, *self.route]
        changes = [file for file, before in zip(self.route, previous, strict=False) if file != before]
        return len(changes) - len(set(changes))

    def __str__(self) -> str:
        lines = [f"{len(self.functions)} functions, {len(self.files)} files, {self.num_returns} returns"]
        lines += [f"  {file}: {name}" for name, file in self.functions]
        return "\n".join(lines)


def _is_called_by_torch(frame: FrameType) -> bool:
    """Whether a frame of torch lies between a function of the package and the one that has led to it.

    On a CPU, autograd calls a hook from within `_engine_run_backward`.
    """
    caller = frame.f_back
    while caller is not None:
        path = Path(caller.f_code.co_filename)
        if PACKAGE in path.parents:
            return False
        if TORCH in path.parents and path != DECORATORS:
            return True
        caller = caller.f_back
    return False


class _Watched(LabelledModule):
    """Notes what runs between the return of `training_step` and `on_after_backward`, in one micro-batch."""

    def __init__(self) -> None:
        super().__init__(CASE.seed)
        self.route = Route()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == COUNTED:
            sys.setprofile(self.route.note)
        return loss

    def on_after_backward(self) -> None:
        sys.setprofile(None)


def route(options: dict[str, Any]) -> Route:
    """What this rank runs for the micro-batch that ends the third window of a fit. A collective over the world.

    Only what the thread of the training step runs is noted. On a CPU, autograd's backward is part of it.
    """
    module = _Watched()
    trainer = make_trainer(AutomodelStrategy(**options), accumulate_grad_batches=ACCUMULATE)
    trainer.fit(module, loader(CASE))
    return module.route


def print_routes() -> None:
    """Print both routes."""
    pool = RankPool(2)
    for name, options in OPTIONS.items():
        print(f"{name}: {pool.run(route, options)[0]}")
    pool.stop()


if __name__ == "__main__":
    print_routes()

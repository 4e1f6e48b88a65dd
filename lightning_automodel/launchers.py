"""How processes come about; each runs the Trainer's function inside of a guard."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_automodel import _compat
from lightning_automodel.guard import RunGuard


class SubprocessLauncher(_compat.SubprocessScriptLauncher):
    """Runs this script again, as a process of its own, for every further rank of the node."""

    def __init__(
        self, guard: RunGuard, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._guard = guard

    @override
    def launch(self, function: Callable, *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any) -> Any:
        return super().launch(partial(self._guard.run, function), *args, trainer=trainer, **kwargs)


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

"""Watching users' optimizer steps, ``zero_grad``, toggling and plain backwards while windows are open."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.gradients.windows import GradientWindows, OneOptimizer, optimizer_parameters, unwrap
from lightning_automodel.patching import PatchStack


class OptimizerWatch:
    """Tells the windows of steps, ``zero_grad`` and toggling, and refuses steps with gradients that are not final.

    Torch has hooks for an optimizer's step. It has none for ``zero_grad``, which is patched on the instances.
    """

    def __init__(self, windows: GradientWindows) -> None:
        self._windows = windows
        self._patches = PatchStack()  # of the optimizers, which a callback may replace in mid-run
        self._stray: set[nn.Parameter] = set()

    def watch(self, optimizers: list[Optimizer], wrappers: list[LightningOptimizer]) -> None:
        """Watch these optimizers, and Lightning's wrappers of them, instead of any earlier ones."""
        self._patches.restore()
        self._windows.optimizers = optimizers
        for optimizer, wrapper in zip(optimizers, wrappers, strict=True):
            self._patches.callback(optimizer.register_step_pre_hook(self._before_raw_step).remove)
            self._patches.callback(optimizer.register_step_post_hook(self._after_raw_step).remove)
            parameters = partial(optimizer_parameters, optimizer)
            for watched in (optimizer, wrapper):
                self._patches.set(watched, "zero_grad", self._dropping(watched.zero_grad, parameters))

    def _dropping(
        self, zero_grad: Callable[..., None], parameters: Callable[[], list[nn.Parameter]]
    ) -> Callable[..., None]:
        # A function, not a bound method, which a copy of the module would follow to process groups.
        def zero_and_drop(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            self._stray.difference_update(parameters())
            self._windows.drop(parameters())

        return zero_and_drop

    def watch_module(self, module: pl.LightningModule, patches: PatchStack, on_toggle: Callable[[], None]) -> None:
        """Watch ``module.zero_grad`` and optimizer toggling; ``on_toggle`` is called after each toggle."""
        zero_grad, toggle, untoggle = module.zero_grad, module.toggle_optimizer, module.untoggle_optimizer

        def toggle_optimizer(optimizer: OneOptimizer) -> None:
            toggle(optimizer)
            self._windows.toggled = unwrap(optimizer)
            on_toggle()

        def untoggle_optimizer(optimizer: OneOptimizer) -> None:
            untoggle(optimizer)
            self._windows.toggled = None
            on_toggle()

        patches.set(module, "zero_grad", self._dropping(zero_grad, lambda: self._windows.parameters))
        patches.set(module, "toggle_optimizer", toggle_optimizer)
        patches.set(module, "untoggle_optimizer", untoggle_optimizer)

    def watch_stray_backwards(self, patches: PatchStack) -> None:
        """Record gradients of a plain ``loss.backward()``, which the engine (DDP) would not synchronise."""
        for parameter in self._windows.parameters:
            if parameter.requires_grad:
                patches.callback(parameter.register_post_accumulate_grad_hook(self._note_accumulation).remove)

    def _note_accumulation(self, parameter: Tensor) -> None:
        if not self._windows.in_backward:
            self._stray.add(parameter)  # type: ignore[arg-type]

    def _before_raw_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A closure runs its backward inside the step, so the strategy checks after it. (`args[0]` is the optimizer.)
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is None:
            self.check_step(optimizer)

    def _after_raw_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._windows.stepped(optimizer)

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if an open window holds gradients of ``optimizer``, or nobody has synchronised them."""
        parameters, name = optimizer_parameters(optimizer), type(optimizer).__name__
        for window in self._windows.open_windows:
            if window.ahead is not None and self._windows.in_backward:
                continue  # counted ahead, so final at once: a gradient hook may step during backward
            if not window.owned.isdisjoint(parameters):
                raise RuntimeError(
                    f"{name}.step() in the middle of an accumulation window: {window.num_micro_batches}"
                    " backward(s) have accumulated and none has synchronised. Step after a backward outside of"
                    " `optimizer.toggle_model(sync_grad=False)`, or call optimizer.zero_grad() to give the window up."
                )
        stray = sum(parameter.grad is not None for parameter in self._stray.intersection(parameters))
        if stray:
            raise RuntimeError(
                f"{stray} parameters of {name} have gradients of a plain loss.backward(), which"
                " DistributedDataParallel does not synchronise under manual optimization, so ranks would diverge. Call"
                " self.manual_backward(loss) instead."
            )

    def close(self) -> None:
        """Stop watching optimizers."""
        self._patches.restore()
        self._windows.optimizers = []
        self._stray.clear()

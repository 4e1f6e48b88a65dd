"""One accumulation window for each optimizer, reset exactly when its gradients are zeroed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer

from lightning_automodel.token_loss import LossWindow


def unwrap(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerWindows:
    """The windows of a fit, by optimizer.

    Gradients and counts must vanish together, and only the optimizer's own ``zero_grad`` says when: Lightning calls it
    between the first forward and the first backward of a window, users where they like. Torch has no hook for it, so
    the method is replaced on the instances, for the time of the fit.

    Args:
        on_zero_grad: Called with the optimizer after its gradients were zeroed.
        is_misplaced: Called before they are; True leaves them as they are.
    """

    def __init__(self, on_zero_grad: Callable[[Optimizer], None], is_misplaced: Callable[[], bool]) -> None:
        self._on_zero_grad = on_zero_grad
        self._is_misplaced = is_misplaced
        self._windows: dict[Optimizer, LossWindow] = {}
        self._watched: list[Any] = []
        self._toggled: Optimizer | None = None
        self._module: pl.LightningModule | None = None
        self._ignores_zero_grad = False

    def __getitem__(self, optimizer: Optimizer | LightningOptimizer) -> LossWindow:
        return self._windows[unwrap(optimizer)]

    def watch(self, optimizers: list[Optimizer], wrappers: list[LightningOptimizer]) -> None:
        """Follow these optimizers, and Lightning's wrappers of them, from now on instead of those before."""
        self._unwatch()
        self._windows = {optimizer: self._windows.get(optimizer, LossWindow()) for optimizer in optimizers}
        for optimizer, wrapper in zip(optimizers, wrappers, strict=True):
            for watched in (optimizer, wrapper):
                watched.zero_grad = self._followed_by_reset(watched.zero_grad, optimizer)  # type: ignore[method-assign]
                self._watched.append(watched)

    def _unwatch(self) -> None:
        for watched in self._watched:
            del watched.__dict__["zero_grad"]
        self._watched = []

    def _followed_by_reset(self, zero_grad: Callable[..., None], optimizer: Optimizer) -> Callable[..., None]:
        def zero_grad_and_reset(*args: Any, **kwargs: Any) -> None:
            if self._is_misplaced():
                return
            zero_grad(*args, **kwargs)
            if not self._ignores_zero_grad:
                self._windows[optimizer].reset()
                self._on_zero_grad(optimizer)

        return zero_grad_and_reset

    def watch_toggling(self, module: pl.LightningModule, on_toggle: Callable[[], None]) -> None:
        """Follow which optimizer is toggled; ``on_toggle`` is called after each change of ``requires_grad``."""
        toggle, untoggle = module.toggle_optimizer, module.untoggle_optimizer

        def toggle_optimizer(optimizer: Optimizer | LightningOptimizer) -> None:
            toggle(optimizer)
            self._toggled = unwrap(optimizer)
            on_toggle()

        def untoggle_optimizer(optimizer: Optimizer | LightningOptimizer) -> None:
            untoggle(optimizer)
            self._toggled = None
            on_toggle()

        module.toggle_optimizer = toggle_optimizer  # type: ignore[method-assign]
        module.untoggle_optimizer = untoggle_optimizer  # type: ignore[method-assign]
        self._module = module

    def owner(self, named: Optimizer | LightningOptimizer | None) -> Optimizer:
        """The optimizer that a manual backward's count belongs to: the toggled, else the named, else the only one.

        Raises:
            ValueError: If there are several and none is toggled or named, or the named one is not among them.
        """
        if self._toggled is not None:
            return self._toggled
        if named is not None:
            if unwrap(named) not in self._windows:
                raise ValueError(
                    f"manual_backward(optimizer=...) got {type(unwrap(named)).__name__}, which is none of the"
                    f" {len(self._windows)} optimizers that configure_optimizers returned; pass one of"
                    " self.optimizers()."
                )
            return unwrap(named)
        if len(self._windows) != 1:
            raise ValueError(
                f"manual_backward cannot tell which of the {len(self._windows)} optimizers its label tokens belong to:"
                " run it inside `with optimizer.toggle_model():` or pass"
                " self.manual_backward(loss, num_label_tokens=n, optimizer=optimizer)."
            )
        return next(iter(self._windows))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which ``zero_grad`` is not the user's: torch calls it when it initialises optimizer state."""
        self._ignores_zero_grad = True
        try:
            yield
        finally:
            self._ignores_zero_grad = False

    def reset(self) -> None:
        """Forget what every window holds."""
        for window in self._windows.values():
            window.reset()

    def close(self) -> None:
        """Put the replaced methods back and forget the optimizers."""
        self._unwatch()
        if self._module is not None:
            del self._module.__dict__["toggle_optimizer"], self._module.__dict__["untoggle_optimizer"]
        self._windows, self._module, self._toggled = {}, None, None

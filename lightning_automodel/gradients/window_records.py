"""What one accumulation window is, and one backward of it. A window ends with a backward that synchronises."""

from dataclasses import dataclass, field

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.gradients.token_loss import WindowTotals

OneOptimizer = Optimizer | LightningOptimizer


def unwrap(optimizer: OneOptimizer) -> Optimizer:
    """The user's optimizer behind Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def optimizer_parameters(optimizer: OneOptimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [parameter for group in unwrap(optimizer).param_groups for parameter in group["params"]]


@dataclass(eq=False)
class Window:
    """One accumulation window.

    Attributes:
        key: The toggled optimizer that it belongs to; None without toggling.
        optimizers: The optimizers that step with its gradients.
        scale: [] the factor on its losses before backward; None if there is none.
        sums: [2] over its micro-batches on this rank, see :func:`sums_of`.
        num_micro_batches: On this rank, without padding batches.
        ahead: If it was counted ahead: losses are divided by these totals, so that gradients are final at once.
        trained: Parameters that were trainable in any of its backwards. The same on all ranks.
        used: Parameters that this rank's losses depend on.
    """

    key: Optimizer | None
    optimizers: list[Optimizer]
    scale: Tensor | None
    sums: Tensor
    num_micro_batches: int = 0
    ahead: WindowTotals | None = None
    trained: set[nn.Parameter] = field(default_factory=set)
    used: set[nn.Parameter] = field(default_factory=set)

    @property
    def owned(self) -> set[nn.Parameter]:
        """The parameters of its optimizers. No other open window may hold any of them."""
        return {p for optimizer in self.optimizers for p in optimizer_parameters(optimizer)}


@dataclass(eq=False)
class BackwardPass:
    """One backward of the strategy, from before it until its gradients stand in ``.grad``.

    Attributes:
        window: The window that it adds to.
        ends: Whether the window ends with it. The same on all ranks.
        is_padding: Whether its micro-batch is a padding batch, in which no parameter counts as used.
        final: Parameters whose gradients are final after it, in one order on all ranks; none in mid-window.
        owned_elsewhere: Parameters of other open windows.
        frozen: Parameters that earlier backwards of the open windows have trained, and this one does not.
        older_gradients: By parameter, what ``.grad`` held before it.
        zero_filled: Parameters that the engine gives a zero gradient even if no rank has used them, where one process
            would have none; in one order on all ranks. Set by the engine when the window ends.
    """

    window: Window
    ends: bool
    is_padding: bool
    final: list[nn.Parameter]
    owned_elsewhere: set[nn.Parameter]
    frozen: set[nn.Parameter]
    older_gradients: list[Tensor | None]
    zero_filled: list[nn.Parameter] = field(default_factory=list)

"""Parameters that sharding has replaced by shards, and that user code may still hold: using them is refused."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.torch import versions

_NUM_NAMED = 3


class ReplacedParameters:
    """Remembers the plain parameters of ``module``, which is then sharded, without keeping them alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Not of subclasses: `Module.to` swaps them, which torch refuses for what is weakly referred to.
        self._before = {name: weakref.ref(p) for name, p in self._named() if type(p) is nn.Parameter}
        self._replaced: list[tuple[str, weakref.ref[nn.Parameter], nn.Parameter]] = []
        self._watched: list[tuple[str, weakref.ref[nn.Parameter], list[int]]] = []
        self._counts: Callable[[list[nn.Parameter]], list[int]] = versions

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._module.named_parameters(remove_duplicate=False)

    def refuse_use(self, counts: Callable[[list[nn.Parameter]], list[int]], patches: PatchStack) -> None:
        """Refuse from now on what reaches a replaced parameter. Called once the module is sharded.

        ``counts`` tells how often parameters may have been written.
        """
        self._counts = counts
        for name, shard in self._named():
            reference = self._before.get(name)
            if reference is None or reference() is shard:
                continue
            self._replaced.append((name, reference, shard))
            if (old := reference()) is not None:
                self._watched.append((name, reference, counts([old])))
                if old.requires_grad:
                    patches.callback(old.register_hook(partial(_refuse_gradient, name, reference)).remove)

    def give_shards(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was made before the module was sharded, as LightningCLI makes it, the shards."""
        shards = {
            id(old): shard for _, reference, shard in self._replaced if (old := reference()) is not None
        }
        for group in optimizer.param_groups if not optimizer.state else ():
            group["params"] = [shards.get(id(parameter), parameter) for parameter in group["params"]]

    def check(self) -> None:
        """Raise RuntimeError if a replaced parameter was written. Called before each training step."""
        self._watched = [entry for entry in self._watched if entry[1]() is not None]
        for name, reference, before in self._watched:
            old = reference()
            if old is not None and self._counts([old]) != before:
                raise RuntimeError(f"{name} was read through .data or written past the module: {_text(old)}")


def _refuse_gradient(name: str, reference: "weakref.ref[nn.Parameter]", gradient: Tensor) -> None:
    old = reference()
    if old is None:
        held = ""
    else:
        held = _text(old)
    raise RuntimeError(f"{name} was used past the module, so that its gradient would be lost: {held}")


def _text(old: nn.Parameter) -> str:
    holders = ", ".join(holder for holder, _ in zip(_holders(old), range(_NUM_NAMED), strict=False))
    return (
        f"sharding has replaced this parameter, and {holders or 'something'} still holds the tensor that it"
        " was before. Take it from the module each time (self.weight, a property, or a module that is"
        " called), or pass data_parallel='ddp', which replaces nothing."
    )


def _holders(held: Any) -> Iterator[str]:
    """Where containers and objects hold something, in words. Searches all objects of the process."""
    for referrer in gc.get_referrers(held):
        if isinstance(referrer, dict):
            keys = [key for key, value in list(referrer.items()) if value is held]
            yield from (_place(referrer, key) for key in keys)
        elif isinstance(referrer, (list, tuple, set)):
            yield f"a {type(referrer).__name__} of {len(referrer)}{_owner(referrer)}"
        elif isinstance(referrer, CellType):
            # None if it is that of a running function, as of this one.
            for function in _functions(referrer)[:1]:
                yield f"the closure of {function.__qualname__}()"


def _place(holder: dict[Any, Any], key: Any) -> str:
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder:
            return f"{type(owner).__name__}.{key}"
    return f"a dict under {key!r}{_owner(holder)}"


def _owner(container: Any) -> str:
    """The attribute that holds a container, if any."""
    namespaces: list[dict[str, Any]] = [
        referrer for referrer in gc.get_referrers(container) if isinstance(referrer, dict)
    ]
    for namespace in namespaces:
        for owner in gc.get_referrers(namespace):
            if getattr(owner, "__dict__", None) is namespace:
                name = next(name for name, value in namespace.items() if value is container)
                return f" ({type(owner).__name__}.{name})"
    return ""


def _functions(cell: CellType) -> list[FunctionType]:
    """The functions whose closure has this cell."""
    closures = [found for found in gc.get_referrers(cell) if isinstance(found, tuple)]
    return [f for closure in closures for f in gc.get_referrers(closure) if isinstance(f, FunctionType)]

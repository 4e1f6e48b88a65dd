"""What is sent to a process that was not forked must be pickled, and arrives in shared memory where it is a tensor."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn


def refuse_unpicklable(
    start_method: str, trainer: "pl.Trainer", args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> None:
    """Raise what tells which part of the run cannot be pickled, if any.

    Args:
        start_method: How the processes were to be started.
        trainer: With its callbacks, loggers and strategy.
        args: Of the Trainer's function: the module, loaders, data module.
        kwargs: Likewise.
        error: What starting the processes raised.

    Raises:
        TypeError: If a part cannot be pickled; from ``error``.
    """
    sent = [(_role(value), value) for value in (*args, *kwargs.values())]
    parts = [*sent, *((f"the callback {type(c).__name__}", c) for c in trainer.callbacks)]  # type: ignore[attr-defined]
    parts += [(f"the logger {type(logger).__name__}", logger) for logger in trainer.loggers]
    parts += [("the strategy", trainer.strategy), ("the Trainer", trainer)]
    found = _find(parts, set())
    if found is None:
        return
    where, what, cause = found
    raise TypeError(
        f"start_method={start_method!r} sends the Trainer, the module and its data to new processes, but {where}"
        f" ({type(what).__name__}) cannot be pickled: {str(cause).rstrip('.')}. Define it at the top level of a module"
        " that can be imported, make it in setup(), or pass start_method='fork', or 'popen' in a script."
    ) from error


def _role(value: Any) -> str:
    if isinstance(value, pl.LightningModule):
        return "the module"
    return "the data module" if isinstance(value, pl.LightningDataModule) else "the data"


def _find(parts: Sequence[tuple[str, Any]], seen: set[int]) -> tuple[str, Any, Exception] | None:
    """The innermost of the parts that cannot be pickled: where, what, and what pickling says of it."""
    for where, value in parts:
        if id(value) in seen:
            continue
        seen.add(id(value))
        error = _error(value)
        if error is None:
            continue
        inner = [(f"{where}{name}", part) for name, part in _parts(value) if _error(part) is not None]
        found = _find(inner, seen) if inner else (where, value, error)
        if found is not None:
            return found
    return None


def _error(value: Any) -> Exception | None:
    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What ``value`` is pickled with, each with how to write it."""
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    """What the value itself says that it is pickled with; nothing where it fails at that."""
    try:
        state = value.__getstate__()
    except Exception:
        return {}
    return state if isinstance(state, dict) else {}


def unshare_attributes(owners: Iterable[Any]) -> None:
    """Give modules and other objects tensors of their own, which ranks that are no forks hold in shared memory.

    Ranks would otherwise add to one another's metrics, whose states are no buffers.

    Args:
        owners: Objects whose attributes, and what these hold directly, are copied; of a module, of all modules in it
            but their parameters and buffers.
    """
    copies: dict[int, Tensor] = {}
    for owner in owners:
        for holder in owner.modules() if isinstance(owner, nn.Module) else [owner]:
            attributes = getattr(holder, "__dict__", {})
            for name, value in attributes.items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    _unshare(attributes, name, copies)
                    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
                    for key, _ in list(items):
                        _unshare(value, key, copies)


def _unshare(container: Any, key: Any, copies: dict[int, Tensor]) -> None:
    tensor = container[key]
    if isinstance(tensor, Tensor) and tensor.is_shared():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        container[key] = copies[id(tensor)]

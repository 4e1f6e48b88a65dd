"""What is sent to a process that was not forked must be pickled: tell what cannot be, and what to do."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import lightning.pytorch as pl

PICKLING_ERRORS = (pickle.PicklingError, TypeError, AttributeError)


def refuse_unpicklable(
    start_method: str, trainer: "pl.Trainer", args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> NoReturn:
    """Raise what tells which part of the run cannot be pickled.

    Args:
        start_method: How the processes were to be started.
        trainer: With its callbacks, loggers and strategy.
        args: Of the Trainer's function: the module, loaders, data module.
        kwargs: Likewise.
        error: What pickling said.

    Raises:
        TypeError: Always; from ``error``.
    """
    sent = [(_role(value), value) for value in (*args, *kwargs.values())]
    parts = [*sent, *((f"the callback {type(c).__name__}", c) for c in trainer.callbacks)]  # type: ignore[attr-defined]
    parts += [(f"the logger {type(logger).__name__}", logger) for logger in trainer.loggers]
    parts += [("the strategy", trainer.strategy), ("the Trainer", trainer)]
    where, what, cause = _find(parts, set()) or ("the run", trainer, error)
    raise TypeError(
        f"start_method={start_method!r} sends the Trainer, the module and its data to new processes, but {where}"
        f" ({type(what).__name__}) cannot be pickled: {cause}. Define it at the top level of a module that can be"
        " imported, make it in setup(), or pass start_method='fork', or 'popen' in a script."
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
        try:
            ForkingPickler.dumps(value)
        except Exception as error:
            return _find([(f"{where}{name}", part) for name, part in _parts(value)], seen) or (where, value, error)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What ``value`` is pickled with, each with how to write it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        state = value.__getstate__()
        attributes = state if isinstance(state, dict) else {}
        yield from ((f".{name}", part) for name, part in attributes.items())

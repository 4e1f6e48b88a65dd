"""Numbers, names and errors in words."""

import math
import textwrap
from collections.abc import Sequence

from torch import Tensor

from lightning_automodel.distributed.failures import list_first

_NAMED = 4  # parameters, at most


def percent(value: float) -> str:
    """A share in percent, with two digits."""
    if not math.isfinite(value):
        return "infinitely much"
    if 0 < abs(value) < 1e-9:
        return f"{100 * value:.1e} %"
    return f"{float(f'{100 * value:.2g}'):.9f}".rstrip("0").rstrip(".") + " %"


def range_of(values: Tensor) -> str:
    """The smallest and the largest of some shares."""
    low = percent(float(values.min()))
    high = percent(float(values.max()))
    if low == high:
        return low
    return f"{low} to {high}"


def described(error: Exception) -> str:
    """An exception in one line, without a full stop."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' [...]').rstrip('.')}"


def number_of(number: float, noun: str) -> str:
    """A number with its noun, such as "2 ranks"."""
    return f"{number:g} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a countable noun."""
    return noun + ("es" if noun.endswith("ch") else "s")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return list_first(names, _NAMED)

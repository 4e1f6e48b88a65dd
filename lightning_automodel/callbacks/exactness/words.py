"""Numbers and names in words."""

from torch import Tensor


def percent(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.3g} %"


def range_of(values: Tensor) -> str:
    """The smallest and the largest of some shares."""
    low = percent(float(values.min()))
    high = percent(float(values.max()))
    if low == high:
        return low
    return f"{low} to {high}"


def number_of(number: int, noun: str) -> str:
    """A number with its noun, such as "2 ranks"."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """The plural of a countable noun."""
    return noun + ("es" if noun.endswith("ch") else "s")

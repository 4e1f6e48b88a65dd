"""Dividing what is too large to hold at once."""

import re
from collections.abc import Mapping

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40})


def number_of_bytes(size: str | int) -> int:
    """Bytes that ``"5GB"`` or ``"200MiB"`` says; a number is one of bytes.

    Raises:
        ValueError: If it says none, or less than one.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{size!r} is no size: write a number of bytes, or one with KB, MB, GB, KiB, MiB or GiB (5GB)")
    return int(float(found[1]) * unit)


def in_portions(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, in lists of at most ``limit`` bytes together; what is larger by itself is a list."""
    portions: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        if not portions or total + size > limit:
            portions.append([])
            total = 0
        portions[-1].append(name)
        total += size
    return portions

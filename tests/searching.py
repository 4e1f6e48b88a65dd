"""The command of a search that draws cases by seed and number: it prints what is wrong, until its time is over."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.rank_pool import RankPool


def main(draw: Callable[[int, int], Any], judge: Callable[[RankPool, Any], str | None]) -> None:
    """Search on two ranks, and end with 1 if something was found. `--first 12 --cases 1` runs one case again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pool = RankPool(2)
    end = time.monotonic() + arguments.seconds
    number = arguments.first
    num_found = 0
    try:
        while time.monotonic() < end and number < arguments.first + arguments.cases:
            case = draw(arguments.seed, number)
            if wrong := judge(pool, case):
                num_found += 1
                print(f"FOUND case {number} of seed {arguments.seed}: {case}\n{wrong}\n", flush=True)
            number += 1
    finally:
        pool.stop()
    print(f"{number - arguments.first} cases of seed {arguments.seed}, {num_found} findings")
    sys.exit(num_found > 0)

"""`python -m tests.search --seconds 600 --seed 7`: search for a run that does not equal one process.

Prints the seed, what came of the cases, and for each finding the smallest case that shows it. `--case 123`
runs one number of the seed again, `--dict "{'engine': 'ddp'}"` a case as it was printed.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Callable

import torch

from tests.rank_pool import RankPool
from tests.search.cases import Case
from tests.search.drawing import EXPERTS
from tests.search.harness import Search, judge
from tests.search.kinds import KINDS


def main() -> int:
    """Search until the time or the cases are over; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this number alone")
    parser.add_argument("--dict", nargs="+", default=[], help="run these cases alone")
    parser.add_argument(
        "--kinds", nargs="*", default=[], choices=[*KINDS, EXPERTS], help="user code that every case has"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first finding")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a smaller case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools: dict[int, RankPool] = {}

    def pool(num_ranks: int) -> RankPool:
        return pools.setdefault(num_ranks, RankPool(num_ranks))

    search = Search(pool, arguments.seed, tuple(arguments.kinds))
    try:
        if arguments.dict:
            return sum(_run(Case(**ast.literal_eval(each)), pool) for each in arguments.dict)
        return _search(search, arguments)
    finally:
        for each in pools.values():
            each.stop()


def _run(case: Case, pool: Callable[[int], RankPool]) -> bool:
    """Whether something is wrong with a case, which is printed."""
    verdict = judge(pool(case.num_ranks), case)
    print(
        f"{case.as_dict()}: {verdict.what or f'{verdict.finding.kind}: {verdict.finding.text}'}", flush=True
    )
    return verdict.finding is not None


def _search(search: Search, arguments: argparse.Namespace) -> int:
    numbers = range(arguments.first, arguments.first + arguments.cases)
    if arguments.case is not None:
        numbers = range(arguments.case, arguments.case + 1)
    print(f"seed {arguments.seed}, kinds {arguments.kinds}", flush=True)
    began = time.monotonic()
    num_cases = 0
    num_found = 0
    for number in numbers:
        if time.monotonic() - began > arguments.seconds:
            break
        case, verdict = search.judge(number)
        num_cases += 1
        if verdict.finding is None:
            continue
        num_found += 1
        finding = verdict.finding
        if not arguments.no_shrink:
            case = search.smaller(case, finding)
        print(f"\nFOUND {finding.kind}, case {number} of seed {search.seed}: {finding.text[:3000]}")
        print(f"  python -m tests.search --dict {str(case.as_dict())!r}", flush=True)
        if arguments.stop:
            break
    seconds = time.monotonic() - began
    print(f"\n{num_cases} cases of seed {search.seed} in {seconds:.0f} s, {num_found} findings")
    for what, times in search.tally.most_common():
        print(f"{times:6d} {what}")
    return num_found > 0


if __name__ == "__main__":
    sys.exit(main())

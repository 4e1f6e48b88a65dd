"""A debugger on one rank of a test, whose standard streams lead elsewhere.

    from tests.debugger import stop_here
    stop_here()  # in a test's function for the ranks, or anywhere in the package

    RANK_TIMEOUT_S=3600 python -m pytest -s --timeout 0 tests/gradients/test_hooks.py

pdb reads and writes the terminal that pytest was started in. The other ranks go on to their next collective,
and wait.
"""

from __future__ import annotations

import os
import pdb
import sys

TERMINAL = "/dev/tty"


def stop_here(rank: int = 0) -> None:
    """Stop `rank` at the caller's line. On the other ranks, and in a process that is no rank, nothing happens."""
    if os.environ.get("RANK") != str(rank):
        return
    # Left open: the debugger goes on reading after this function has returned.
    answers = open(TERMINAL)  # noqa: SIM115
    questions = open(TERMINAL, "w")  # noqa: SIM115
    debugger = pdb.Pdb(stdin=answers, stdout=questions, nosigint=True)
    debugger.prompt = f"(rank {rank}) "
    debugger.set_trace(sys._getframe().f_back)

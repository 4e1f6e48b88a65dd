"""How a rank's process has ended, in words."""

import signal

from lightning.pytorch.strategies.parallel import ParallelStrategy

from lightning_automodel.distributed import failures

WHY_ENDED = {
    "SIGKILL": (
        ', usually by the kernel as memory ran out: look for "out of memory" in dmesg, and for limits of the job'
    ),
    "SIGSEGV": (
        ', a fault in compiled code, often of an extension: look for "Fatal Python error" above, where its line'
        " is"
    ),
    "SIGBUS": (
        ", often as /dev/shm is full: give the container more of it (docker run --shm-size), or take fewer"
        " num_workers"
    ),
}


def describe_exit(status: int, backend: str) -> str:
    """The exit status of a rank's process, which used ``backend``, in words; below 0, it is minus a signal."""
    names = {known.value: known.name for known in signal.Signals}
    if status == -signal.SIGABRT:
        return f"was ended by SIGABRT, {_why_aborted(backend)} {failures.RUN_ON_ALL_RANKS}"
    if status < 0:
        name = names.get(-status, f"signal {-status}")
        return f"was ended by {name}{WHY_ENDED.get(name, '')}"
    return f"ended with exit status {status}"


def _why_aborted(backend: str) -> str:
    """What aborts a process whose groups have this backend, and how to tell which it was."""
    if backend.lower() in ("gloo", "cpu:gloo"):
        return "as gloo does where ranks call different collectives."
    name = backend.rpartition(":")[2].upper()
    return (
        f"as the watchdog of {name} does after an error in a kernel (its log then has the device's error),"
        " or where a"
        ' collective has waited for the strategy\'s timeout ("Watchdog caught collective operation timeout"), since a'
        " rank did not come to it."
    )


def backend_of(strategy: ParallelStrategy) -> str:
    """Backend of the process groups of ``AutomodelStrategy``, as it will be or is."""
    return str(strategy.process_group_backend)  # type: ignore[attr-defined]

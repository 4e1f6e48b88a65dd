"""What a rank tells of its failure, which exceptions only follow from another rank's, and how a process ends."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from dataclasses import asdict

import pytest
import torch.distributed as dist

from lightning_automodel.distributed import last_resort
from lightning_automodel.distributed.failures import (
    MAX_MESSAGE_CHARACTERS,
    MISSED_HEARTBEATS,
    MISSING,
    PROCESS_ENDED,
    RankFailedError,
    RankFailure,
    is_communication_error,
    message_of,
)
from lightning_automodel.distributed.last_resort import limited

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def test_failure_travels_whole() -> None:
    """Through a store and through a pipe, whatever its message holds."""
    failure = RankFailure.from_exception(
        ValueError('no "labels" | here\n\u00e9'), rank=3, where="training_step"
    )
    assert RankFailure(**json.loads(json.dumps(asdict(failure)))) == failure
    error = pickle.loads(pickle.dumps(RankFailedError(failure)))
    assert error.failure == failure
    assert str(error) == (
        f'rank 3 on {socket.gethostname()} failed in training_step: ValueError: no "labels" | here\n\u00e9'
    )


@pytest.mark.parametrize(
    ("failure", "ending"),
    [
        (ValueError(), "failed in setup: ValueError"),
        (SystemExit(3), "failed in setup: SystemExit: 3"),
        (KeyboardInterrupt(), "was interrupted in setup"),
        (MISSED_HEARTBEATS, "missed heartbeats, last seen in setup: nothing for 6 s"),
        (PROCESS_ENDED, "was last seen in setup: nothing for 6 s"),
        (MISSING, "is missing, last seen in setup: nothing for 6 s"),
    ],
    ids=repr,
)
def test_sentences(failure: BaseException | str, ending: str) -> None:
    """Without a message there is no colon; of a rank that raised nothing, its last known place is given as such."""
    if isinstance(failure, str):
        told = RankFailure(1, socket.gethostname(), "setup", failure, "nothing for 6 s")
    else:
        told = RankFailure.from_exception(failure, 1, "setup")
    assert str(told) == f"rank 1 on {socket.gethostname()} {ending}"


def test_long_message_is_cut() -> None:
    """A store is no place for megabytes."""
    told = RankFailure.from_exception(ValueError("x" * 10**6), 0, "setup")
    assert len(told.message) == MAX_MESSAGE_CHARACTERS


class _UnprintableError(RuntimeError):
    """Its text depends on what is not there."""

    def __str__(self) -> str:
        raise AttributeError("path")


def test_a_cause_without_a_text() -> None:
    """It is told nevertheless: the others would else hear of nothing but an end."""
    failure = RankFailure.from_exception(_UnprintableError(), 1, "training_step")
    assert (failure.error, failure.message) == (
        "_UnprintableError",
        "(the exception has no text: its __str__ raises AttributeError)",
    )
    assert not is_communication_error(_UnprintableError())
    assert message_of(ValueError("no labels")) == "no labels"


def _raised_from(cause: BaseException) -> BaseException:
    try:
        raise KeyError("batch") from cause
    except KeyError as error:
        return error


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (GLOO, True),
        (dist.DistNetworkError("broken pipe"), True),
        (dist.DistStoreError("wait timeout"), True),
        (_raised_from(GLOO), True),
        (ValueError("gloo"), False),
        (RuntimeError("shape mismatch"), False),
        (_raised_from(RuntimeError("shape mismatch")), False),
        (KeyboardInterrupt(), False),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("Rank 0 failed in monitoredBarrier"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("cannot decode data/gloomy_forest.jpg"), False),
        (FileNotFoundError("gloo"), False),
    ],
    ids=repr,
)
def test_communication_errors(exception: BaseException, expected: bool) -> None:
    """Only what says that another rank did not answer is taken for the result of its failure."""
    assert is_communication_error(exception) is expected


# --- What a process that has to end says ------------------------------------------------------------------------------


def test_a_block_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end cancels the end of the process."""
    ended = threading.Event()
    monkeypatch.setattr(last_resort, "end_process", lambda rank, why: ended.set())
    with limited(60.0, 1, "late"):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    timer.join(20)
    assert not timer.is_alive()
    assert not ended.is_set()
    with limited(0.01, 1, "late"):
        assert ended.wait(20)

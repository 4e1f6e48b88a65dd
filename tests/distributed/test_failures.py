"""What a rank tells of its failure, and which exceptions only follow from another rank's."""

from __future__ import annotations

import json
import pickle
import socket
from dataclasses import asdict

import pytest
import torch.distributed as dist

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
    ("exception", "ending"),
    [
        (ValueError(), "failed in setup: ValueError"),
        (SystemExit(3), "failed in setup: SystemExit: exit status 3"),
        (KeyboardInterrupt(), "was interrupted in setup"),
    ],
)
def test_endings(exception: BaseException, ending: str) -> None:
    """An exception without a message leaves no colon behind, and an exit tells its status."""
    assert str(RankFailure.from_exception(exception, 0, "setup")).endswith(ending)


def test_long_message_is_cut() -> None:
    """A store is no place for megabytes."""
    assert (
        len(RankFailure.from_exception(ValueError("x" * 10**6), 0, "setup").message)
        == MAX_MESSAGE_CHARACTERS
    )


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ("fit", MISSED_HEARTBEATS, "rank 1 on host missed heartbeats, last seen in fit: nothing for 6 s"),
        ("fit", PROCESS_ENDED, "rank 1 on host was last seen in fit: nothing for 6 s"),
        ("fit", MISSING, "rank 1 on host is missing, last seen in fit: nothing for 6 s"),
    ],
)
def test_what_others_saw(where: str, error: str, said: str) -> None:
    """No exception is named, since the rank raised none, and its last known place is given as such."""
    assert str(RankFailure(1, "host", where, error, "nothing for 6 s")) == said


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
        (RuntimeError("cannot decode data/gloomy_forest.jpg"), False),
        (FileNotFoundError("gloo"), False),
    ],
    ids=repr,
)
def test_communication_errors(exception: BaseException, expected: bool) -> None:
    """Only what says that another rank did not answer is taken for the result of its failure."""
    assert is_communication_error(exception) is expected

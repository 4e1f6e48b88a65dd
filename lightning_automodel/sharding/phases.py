"""The phases of a run under FSDP2."""

from collections import Counter
from enum import Enum, auto
from typing import Any

from lightning_automodel.gradients.engine import Engine


class Phase(Enum):
    """What runs, which decides what FSDP2 frees."""

    HOOKS = auto()  # what a forward gathers is freed after it: the module shows shards
    STEP = auto()  # of training, and its backward: gathered parameters stay for it, or for the window
    BEFORE_BACKWARD = auto()  # as HOOKS, and the backward needs the weights of the step's forward
    EVALUATION = auto()  # as STEP, without a backward of the strategy's
    REPLAY = auto()  # as STEP, with a backward that is not the strategy's


class PhasedEngine(Engine):
    """An engine that is in a phase.

    Attributes:
        phase: What runs.
        calls: By FSDP2's group, how often a step has called its unit with gradients.
    """

    phase: Phase
    calls: Counter[Any]

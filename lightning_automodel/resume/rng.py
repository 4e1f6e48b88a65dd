"""States of random-number generators as plain data, which ``weights_only`` loads, and what a loader draws from."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

_FOLLOWED_ATTRIBUTES = ("sampler", "batch_sampler", "dataset", "_inner")
GlobalStates = dict[str, Any]
OwnStates = tuple[list[Any], list[Any]]
"""States of a loader's generators, and of its samplers that have ``state_dict``."""


def global_states(device: torch.device) -> GlobalStates:
    """The global states of python, numpy and torch on this process, on the host and on its ``device``.

    Does not synchronise: the state of a CUDA generator is on the host. An accelerator's is that of the current device.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, list(map(int, keys)), *rest)}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_global_states(states: GlobalStates, device: torch.device) -> None:
    """Set the global states to what :func:`global_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def own_states(loader: Any) -> OwnStates:
    """States of the generators of torch and of the samplers that a loader holds."""
    return [generator.get_state() for generator in _generators(loader)], [
        copy.deepcopy(sampler.state_dict()) for sampler in _samplers(loader)
    ]


def set_own_states(loader: Any, generators: list[Any], samplers: list[Any]) -> None:
    """Set what :func:`own_states` returned."""
    for generator, state in zip(_generators(loader), generators, strict=False):
        generator.set_state(state)
    for sampler, state in zip(_samplers(loader), samplers, strict=False):
        sampler.load_state_dict(copy.deepcopy(state))


def _generators(loader: Any) -> list[torch.Generator]:
    held = [value for owner in _reachable_from(loader) for value in getattr(owner, "__dict__", {}).values()]
    return list({id(value): value for value in held if isinstance(value, torch.Generator)}.values())


def _samplers(loader: Any) -> list[Any]:
    samplers = [owner for owner in _reachable_from(loader) if isinstance(owner, Sampler)]
    # Asked of the class: a sampler that records another has its attributes.
    return [sampler for sampler in samplers if hasattr(type(sampler), "load_state_dict")]


def _reachable_from(loader: Any) -> list[Any]:
    """``loader``, its samplers and datasets, and theirs, each once."""
    found, waiting = {id(loader): loader}, [loader]
    while waiting:
        held = getattr(waiting.pop(0), "__dict__", {})
        new = [value for name, value in held.items() if name in _FOLLOWED_ATTRIBUTES or isinstance(value, Sampler)]
        waiting += [value for value in new if id(value) not in found]
        found |= {id(value): value for value in new}
    return list(found.values())

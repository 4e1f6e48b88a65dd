"""States of random-number generators as plain data, which ``weights_only`` loads: global ones, loaders', modules'."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

_FOLLOWED_ATTRIBUTES = ("sampler", "batch_sampler", "dataset", "_inner")


def global_states(device: torch.device) -> dict[str, Any]:
    """The global states of python, numpy and torch in this process, for the host and its ``device``.

    This does not synchronise: the state of a CUDA generator is on the host. For an accelerator, it is the
    state of the current device.
    """
    name, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, list(map(int, keys)), *rest),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def set_global_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the global states to what :func:`global_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def own_states(loader: Any) -> dict[str, list[Any]]:
    """States of the generators of torch and of the samplers that a loader holds."""
    generators, samplers = _sources(loader)
    return {
        "generators": [generator.get_state() for generator in generators],
        "samplers": [copy.deepcopy(sampler.state_dict()) for sampler in samplers],
    }


def set_own_states(loader: Any, states: dict[str, Any]) -> None:
    """Set what :func:`own_states` returned."""
    generators, samplers = _sources(loader)
    for generator, state in zip(generators, states["generators"], strict=False):
        generator.set_state(state)
    for sampler, state in zip(samplers, states["samplers"], strict=False):
        sampler.load_state_dict(copy.deepcopy(state))


def generators_of(module: nn.Module) -> dict[str, torch.Generator]:
    """The generators of torch that are attributes of ``module`` and the modules in it."""
    return {
        f"{path}.{name}": value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, torch.Generator)
    }


def _sources(loader: Any) -> tuple[list[torch.Generator], list[Any]]:
    """Generators, and samplers with a state, of a loader and of the samplers and datasets below it, once each."""
    owners = [loader]
    generators: list[torch.Generator] = []
    for owner in owners:  # which grows
        for name, value in getattr(owner, "__dict__", {}).items():
            found: list[Any] = owners
            if isinstance(value, torch.Generator):
                found = generators
            elif not (name in _FOLLOWED_ATTRIBUTES or isinstance(value, Sampler)):
                continue
            if all(value is not other for other in found):
                found.append(value)
    # Asked of the class: a sampler that records another has its attributes. A batch sampler may be of any class.
    return generators, [
        owner
        for owner in owners[1:]
        if hasattr(type(owner), "load_state_dict") and not isinstance(owner, Dataset)
    ]

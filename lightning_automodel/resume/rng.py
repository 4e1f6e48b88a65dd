"""States of random-number generators: collected cheaply, saved in a form that ``weights_only`` loads, and restored."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch.utils.data import Sampler

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_FOLLOWED_ATTRIBUTES = ("sampler", "batch_sampler", "dataset", "_inner")


def global_states(device: torch.device) -> dict[str, Any]:
    """The global states of python, numpy and torch on this process, on the host and on its ``device``.

    Does not synchronise: the state of a CUDA generator is on the host. An accelerator's is that of the current device.
    """
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
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


def generators_of(owners: Iterable[Any]) -> list[Generator]:
    """Generators in the attributes of ``owners`` (modules, or :func:`reachable_from` a loader), each once, in order."""
    held = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    # Asked of each class once: a model has tens of thousands of attributes, and torch answers in Python.
    kinds = {kind for kind in set(map(type, held)) if issubclass(kind, Generator)}
    return list({id(value): value for value in held if type(value) in kinds}.values())


def samplers_of(loader: Any) -> list[Any]:
    """The samplers of a loader that have ``state_dict`` and ``load_state_dict``, in a fixed order."""
    samplers = [owner for owner in reachable_from(loader) if isinstance(owner, Sampler)]
    # Asked of the class: a sampler that records another has its attributes.
    return [sampler for sampler in samplers if hasattr(type(sampler), "load_state_dict")]


def reachable_from(owner: Any) -> list[Any]:
    """``owner``, its samplers and datasets, and theirs, each once."""
    found, waiting = {id(owner): owner}, [owner]
    while waiting:
        held = getattr(waiting.pop(0), "__dict__", {})
        new = [value for name, value in held.items() if name in _FOLLOWED_ATTRIBUTES or isinstance(value, Sampler)]
        waiting += [value for value in new if id(value) not in found]
        found |= {id(value): value for value in new}
    return list(found.values())


def set_generators(generators: list[Generator], states: list[Any]) -> None:
    """Set states in the same order; does nothing if their number differs, as the loaders are then others."""
    if len(generators) != len(states):
        return
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def state_of(generator: Generator) -> Any:
    """State of a generator, for :func:`set_generators`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def savable(value: Any) -> Any:
    """``value`` with arrays as tensors and every tensor as a copy on the host, as ``weights_only`` loads it.

    Unsigned arrays become signed tensors: pickle, by which ranks send them, supports no other (torch 2.13).
    """

    def plain(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return found.detach().cpu().clone()
        if isinstance(found, np.generic):
            return found.item()
        signed = found.view(f"i{found.itemsize}") if found.dtype.kind == "u" else found
        return {"numpy": torch.from_numpy(signed.copy()), "dtype": str(found.dtype)}

    return apply_to_collection(value, (np.ndarray, np.generic, torch.Tensor), plain)


def loaded(value: Any) -> Any:
    """The inverse of :func:`savable`, tensors on the host."""
    if isinstance(value, dict):
        if value.keys() == {"numpy", "dtype"}:
            return value["numpy"].numpy().view(value["dtype"])
        return {key: loaded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(loaded, value)) if type(value) in (list, tuple) else value
    return value

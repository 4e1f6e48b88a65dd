"""Names of parameters, without the prefixes that wrapper modules add."""

from lightning_automodel.torch_internals import WRAPPED


def without_wrappers(name: str) -> str:
    """A parameter's name without the prefixes of wrappers (``torch.compile``, activation checkpointing)."""
    for wrapped in WRAPPED:
        name = name.replace(f"{wrapped}.", "")
    return name

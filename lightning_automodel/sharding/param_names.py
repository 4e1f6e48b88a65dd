"""Wrapper modules, and the prefixes that they add to parameter names."""

WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
"""Attributes in which activation checkpointing and ``torch.compile`` hold the module that they wrap."""


def without_wrappers(name: str) -> str:
    """A parameter's name without the prefixes of wrappers (``torch.compile``, activation checkpointing)."""
    for wrapped in WRAPPED:
        name = name.replace(f"{wrapped}.", "")
    return name

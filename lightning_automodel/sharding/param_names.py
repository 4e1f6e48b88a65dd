"""Modules that merely wrap another one, and the names that they put before those of its parameters."""

WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
"""Attributes in which recomputation and ``torch.compile`` keep the module that they wrap."""


def without_wrappers(name: str) -> str:
    """A parameter's name as if nothing wrapped the modules that it belongs to (``torch.compile``, recomputation)."""
    for wrapped in WRAPPED:
        name = name.replace(f"{wrapped}.", "")
    return name

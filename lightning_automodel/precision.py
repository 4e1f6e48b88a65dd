"""Which Trainer precisions work with which engine."""

from lightning.pytorch.plugins.precision import Precision

FSDP2_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")


def check_precision(plugin: Precision, data_parallel: str) -> None:
    """Refuse a precision whose gradients the engine would get wrong.

    Raises:
        ValueError: For a gradient scaler under FSDP2: each rank would look for overflow in its own shards only, and
            ranks would disagree on skipping a step.
    """
    if data_parallel == "fsdp2" and getattr(plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision={plugin.precision!r} uses a gradient scaler, which does not work on sharded gradients:"
            f" choose one of {', '.join(FSDP2_PRECISIONS)}, or data_parallel='ddp'."
        )

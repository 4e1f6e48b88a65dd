"""NeMo Automodel's helper: which rank evaluates which samples."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy


def dp_eval_sample_shard(
    strategy: Any = None, dp_rank: int = 0, dp_size: int = 1, *, distributed_config: Any = None
) -> tuple[int, int] | None:
    """Whether data-parallel ranks may evaluate different samples independently, and if so which. Not a collective.

    With the whole model on every rank (DDP) each can score its own samples, however long that takes. A
    sharded model all-gathers its parameters in every forward: with different samples (``generate``) ranks
    would hang.

    ``strategy``, in NeMo Automodel ``distributed_config``, may be an engine's name, ``"ddp"`` or
    ``"fsdp2"``. ``dp_rank`` is this rank within the data-parallel group, of ``dp_size`` ranks; ValueError if
    it cannot be.

    Returns ``(dp_rank, dp_size)``: take every ``dp_size``-th sample from ``dp_rank`` on. None if each rank
    must go through all samples, or is alone.
    """
    if not 0 <= dp_rank < dp_size:
        raise ValueError(
            f"dp_rank={dp_rank} is not in range(dp_size={dp_size}); pass the rank within the dp group."
        )
    if strategy is None:
        strategy = distributed_config
    engine = strategy if isinstance(strategy, str) else getattr(strategy, "data_parallel", None)
    is_replicated = engine == "ddp" or isinstance(strategy, DDPStrategy)
    if is_replicated and dp_size > 1:
        return (dp_rank, dp_size)
    return None

"""What a user is told in one line when a run starts."""

from __future__ import annotations

from lightning_automodel.advice import summary


def test_summary_is_one_line() -> None:
    """Engine, ranks, units, dtypes, denominator, and where the rest is."""
    described = {
        "data_parallel": "fsdp2",
        "mesh": {"data_parallel_replicate": 1, "data_parallel_shard": 4, "data_parallel": 4, "tensor_parallel": 2},
        "units": ["model.blocks.0 (Block)", "model.blocks.1 (Block)"],
        "activation_checkpointing": ["model.blocks.0 (Block)"],
        "precision": {"trainer": "bf16-mixed"},
        "gradient_denominator": "label tokens",
    }
    assert summary(described) == (
        "AutomodelStrategy: fsdp2 over data_parallel_shard=4, tensor_parallel=2, 2 FSDP units beside the root,"
        " 1 blocks checkpointed, precision bf16-mixed, gradients per label token;"
        " trainer.strategy.describe() tells all."
    )
    described.update(data_parallel="ddp", mesh={"data_parallel_shard": 1}, activation_checkpointing=[])
    described["units"] = []
    assert "one rank, one FSDP unit," in summary(described)
    del described["units"]
    assert summary(described) == (
        "AutomodelStrategy: ddp over one rank, precision bf16-mixed, gradients per label token;"
        " trainer.strategy.describe() tells all."
    )

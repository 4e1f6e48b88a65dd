"""The faults of `docs/failures.md`, on gloo and on collectives that behave as NCCL's, and which a default run takes."""

from __future__ import annotations

from dataclasses import replace

from tests.failure.faults import (
    CALLED_LAST,
    CTRL_C,
    DATA_ENDS,
    HANG,
    KERNEL,
    OUT_OF_MEMORY,
    SKIP,
    WORLD_SIZE,
    Cell,
)

STEP_HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "__getitem__",
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
)
SET_UP_HOOKS = (
    "configure_callbacks",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
)
CELLS = [
    Cell("prepare_data", "exception", rank=0),
    *(Cell(hook, "exception") for hook in (*SET_UP_HOOKS, *STEP_HOOKS)),
    *(Cell(hook, "exception") for hook in CALLED_LAST),
    *(Cell(hook, "exception", rank=0) for hook in ("setup", "training_step", "validation_step")),
    *(
        Cell(hook, "exception", data_parallel="ddp")
        for hook in ("training_step", "on_before_optimizer_step")
    ),
    *(Cell(hook, "sys.exit") for hook in ("setup", "training_step", "on_validation_start")),
    *(Cell(hook, "os._exit") for hook in ("setup", "training_step")),
    Cell("training_step", "os._exit", rank=0),
    *(Cell(hook, "SIGTERM") for hook in ("setup", "training_step", "on_train_batch_end", "validation_step")),
    Cell("training_step", "SIGTERM", rank=0),
    Cell("training_step", "SIGTERM", data_parallel="ddp"),
    Cell("prepare_data", "SIGKILL", rank=0),
    *(Cell(hook, "SIGKILL") for hook in ("setup", "configure_model", "on_train_start", "__getitem__")),
    *(Cell(hook, "SIGKILL") for hook in ("training_step", "on_before_optimizer_step", "validation_step")),
    Cell("on_fit_end", "SIGKILL"),
    Cell("training_step", "SIGKILL", rank=0),
    Cell("training_step", "SIGKILL", data_parallel="ddp"),
    *(
        Cell(hook, "SIGSTOP")
        for hook in ("setup", "training_step", "on_before_optimizer_step", "validation_step")
    ),
    Cell("training_step", "SIGSTOP", rank=0),
    Cell("training_step", "SIGSTOP", data_parallel="ddp"),
    Cell("training_step", DATA_ENDS),
    Cell("training_step", DATA_ENDS, rank=0),
    Cell("training_step", DATA_ENDS, data_parallel="ddp"),
    *(Cell("test_step", fault) for fault in ("exception", "SIGTERM", "SIGKILL")),
    Cell("test_step", "SIGTERM", rank=0),
    Cell("test_step", "SIGTERM", data_parallel="ddp"),
    *(Cell("attend", fault, context=WORLD_SIZE) for fault in ("exception", "SIGKILL", "SIGSTOP")),
    Cell("attend", "SIGKILL", data_parallel="ddp", context=WORLD_SIZE),
    *(Cell("training_step", CTRL_C, data_parallel=engine) for engine in ("fsdp2", "ddp")),
    Cell("training_step", OUT_OF_MEMORY),
    *(Cell("training_step", HANG, data_parallel=engine) for engine in ("fsdp2", "ddp")),
]
"""On gloo. A skipped collective is not among them: gloo itself aborts a process where ranks do not match."""

NCCL_CELLS = [
    *(replace(cell, device="nccl") for cell in CELLS),
    *(Cell("training_step", KERNEL, data_parallel=engine, device="nccl") for engine in ("fsdp2", "ddp")),
    *(Cell("training_step", SKIP, data_parallel=engine, device="nccl") for engine in ("fsdp2", "ddp")),
]

BY_DEFAULT = {
    Cell("prepare_data", "exception", rank=0),
    Cell("teardown", "exception"),
    Cell("training_step", "sys.exit"),
    Cell("training_step", "os._exit", rank=0),
    Cell("training_step", "SIGTERM"),
    Cell("training_step", DATA_ENDS),
    Cell("training_step", "SIGSTOP"),
    Cell("attend", "exception", context=WORLD_SIZE),
    Cell("training_step", OUT_OF_MEMORY),
}
NCCL_BY_DEFAULT = {
    Cell("training_step", "exception", data_parallel="ddp", device="nccl"),
    Cell("training_step", HANG, data_parallel="ddp", device="nccl"),
    Cell("training_step", "SIGKILL", device="nccl"),
    Cell("training_step", SKIP, device="nccl"),
    Cell("training_step", KERNEL, device="nccl"),
    Cell("training_step", CTRL_C, device="nccl"),
}

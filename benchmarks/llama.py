"""Trains a Llama of a given shape in one of several ways, and measures its optimizer steps.

Shapes: b = rows of a micro-batch, s = tokens of a row, d = model width, v = vocabulary.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time
from types import MethodType
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.strategies import ModelParallelStrategy
from peak_memory import MALLOC, MEBIBYTE, peak, start_peak
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from turns import CollectiveCounter

from lightning_automodel import AutomodelStrategy, token_loss

IGNORE_INDEX = -100
SHAPES = {
    "llama3-8b": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0},
    },
    # The sizes of Llama 3.2, with a head of their own.
    "llama3-3b": {
        **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "vocab_size": 128_256},
        **{"num_attention_heads": 24, "num_key_value_heads": 8, "rope_theta": 500_000.0},
    },
    "llama3-1b": {
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0},
    },
    "tiny": {
        **{"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 32_000},
        **{"num_attention_heads": 8, "num_key_value_heads": 2},
    },
    "narrow": {
        **{"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "vocab_size": 32_000},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
}


@dataclass(frozen=True)
class Case:
    """One way to train, measured in processes of its own.

    Attributes:
        way: "automodel", "model-parallel" (Lightning's strategy) or "loop" (FSDP2 by hand).
        shape: Shape of the model, a key of `SHAPES`.
        device: "cpu", "cuda", or "hostdev", the device of `tests/second_device`.
        length: Tokens of a row, s.
        rows: Rows of a micro-batch, b.
        accumulate: Micro-batches of an optimizer step, of each rank.
        warm_up: Optimizer steps before those that are measured.
        steps: Optimizer steps that are measured.
        ranks: Processes.
        context: `context_parallel_size`.
        is_chunked: Whether the loss is `token_loss`, not `F.cross_entropy` over all logits.
        recompute: `activation_checkpointing`.
        compile: Whether blocks are compiled.
        precision: Of the Trainer; None: bf16-true on CUDA, else 32-true.
        shares_device: Whether each rank is the only one of a node, so that all use the first device.
        timeout: Seconds after which a collective fails.
        options: Further keywords of the strategy.
        is_ragged: Whether ranks have rows of their own, and micro-batches unequal numbers of labels, and unlike tokens.
        reduces_in_float32: Whether the ways by hand reduce gradients in float32, as the strategy does.
    """

    way: str
    shape: str
    device: str
    length: int
    rows: int = 1
    accumulate: int = 1
    warm_up: int = 1
    steps: int = 1
    ranks: int = 1
    context: int = 1
    is_chunked: bool = False
    recompute: bool | str = False
    compile: bool = False
    precision: str | None = None
    shares_device: bool = False
    timeout: float = 1800.0
    options: tuple[tuple[str, Any], ...] = ()
    is_ragged: bool = False
    reduces_in_float32: bool = False

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Case":
        """The case of `asdict`, back from JSON, which has lists for tuples."""
        return cls(**{**fields, "options": tuple(map(tuple, fields["options"]))})

    @property
    def trainer_precision(self) -> str:
        """Of the Trainer."""
        return self.precision or ("bf16-true" if self.device == "cuda" else "32-true")

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.trainer_precision == "bf16-true" else torch.float32

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            **SHAPES[self.shape], max_position_embeddings=self.length, attn_implementation="sdpa"
        )

    def batches(self) -> DataLoader:
        """Random rows whose first tokens carry no labels; on a CPU, those of the warm-up are short.

        Ragged ones differ by the rank, which torchrun tells, and by micro-batch: 1/8 to 1/2 of a row has no labels, and
        its tokens are from one quarter of the vocabulary, so that micro-batches of a wrong weight change gradients.
        """
        rank = int(os.environ.get("RANK", 0)) if self.is_ragged else 0
        generator = torch.Generator().manual_seed(rank)
        batches = []
        for index in range((self.warm_up + self.steps) * self.accumulate):
            # On a CPU, imports, buffers and code have to warm up, but no kernels that are chosen by shape.
            is_short = self.device == "cpu" and index < self.warm_up * self.accumulate
            length = min(self.length, 256) if is_short else self.length
            vocabulary = self.config().vocab_size
            first = 0
            ignored = length // 8
            if self.is_ragged:
                quarter = (rank + index) % 4
                vocabulary //= 4
                first = quarter * vocabulary
                ignored *= 1 + quarter
            tokens = torch.randint(first, first + vocabulary, (self.rows, length + 1), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[:, :ignored] = IGNORE_INDEX
            batches.append({"input_ids": tokens[:, :-1], "labels": labels})
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def measure(self, script: str) -> dict[str, Any]:
        """Runs `script --case` on this in new processes, and returns what `report` printed there."""
        command = [sys.executable, script, "--case", json.dumps(asdict(self))]
        environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            if "OutOfMemoryError" in done.stderr:
                return {}
            raise RuntimeError(f"{self} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.splitlines()[-1])


class ByteCounter(CollectiveCounter):
    """Also adds up the bytes of each collective's largest tensor: the larger of what a rank gives and what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name.startswith("c10d::"):
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self.bytes += max((tensor.nbytes for tensor in tensors), default=0)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Meter:
    """Measures the optimizer steps after the warm-up.

    Attributes:
        strategy: The Trainer's, from the first measured step on.
        counts_collectives: Whether a mode counts the collectives of several ranks, which takes time of the host.

    Args:
        case: The case that is measured.
    """

    strategy: Any = None
    counts_collectives = True

    def __init__(self, case: Case) -> None:
        self.case = case
        # Processor time leaves out waiting, for other ranks as well as for other processes.
        self.clock = process_time if case.device == "cpu" else perf_counter
        self.before = start_peak(case.device)
        self.counter = ByteCounter()
        self.is_counting = self.counts_collectives and case.ranks > 1

    def see_losses(self, total: Tensor, count: Tensor) -> None:
        """Called in each micro-batch with the sum of its losses and the number of its labels, both []."""

    def see_gradients(self, model: nn.Module) -> None:
        """Called before each optimizer step, with its gradients."""

    def end_step(self) -> None:
        """Called after each optimizer step."""

    def start(self) -> None:
        start_peak(self.case.device)
        self._synchronize()
        self.started = self.clock()
        if self.is_counting:
            self.counter.__enter__()

    def stop(self) -> None:
        self._synchronize()
        seconds = self.clock() - self.started
        if self.is_counting:
            self.counter.__exit__(None, None, None)
        held = torch.tensor(float(peak(self.case.device) - self.before), device=self.case.device)
        if self.case.ranks > 1:
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        if not dist.is_initialized() or dist.get_rank() == 0:
            steps = self.case.steps
            print(
                json.dumps(
                    {
                        "seconds": seconds / steps,
                        "peak": float(held) / MEBIBYTE,
                        "collectives": sum(self.counter.counts.values()) / steps,
                        "megabytes": self.counter.bytes / steps / MEBIBYTE,
                    }
                ),
                flush=True,
            )

    def _synchronize(self) -> None:
        if self.case.device != "cpu":
            torch.accelerator.synchronize()


class StepMeter(L.Callback):
    """Starts and stops the meter in a run of the Trainer."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int
    ) -> None:
        if index == self.meter.case.warm_up * self.meter.case.accumulate:
            self.meter.strategy = trainer.strategy
            self.meter.start()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.meter.see_gradients(pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if (index + 1) % self.meter.case.accumulate == 0:
            self.meter.end_step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.meter.stop()


def flops_a_token(case: Case) -> float:
    """Floating-point operations of a token's forward and backward, of which a device's utilization (MFU) is counted.

    6 for each parameter but the embedding's, and 12 * layers * d * s for attention over the whole row. What is
    computed again does not count.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(case.config())
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters -= model.get_input_embeddings().weight.numel()
    return 6.0 * parameters + 12.0 * config.num_hidden_layers * config.hidden_size * case.length


def build_model(case: Case) -> LlamaForCausalLM:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with torch.device(case.device):
            model: Any = LlamaForCausalLM(case.config()).train()
    finally:
        torch.set_default_dtype(before)
    model.chunked_losses = MethodType(chunked_losses, model)
    return model


def chunked_losses(
    self: LlamaForCausalLM, inputs: dict[str, Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """What `losses` returns, without all logits; a method, since FSDP2 gathers the root's parameters in its methods."""
    hidden = self.model(**inputs, use_cache=False).last_hidden_state  # [b, s, d]
    return token_loss(hidden, self.lm_head, labels)


def build_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.device == "cuda")


def losses(model: Any, case: Case, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the losses over the label tokens, and their number, both []."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]  # [b, s]
    if case.is_chunked:
        return model.chunked_losses(inputs, labels)
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1).float()  # [b * s, v]
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != IGNORE_INDEX).sum()


def shard_by_hand(model: LlamaForCausalLM, case: Case, mesh: DeviceMesh) -> None:
    """Shard as the strategy does: recomputation, compiling, then the blocks and the rest as FSDP units."""
    policy = MixedPrecisionPolicy()
    if case.reduces_in_float32:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if case.trainer_precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for block in model.model.layers:
        if case.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "chunked_losses")


class LlamaModule(L.LightningModule):
    """The case as a LightningModule.

    Args:
        case: What it trains.
        meter: Sees its losses.
    """

    def __init__(self, case: Case, meter: Meter | None = None) -> None:
        super().__init__()
        self.case = case
        self.meter = meter
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(self.case)
            if self.case.way == "model-parallel":
                assert self.device_mesh is not None
                shard_by_hand(self.model, self.case, self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, n = losses(self.model, self.case, batch)
        if self.meter is not None:
            self.meter.see_losses(loss.detach(), n)
        return loss / n.clamp(min=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self, self.case)


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def accelerator(device: str) -> Any:
    """For `Trainer(accelerator=...)`; it registers the second device."""
    if device == "hostdev":
        sys.path.append(str(Path(__file__).parents[1]))
        from tests.second_device.device import HostDeviceAccelerator

        return HostDeviceAccelerator()
    return "gpu" if device == "cuda" else "cpu"


def run(case: Case, meter: type[Meter] = Meter) -> None:
    """Trains the case in this process, and those that the Trainer starts, and prints the measurements."""
    warnings.filterwarnings("ignore")
    accelerator(case.device)
    if case.device == "cpu":
        torch.set_num_threads(1)
    {"loop": _run_loop, "automodel": _run_trainer, "model-parallel": _run_trainer}[case.way](
        case, meter(case)
    )


def _run_trainer(case: Case, meter: Meter) -> None:
    backend = dist.get_default_backend_for_device(case.device)
    strategy: Any = ModelParallelStrategy(
        case.ranks,
        tensor_parallel_size=1,
        process_group_backend=backend,
        timeout=timedelta(seconds=case.timeout),
    )
    if case.way == "automodel":
        strategy = AutomodelStrategy(
            context_parallel_size=case.context,
            activation_checkpointing=case.recompute,
            compile=case.compile,
            timeout=case.timeout / 60,
            **dict(case.options),
        )
    devices = 1
    if not case.shares_device:
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", case.ranks))
    trainer = L.Trainer(
        accelerator=accelerator(case.device),
        devices=devices,
        num_nodes=case.ranks // devices,
        strategy=strategy,
        precision=case.trainer_precision,
        accumulate_grad_batches=case.accumulate,
        max_steps=case.warm_up + case.steps,
        callbacks=[StepMeter(meter)],
        use_distributed_sampler=False,
        **dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        ),
    )
    trainer.fit(LlamaModule(case, meter), case.batches())


def _run_loop(case: Case, meter: Meter) -> None:
    """FSDP2 by hand: gradients are reduced, and parameters gathered, once a window. torchrun starts several ranks."""
    backend = dist.get_default_backend_for_device(case.device)
    if case.ranks > 1:
        if case.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=timedelta(seconds=case.timeout))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = build_model(case)
    if case.trainer_precision == "bf16-true":
        # Lightning's plugin also rounds the buffers, as the frequencies of rotary positions.
        model.to(torch.bfloat16)
    shard_by_hand(model, case, init_device_mesh(case.device, (case.ranks,)))
    fsdp: Any = model
    fsdp.set_reshard_after_forward(False)
    optimizer = build_optimizer(model, case)
    counted = torch.zeros((), dtype=torch.int64, device=case.device)
    for index, batch in enumerate(case.batches()):
        if index == case.warm_up * case.accumulate:
            meter.start()
        is_last = (index + 1) % case.accumulate == 0
        fsdp.set_requires_gradient_sync(is_last)
        fsdp.set_reshard_after_backward(is_last)
        total, n = losses(model, case, {name: tensor.to(case.device) for name, tensor in batch.items()})
        meter.see_losses(total.detach(), n)
        counted += n
        total.backward()
        if is_last:
            dist.all_reduce(counted)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(case.ranks / counted)  # FSDP2 has averaged over ranks
            meter.see_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            counted.zero_()
            meter.end_step()
    meter.stop()
    dist.destroy_process_group()


def main_or_case(main: Callable[[], None]) -> None:
    """Runs the case of `--case`, in a process that `Case.measure` has started, or else `main`."""
    if "--case" in sys.argv:
        fields = json.loads(sys.argv[sys.argv.index("--case") + 1])
        run(Case.from_fields(fields))
    else:
        main()

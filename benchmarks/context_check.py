"""How far one wrong layer throws off what the check of context parallelism compares, beside rounding.

Two CPU ranks share the sequences of a Llama. In turn each layer is made wrong: its attention stays within
the slice, or it counts positions from 0 there. The figures are errors relative to the size of an output: of
the layer at fault's own modules, and of the model's output, which is the last and outermost. `right` is the
largest error of any module without a wrong layer, which is rounding.

    python benchmarks/context_check.py --output report.md
    python benchmarks/context_check.py --layers 4 --precisions 32-true     # a look in a minute
"""

import argparse
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from ranks import launch
from report import describe_environment, publish, table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import AutomodelStrategy
from lightning_automodel.context_parallel.attention import Slices, current
from lightning_automodel.context_parallel.check import FirstPositions, FirstStepCheck

SIZES = {"hidden_size": 128, "intermediate_size": 344, "vocab_size": 512, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
INITS = {
    "as transformers": lambda model: None,
    "scaled": lambda model: _scale_outputs(model),
    "large residual": lambda model: _scale_embedding(model),
}
"""How weights start: N(0, 0.02); outputs of layers divided by sqrt(2 L) as GPT-2 has it; embeddings of size 1."""


def _scale_outputs(model: nn.Module) -> None:
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data /= (2 * len(model.model.layers)) ** 0.5


def _scale_embedding(model: nn.Module) -> None:
    _scale_outputs(model)
    model.model.embed_tokens.weight.data /= model.config.initializer_range


class Language(pl.LightningModule):
    """A Llama with its own loss."""

    def __init__(self, num_layers: int, init: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, num_hidden_layers=num_layers))
        INITS[init](self.model)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@contextmanager
def attends_within_slice(layer: nn.Module) -> Iterator[None]:
    """Context in which a layer's attention does not cross ranks: it is torch's own."""
    from copy import copy

    original = layer.self_attn.config
    layer.self_attn.config = copy(original)
    layer.self_attn.config._attn_implementation_internal = "sdpa"
    try:
        yield
    finally:
        layer.self_attn.config = original


@contextmanager
def counts_from_zero(layer: nn.Module) -> Iterator[None]:
    """Context in which a layer takes for each slice the rotary embeddings of the first positions."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        slices = current()
        if slices is None or slices.group is None:
            return None
        hidden = kwargs["hidden_states"]
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        return args, {**kwargs, "position_embeddings": rotary[0](hidden, positions)}

    rotary = ROTARY
    handle = layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


ROTARY: list[Callable[..., Any]] = []
FAULTS = {"attends within its slice": attends_within_slice, "counts positions from 0": counts_from_zero}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Runs on every rank: errors without a fault, and with each fault of each layer."""
    found: dict[str, Any] = {}

    def check(checker: FirstStepCheck, slices: Slices, shape: torch.Size) -> None:
        model = checker._module.model
        ROTARY[:] = [model.model.rotary_emb]
        first = FirstPositions(slices, shape)
        ((module, *arguments),) = checker.calls
        assert first.cover(arguments)
        errors = list(checker.differences(module, arguments, first))
        found["right"] = max(error for _, error, _ in errors)
        found["limit"] = errors[-1][2]
        found["outermost, right"] = errors[-1][1]
        for name, fault in FAULTS.items():
            rows = []
            for layer in model.model.layers:
                with fault(layer):
                    errors = list(checker.differences(module, arguments, first))
                own = [error for part, error, _ in errors if part in set(layer.modules())]
                first_over = next((error for _, error, limit in errors if error > limit), 0.0)
                rows.append([max(own), first_over, errors[-1][1]])
            found[name] = rows

    FirstStepCheck.check = check  # type: ignore[method-assign,assignment]
    warnings.simplefilter("ignore")
    ids = torch.randint(SIZES["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision=case["precision"],
        strategy=AutomodelStrategy(context_parallel_size=2, label_shift=1),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Language(case["layers"], case["init"]),
        DataLoader([{"input_ids": ids, "labels": ids}], batch_size=None),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 32], help="(%(default)s)")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parsed = parser.parse_args()
    rows = []
    for precision in parsed.precisions:
        for layers in parsed.layers:
            for init in INITS:
                case = {"layers": layers, "precision": precision, "init": init}
                found = launch(Path(__file__), case, 2, None)
                for name in FAULTS:
                    by_layer = found[name]
                    limit = found["limit"]
                    rows.append(
                        [
                            *(precision, str(layers), init, name, f"{limit:.2g}"),
                            *(f"{found['right']:.2g}", f"{found['outermost, right']:.2g}"),
                            f"{min(own for own, _, _ in by_layer):.2g}",
                            f"{sum(over > 0 for _, over, _ in by_layer)} of {layers}",
                            f"{min(out for _, _, out in by_layer):.2g}",
                            f"{sum(out > limit for _, _, out in by_layer)} of {layers}",
                        ]
                    )
                    print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    header = [
        "precision",
        "layers",
        "weights",
        "one layer",
        "limit",
        "right, any module",
        "right, outermost",
    ]
    header += ["least of the layer's own", "found by modules", "least of the outermost", "found by it alone"]
    report = [
        "# One wrong layer under context parallelism",
        "",
        *(f"- {name}: {value}" for name, value in describe_environment("transformers").items()),
        f"- command: `python benchmarks/context_check.py {shlex.join(sys.argv[1:])}`",
        f"- Llama of the shape {SIZES | HEADS}, two ranks, 16 positions compared",
        "",
        table(header, rows),
    ]
    publish("\n".join(report), parsed.output)


if __name__ == "__main__":
    if "--child" in sys.argv:
        measured = measure(json.loads(sys.argv[sys.argv.index("--child") + 1]))
        if torch.distributed.get_rank() == 0:
            print(json.dumps(measured), flush=True)
    else:
        main()

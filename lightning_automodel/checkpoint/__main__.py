"""The command line: ``python -m lightning_automodel.checkpoint inspect|consolidate|export PATH ...``."""

import argparse
import json
import sys
from typing import Any

import torch

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.cli.consolidate import consolidate
from lightning_automodel.checkpoint.cli.export import export_checkpoint
from lightning_automodel.checkpoint.cli.inspect import inspect
from lightning_automodel.checkpoint.errors import CheckpointError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Command-line arguments; None for those of this process.

    Returns:
        The exit status: 0, or 1 if something is wrong with a checkpoint.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (CheckpointError, OSError) as error:
        reason = str(error)
    except Exception as error:  # what others wrote can raise anything
        reason = f"{parsed.path}: {type(error).__name__}: {error}"
    # Names come from files that anybody may have written: on one line, without what a terminal would obey.
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(reason.split()))
    print(f"error: {text}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_automodel.checkpoint", description="Look at checkpoints, and convert them."
    )
    commands = parser.add_subparsers(required=True, metavar="inspect | consolidate | export")

    command = commands.add_parser("inspect", help="what a checkpoint is, and whether it is complete")
    _add_path(command, "checkpoints", nargs="+")
    command.add_argument("--verify", action="store_true", help="read all content and compare it with its checksums")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("consolidate", help="write a directory of shards as one file")
    _add_path(command, "the checkpoint")
    command.add_argument("out", help="the file to write; a local path that does not exist yet")
    command.set_defaults(run=_consolidate)

    command = commands.add_parser("export", help="write safetensors, as Hugging Face's from_pretrained reads them")
    _add_path(command, "the checkpoint")
    command.add_argument("out", help="the directory to write; a local path that does not exist yet")
    command.add_argument("--max-shard-size", default="5GB", help="largest size of a file; the default is 5GB")
    command.add_argument("--dtype", choices=_DTYPES, help="of floating-point tensors; the default is each tensor's own")
    command.add_argument("--adapter-only", action="store_true", help="export only the adapters of a PEFT model")
    command.add_argument("--key", metavar="PREFIX", help="prefix of the model in the LightningModule, such as model.")
    command.set_defaults(run=_export)
    return parser


def _add_path(parser: argparse.ArgumentParser, what: str, **options: Any) -> None:
    parser.add_argument("path", help=f"{what}; local, or a URL", **options)
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the checkpoint may hold: only if you trust its source"
    )


def _inspect(parsed: argparse.Namespace) -> int:
    reports = [inspect(paths.normalize(path), parsed.verify, not parsed.trust) for path in parsed.path]
    if parsed.json:
        print(json.dumps({"checkpoints": reports}))
    else:
        print(*(f"{name + ':':<14}{json.dumps(each)}" for report in reports for name, each in report.items()), sep="\n")
    return 0 if all(report["damage"] is None for report in reports) else 1


def _consolidate(parsed: argparse.Namespace) -> int:
    consolidate(paths.normalize(parsed.path), parsed.out, not parsed.trust)
    print(f"Wrote {parsed.out}")
    return 0


def _export(parsed: argparse.Namespace) -> int:
    dtype = None if parsed.dtype is None else _DTYPES[parsed.dtype]
    size = int(parsed.max_shard_size) if parsed.max_shard_size.isdigit() else parsed.max_shard_size
    names = {"max_shard_size": size, "adapter_only": parsed.adapter_only, "prefix": parsed.key}
    export_checkpoint(paths.normalize(parsed.path), parsed.out, not parsed.trust, dtype=dtype, **names)
    print(f"Wrote {parsed.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

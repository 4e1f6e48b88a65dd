"""The command line: ``python -m lightning_automodel.checkpoint inspect|consolidate|export PATH ...``."""

import argparse
import dataclasses
import json
import sys

import torch

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.cli.consolidate import consolidate
from lightning_automodel.checkpoint.cli.export import ExportOptions, export_checkpoint, number_of_bytes
from lightning_automodel.checkpoint.cli.inspect import checkpoints_in, inspect, leftovers_in
from lightning_automodel.checkpoint.errors import CheckpointError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows the program's name; None for those of this process.

    Returns:
        The exit status: 0, or 1 where something is wrong with a checkpoint.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (CheckpointError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_automodel.checkpoint", description="Look at checkpoints, and convert them."
    )
    commands = parser.add_subparsers(required=True, metavar="inspect | consolidate | export")

    command = commands.add_parser("inspect", help="what a checkpoint is, and whether it is complete")
    _add_path(command, "a checkpoint, or a directory of checkpoints")
    command.add_argument("--verify", action="store_true", help="read all content and compare it with its checksums")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("consolidate", help="a directory of shards becomes one file")
    _add_path(command, "the checkpoint")
    command.add_argument("out", help="the file to write; local, not there yet")
    command.set_defaults(run=_consolidate)

    command = commands.add_parser("export", help="safetensors, as Hugging Face's from_pretrained reads them")
    _add_path(command, "the checkpoint")
    command.add_argument("out", help="the directory to write; local, not there yet")
    command.add_argument("--max-shard-size", default="5GB", type=_size, help="of a file; the default is 5GB")
    command.add_argument("--dtype", choices=_DTYPES, help="of floating-point tensors; the default: as they are")
    command.add_argument("--adapter-only", action="store_true", help="the adapters of a PEFT model alone")
    command.add_argument("--key", metavar="PREFIX", help="prefix of the model in the LightningModule, such as model.")
    command.set_defaults(run=_export)
    return parser


def _add_path(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("path", help=f"{what}; local, or a URL")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the checkpoint may hold: only if you trust its source"
    )


def _size(text: str) -> int:
    try:
        return number_of_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _inspect(parsed: argparse.Namespace) -> int:
    path = paths.normalize(parsed.path)
    several = checkpoints_in(path)
    reports = [inspect(each, parsed.verify, not parsed.trust) for each in several or [path]]
    left = leftovers_in(path if several else paths.parent(path))
    complete = [report.path for report in reports if report.damage is None]
    newest = complete[-1] if several and complete else None
    if parsed.json:
        print(json.dumps({"checkpoints": list(map(dataclasses.asdict, reports)), "newest": newest, "leftovers": left}))
    else:
        for report in reports:
            line = f"{report.as_line()}{' (newest)' if report.path == newest else ''}"
            print(line if several else report.as_text())
        for name in left:
            print(f"leftover of a save that has not ended: {name}")
    return 0 if len(complete) == len(reports) else 1


def _consolidate(parsed: argparse.Namespace) -> int:
    consolidate(paths.normalize(parsed.path), parsed.out, not parsed.trust)
    return 0


def _export(parsed: argparse.Namespace) -> int:
    dtype = None if parsed.dtype is None else _DTYPES[parsed.dtype]
    options = ExportOptions(parsed.max_shard_size, dtype, parsed.adapter_only, parsed.key)
    export_checkpoint(paths.normalize(parsed.path), parsed.out, options, not parsed.trust)
    return 0


if __name__ == "__main__":
    sys.exit(main())

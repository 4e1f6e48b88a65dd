"""The command line: ``python -m lightning_automodel.checkpoint inspect|consolidate|export PATH ...``."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.cli.consolidate import consolidate
from lightning_automodel.checkpoint.cli.export import export_checkpoint
from lightning_automodel.checkpoint.cli.export_plan import ExportOptions
from lightning_automodel.checkpoint.cli.inspect import checkpoints_in, inspect, leftovers_in
from lightning_automodel.checkpoint.cli.report import as_line, as_text
from lightning_automodel.checkpoint.errors import CheckpointError
from lightning_automodel.checkpoint.splitting import number_of_bytes

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
    _add_inspect(commands.add_parser("inspect", help="what a checkpoint is, and whether it is complete"))
    _add_consolidate(commands.add_parser("consolidate", help="a directory of shards becomes one file"))
    _add_export(commands.add_parser("export", help="safetensors, as Hugging Face's from_pretrained reads them"))
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or a directory of checkpoints; local, or a URL")
    parser.add_argument("--verify", action="store_true", help="read all content and compare it with its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_inspect)


def _add_consolidate(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser, "the file to write")
    parser.set_defaults(run=_consolidate)


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser, "the directory to write")
    parser.add_argument("--max-shard-size", default="5GB", type=_size, help="of a file; the default is 5GB")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point tensors; the default: as they are")
    parser.add_argument("--adapter-only", action="store_true", help="the adapters of a PEFT model alone")
    parser.add_argument("--key", metavar="PREFIX", help="prefix of the model in the LightningModule, such as model.")
    parser.set_defaults(run=_export)


def _add_paths(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("path", help="the checkpoint; local, or a URL")
    parser.add_argument("out", help=f"{out}; local, not there yet")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the checkpoint may hold: only if you trust its source"
    )


def _size(text: str) -> int:
    try:
        return number_of_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _inspect(parsed: argparse.Namespace) -> int:
    path = paths.normal(parsed.path)
    several = checkpoints_in(path)
    reports = [inspect(each, parsed.verify) for each in several or [path]]
    left = leftovers_in(path if several else paths.parent(path))
    complete = [report.path for report in reports if report.damage is None]
    newest = complete[-1] if several and complete else None
    if parsed.json:
        print(json.dumps({"checkpoints": list(map(dataclasses.asdict, reports)), "newest": newest, "leftovers": left}))
    else:
        print(
            *([as_line(each, each.path == newest) for each in reports] if several else [as_text(reports[0])]), sep="\n"
        )
        for name in left:
            print(f"leftover of a save that has not ended: {name}")
    return 0 if len(complete) == len(reports) else 1


def _consolidate(parsed: argparse.Namespace) -> int:
    with _progress("consolidating") as progress:
        consolidate(paths.normal(parsed.path), parsed.out, not parsed.trust, progress)
    return 0


def _export(parsed: argparse.Namespace) -> int:
    dtype = None if parsed.dtype is None else _DTYPES[parsed.dtype]
    options = ExportOptions(parsed.max_shard_size, dtype, parsed.adapter_only, parsed.key)
    with _progress("exporting") as progress:
        export_checkpoint(paths.normal(parsed.path), parsed.out, options, not parsed.trust, progress)
    return 0


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes, on stderr."""
    with tqdm(desc=what, unit="B", unit_scale=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


if __name__ == "__main__":
    sys.exit(main())

"""The command line: ``python -m lightning_automodel.checkpoint inspect|consolidate|export PATH ...``."""

import argparse
import importlib
import json
import sys

import torch

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.errors import describe
from lightning_automodel.checkpoint.export import consolidate, export_hugging_face
from lightning_automodel.checkpoint.shard_directory import open_checkpoint
from lightning_automodel.resume.fit import CHECKPOINT_KEY

_INSPECT_EXAMPLES = """the usual cases:
  inspect checkpoints/last.ckpt             what it holds, and whether any of it is missing or has changed
  inspect s3://bucket/last.ckpt --trust     the same of one that holds classes of your own
  inspect s3://bucket/last.ckpt | jq .epoch for a program
"""
_EXPORT_EXAMPLES = """the usual cases, for a LightningModule named Writer in train.py:
  export last.ckpt my-model --class train.Writer --dtype bfloat16
  export last.ckpt my-adapter --class train.Writer --adapter-only
  export last.ckpt teacher --class train.Distillation --key teacher
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command, with ``arguments`` in place of this process's; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.path = paths.normalize(parsed.path)
        parsed.run(parsed)
    except Exception as error:  # a file that another program wrote can raise anything
        line = " ".join(f"{parsed.path}: {describe(error)}".split())
        # It quotes names from files of unknown origin, which must not control the terminal.
        print(f"error: {repr(line)[1:-1]}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_automodel.checkpoint", description="Look at checkpoints, and convert them."
    )
    commands = parser.add_subparsers(required=True, metavar="inspect | consolidate | export")
    inspect = commands.add_parser("inspect", help="read all of a checkpoint, and print what it is as JSON")
    inspect.set_defaults(run=_inspect)
    inspect.epilog = _INSPECT_EXAMPLES
    one_file = commands.add_parser("consolidate", help="write a directory of shards as one file")
    one_file.set_defaults(run=_consolidate)
    export = commands.add_parser("export", help="write a Hugging Face model, for from_pretrained")
    export.set_defaults(run=_export)
    export.epilog = _EXPORT_EXAMPLES
    for command in (inspect, one_file, export):
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("path", help="the checkpoint; local, or a URL")
        command.add_argument(
            "--trust",
            action="store_true",
            help="run the code that the checkpoint may hold: only if you trust its source",
        )
    for command in (one_file, export):
        command.add_argument("out", help="what to write; a local path that does not exist yet")
    export.add_argument(
        "--class",
        dest="module_class",
        metavar="MODULE.CLASS",
        required=True,
        help="the LightningModule, whose load_from_checkpoint makes the model; importing it runs its code",
    )
    export.add_argument(
        "--dtype", help="of floating-point tensors, such as bfloat16; the default is each tensor's own"
    )
    export.add_argument("--adapter-only", action="store_true", help="export the adapters of a PEFT model")
    export.add_argument(
        "--key",
        metavar="PREFIX",
        help="of the model's names in the LightningModule, if that has several models",
    )
    return parser


def _inspect(parsed: argparse.Namespace) -> None:
    tree, shards = open_checkpoint(parsed.path, not parsed.trust)
    if shards is not None:
        shards.check()
    report = {
        "mesh": tree.get(CHECKPOINT_KEY, {}).get("sizes"),  # None if another program wrote it
        "epoch": tree.get("epoch"),
        "global_step": tree.get("global_step"),
    }
    print(json.dumps(report, indent=1, default=str))


def _consolidate(parsed: argparse.Namespace) -> None:
    consolidate(parsed.path, parsed.out, not parsed.trust)
    print(f"Wrote {parsed.out}")


def _export(parsed: argparse.Namespace) -> None:
    weights_only = not parsed.trust
    # Compares a file with its checksums. Entries of a directory are compared as they are read.
    open_checkpoint(parsed.path, weights_only)
    place, _, name = parsed.module_class.rpartition(".")
    module_class = getattr(importlib.import_module(place), name)
    module = module_class.load_from_checkpoint(parsed.path, map_location="cpu", weights_only=weights_only)
    dtype = parsed.dtype and getattr(torch, parsed.dtype)
    export_hugging_face(module, parsed.out, dtype=dtype, adapter_only=parsed.adapter_only, prefix=parsed.key)
    print(f"Wrote {parsed.out}")


if __name__ == "__main__":
    sys.exit(main())

"""kosmos-raw COMMAND: picks the command, turns expected errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..build.zig import BuildError
from ..errors import KosmosError

COMMANDS = {
    "demo": "runs everything once on this machine, checks it, draws a timeline",
    "validate": "checks one operator against its oracle, on fresh random data",
    "trace": "records who did what when, as a Perfetto file and a picture",
    "bench": "measures",
    "compile": "builds the kernels ahead of time and reports their resources",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only when what was asked for was done and what was checked holds."""
    parser = argparse.ArgumentParser(prog="kosmos-raw", description="Self-scheduling collective + GEMM kernels.")
    parser.add_argument("--version", action="version", version=f"kosmos-raw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        _module(name).add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return int(_module(args.command).run(args))
    except (KosmosError, BuildError, ValueError, TypeError, OSError) as error:
        print(f"kosmos-raw {args.command}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(note, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _module(command: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f".{command}", __package__)

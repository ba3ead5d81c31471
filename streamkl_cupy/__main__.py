"""`python -m streamkl_cupy COMMAND`: doctor, bench, compile."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .cli import exit_code

COMMANDS = ("doctor", "bench", "compile")
EPILOG = """\
examples:
  python -m streamkl_cupy doctor             does it work here, and if not, what fixes it
  python -m streamkl_cupy bench --plot       how fast, how much memory, against what is installed
  python -m streamkl_cupy compile --arch sm_90     kernels ahead of time, without a GPU
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m streamkl_cupy",
        description="KL divergence between two attention distributions, without the N x N matrix.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f".cli.{name}", __package__)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return exit_code(f"{parser.prog} {options.command}", lambda: int(options.run(options)))


if __name__ == "__main__":
    sys.exit(main())

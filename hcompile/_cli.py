"""The `hcompile` command.

A subcommand is a module of `hcompile._bench` with `add_arguments(parser)` and `run(args)`.
Such a module imports jax, flax, optax and rich only while it runs, so that `--help` is quick.
"""

import argparse
import importlib.metadata
import sys

from hcompile._bench import demo

COMMANDS = {"demo": (demo, "compare jax.jit with hcompile.jit on a small transformer")}


def main(argv: list[str] | None = None) -> int:
    """Runs the `hcompile` command.

    Args:
      argv: the arguments after the program's name; default: those of this process.

    Returns:
      The exit status: 0 if all went well.

    Raises:
      SystemExit: with status 2 for a bad option, with status 0 after `--help`.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.version:
        print(f"hcompile {_version()}")
        return 0
    if args.command is None:
        parser.error(f"a command is missing: got none, expected one of: {', '.join(COMMANDS)}")
    try:
        return COMMANDS[args.command][0].run(args)
    except KeyboardInterrupt:
        return 130  # what a shell reports for a process that ctrl-C ended


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hcompile", description="Hierarchical compilation for JAX."
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary))
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("hcompile")
    except importlib.metadata.PackageNotFoundError:
        return "(run from its source, not installed)"


if __name__ == "__main__":
    sys.exit(main())

"""The `outrider` command: one module of `deployments.commands` for each subcommand."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("serve", "generate", "bench", "prepare_draft", "models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. A user's mistake is one line on stderr and exit status 2."""
    logging.basicConfig(level=logging.WARNING, format="outrider: %(message)s")
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Speculative decoding with many drafts for one target, exact to the token.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        import_module(f"deployments.commands.{command}").add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        status: int = args.func(args)
    except ValueError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())

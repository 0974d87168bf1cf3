"""The `outrider` command: one module of `deployments.commands` for each subcommand."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

COMMANDS = {
    "serve": "answer over HTTP",
    "generate": "answer one prompt in this process, without a server",
    "bench": "measure on this machine",
    "prepare-draft": "make a draft for a target and a domain",
    "models": "fetch and convert models",
}
"""What each is for. Only the module of the one that was asked for is imported: most bring torch
along, which takes seconds."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. A user's mistake is one line on stderr and exit status 2; so is Ctrl-C, and
    130.
    """
    logging.basicConfig(level=logging.WARNING, format="outrider: %(message)s")
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Speculative decoding with many drafts for one target, exact to the token.",
    )
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if arguments is None else arguments
    for command, purpose in COMMANDS.items():
        own = subparsers.add_parser(command, help=purpose)
        if command in arguments[:1]:
            _module_of(command).add_arguments(own)
    args = parser.parse_args(arguments)
    try:
        status: int = args.func(args)
    except ValueError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def _module_of(command: str) -> ModuleType:
    return import_module(f"deployments.commands.{command.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())

"""`outrider models`: have a model's files ready before anything needs them."""

import argparse

from workers.engine.model_store import DEFAULT_TARGET, cache_dir, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser(
        "fetch",
        help="make a model ready to serve and print its folder",
        description="Make a model ready to serve and print its folder. Ready ones "
        f"take no time. Converted models are kept in {cache_dir()} (OUTRIDER_CACHE changes that).",
    )
    fetch.add_argument(
        "name",
        nargs="?",
        default=DEFAULT_TARGET,
        metavar="NAME",
        help="a folder, a .gguf file or a Hugging Face hub name (default: %(default)s)",
    )
    fetch.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Fetch one model; the folder goes to stdout, progress to stderr.

    Raises:
        ValueError: the model cannot be had; the message says what to do.
    """
    print(resolve(args.name))
    return 0

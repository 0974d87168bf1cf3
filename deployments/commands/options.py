"""Options that several commands share."""

import argparse

from workers.engine.model import DTYPES
from workers.engine.model_store import DEFAULT_TARGET
from workers.target import TargetSpec


def add_target_options(parser: argparse.ArgumentParser, *, dtype: str = "bfloat16") -> None:
    """--target, --dtype, --device and --threads."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="T",
        help="a folder, a .gguf file or a Hugging Face hub name (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default=dtype,
        help="of the target; float32 gives the same text on every path (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the target runs (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all cores)"
    )


def count(text: str) -> int:
    """An option's value that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def target_spec(args: argparse.Namespace) -> TargetSpec:
    return TargetSpec(model=args.target, dtype=args.dtype, device=args.device, threads=args.threads)

"""Options that several commands share."""

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from workers.budget import AUTO, Budget
from workers.engine.model import DTYPES
from workers.engine.model_store import DEFAULT_TARGET
from workers.target import TargetSpec

TARGET_OPTIONS = ("target", "dtype", "device", "threads")

_Number = TypeVar("_Number", int, float)


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
        help="of the target; int8 rounds the weights of a Llama on a CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the target runs (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=natural,
        default=0,
        metavar="N",
        help="CPU threads (default: all cores)",
    )


def add_budget_option(parser: argparse.ArgumentParser) -> None:
    """--budget."""
    parser.add_argument(
        "--budget",
        type=budget,
        default=AUTO,
        metavar="N",
        help="nodes of the token tree per step: a number, 0 to decode plainly, or auto for as many "
        "as pay (default: %(default)s)",
    )


def add_temperature_option(parser: argparse.ArgumentParser) -> None:
    """--temperature."""
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )


def budget(text: str) -> Budget:
    """auto, or a value that must be 0 or more."""
    return AUTO if text == AUTO else natural(text)


def count(text: str) -> int:
    """An option's value that must be 1 or more."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An option's value that must be 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < least:
        raise ArgumentTypeError(f"{number} is not {least} or more")
    return number


def temperature(text: str) -> float:
    """An option's value that must be 0 or more."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise ArgumentTypeError(f"{number} is not 0 or more")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None


def temperatures(text: str) -> tuple[float, ...]:
    """Some of them, between commas, each once."""
    return _each_once(temperature, text)


def counts(text: str) -> tuple[int, ...]:
    """Some that are 1 or more, between commas, each once."""
    return _each_once(count, text)


def rates(text: str) -> tuple[float, ...]:
    """Some that are more than 0, between commas, each once."""
    return _each_once(_rate, text)


def _rate(text: str) -> float:
    number = _number(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{number} is not more than 0")
    return number


def _each_once(parse: Callable[[str], _Number], text: str) -> tuple[_Number, ...]:
    found = tuple(parse(part) for part in text.split(","))
    if len(set(found)) < len(found):
        raise ArgumentTypeError(f"{text} names one twice")
    return found


def target_spec(args: argparse.Namespace) -> TargetSpec:
    return TargetSpec(model=args.target, dtype=args.dtype, device=args.device, threads=args.threads)

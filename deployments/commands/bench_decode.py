"""`outrider bench decode`: drafts against plain decoding, one request at a time."""

import argparse
from collections.abc import Mapping
from typing import Any

from bench.decode import PLAIN, Results, Settings, measure, summarise, table
from bench.matrix import matrix_of, matrix_table
from bench.reliability import Witness
from bench.report import decode_report
from deployments.commands.bench_options import (
    add_plot_option,
    add_seed_option,
    check_folder,
    write,
    write_json,
)
from deployments.commands.bench_plan import Plan, add_plan_options, load, plan_of, run_of
from deployments.commands.options import temperatures

HELP = "tokens per second, tau, alpha and calibration of drafts against plain decoding"
DESCRIPTION = (
    "Decode the same prompts with each arm in turn, one request at a time, at each temperature. "
    "Prints a table per temperature: tau is tokens per pass of the target, alpha the share of "
    "right guesses, same the share of texts equal to plain's, ece the calibration error: how far, "
    "on average over all nodes, the draft's confidence in a node is from the share accepted. OUT "
    "holds the same numbers by temperature, and in it under arms and domains, with the bins of "
    "the calibration, the accepted tokens by the draft's member that guessed them, command, "
    "revision and machine. Times include prefill."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser, arms=f"{PLAIN},chain,ngram,eagle,hybrid")
    parser.add_argument(
        "--temperatures",
        type=temperatures,
        default=(0.0, 0.8),
        metavar="T,T",
        help="one after the other; 0 is greedy (default: 0,0.8)",
    )
    add_seed_option(parser, "of the first prompt, the next one has S + 1")
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="also decode with the shipped draft of every domain; prints tau and speed-up by "
        "prompts and draft",
    )
    add_plot_option(parser, "tau, tokens/s, calibration and the matrix")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    plan = plan_of(args, matrix=args.matrix)
    check_folder("plot", args.plot)
    witness = Witness()
    target, verifier = load(plan, args, witness)
    prompts = plan.encode(target)
    found = {}
    with plan.progress(rounds=len(args.temperatures)) as bar:
        for temperature in args.temperatures:
            results = measure(
                verifier,
                prompts,
                {domain: line_up.arms for domain, line_up in plan.line_ups.items()},
                Settings(args.max_tokens, args.budget, temperature, args.seed),
                bar.update,
                witness,
            )
            found[str(temperature)] = _summary(plan, results)
    summary = {"temperatures": found, "run": run_of(args, plan)}
    for temperature_name, own in found.items():
        print(f"temperature {temperature_name}\n\n{_tables(own)}\n")
    write_json(args.json, summary)
    write(args.report, lambda: decode_report(summary))
    if args.plot:
        from bench.plot import plot  # imported late: matplotlib takes a second

        plot(summary, args.plot)
    return 0


def _summary(plan: Plan, results: Results) -> dict[str, Any]:
    """The arms' numbers, without those of drafts that only the matrix asks for, and the matrix."""
    asked = {
        domain: {name: results[domain][name] for name in line_up.asked}
        for domain, line_up in plan.line_ups.items()
    }
    columns = {domain: line_up.columns for domain, line_up in plan.line_ups.items()}
    matrix = {"matrix": matrix_of(results, columns)} if any(columns.values()) else {}
    return summarise(asked) | matrix


def _tables(found: Mapping[str, Any]) -> str:
    tables = [table(found)]
    if "matrix" in found:
        tables += ["draft by draft: tau (speed-up)", matrix_table(found["matrix"])]
    return "\n\n".join(tables)

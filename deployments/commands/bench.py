"""`outrider bench`: measure on this machine, side by side in one run."""

import argparse

from deployments.commands import bench_decode, bench_kv, bench_load, bench_peers

_KINDS = {"decode": bench_decode, "peers": bench_peers, "load": bench_load, "kv": bench_kv}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, kind in _KINDS.items():
        kind.add_arguments(kinds.add_parser(name, help=kind.HELP, description=kind.DESCRIPTION))

"""`outrider serve`: a whole server on this machine, until it is interrupted."""

import argparse
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from joblib import cpu_count

from deployments.config import HttpConfig, OutriderConfig, explain, load_config

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

APPLICATION = "outrider"

OBJECT_STORE_BYTES = 256 * 2**20
"""Ray would set 30 % of the memory aside for large objects; messages here are small."""

RAY_SETTINGS = {
    # Ray's workers would be nice to every other process of the machine; a server is not.
    "RAY_worker_niceness": "0",
    # Serve's own loop runs our code, which saves a hop between threads for every chunk. Nothing of
    # ours blocks a loop. Not RAY_SERVE_THROUGHPUT_OPTIMIZED: it also lets replicas listen on ports
    # of their own, and every shutdown then drains them for 30 s.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Chunks travel from replica to replica over gRPC instead of Ray's object store: half the CPU.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # The controller looks at everything ten times a second, which costs 3 % of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
"""Set unless the environment has them; Ray reads them when its processes start."""

LOGS = "/tmp/ray/session_latest/logs"
"""Where Ray keeps those of all its processes, Serve's in `serve` below."""

LOOPBACK = "127.0.0.1"

POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start the server on this machine, with an OpenAI-compatible API. Without a "
        "file it serves a small model with the shipped drafts. Ctrl-C ends it. On a Ray cluster "
        "use `serve run deployments.app:build` instead."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML; deployments/config.example.yaml shows all keys"
    )
    parser.add_argument("--host", help="address to listen on (default: http.host, 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: http.port, 8000)")
    parser.add_argument(
        "--dashboard", action="store_true", help="start Ray's dashboard too, on port 8265"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; then everything it started is gone.

    Raises:
        ValueError: the configuration is wrong, the port is taken, or the model or a draft cannot be
            served; the message says why.
    """
    config = configured(args)
    check_port(config.http.host, config.http.port)
    try:
        _catch_signals()
        with _cluster(config, dashboard=args.dashboard):
            _start(config)
            print(greeting(config), flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        _say("stopped")
    return 0


def configured(args: argparse.Namespace) -> OutriderConfig:
    """The file, and what the command line says on top of it."""
    from pydantic import ValidationError

    config = load_config(args.config)
    given = {"host": args.host, "port": args.port}
    http = config.http.model_dump() | {k: v for k, v in given.items() if v is not None}
    try:
        return OutriderConfig.model_validate({**dict(config), "http": http})
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def check_port(host: str, port: int) -> None:
    """Raises ValueError when it cannot be listened on; Serve would only log it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port"
            ) from error


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def greeting(config: OutriderConfig) -> str:
    """What to do with a server that is ready."""
    host = "localhost" if config.http.host in ("0.0.0.0", "127.0.0.1") else config.http.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.http.port}"
    return "\n".join(
        (
            f"Ready at {url}/v1 (model {config.target.served_name}). Try:",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d \\",
            '    \'{"messages": [{"role": "user", "content": "Write quicksort in Python."}], '
            '"max_tokens": 128, "temperature": 0}\'',
        )
    )


def _start(config: OutriderConfig) -> None:
    """Deploys the application and tells how it is getting on."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from deployments.app import build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    http = {"host": config.http.host, "port": config.http.port}
    serve.start(http_options=http, logging_config=quiet)
    names = ", ".join(draft.name for draft in config.pool) or "none"
    _say(f"starting the verifier ({config.target.served_name}; drafts: {names})")
    application = serve.RunTarget(
        build(config.model_copy(update={"http": HttpConfig()})),
        name=APPLICATION,
        route_prefix="/",
        logging_config=quiet,
    )
    serve.run_many([application], wait_for_applications_running=False)
    _wait_until_running()


def _wait_until_running() -> None:
    from ray import serve

    known: set[str] = set()
    while True:
        status = serve.status().applications[APPLICATION]
        up = {name for name, one in status.deployments.items() if one.status == "HEALTHY"}
        for name in sorted(up - known):
            _say(f"{name} is up")
        known |= up
        if status.status == "RUNNING":
            return
        if status.status == "DEPLOY_FAILED":
            raise ValueError(failure(status))
        time.sleep(POLL_S)


def failure(status: "ApplicationStatusOverview") -> str:
    """Why an application did not start: the user's mistake if there is one, else all that is known.

    Serve hands over tracebacks as text; what a constructor raised is in their last lines.
    """
    messages = [one.message for one in status.deployments.values() if one.message]
    lines = [line.strip() for message in messages for line in message.splitlines()]
    mistakes = [line for line in lines if line.startswith("ValueError: ")]
    if mistakes:
        return mistakes[-1].removeprefix("ValueError: ")
    logs = f"the server did not start; its logs are in {LOGS}\n"
    return logs + "\n".join([status.message, *messages])


@contextmanager
def _cluster(config: OutriderConfig, *, dashboard: bool) -> Iterator[None]:
    """A Ray cluster of our own. The model is found, and converted if need be, while it starts."""
    import ray

    set_environment()
    ready = _import_in_background()
    metrics_port = free_port()
    _say(f"starting Ray (metrics: http://{LOOPBACK}:{metrics_port}/metrics; logs: {LOGS})")
    ray.init(
        address="local",
        _metrics_export_port=metrics_port,
        num_cpus=_cpus(config),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=dashboard,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    _catch_signals()  # again: Ray has put its own handler there
    try:
        _prepare_model(config)
        ready.result()
        yield
    finally:
        _say("shutting down")
        from ray import serve

        serve.delete(APPLICATION)
        ray.shutdown()


def set_environment() -> None:
    """Applies RAY_SETTINGS, before Ray starts."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)


def _cpus(config: OutriderConfig) -> int:
    """All cores; more on a machine that has fewer than the reservations add up to."""
    from deployments.placement import OVERHEAD_CPUS, bundles

    needed = sum(bundle["CPU"] for bundle in bundles(config)) + OVERHEAD_CPUS
    cores: int = cpu_count()
    return max(cores, math.ceil(needed))


def _prepare_model(config: OutriderConfig) -> None:
    """Here, where progress can be seen, and once, not in every process at the same time."""
    from workers.engine.model_store import resolve

    _say(f"model {config.target.model}")
    resolve(config.target.model)


def _import_in_background() -> "Future[Any]":
    """torch and transformers take seconds to import, as long as Ray takes to start."""
    done: Future[Any] = Future()

    def load() -> None:
        try:
            import deployments.app

            done.set_result(deployments.app)
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=load, daemon=True).start()
    return done


def _catch_signals() -> None:
    """SIGTERM becomes a KeyboardInterrupt too; and SIGINT, which a shell's `&` switches off."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _say(what: str) -> None:
    print(f"outrider: {what}", file=sys.stderr, flush=True)

"""The Serve application: `serve run deployments.app:build`, or `outrider serve`.

    Ingress  ->  DraftRouter
             ->  Verifier (a placement group: rank 0, the draft actors, the other ranks)

The classes themselves know nothing of Serve; they become deployments here.

No `from __future__ import annotations` in this module: Serve reads the annotation of `build`, and
as a string it would hand over a raw dict, unchecked.
"""

from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle
from transformers import AutoTokenizer

from deployments.admission import Admission
from deployments.config import HttpConfig, OutriderConfig
from deployments.errors import RETRY_AFTER_S
from deployments.ingress import Ingress, create_app
from deployments.links import ServeRouter, ServeVerifier
from deployments.logprobs import Words
from deployments.metrics import IngressMetrics
from deployments.placement import (
    INGRESS_CPUS,
    ROUTER_CPUS,
    actor_options,
    bundles,
    rank_resources,
    thread_variables,
    threads_for,
)
from deployments.prompt import Prompter
from deployments.resuming import ResumingVerifier
from deployments.router import DraftRouterDeployment, router_opener
from deployments.tracing import open_tracer
from deployments.verifier import VerifierDeployment, open_engine
from workers.engine.model_store import resolve

SPARE_REQUESTS = 64
"""Calls that Serve lets through beyond the verifier's own queue, so that the verifier refuses them
itself, at once, and that health checks and cancellations still get in."""

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
CONSTRUCTOR_TRIES = 1
"""A first start that fails is told at once. After a success Serve retries until it works."""

DRAIN_S = 30.0
"""How long a replica that is being replaced may finish its streams."""

DRAIN_POLL_S = 0.2


class VerifierReplica(VerifierDeployment):
    """The verifier as Serve runs it."""

    async def __del__(self) -> None:
        """Serve awaits this when it stops a replica, also one whose constructor failed."""
        await self.close()


class RouterReplica(DraftRouterDeployment):
    """The router as Serve runs it."""

    async def __del__(self) -> None:
        """Serve awaits this when it stops a replica, also one whose constructor failed."""
        await self.close()


class IngressDeployment:
    """Wires the HTTP application to the other two deployments."""

    def __init__(
        self,
        config: OutriderConfig,
        verifier: DeploymentHandle[Any],
        router: DeploymentHandle[Any],
    ) -> None:
        self._config = config
        patience_s = config.limits.restart_patience_s
        self._verifier = ResumingVerifier(ServeVerifier(verifier), patience_s)
        self._router = ServeRouter(router)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, in the replica."""
        tokenizer: Any = AutoTokenizer.from_pretrained(resolve(self._config.target.model))
        metrics, tracer = IngressMetrics(), open_tracer(self._config.tracing, "ingress")
        admission = Admission(
            self._verifier,
            self._router,
            Prompter(tokenizer),
            self._config.speculation,
            self._config.limits,
            tracer,
        )
        ingress = Ingress(self._verifier, self._router, admission, Words(tokenizer), metrics)
        return create_app(ingress, metrics, self._config.api, tracer)


def build(args: OutriderConfig) -> Application:
    """The application for a configuration; Serve has checked `args` against its model.

    Raises:
        ValueError: it says where to listen, which is not the application's to decide.
    """
    if args.http != HttpConfig():
        raise ValueError("http: is for `outrider serve`; here Serve's own http_options say it")
    config = args.from_environment()
    verifier = _verifier(config)
    router = _deployment(
        RouterReplica,
        name="DraftRouter",
        ray_actor_options=_small(ROUTER_CPUS),
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        max_ongoing_requests=_ongoing(config),
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
    ).bind(router_opener(config), config.router.redis_url)
    return _deployment(
        serve.ingress()(IngressDeployment),
        name="Ingress",
        ray_actor_options=_small(INGRESS_CPUS),
        max_ongoing_requests=2 * _ongoing(config),
        max_queued_requests=_ongoing(config),
        backpressure_config=BackpressureConfig(retry_after_s=RETRY_AFTER_S),
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
    ).bind(config, verifier, router)


def _verifier(config: OutriderConfig) -> Application:
    return _deployment(
        VerifierReplica,
        name="Verifier",
        ray_actor_options={
            **actor_options(rank_resources(config.target)),
            "runtime_env": {"env_vars": thread_variables(threads_for(config).rank)},
        },
        placement_group_bundles=bundles(config),
        placement_group_strategy="PACK",
        max_ongoing_requests=_ongoing(config),
        max_queued_requests=SPARE_REQUESTS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
    ).bind(partial(open_engine, config), config.tracing)


def _deployment(cls: type, name: str, **options: Any) -> Deployment:
    """Serve's decorator, as the function it also is."""
    deployment: Any = serve.deployment(cls, name=name, **options)
    assert isinstance(deployment, Deployment)
    return deployment


def _ongoing(config: OutriderConfig) -> int:
    return config.limits.max_running + config.limits.max_queued + SPARE_REQUESTS


def _small(cpus: float) -> dict[str, Any]:
    """A process that must not take cores from the target's."""
    return {"num_cpus": cpus, "runtime_env": {"env_vars": thread_variables(1)}}

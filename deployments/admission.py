"""From a request body to a job for the verifier.

Every check that needs the target is made here, then the draft is chosen.
"""

import asyncio
import itertools
import logging
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.trace import Tracer

from deployments.config import RESERVED_NAMES, LimitsConfig, SpeculationConfig
from deployments.dialect import Choice, Dialect, Envelope
from deployments.errors import ApiError, bad_request, refused
from deployments.links import RouterLink, TargetFacts, VerifierLink
from deployments.openai_schema import (
    SEED_LIMIT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SpeculationOptions,
    TokenizeRequest,
)
from deployments.prompt import Prompt, Prompter
from deployments.tool_calls import ToolUse
from deployments.tracing import traceparent
from router.decision import RouteDecision, RouteRequest
from workers.budget import AUTO, Budget, spending
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest

logger = logging.getLogger("outrider.ingress")

ROUTING_PATIENCE_S = 1.0
"""How long a request waits for the router before it goes without a draft."""

Body = ChatRequest | CompletionRequest

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one way to write each, and none too long to read

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One choice: what the verifier is asked, and who drafts for it. `route` is the prompt as the
    router sees it; `decision` the router's, when it was asked; `echo` is what the answer begins
    with.
    """

    request: GenerationRequest
    choice: Choice
    route: RouteRequest
    decision: RouteDecision | None
    echo: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has passed every check, and what its answer is wrapped in.

    `choices`: those of each prompt in turn; a prompt's are alike but for names and seeds.
    `deadline_s`: seconds within which all of them must be complete; `tools`: what they may call.
    """

    choices: tuple[Wanted, ...]
    envelope: Envelope
    deadline_s: float | None
    tools: ToolUse | None


class Admission:
    """Checks bodies against the target and picks the draft."""

    def __init__(
        self,
        verifier: VerifierLink,
        router: RouterLink,
        prompter: Prompter,
        speculation: SpeculationConfig,
        limits: LimitsConfig,
        tracer: Tracer,
    ) -> None:
        self._verifier = verifier
        self._router = router
        self._prompter = prompter
        self._speculation = speculation
        self._limits = limits
        self._tracer = tracer

    async def admit(self, body: Body, dialect: Dialect) -> Job:
        """The job.

        Raises:
            ApiError: a 4xx that names the field.
            VerifierAway: nobody is there to ask what is served.
        """
        facts = await self._verifier.facts()
        check_model(body.model, facts)
        sampling = sampling_of(body, facts.vocab_size)
        budget = self._budget(body.speculation)
        self._check_draft(body.speculation.draft, facts)
        check_stop_tokens(body, facts.vocab_size)
        check_places(body, self._limits.max_running + self._limits.max_queued)
        prompts = await self._read(body, facts.vocab_size)
        id_ = f"{dialect.prefix}-{secrets.token_hex(12)}"
        requests = [
            request_of(body, field, prompt, sampling, facts, id_)
            for field, prompt in prompts.items()
        ]
        wanted = await asyncio.gather(
            *(
                self._wanted(body, request, prompt, budget, facts)
                for request, prompt in zip(requests, prompts.values(), strict=True)
            )
        )
        choices = tuple(itertools.chain.from_iterable(wanted))
        read = sum(len(prompt.ids) for prompt in prompts.values())
        drafted = tuple(each.choice for each in choices)
        envelope = Envelope(id_, int(time.time()), facts.model, read, drafted)
        return Job(choices, envelope, self._deadline_s(body), body.tool_use)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The ids of a text or a chat, how many there are, and how many the context holds.

        Raises:
            ApiError: another model, or a chat that the target's template refuses.
        """
        facts = await self._verifier.facts()
        check_model(body.model, facts)
        if body.messages is not None:
            ids = (await self._prompter.chat(body.messages)).ids
        else:
            assert body.prompt is not None, "the schema has seen to it"
            ids = await self._prompter.ids_of(body.prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": facts.context_length}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """The text of ids, special tokens by their names.

        Raises:
            ApiError: another model, or an id outside the vocabulary.
        """
        facts = await self._verifier.facts()
        check_model(body.model, facts)
        return {"prompt": await self._prompter.text_of(body.tokens, facts.vocab_size)}

    async def _read(self, body: Body, vocab_size: int) -> dict[str, Prompt]:
        """The prompts, by the fields that hold them."""
        if isinstance(body, ChatRequest):
            prompt = await self._prompter.chat(body.messages, body.callable_tools)
            return {"messages": prompt}
        return {
            field: await self._prompter.completion(field, prompt, vocab_size)
            for field, prompt in body.prompts.items()
        }

    def _deadline_s(self, body: Body) -> float | None:
        given = [s for s in (body.deadline_s, self._limits.deadline_s) if s is not None]
        return min(given, default=None)

    def _budget(self, options: SpeculationOptions) -> Budget:
        most = self._speculation.max_budget
        if options.budget is None:
            return self._speculation.budget
        if options.budget != AUTO and options.budget > most:
            raise bad_request(
                "speculation.budget",
                f"speculation.budget: {options.budget} is more than this server's {most}",
            )
        return options.budget

    @staticmethod
    def _check_draft(draft: str, facts: TargetFacts) -> None:
        known = (*RESERVED_NAMES, *facts.drafts)
        if draft not in known:
            raise bad_request(
                "speculation.draft",
                f"speculation.draft: there is no draft {draft!r}; choose one of {', '.join(known)}",
                "draft_not_found",
            )

    async def _wanted(
        self,
        body: Body,
        request: GenerationRequest,
        prompt: Prompt,
        budget: Budget,
        facts: TargetFacts,
    ) -> list[Wanted]:
        """The choices for one prompt."""
        choice, decision = await self._choose(body.speculation.draft, budget, prompt.route, facts)
        spent, adaptive = spending(budget if choice.draft else 0, self._speculation.max_budget)
        drafted = replace(request, draft=choice.draft, budget=spent, adaptive=adaptive)
        echo = prompt.route.query if body.echoes else ""
        return [
            Wanted(each, choice, prompt.route, decision, echo)
            for each in choices_of(drafted, body.n or 1)
        ]

    async def _choose(
        self, draft: str, budget: Budget, route: RouteRequest, facts: TargetFacts
    ) -> tuple[Choice, RouteDecision | None]:
        if draft == "none":
            return Choice(None, "requested: plain decoding"), None
        if budget == 0:
            return Choice(None, "requested: a budget of 0 is plain decoding"), None
        if draft != "auto":
            return Choice(draft, "requested: by name"), None
        if not facts.drafts:
            return Choice(None, "default: the pool is empty"), None
        return await self._route(route)

    async def _route(self, route: RouteRequest) -> tuple[Choice, RouteDecision | None]:
        try:
            with self._tracer.start_as_current_span("route"):
                decision = await asyncio.wait_for(self._router.decide(route), ROUTING_PATIENCE_S)
        except Exception as error:  # a router that is away must cost a draft, not the answer
            logger.warning("routing failed, decoding plainly: %r", error)
            return Choice(None, "default: the router did not answer"), None
        return Choice(decision.draft, f"{decision.reason}: {decision.detail}"), decision


def request_of(
    body: Body, field: str, prompt: Prompt, sampling: SamplingParams, facts: TargetFacts, id_: str
) -> GenerationRequest:
    """What the verifier is asked, without a draft.

    Raises:
        ApiError: no room for the answer, or not for as much as was asked for at least.
    """
    max_tokens = room_for(body, field, prompt, facts)
    return GenerationRequest(
        id=f"{id_}-{field}",
        prompt=prompt.ids,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=body.stops,
        stop_tokens=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=least_of(body, max_tokens),
        logprobs=body.likeliest,
        grammar=body.grammar,
        group=id_,
        trace=traceparent(),
    )


def choices_of(request: GenerationRequest, count: int) -> tuple[GenerationRequest, ...]:
    """As many answers to the same, the first of them the one there would be without the others."""
    return tuple(
        replace(
            request,
            id=f"{request.id}-{number}",
            sampling=replace(request.sampling, seed=(request.sampling.seed + number) % SEED_LIMIT),
        )
        for number in range(count)
    )


def check_model(name: str | None, facts: TargetFacts) -> None:
    """404 for a model that is not the served one."""
    if name not in (None, facts.model):
        raise ApiError(
            404,
            f"model: {name!r} is not served here; this is {facts.model!r}",
            "not_found_error",
            "model",
            "model_not_found",
        )


def sampling_of(body: Body, vocab_size: int) -> SamplingParams:
    """How to draw tokens. Without a seed a random one: two such requests answer differently."""
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    seed = secrets.randbelow(SEED_LIMIT) if body.seed is None else body.seed
    try:
        params = SamplingParams(
            seed=seed,
            logit_bias=_biases(body.logit_bias or {}),
            **{name: value for name, value in given.items() if value is not None},
        )
        params.check_vocabulary(vocab_size)
    except ValueError as error:
        raise refused(error) from error
    return params


def _biases(logit_bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"logit_bias: {key[:32]!r} is not a token id")
    return tuple((int(key), value) for key, value in logit_bias.items())


def check_stop_tokens(body: Body, vocab_size: int) -> None:
    """400 for tokens that the target does not have."""
    for token in body.stop_token_ids or ():
        if token >= vocab_size:
            raise bad_request(
                "stop_token_ids",
                f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}",
            )


def least_of(body: Body, max_tokens: int) -> int:
    """Tokens the answer has before it may end."""
    least = body.min_tokens or 0
    if least > max_tokens:
        raise bad_request(
            "min_tokens", f"min_tokens: {least} is more than the answer may have, {max_tokens}"
        )
    return least


def check_places(body: Body, places: int) -> None:
    """400 for more answers than can be taken on at all."""
    prompts = 1 if isinstance(body, ChatRequest) else len(body.prompts)
    choices = prompts * (body.n or 1)
    if choices > places:
        raise bad_request(
            "prompt" if prompts > 1 else "n",
            f"{prompts} prompts with {body.n or 1} answers each are {choices} to be taken on at "
            f"once; this server takes {places} (limits.max_running and limits.max_queued): send "
            "them in smaller parts",
        )


def room_for(body: Body, field: str, prompt: Prompt, facts: TargetFacts) -> int:
    """Tokens the answer may have: what was asked for, at most what is left of the context."""
    room = facts.request_tokens - len(prompt.ids)
    if room < 1:
        raise bad_request(
            field,
            f"{field}: {len(prompt.ids)} tokens leave no room for an answer; prompt and answer "
            f"together may have {facts.request_tokens}",
            "context_length_exceeded",
        )
    return min(room, body.token_limit or room)

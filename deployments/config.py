"""The configuration file: every knob of a running Outrider, checked before anything starts.

One model, `OutriderConfig`, serves `outrider serve --config FILE` and the `args:` of a Ray Serve
file (`serve run deployments.app:build`). Unknown keys are errors that name the key: Serve itself
would ignore them, and a mistyped limit that silently does nothing is worse than a server that
does not start.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from workers.budget import AUTO
from workers.draft import CHILDREN, DraftKind, DraftSpec
from workers.engine.model_store import DEFAULT_TARGET, is_default

REDIS_URL_VARIABLE = "OUTRIDER_REDIS_URL"
API_KEY_VARIABLE = "OUTRIDER_API_KEY"

SHIPPED_DRAFTS = Path(__file__).resolve().parents[1] / "drafts"
"""Where the shipped drafts lie, one folder per domain."""

Domain = Literal["code", "math", "en", "zh"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)

RESERVED_NAMES = ("auto", "none")
"""What `speculation.draft` means without naming a draft; no pool member may be called so."""

_PLACEMENTS: Mapping[DraftKind, Literal["inline", "actor"]] = {
    "ngram": "inline",
    "lm": "actor",
    "eagle": "inline",
    "hybrid": "inline",
}

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
_PositiveInt = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _absolute_if_it_exists(name: str) -> str:
    """A relative path must survive the move into a Ray worker with its own working directory."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


class TargetConfig(_Section):
    """The large model whose text is served."""

    model: str = Field(
        default=DEFAULT_TARGET, min_length=1, description="name, folder or .gguf file"
    )
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="float32",
        description="bfloat16 and int8 (a Llama on a CPU) are faster",
    )
    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: _PositiveInt = Field(default=1, description="ranks the model is split over")
    kv_tokens: _PositiveInt = Field(
        default=33280, description="slots of the KV pool; these hold four whole contexts of 8,192"
    )
    host_kv_tokens: int = Field(
        default=0,
        ge=0,
        description="slots that the host keeps beside a GPU's, for what is to return",
    )
    context_length: _PositiveInt | None = Field(default=None, description="at most the model's own")
    threads: _PositiveInt | None = Field(
        default=None,
        description="CPU threads of one rank, reserved for it; unset: its share of all cores",
    )

    @field_validator("model")
    @classmethod
    def _resolve_model(cls, model: str) -> str:
        return DEFAULT_TARGET if is_default(model) else _absolute_if_it_exists(model)

    @property
    def served_name(self) -> str:
        """What clients call the model: a folder is known by its last component."""
        return Path(self.model).name if Path(self.model).is_absolute() else self.model


class DraftConfig(_Section):
    """One member of the pool: the fields of `workers.draft.DraftSpec`, and where it runs."""

    name: _Name
    kind: DraftKind
    path: str | None = Field(
        default=None, description="a folder that prepare-draft made, or a model (lm)"
    )
    domain: Domain | None = Field(default=None, description="what the router may send it")
    verification: Literal["invariant", "ratio"] = "invariant"
    layers: tuple[int, ...] = Field(
        default=(), description="lm only: these layers of the target make it"
    )
    children: int = Field(
        default=CHILDREN, ge=1, description="most per node of its trees; 1 makes chains; not for lm"
    )
    placement: Literal["inline", "actor"] | None = Field(
        default=None,
        description="in the verifier's process or in one of its own; unset: lm actor, else inline",
    )

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in RESERVED_NAMES:
            raise ValueError(f"a draft cannot be called {name!r}: requests use that word")
        return name

    @field_validator("path")
    @classmethod
    def _resolve_path(cls, path: str | None) -> str | None:
        return path and _absolute_if_it_exists(path)

    @model_validator(mode="after")
    def _makes_a_spec(self) -> Self:
        self.spec()
        return self

    @property
    def inline(self) -> bool:
        """Whether it runs in the decode loop itself: a proposal of n-grams takes a millisecond, as
        much as a message to another process, and a hybrid reads hidden states that are here."""
        return (self.placement or _PLACEMENTS[self.kind]) == "inline"

    def spec(self) -> DraftSpec:
        """The same, as the floor below knows it."""
        return DraftSpec(
            name=self.name,
            kind=self.kind,
            path=self.path,
            domain=self.domain,
            verification=self.verification,
            layers=self.layers,
            children=self.children,
        )


class RouterConfig(_Section):
    """How a draft is chosen for a request that does not name one."""

    redis_url: str | None = Field(
        default=None, description=f"unset: an embedded Valkey; {REDIS_URL_VARIABLE} overrides"
    )
    threshold: float = Field(
        default=0.85, gt=0, lt=1, description="cosine above which prompts are alike"
    )
    ttl_s: _PositiveInt = Field(default=7 * 24 * 3600, description="how long outcomes are kept")
    max_entries: _PositiveInt = Field(
        default=10_000, description="fingerprints kept in each replica"
    )


class LimitsConfig(_Section):
    """What one verifier takes on at once. Beyond it: 503 with Retry-After, no endless wait."""

    max_running: _PositiveInt = Field(default=8, description="sequences decoded together")
    max_queued: int = Field(default=64, ge=0, description="requests waiting for a place")
    prefill_tokens: _PositiveInt = Field(default=256, description="prompt tokens read per step")
    max_request_tokens: _PositiveInt | None = Field(
        default=None, description="prompt and answer together; unset: the context"
    )
    restart_patience_s: float = Field(
        default=120.0,
        ge=0,
        allow_inf_nan=False,
        description="how long answers wait for a verifier that restarts before they end with an "
        "error; at least what it takes to load the target",
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="how long an answer may take in all before it ends with an error; a request's "
        "own deadline_s may be shorter; unset: as long as it takes",
    )


class SpeculationConfig(_Section):
    """The proposals' size, in nodes of the token tree."""

    budget: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=AUTO,
        description="for requests that do not say; auto: as many as pay, 0: decode plainly",
    )
    max_budget: int = Field(
        default=32, ge=0, description="the most a request may ask for, and that auto may choose"
    )
    draft_timeout_ms: _PositiveInt = Field(
        default=1000, description="a draft that has not answered by then is left out until it does"
    )

    @model_validator(mode="after")
    def _budget_fits(self) -> Self:
        if self.budget != AUTO and self.budget > self.max_budget:
            raise ValueError(f"budget {self.budget} is larger than max_budget {self.max_budget}")
        return self


class HttpConfig(_Section):
    """Where `outrider serve` listens. `serve run` takes this from its own `http_options`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)


class ApiConfig(_Section):
    """Who may ask, and how much at once."""

    key: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        default=None,
        description="to be sent as `Authorization: Bearer KEY`; unset: everybody may ask; "
        f"{API_KEY_VARIABLE} overrides, and stays out of files",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="origins whose pages may ask from a browser; `*`: all"
    )
    max_body_bytes: _PositiveInt = Field(
        default=8 * 2**20, description="beyond it 413; more than most contexts hold"
    )
    request_log: str | None = Field(
        default=None,
        min_length=1,
        description="file that gets a line of JSON for each request, without its text",
    )

    @field_validator("request_log")
    @classmethod
    def _from_here(cls, path: str | None) -> str | None:
        """A worker has another working directory."""
        return None if path is None else str(Path(path).expanduser().resolve())


class TracingConfig(_Section):
    """Where spans go, and of how many requests."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="an OpenTelemetry collector's address for traces over HTTP, as "
        "http://collector:4318/v1/traces; unset: no spans are made",
    )
    share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="of the requests that come without a trace of their own; those that come with "
        "one are traced as it says",
    )


def default_pool() -> tuple[DraftConfig, ...]:
    """A hybrid per domain, and the target's own outermost layers as a language model."""
    hybrids = tuple(
        DraftConfig(name=domain, kind="hybrid", path=str(SHIPPED_DRAFTS / domain), domain=domain)
        for domain in DOMAINS
    )
    return (*hybrids, DraftConfig(name="lm", kind="lm", layers=(0, 1, 28, 29)))


class OutriderConfig(_Section):
    """Everything a server is made of. All of it has a default that runs anywhere."""

    target: TargetConfig = TargetConfig()
    drafts: tuple[DraftConfig, ...] | None = Field(
        default=None,
        description="the pool; unset: the shipped pool with the default target, else none",
    )
    router: RouterConfig = RouterConfig()
    limits: LimitsConfig = LimitsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    api: ApiConfig = ApiConfig()
    tracing: TracingConfig = TracingConfig()
    http: HttpConfig = HttpConfig()

    @field_validator("drafts")
    @classmethod
    def _names_are_unique(
        cls, drafts: tuple[DraftConfig, ...] | None
    ) -> tuple[DraftConfig, ...] | None:
        names = [draft.name for draft in drafts or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two drafts are called {twice[0]!r}: give each a name of its own")
        return drafts

    @property
    def pool(self) -> tuple[DraftConfig, ...]:
        """The drafts to start. The shipped ones know the default target's vocabulary only."""
        if self.drafts is not None:
            return self.drafts
        return default_pool() if is_default(self.target.model) else ()

    @property
    def draft_actors(self) -> tuple[DraftConfig, ...]:
        """Those of the pool that have a process of their own, in the pool's order."""
        return tuple(draft for draft in self.pool if not draft.inline)

    def from_environment(self, environment: Mapping[str, str] = os.environ) -> "OutriderConfig":
        """The same with what the environment overrides: where Redis is differs by host, and a key
        is nothing for a file.
        """
        router, api = self.router, self.api
        if url := environment.get(REDIS_URL_VARIABLE):
            router = router.model_copy(update={"redis_url": url})
        if key := environment.get(API_KEY_VARIABLE):
            api = api.model_copy(update={"key": SecretStr(key)})
        return self.model_copy(update={"router": router, "api": api})


DEFAULT = OutriderConfig()


def load_config(path: Path | str | None = None) -> OutriderConfig:
    """Reads a YAML file, or takes the defaults, and applies the environment.

    Raises:
        ValueError: the file is missing, is no YAML, or a key or value is wrong; every wrong key
        is named by
            its path, one a line.
    """
    if path is None:
        return DEFAULT.from_environment()
    try:
        return OutriderConfig.model_validate(_read(Path(path))).from_environment()
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys such as `target:`, found {type(content).__name__}")
    if "applications" in content:
        raise ValueError(
            f"{path} is a Ray Serve file: start it with `serve run {path}`, or give its `args:` "
            "alone to `outrider serve --config`"
        )
    return content


def explain(error: ValidationError) -> str:
    """One line per fault: the key's path, then what is wrong with it."""
    return "\n".join(
        f"{'.'.join(str(part) for part in fault['loc']) or 'config'}: {_reason(fault)}"
        for fault in error.errors(include_url=False)
    )


def _reason(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "unknown key; see deployments/config.example.yaml for those there are"
    return str(fault["msg"]).removeprefix("Value error, ")

"""generate and bench from end to end, on a tiny target."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import deployments.config
import deployments.pool
from bench import llama_peers
from deployments.admission import Admission
from deployments.cli import main
from deployments.commands import bench_peers
from deployments.config import (
    DOMAINS,
    LimitsConfig,
    SpeculationConfig,
    TracingConfig,
    load_config,
)
from deployments.ingress import Ingress, create_app
from deployments.links import TargetFacts
from deployments.logprobs import Words
from deployments.metrics import IngressMetrics
from deployments.pool import verifier_over
from deployments.prompt import Prompter
from deployments.prompt_file import chat_ids, read_prompts
from deployments.tracing import open_tracer
from deployments.verifier import Engine, VerifierDeployment
from router.decision import Outcome, RouteDecision, RouteRequest
from tests.serving import listening
from tests.tiny import make_target
from workers.calibration import UNCALIBRATED
from workers.completion import run_requests
from workers.draft import DraftSpec
from workers.engine.eagle import EagleConfig, new_eagle, save_eagle
from workers.engine.model_store import DEFAULT_TARGET
from workers.engine.sampling import SamplingParams
from workers.engine.vocabulary import vocabulary_of
from workers.engine.weights import identity_of
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import TargetSpec, load_target
from workers.training.ngram_table import NgramTable
from workers.verifier import build_verifier

pytestmark = pytest.mark.usefixtures("single_thread")

Command = Callable[..., dict[str, Any]]
TINY = ("--dtype", "float32", "--threads", "1")
DEFAULTS = ("--dtype", "bfloat16", "--threads", "0", "--target", DEFAULT_TARGET)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "songs.jsonl"
    lines = ["on and on and on", "你好", "the thing and the other thing"]
    path.write_text("\n".join(json.dumps({"prompt": line}) for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def failed(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], str]:
    """Run a command that must fail as a user's mistake; what it said."""

    def run(arguments: Sequence[str]) -> str:
        try:
            assert main(arguments) == 2
        except SystemExit as exit_:
            assert exit_.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        return captured.err

    return run


# -- generate ------------------------------------------------------------------------------------


@pytest.fixture
def generated(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*options: str) -> dict[str, Any]:
        arguments = ["generate", "--prompt", "on and on", "--target", str(tiny_folder), *TINY]
        assert main([*arguments, "--max-tokens", "24", "--json", *options]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    return run


def test_the_text_is_the_targets_with_any_draft(
    generated: Command, tiny_folder: Path, stranger_folder: Path
) -> None:
    plain = generated("--draft", "none")
    assert (plain["draft"], plain["drafted"], plain["tau"], plain["alpha"]) == (None, 0, 1.0, None)
    for draft in ("ngram", str(tiny_folder), str(stranger_folder)):
        facts = generated("--draft", draft, "--budget", "6")
        assert facts["text"] == plain["text"]
        assert facts["tokens"] == plain["tokens"]
        assert facts["draft"] == Path(draft).name
        assert facts["tau"] == pytest.approx(len(facts["tokens"]) / facts["steps"])
    own = generated("--draft", str(tiny_folder), "--budget", "6")
    assert own["alpha"] == 1.0
    assert own["tau"] > 1.5


def test_a_seed_repeats_a_text_and_without_one_texts_vary(generated: Command) -> None:
    hot = ("--temperature", "1.5", "--draft", "none")
    first = generated(*hot, "--seed", "7")
    assert first["seed"] == 7
    assert generated(*hot, "--seed", "7")["tokens"] == first["tokens"]
    unseeded = [generated(*hot) for _ in range(3)]
    assert len({tuple(facts["tokens"]) for facts in unseeded}) == 3
    again = generated(*hot, "--seed", str(unseeded[0]["seed"]))
    assert again["tokens"] == unseeded[0]["tokens"], "the seed it drew is told"


def test_for_people_text_goes_to_stdout_and_numbers_to_stderr(
    generated: Command, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generated()
    arguments = ["generate", "--prompt", "on and on", "--target", str(tiny_folder), *TINY]
    assert main([*arguments, "--max-tokens", "24"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected["text"] + "\n"
    assert f"[{len(expected['tokens'])} tokens, " in captured.err
    assert f"tau {expected['tau']:.2f}" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens: 0 is not 1 or more"),
        (["--max-tokens", "999"], "max_tokens: 999 do not fit"),
        (["--budget", "-1"], "budget: -1 is not 0 or more"),
        (["--temperature", "nan"], "temperature: nan is not 0 or more"),
        (["--top-p", "7"], "top_p: 7.0 is not more than 0"),
        (["--seed", "-1"], "seed: -1 is not"),
        (["--threads", "-1"], "--threads: -1 is not 0 or more"),
        (["--draft", "nobody"], "draft: 'nobody' is no member of the pool"),
        (["--draft", "lm"], "layers: the model has layers 0 to 1, not [28, 29]"),
        (["--target", "/no/such/folder"], "/no/such/folder"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_options_that_cannot_be_used_are_named(
    tiny_folder: Path,
    failed: Callable[[Sequence[str]], str],
    options: list[str],
    message: str,
) -> None:
    arguments = ["generate", "--prompt", "x", "--target", str(tiny_folder), *TINY]
    assert message in failed([*arguments, "--max-tokens", "4", *options])


# -- bench -----------------------------------------------------------------------------------------


def greedy_texts(target: Path, prompts: Path) -> list[list[int]]:
    """What a target says to a file of prompts, each prompt included."""
    loaded = load_target(TargetSpec(str(target), dtype="float32", kv_tokens=256, threads=1))
    greedy = SamplingParams(seed=0, temperature=0.0)
    requests = [
        GenerationRequest(prompt, chat_ids(loaded.tokenizer, prompt), 40, greedy)
        for prompt in read_prompts(prompts).prompts
    ]
    run = run_requests(build_verifier(loaded, {}, Limits(max_running=1)), requests)
    return [[*done.request.prompt, *done.tokens] for done in run.completions]


@pytest.fixture
def shipped(
    tiny_folder: Path, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts for the tiny target where those for the default target are looked for. The math
    draft's table knows the target's answers.
    """
    folder, unknown = tmp_path / "drafts", [[5, 9, 11]]
    for domain in DOMAINS:
        texts = greedy_texts(tiny_folder, prompts) if domain == "math" else unknown
        make_hybrid(folder / domain, tiny_folder, texts)
    for module in (deployments.config, deployments.pool):
        monkeypatch.setattr(module, "SHIPPED_DRAFTS", folder)


def make_hybrid(folder: Path, target: Path, texts: Sequence[Sequence[int]]) -> None:
    """A draft whose neural member is untrained."""
    vocabulary = vocabulary_of(target)
    NgramTable.build(texts, vocabulary, {}).save(folder / "ngram")
    config = EagleConfig(32, 32, 4, 2, 8, 1e-6, 1e4, 64, feature_layers=(1, 2))
    model = new_eagle(target, config, torch.arange(64), torch.Generator().manual_seed(0))
    save_eagle(model, folder / "eagle", identity_of(target, "tiny"), vocabulary.size)
    for place in (folder, folder / "eagle"):
        UNCALIBRATED.save(place)


def test_bench_decode_measures_every_arm_and_every_shipped_draft(
    shipped: None,
    tiny_folder: Path,
    tmp_path: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [prompts.rename(prompts.with_name("math.jsonl")), tmp_path / "songs.jsonl"]
    files[1].write_bytes(files[0].read_bytes())
    outs = {name: tmp_path / f"out.{name}" for name in ("json", "report", "plot")}
    arguments = ["bench", "decode", "--matrix", "--target", str(tiny_folder), *TINY]
    arguments += [part for file in files for part in ("--prompts", str(file))]
    arguments += [part for name, out in outs.items() for part in (f"--{name}", str(out))]
    assert main([*arguments, "--limit", "2", "--max-tokens", "20"]) == 0

    summary = json.loads(outs["json"].read_text())
    assert list(summary["temperatures"]) == ["0.0", "0.8"]
    for found in summary["temperatures"].values():
        assert list(found["arms"]) == ["plain", "chain", "ngram", "eagle", "hybrid"]
        assert all(row["exact_match"] == 1 for row in found["arms"].values())
        assert {tuple(own) for own in found["matrix"].values()} == {DOMAINS}
        hybrid = found["domains"]["math"]["hybrid"]
        assert found["matrix"]["math"]["math"]["tau"] == hybrid["tau"], "decoded once"
        assert found["matrix"]["songs"]["code"]["tau"] == found["domains"]["songs"]["hybrid"]["tau"]
        assert 0 <= hybrid["calibration_error"] <= 1
        assert sum(row["count"] for row in hybrid["reliability"]) > 0
        assert found["arms"]["plain"]["calibration_error"] is None
    greedy = summary["temperatures"]["0.0"]
    assert greedy["matrix"]["math"]["math"]["tau"] > 1.3, "it has seen these very answers"
    assert greedy["matrix"]["songs"]["math"]["tau"] > 1.3 > greedy["matrix"]["math"]["zh"]["tau"]
    assert greedy["arms"]["hybrid"]["members"]["table"] > 0
    assert set(greedy["arms"]["eagle"]["members"]) <= {"neural"}
    settings = summary["run"]["settings"]
    assert (settings["dtype"], settings["prompts"]) == ("float32", {"math": 2, "songs": 2})

    said = capsys.readouterr().out
    assert said.count("tau (speed-up)") == 2
    assert said.startswith("temperature 0.0\n")
    assert "## Temperature 0.8" in outs["report"].read_text()
    assert outs["plot"].read_bytes().startswith(b"\x89PNG")


def test_bench_decode_compares_with_plain_decoding(
    tiny_folder: Path, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, numbers = tmp_path / "songs", tmp_path / "numbers.json"
    texts = greedy_texts(tiny_folder, prompts)
    NgramTable.build(texts, vocabulary_of(tiny_folder), {}).save(out)
    arguments = ["bench", "decode", "--arms", f"plain,{out}", "--temperatures", "0"]
    arguments += ["--prompts", str(prompts), "--target", str(tiny_folder), *TINY]
    assert main([*arguments, "--limit", "2", "--max-tokens", "25", "--json", str(numbers)]) == 0
    summary = json.loads(numbers.read_text())
    [found] = summary["temperatures"].values()
    assert "matrix" not in found
    assert found["arms"] == found["domains"]["songs"]
    plain, drafted = found["arms"]["plain"], found["arms"][str(out)]
    assert (plain["tau"], plain["alpha"], plain["speedup"], plain["exact_match"]) == (1, None, 1, 1)
    assert drafted["exact_match"] == 1
    assert drafted["tau"] > 1.3, "it has seen these very answers"
    assert 0 < drafted["alpha"] <= 1
    ratio = drafted["tokens_per_second"] / plain["tokens_per_second"]
    assert drafted["speedup"] == pytest.approx(ratio)
    assert summary["run"]["command"]
    assert "songs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "--limit: 0 is not 1 or more"),
        (["--arms", "plain,plain"], "arms: two are called 'plain'"),
        (["--arms", "plain,nobody"], "use 'plain' for plain decoding"),
        (["--json", "/no/such/folder/x.json"], "json: there is no folder /no/such/folder"),
        (["--report", "/no/such/folder/x.md"], "report: there is no folder /no/such/folder"),
        (["--plot", "/no/such/folder/x.png"], "plot: there is no folder /no/such/folder"),
        (["--temperatures", "0,-1"], "--temperatures: -1.0 is not 0 or more"),
        (["--temperatures", "nan"], "--temperatures: nan is not 0 or more"),
        (["--temperatures", "0.5,0,0.50"], "--temperatures: 0.5,0,0.50 names one twice"),
        (["--prompts", "/no/such/file"], "prompts: there is no file /no/such/file"),
        (["--max-tokens", "0"], "--max-tokens: 0 is not 1 or more"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_what_bench_cannot_measure_is_named(
    tiny_folder: Path,
    prompts: Path,
    failed: Callable[[Sequence[str]], str],
    options: list[str],
    message: str,
) -> None:
    arguments = ["bench", "decode", "--prompts", str(prompts), "--target", str(tiny_folder), *TINY]
    assert message in failed([*arguments, "--max-tokens", "4", "--arms", "plain", *options])


def test_bench_peers_says_the_same_text_as_transformers(
    tiny_folder: Path,
    stranger_folder: Path,
    tmp_path: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, report = tmp_path / "peers.json", tmp_path / "peers.md"
    arguments = ["--prompts", str(prompts), "--target", str(tiny_folder), "--json", str(out), *TINY]
    arguments += ["--arms", "plain,ngram", "--report", str(report)]
    assert main(["bench", "peers", *arguments, "--max-tokens", "12"]) == 0
    captured = capsys.readouterr()
    found = json.loads(out.read_text())
    decoders = found["domains"]["songs"]
    assert list(decoders) == ["transformers", "transformers lookup", "plain", "ngram"]
    for name, row in decoders.items():
        for said in (captured.out, report.read_text()):
            assert f"| {name} | {row['tokens_per_second']:.1f} |" in said
        assert row["exact_match"] == 1
        assert row["tokens_per_second"] > 0
    assert decoders["transformers"]["speedup"] == 1
    assert {"command", "revision", "machine"} <= found["run"].keys()
    assert "llama.cpp is left out: it reads GGUF files" in captured.err

    arguments += ["--assistant", str(stranger_folder), "--limit", "1"]
    assert main(["bench", "peers", *arguments, "--max-tokens", "4"]) == 0
    decoders = json.loads(out.read_text())["domains"]["songs"]
    assert decoders["transformers assisted"]["exact_match"] == 1


def test_bench_peers_refuses_what_is_no_assistant(
    tiny_folder: Path, tmp_path: Path, prompts: Path, failed: Callable[[Sequence[str]], str]
) -> None:
    arguments = ["bench", "peers", "--prompts", str(prompts), "--target", str(tiny_folder), *TINY]
    said = failed([*arguments, "--arms", "plain", "--assistant", str(tmp_path)])
    assert f"assistant: {tmp_path} holds no lm draft" in said


def test_bench_peers_says_how_llama_cpp_is_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_peers, "installed", lambda: False)
    assert bench_peers._llama(Namespace(target=DEFAULT_TARGET), {}, frozenset()) == {}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("llama.cpp is left out: `pip install -e '.[llama]'`")


def test_bench_refuses_names_under_which_numbers_would_be_mixed_up(
    tiny_folder: Path, tmp_path: Path, prompts: Path, failed: Callable[[Sequence[str]], str]
) -> None:
    one, other = (make_target(tmp_path / n / "same", seed=1, num_hidden_layers=1) for n in "ab")
    arguments = ["bench", "decode", "--prompts", str(prompts), "--target", str(tiny_folder), *TINY]
    said = failed([*arguments, "--arms", f"{one},{other}"])
    assert "arms: two different drafts are called 'same'" in said
    copy = tmp_path / "elsewhere" / prompts.name
    copy.parent.mkdir()
    copy.write_bytes(prompts.read_bytes())
    assert "prompts: two files are called 'songs'" in failed([*arguments, "--prompts", str(copy)])


# -- bench load ----------------------------------------------------------------------------------


Load = Callable[..., dict[str, Any]]
SMALL = ("--requests", "6", "--max-tokens", "16")


@pytest.fixture
def loaded(tmp_path: Path, prompts: Path) -> Load:
    """Run bench load, and what it wrote: `out.json`, `out.md` and `out.png`."""

    def run(*options: str) -> dict[str, Any]:
        outs = {name: tmp_path / f"out.{name}" for name in ("json", "report", "plot")}
        files = [part for name, out in outs.items() for part in (f"--{name}", str(out))]
        arguments = ["bench", "load", "--prompts", str(prompts), *SMALL, *files, *options]
        assert main(arguments) == 0
        assert "| load | arm | done |" in outs["report"].read_text()
        assert outs["plot"].read_bytes().startswith(b"\x89PNG")
        summary: dict[str, Any] = json.loads(outs["json"].read_text())
        return summary

    return run


def test_bench_load_measures_arms_by_load_and_their_texts_are_the_same(
    shipped: None, loaded: Load, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--concurrency", "3,1", "--rates", "200", "--target", str(tiny_folder), *TINY]
    found = loaded(*options)
    assert [own["load"] for own in found["levels"]] == ["3 open", "1 open", "200/s"]
    for level in found["levels"]:
        assert list(level["arms"]) == ["plain", "auto"]
        for row in level["arms"].values():
            assert (row["done"], row["refused"], row["failed"]) == (6, {}, {})
            assert row["exact_match"] == 1
            assert row["first_text_s"]["p50"] <= row["whole_s"]["p50"]
            assert 0 < row["kv_pages"] <= row["kv_pool"]
            assert row["pass_share"] > 0
        assert level["arms"]["plain"]["tau"] == 1
    assert [own["arms"]["auto"]["most_open"] for own in found["levels"][:2]] == [3, 1]
    settings = found["run"]["settings"]
    assert (settings["url"], settings["max_running"], settings["requests"]) == (None, 8, 6)
    assert settings["prompts"] == {"songs": 3}
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["3", "open", "plain"],
        ["3", "open", "auto"],
    ]
    assert len(lines) == 1 + 2 * 3
    assert "36/36" in captured.err


def test_bench_load_counts_what_the_target_has_no_room_for(
    loaded: Load, tiny_folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_prompt(prompts, "on and " * 100)
    options = ["--concurrency", "2", "--arms", "plain", "--target", str(tiny_folder), *TINY]
    [level] = loaded(*options)["levels"]
    row = level["arms"]["plain"]
    [(reason, number)] = row["refused"].items()
    assert (row["done"], number) == (5, 1)
    assert reason.startswith("max_tokens: 16 do not fit: the prompt has")
    assert f"  1 refused: {reason}" in capsys.readouterr().out.splitlines()


@pytest.fixture
def server(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Our HTTP application over a tiny target and its decode loop, with everything but Ray. It asks
    for a key.
    """
    drafts = [DraftSpec("ngram", "ngram")]
    spec = TargetSpec(str(tiny_folder), dtype="float32", threads=1)
    target = load_target(spec)
    verifier = verifier_over(target, spec, drafts, limits=Limits(max_running=2))
    verifier.start()
    size, context = target.vocab_size, target.context_length
    facts = TargetFacts("tiny", size, context, context, ("ngram",), created=0)
    link = VerifierDeployment(lambda: Engine(verifier, facts, {}, None), TracingConfig())
    metrics, router = IngressMetrics(), LearntNothing()
    tokenizer: Any = target.tokenizer
    tracer = open_tracer(TracingConfig(), "ingress")
    admission = Admission(
        link, router, Prompter(tokenizer), SpeculationConfig(), LimitsConfig(), tracer
    )
    ingress = Ingress(link, router, admission, Words(tokenizer), metrics)
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    try:
        with listening(create_app(ingress, metrics, load_config().api, tracer)) as url:
            yield url
    finally:
        verifier.stop()


class LearntNothing:
    """A router that always chooses the same."""

    async def decide(self, request: RouteRequest) -> RouteDecision:
        return RouteDecision("ngram", "default", "as ever", "f")

    async def fingerprint(self, request: RouteRequest) -> str:
        return "f"

    async def observe(self, outcome: Outcome) -> None:
        pass


def test_bench_load_over_http_says_what_it_says_in_process(
    server: str, loaded: Load, tiny_folder: Path
) -> None:
    over_http = loaded("--url", server, "--concurrency", "1,3", "--rates", "100", "--seed", "3")
    assert [own["load"] for own in over_http["levels"]] == ["1 open", "3 open", "100/s"]
    for level in over_http["levels"]:
        for row in level["arms"].values():
            assert (row["done"], row["refused"], row["failed"]) == (6, {}, {})
            assert row["exact_match"] == 1
            assert (row["kv_pages"], row["draft_share"]) == (None, None)
        assert level["arms"]["plain"]["tau"] == 1
    settings = over_http["run"]["settings"]
    assert (settings["url"], settings["target"], settings["dtype"]) == (server, "tiny", None)
    options = ["--concurrency", "1", "--arms", "plain", "--seed", "3", *TINY]
    [inside] = loaded(*options, "--target", str(tiny_folder))["levels"]
    outside = over_http["levels"][0]
    assert inside["arms"]["plain"]["tokens"] == outside["arms"]["plain"]["tokens"]


def test_bench_load_over_http_counts_the_refused_and_names_a_draft_that_is_not_there(
    server: str, loaded: Load, prompts: Path, failed: Callable[[Sequence[str]], str]
) -> None:
    arguments = ["bench", "load", "--url", server, "--prompts", str(prompts), *SMALL]
    said = failed([*arguments, "--concurrency", "1", "--arms", "plain,nobody"])
    assert "arms: nobody does not answer the first prompt of songs: HTTP 400: speculation" in said

    add_prompt(prompts, "on and " * 100)
    [level] = loaded("--url", server, "--concurrency", "2")["levels"]
    for row in level["arms"].values():
        [(reason, number)] = row["refused"].items()
        assert (row["done"], number) == (5, 1)
        assert reason.startswith("HTTP 400: ")


def add_prompt(prompts: Path, text: str) -> None:
    lines = prompts.read_text(encoding="utf-8")
    prompts.write_text(f"{lines}\n{json.dumps({'prompt': text})}", encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1,0"], "--concurrency: 0 is not 1 or more"),
        (["--concurrency", "2,2"], "--concurrency: 2,2 names one twice"),
        (["--concurrency", "16"], "requests: 6 cannot keep 16 open; give more"),
        (["--concurrency", "x"], "--concurrency: 'x' is no whole number"),
        (["--rates", "0"], "--rates: 0.0 is not more than 0"),
        (["--rates", "1,inf"], "--rates: inf is not more than 0"),
        (["--rates", "1,1.0"], "--rates: 1,1.0 names one twice"),
        (["--requests", "0"], "--requests: 0 is not 1 or more"),
        (["--temperature", "-1"], "--temperature: -1.0 is not 0 or more"),
        (["--arms", "plain,plain"], "arms: two are called 'plain'"),
        (["--arms", "auto,hybrid"], "arms: two stand for 'hybrid'"),
        (["--arms", "plain,nobody"], "use 'plain' for plain decoding"),
        (["--json", "/no/such/folder/x.json"], "json: there is no folder /no/such/folder"),
        (["--plot", "/no/such/folder/x.png"], "plot: there is no folder /no/such/folder"),
        (["--url", "http://127.0.0.1:8000"], "target: the server at --url has its target already"),
        (["--url", "nowhere", *DEFAULTS], "url: no server tells at nowhere/v1/models"),
        (["--url", "http://[", *DEFAULTS], "url: no server tells at http://[/v1/models"),
    ],
    ids=lambda value: " ".join(value[:2]).strip("-") if isinstance(value, list) else "",
)
def test_what_bench_load_cannot_measure_is_named(
    tiny_folder: Path,
    prompts: Path,
    failed: Callable[[Sequence[str]], str],
    options: list[str],
    message: str,
) -> None:
    arguments = ["bench", "load", "--prompts", str(prompts), "--target", str(tiny_folder), *TINY]
    assert message in failed(
        [*arguments, *SMALL, "--concurrency", "1", "--arms", "plain", *options]
    )

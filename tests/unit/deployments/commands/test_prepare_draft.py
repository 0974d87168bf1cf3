"""prepare-draft from end to end, on a tiny target: every kind, interrupted runs, and refusals."""

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments import draft_maker
from deployments.cli import main
from deployments.draft_maker import MakerOptions, _request, texts_beside
from deployments.draft_prompts import SplitPrompts, planned
from tests.tiny import CONTEXT, make_target
from workers.calibration import CALIBRATION
from workers.engine.vocabulary import Vocabulary
from workers.target import TargetSpec
from workers.training import teacher
from workers.training.distil import Trainer
from workers.training.ngram_table import TOKENS, NgramTable

pytestmark = pytest.mark.usefixtures("single_thread")

WORDS = [
    "the",
    "king",
    "sang",
    "on",
    "and",
    "another",
    "thing",
    "was",
    "bright",
    "while",
    "a",
    "river",
]
MEASURED = 20
QUICK = ("--tokens", "300", "--steps", "6", "--max-tokens", "16", "--vocab", "90")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "songs.jsonl"
    lines = [f"{one} {other}" for one, other in zip(WORDS, WORDS[1:], strict=False)]
    path.write_text("\n".join(json.dumps({"prompt": line}) for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def prepare(
    tiny_folder: Path, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Run the command into tmp_path / "draft"; its exit status."""
    monkeypatch.setattr(draft_maker, "MEASURED_TOKENS", MEASURED)

    def run(kind: str, *options: str, out: str = "draft") -> int:
        arguments = ["prepare-draft", "--kind", kind, "--domain", "songs"]
        arguments += ["--prompts", str(prompts), "--out", str(tmp_path / out)]
        arguments += ["--target", str(tiny_folder), "--dtype", "float32", "--threads", "1"]
        arguments += ["--measure-limit", "2", "--device", "cpu"]
        return main([*arguments, *QUICK, *options])

    return run


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


CARD = {"README.md", "card.json", "held_out.jsonl"}
NGRAM = {"config.json", TOKENS, CALIBRATION}
EAGLE = {"config.json", "model.safetensors", CALIBRATION}


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("ngram", NGRAM),
        ("eagle", EAGLE),
        ("hybrid", {CALIBRATION, *(f"ngram/{n}" for n in NGRAM), *(f"eagle/{n}" for n in EAGLE)}),
        ("lm", {"config.json", "model.safetensors", "tokenizer.json"}),
    ],
)
def test_every_kind_is_made_measured_and_described(
    prepare: Callable[..., int],
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    files: set[str],
) -> None:
    assert prepare(kind, "--source", "old songs (public domain)") == 0
    draft = tmp_path / "draft"
    assert files | CARD <= files_of(draft)
    assert not (tmp_path / "draft.work").exists()
    card = json.loads((draft / "card.json").read_text())
    assert (card["kind"], card["domain"]) == (kind, "songs")
    assert card["prompts"] == "old songs (public domain)"
    assert card["tokens"] + card["held_out_tokens"] >= 300
    readme = (draft / "README.md").read_text()
    said = capsys.readouterr().out
    for temperature in ("0.0", "0.8"):
        tau = card["measured"][temperature][kind]["tau"]
        assert f"| {temperature} | {kind} | {tau:.2f} |" in readme
        assert f"temperature {temperature}, {kind}: tau {tau:.2f}" in said
    assert tau == pytest.approx(measured_again(tiny_folder, draft, tmp_path), abs=0.001)


def measured_again(target: Path, draft: Path, tmp_path: Path) -> float:
    """By bench decode, at temperature .8, on the prompts that the maker kept."""
    out = tmp_path / "again.json"
    arguments = ["bench", "decode", "--prompts", str(draft / "held_out.jsonl"), "--budget", "32"]
    arguments += ["--arms", str(draft), "--temperatures", "0.8", "--json", str(out)]
    arguments += ["--max-tokens", str(MEASURED)]
    assert main([*arguments, "--target", str(target), "--dtype", "float32", "--threads", "1"]) == 0
    found = json.loads(out.read_text())["temperatures"]["0.8"]["arms"]
    tau: float = found[str(draft)]["tau"]
    return tau


def test_the_same_seed_gives_the_same_draft_and_another_seed_another(
    prepare: Callable[..., int], tmp_path: Path
) -> None:
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert prepare("eagle", "--seed", seed, out=out) == 0
    a, b, c = ((tmp_path / out / "model.safetensors").read_bytes() for out in "abc")
    assert a == b
    assert a != c


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("stage", ["answering", "teaching", "training", "measuring"])
def test_an_interrupted_run_goes_on_to_the_same_draft(
    prepare: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    assert prepare("hybrid", out="whole") == 0
    with monkeypatch.context() as patch:
        interrupt(patch, stage)
        with pytest.raises(Interrupted):
            prepare("hybrid")
    assert not (tmp_path / "draft").exists()
    assert prepare("hybrid", "--resume") == 0
    for name in ("eagle/model.safetensors", f"ngram/{TOKENS}", CALIBRATION):
        whole, resumed = ((tmp_path / out / name).read_bytes() for out in ("whole", "draft"))
        assert whole == resumed, name


def interrupt(patch: pytest.MonkeyPatch, stage: str) -> None:
    """Have a stage fail in its middle."""
    if stage == "answering":
        add = draft_maker.Corpus.add

        def stopping(corpus: draft_maker.Corpus, answer: Any) -> None:
            if len(corpus.answers) == 9:
                raise Interrupted
            add(corpus, answer)

        patch.setattr(draft_maker.Corpus, "add", stopping)
    elif stage == "teaching":
        patch.setattr(teacher, "_save", raising(Interrupted()))
    elif stage == "training":
        learn = Trainer._learn

        def learning(trainer: Trainer, texts: Any) -> float:
            if trainer.step == 3:
                trainer._save()
                raise Interrupted
            return learn(trainer, texts)

        patch.setattr(Trainer, "_learn", learning)
    else:
        patch.setattr(draft_maker, "measure", raising(Interrupted()))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_what_would_mix_up_two_runs_is_refused(
    prepare: Callable[..., int],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, "teaching")
        with pytest.raises(Interrupted):
            prepare("eagle")
    assert prepare("eagle") == 2
    assert "holds a run that was interrupted; go on with --resume" in capsys.readouterr().err
    for option, told in (("seed", "0"), ("steps", "6"), ("domain", "songs")):
        assert prepare("eagle", "--resume", f"--{option}", "5") == 2
        assert (
            f"--resume: the interrupted run has {option} {told}, not 5" in capsys.readouterr().err
        )
    text = prompts.read_text(encoding="utf-8")
    prompts.write_text(text + '\n{"prompt": "one more"}', encoding="utf-8")
    assert prepare("eagle", "--resume") == 2
    assert "--resume: the interrupted run has prompts" in capsys.readouterr().err
    prompts.write_text(text, encoding="utf-8")
    other = make_target(tmp_path / "other", seed=3)
    assert prepare("eagle", "--resume", "--target", str(other)) == 2
    assert "--resume: the interrupted run has target" in capsys.readouterr().err
    assert prepare("eagle", "--resume") == 0
    assert prepare("eagle") == 2
    assert "draft exists; delete it or name another folder" in capsys.readouterr().err


def test_a_full_disk_says_how_to_go_on(
    prepare: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(draft_maker.Corpus, "add", raising(full))
        assert prepare("ngram") == 2
    assert "make room and go on with --resume" in capsys.readouterr().err
    assert prepare("ngram", "--resume") == 0


def test_minutes_bound_answers_and_training(prepare: Callable[..., int], tmp_path: Path) -> None:
    arguments = ("--minutes", "0.1", "--tokens", "1000000")
    assert prepare("eagle", *arguments, "--steps", "2") == 0
    card = json.loads((tmp_path / "draft" / "card.json").read_text())
    assert 0 < card["tokens"] < 1_000_000
    assert card["steps"] == 2


def test_prompts_may_be_measured_on_that_are_not_learned_from(
    prepare: Callable[..., int], prompts: Path, tmp_path: Path
) -> None:
    """Those held out, on which it is calibrated, are kept all the same."""
    measured = tmp_path / "measured.jsonl"
    measured.write_text(json.dumps({"prompt": "another thing"}), encoding="utf-8")
    assert prepare("ngram", "--measure-on", str(measured)) == 0
    card = json.loads((tmp_path / "draft/card.json").read_text())
    assert (card["measured_prompts"], card["measured_tokens"]) == (1, MEASURED)
    held_out = (tmp_path / "draft/held_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(held_out) == 2
    assert set(held_out) < set(prompts.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "--minutes: 0 is not more than 0"),
        (["--prompts", "/no/such/file"], "prompts: there is no file /no/such/file"),
        (["--kind", "parrot"], "--kind: invalid choice: 'parrot'"),
        (["--kind", "lm", "--layers", "7"], "layers: the model has layers 0 to 1, not [7]"),
        (["--temperatures", "-1"], "--temperatures: -1.0 is not 0 or more"),
        (["--temperatures", "warm"], "--temperatures: 'warm' is no number"),
        (["--minutes", "soon"], "--minutes: 'soon' is no number"),
        (["--layers", "first"], "--layers: 'first' is no whole number"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_options_that_cannot_be_used_are_named(
    prepare: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    message: str,
) -> None:
    try:
        assert prepare("ngram", *options) == 2
    except SystemExit as exit_:
        assert exit_.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "draft.work").exists(), "nothing that a mended command would trip over"


def test_too_few_prompts_are_refused(
    prepare: Callable[..., int],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [json.dumps({"prompt": text}) for text in [*"abcd", "z" * CONTEXT, "a"]]
    prompts.write_text("\n".join(lines))
    assert prepare("ngram") == 2
    assert (
        "prompts: 4 different ones fit in 159 tokens; a draft needs at least 8 of every file"
        in (capsys.readouterr().err)
    )


def test_prompts_of_several_files_take_turns_and_are_all_held_out(
    prepare: Callable[..., int], tmp_path: Path
) -> None:
    others = [f"{one} {other}" for one, other in zip(WORDS, WORDS[2:], strict=False)]
    tales = tmp_path / "tales.jsonl"
    tales.write_text("\n".join(json.dumps({"prompt": line}) for line in others), encoding="utf-8")
    assert prepare("ngram", "--prompts", str(tales)) == 0
    assert json.loads((tmp_path / "draft/card.json").read_text())["prompts"] == (
        "songs.jsonl, tales.jsonl"
    )
    held_out = (tmp_path / "draft/held_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] in others for line in held_out] == [False, True] * 2
    asked = planned(SplitPrompts([[(1,), (2,)], [(7,)]], [], []), (0.0, 0.8))
    assert [(a.prompt, a.temperature) for _, a in zip(range(6), asked, strict=False)] == [
        ((1,), 0.0),
        ((7,), 0.0),
        ((2,), 0.8),
        ((7,), 0.8),
        ((1,), 0.8),
        ((7,), 0.0),
    ]


def test_clauses_of_prompts_are_asked_as_well(
    prepare: Callable[..., int], prompts: Path, tmp_path: Path
) -> None:
    assert prepare("ngram", out="whole") == 0
    assert prepare("ngram", "--clauses") == 0
    whole, both = (
        (tmp_path / out / "README.md").read_text(encoding="utf-8") for out in ("whole", "draft")
    )
    assert "songs.jsonl." in whole
    assert "songs.jsonl, whole and by single clauses." in both


def test_a_draft_may_start_from_another(prepare: Callable[..., int], tmp_path: Path) -> None:
    assert prepare("hybrid", "--steps", "60") == 0
    start = str(tmp_path / "draft")
    for kind, folder in (("eagle", start), ("hybrid", f"{start}/eagle")):
        assert prepare(kind, "--start-from", folder, "--vocab", "80", out=f"second-{kind}") == 0
        first, second = (
            json.loads((tmp_path / name / "card.json").read_text())
            for name in ("draft", f"second-{kind}")
        )
        assert second["losses"][0] < 0.9 * first["losses"][0]
        assert (second["start_from"], second["vocabulary"]) == (folder, 80)
        assert f"begun with the weights of {folder}" in (
            tmp_path / f"second-{kind}/README.md"
        ).read_text(encoding="utf-8")


def test_a_draft_may_learn_the_tables_of_others(
    prepare: Callable[..., int], tmp_path: Path
) -> None:
    """What several of them say is learned once."""
    assert prepare("hybrid", "--source", "old songs", out="first") == 0
    assert prepare("ngram", "--seed", "5", out="second") == 0
    others = [str(tmp_path / "first"), str(tmp_path / "second")]
    both = ("--table-from", others[0], "--table-from", others[1])
    assert prepare("ngram", *both, "--seed", "9", out="third") == 0
    assert prepare("ngram", *both, "--table-from", others[0], "--seed", "9", out="fourth") == 0
    folders = ("first/ngram", "second", "third", "fourth")
    tables = [NgramTable.load(tmp_path / folder) for folder in folders]
    learned, again = (set(map(tuple, table.sequences())) for table in tables[2:])
    held_out = (tmp_path / "third/held_out.jsonl").read_text().splitlines()
    for other in tables[:2]:
        left_out = {*map(tuple, other.sequences())} - learned
        assert len(left_out) <= 2 * len(held_out), "answers to prompts that are held out here"
    assert len(tables[2]) > max(map(len, tables[:2]))
    assert (again, len(tables[3])) == (learned, len(tables[2]))
    card = json.loads((tmp_path / "third/card.json").read_text())
    assert card["table_from"] == {others[0]: "old songs", others[1]: "songs.jsonl"}
    assert card["table_tokens"] == len(tables[2]) == tables[2].card["table_tokens"]
    assert prepare("ngram", "--table-from", str(tmp_path / "third"), "--source", "hymns") == 0
    handed_on = json.loads((tmp_path / "draft/card.json").read_text())["table_from"]
    assert handed_on == {str(tmp_path / "third"): "songs.jsonl, old songs"}
    readme = (tmp_path / "third/README.md").read_text(encoding="utf-8")
    assert f"{len(tables[2]):,} tokens, those of {others[0]} (made from prompts of: old" in readme


def test_of_other_tables_held_out_answers_are_left_out() -> None:
    """An answer follows the last six tokens of its prompt."""
    vocabulary, context = Vocabulary(100, "songs"), [1, 2, 3, 4, 5, 6]
    known, answer, other = [*range(20, 60)], [*range(30, 70)], [*range(40, 80)]
    held_out = [answer, [7, 8]]
    table = NgramTable.build(
        [
            [*context, *known],
            [*context, *answer],
            [*context, *answer[:16], 9, 9],
            [*context, *answer[:15], 9, 9],
            [*context, *other],
            [*context, *other],
            [*context, 7, 8],
            [*context, 7, 8, 9],
        ],
        vocabulary,
        {},
    )
    found = [text[6:] for text in texts_beside([[*context, *known]], held_out, [table, table])]
    assert found == [[*answer[:15], 9, 9], other, [7, 8, 9]]


def test_a_run_goes_on_only_with_the_same_table(
    prepare: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepare("ngram", out="other") == 0
    more = ("--table-from", str(tmp_path / "other"))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(draft_maker.DraftMaker, "_learn_table", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare("ngram", *more)
    other = NgramTable.load(tmp_path / "other")
    NgramTable.build([*other.sequences(), [1, 2]], other.vocabulary, other.card).save(
        tmp_path / "other"
    )
    assert prepare("ngram", *more, "--resume") == 2
    assert "--resume: the interrupted run has table_from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "kind", "message"),
    [
        ("--table-from", "lm", "--table-from: goes with --kind ngram or hybrid, not lm"),
        ("--table-from", "eagle", "--table-from: goes with --kind ngram or hybrid, not eagle"),
        ("--table-from", "ngram", "nothing-here holds no ngram or hybrid draft"),
        ("--start-from", "ngram", "--start-from: goes with --kind eagle or hybrid, not ngram"),
        ("--start-from", "lm", "--start-from: goes with --kind eagle or hybrid, not lm"),
        ("--start-from", "eagle", "nothing-here holds no eagle or hybrid draft"),
    ],
)
def test_what_is_no_draft_to_begin_with_is_refused(
    prepare: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    kind: str,
    message: str,
) -> None:
    assert prepare(kind, option, "nothing-here") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "draft.work").exists()


def test_another_targets_draft_is_none_to_start_from(
    prepare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This is found out before an hour of answers, not after it."""
    assert prepare("eagle") == 0
    other = make_target(tmp_path / "other", seed=3)
    start = ("--start-from", str(tmp_path / "draft"))
    assert prepare("eagle", *start, "--target", str(other), out="second") == 2
    assert "--start-from: was made for the target" in capsys.readouterr().err
    assert not (tmp_path / "second.work").exists()


def options_for(temperatures: tuple[float, ...]) -> MakerOptions:
    return MakerOptions(
        target=TargetSpec("t"),
        kind="ngram",
        domain="d",
        out=Path("out"),
        prompts=(),
        clauses=False,
        measured=None,
        measured_limit=1,
        source="",
        tokens=1,
        steps=None,
        start_from=None,
        table_from=(),
        minutes=None,
        vocab=1,
        layers=(),
        max_tokens=30,
        temperatures=temperatures,
        together=1,
        seed=5,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_temperatures_take_turns_over_the_prompts_and_over_the_rounds(size: int) -> None:
    asked = planned(SplitPrompts([[(n,) for n in range(size)]], [(9,)], []), (0.0, 0.8))
    held_out = [next(asked) for _ in range(2)]
    assert [(a.held_out, a.prompt, a.temperature) for a in held_out] == [
        (True, (9,), 0.0),
        (True, (9,), 0.8),
    ]
    made = [next(asked) for _ in range(2 * size)]
    for one in (made[:size], made[size:]):
        assert {answer.temperature for answer in one} == {0.0, 0.8}
    seen = {(answer.prompt, answer.temperature) for answer in made}
    assert len(seen) == 2 * size, "every prompt is answered at every temperature"
    requests = [_request(answer, options_for((0.0, 0.8)), 20) for answer in [*held_out, *made]]
    assert len({request.sampling.seed for request in requests}) == len(requests)
    assert len({request.id for request in requests}) == len(requests)
    assert {request.max_tokens for request in requests} == {19}, "what the context has room for"

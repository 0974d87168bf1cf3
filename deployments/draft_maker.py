"""Making a draft, stage by stage: the target answers, what it knows about its answers is kept, the
draft learns, is calibrated on held-out answers, measured, and described.

What took time lies in a work folder beside the draft's own, so an interrupted run goes on where it
was. The draft appears whole or not at all.
"""

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig

from bench.decode import Arm, Settings, measure, summarise
from bench.provenance import provenance
from bench.reliability import Witness
from deployments.draft_card import write_card
from deployments.draft_prompts import SplitPrompts, planned, split_prompts
from deployments.pool import verifier_over
from deployments.prompt_file import chat_ids, write_prompts
from workers.completion import Completion, run_requests
from workers.draft import DraftKind, DraftSpec
from workers.engine.eagle import (
    WEIGHTS,
    EagleConfig,
    EagleModel,
    check_continues,
    continue_eagle,
    new_eagle,
    save_eagle,
)
from workers.engine.model import check_layers, kv_shape
from workers.engine.model_store import resolve
from workers.engine.sampling import SamplingParams
from workers.engine.vocabulary import vocabulary_of
from workers.engine.weights import identity_of
from workers.fit_calibration import fit_calibration
from workers.hybrid_draft import kind_of, member_folder
from workers.ngram_member import NgramMember
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.training.corpus import Corpus, TargetAnswer, count_tokens
from workers.training.distil import Schedule, Student, Trainer, score
from workers.training.eagle_student import EagleStudent
from workers.training.lm_student import LMStudent, save_lm
from workers.training.ngram_table import ORDER, TOKENS, NgramTable
from workers.training.teacher import TeacherText, bare_text, likeliest_tokens, taught, teach
from workers.verifier import build_verifier

EPOCHS = 12
"""How often each answer is learned from, where neither steps nor minutes are given."""

AHEAD = 3
"""Tokens further and further ahead that an eagle draft is trained to guess."""

SCORED_AHEAD = 6
SAME = 16
"""Two answers that begin with as many equal tokens are to the same prompt."""
MEASURED_TOKENS, MEASURED_BUDGET = 128, 32
_OPTIONS = "options.json"
# Shares of --minutes: what is left after answers, teaching and measuring goes to training.
ANSWERS_SHARE = {"ngram": 0.8, "lm": 0.35, "eagle": 0.35, "hybrid": 0.35}
MEASURING_SHARE = 0.2
# Of the target's MLP that an eagle draft has: its weights for the default target stay below 10 MB.
MLP_SHARE = 11 / 12


@dataclass(frozen=True, slots=True)
class MakerOptions:
    """What `outrider prepare-draft` was asked for.

    prompts: to learn from, by file; clauses: whether theirs are prompts as well; measured: prompts
    to measure on, None for some held out of the former; tokens: most that the target shall say;
    steps: of training, None for as many as `minutes` allow, or `EPOCHS`; start_from: a draft whose
    neural part is trained further, None to start from the target's last layer; table_from: drafts
    whose tables are learned as well; layers: of the target, that an lm draft starts from, () for
    its first and last.
    """

    target: TargetSpec
    kind: DraftKind
    domain: str
    out: Path
    prompts: tuple[tuple[str, ...], ...]
    clauses: bool
    measured: tuple[str, ...] | None
    measured_limit: int
    source: str
    tokens: int
    steps: int | None
    start_from: Path | None
    table_from: tuple[Path, ...]
    minutes: float | None
    vocab: int
    layers: tuple[int, ...]
    max_tokens: int
    temperatures: tuple[float, ...]
    together: int
    seed: int


class DraftMaker:
    """One run of the command. Raises ValueError for what the user can mend."""

    def __init__(self, options: MakerOptions) -> None:
        self._options = options
        self._folder = resolve(options.target.model)
        self._vocabulary = vocabulary_of(self._folder)
        self._identity = identity_of(self._folder, options.target.model)
        self._model = AutoConfig.from_pretrained(self._folder).get_text_config()
        self._work = options.out.with_name(options.out.name + ".work")
        self._draft = self._work / "draft"
        # Now, and not after an hour of answers.
        self._start = self._eagle_to_start_from()
        self._tables = {folder: self._table_to_add(folder) for folder in options.table_from}
        check_layers(options.layers, self._model.num_hidden_layers)
        self._began = time.monotonic()
        self.facts: dict[str, Any] = {}

    def run(self, *, resume: bool) -> None:
        """Make the draft."""
        self._check_work(resume)
        try:
            self._run()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ValueError(
                f"--out: the disk of {self._work} is full; what was done is kept: make room and "
                "go on with --resume"
            ) from error

    def _run(self) -> None:
        options = self._options
        target = load_target(replace(options.target, feature_layers=_feature_layers(self._model)))
        prompts = split_prompts(
            options.prompts,
            target.tokenizer,
            target.context_length,
            options.seed,
            clauses=options.clauses,
        )
        measured = self._to_measure(target, prompts)
        self._begin_work()
        corpus = Corpus(self._work / "answers.jsonl")
        self._answer(target, prompts, corpus)
        shutil.rmtree(self._draft, ignore_errors=True)
        if options.kind == "ngram":
            self._learn_table(corpus)
        else:
            self._teach(target, corpus)
            self._learn(corpus)
        self._measure(target, measured)
        write_prompts(self._draft / "held_out.jsonl", prompts.held_out_texts)
        write_card(self._draft, options.kind, self._card())
        self._draft.rename(options.out)
        shutil.rmtree(self._work)

    # -- the work folder -----------------------------------------------------------------------

    def _check_work(self, resume: bool) -> None:
        """Refuse to mix two runs."""
        options, path = self._options, self._work / _OPTIONS
        if options.out.exists():
            raise ValueError(f"--out: {options.out} exists; delete it or name another folder")
        if not path.is_file():
            return
        if not resume:
            raise ValueError(
                f"--out: {self._work} holds a run that was interrupted; go on with --resume, or "
                "delete it"
            )
        before = json.loads(path.read_text(encoding="utf-8"))
        for name, value in self._fixed().items():
            if before.get(name) != value:
                raise ValueError(
                    f"--resume: the interrupted run has {name} {before.get(name)}, not {value}; "
                    "repeat its options, or delete its folder"
                )

    def _begin_work(self) -> None:
        path = self._work / _OPTIONS
        self._work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._fixed()), encoding="utf-8")

    def _fixed(self) -> dict[str, Any]:
        """What a run keeps to, as it is saved."""
        options = self._options
        names = ("kind", "domain", "tokens", "steps", "max_tokens", "temperatures", "seed", "vocab")
        fixed = {name: getattr(options, name) for name in (*names, "layers", "clauses")} | {
            "prompts": hashlib.sha256(json.dumps(options.prompts).encode()).hexdigest()[:16],
            "target": asdict(self._identity),
            "dtype": options.target.dtype,
            "start_from": self._start and _digest(self._start / WEIGHTS),
            "table_from": [_digest(_table_folder(own) / TOKENS) for own in self._tables],
        }
        saved: dict[str, Any] = json.loads(json.dumps(fixed))
        return saved

    def _eagle_to_start_from(self) -> Path | None:
        options, folder = self._options, self._options.start_from
        if folder is None:
            return None
        if options.kind not in ("eagle", "hybrid"):
            raise ValueError(f"--start-from: goes with --kind eagle or hybrid, not {options.kind}")
        kind = kind_of(folder)
        if kind not in ("eagle", "hybrid"):
            raise ValueError(f"--start-from: {folder} holds no eagle or hybrid draft")
        eagle = member_folder(kind, folder, "eagle")
        config = _eagle_config(self._model, options.vocab)
        check_continues(eagle, config, self._identity, "--start-from")
        return eagle

    def _table_to_add(self, folder: Path) -> NgramTable:
        if self._options.kind not in ("ngram", "hybrid"):
            raise ValueError(
                f"--table-from: goes with --kind ngram or hybrid, not {self._options.kind}"
            )
        table = NgramTable.load(_table_folder(folder))
        self._vocabulary.check_same(table.vocabulary, "--table-from")
        return table

    # -- answers -------------------------------------------------------------------------------

    def _answer(self, target: Target, prompts: SplitPrompts, corpus: Corpus) -> None:
        """The target answers until it has said enough, or its time is over."""
        if not corpus.finished:
            self._ask(target, prompts, corpus)
            corpus.finish(self._options.tokens)
        if not corpus.training:
            raise ValueError(
                "--tokens, --minutes: too few to have an answer to learn from; give more"
            )
        self.facts |= {
            "answers": len(corpus.training),
            "tokens": count_tokens(corpus.training),
            "held_out_tokens": count_tokens(corpus.held_out),
        }

    def _ask(self, target: Target, prompts: SplitPrompts, corpus: Corpus) -> None:
        options, done = self._options, corpus.numbers()
        deadline = self._deadline(ANSWERS_SHARE[options.kind])
        asked: dict[str, TargetAnswer] = {}
        bar = _bar(options.tokens, "tok", "target answers", len(corpus))

        def requests() -> Iterator[GenerationRequest]:
            for answer in planned(prompts, options.temperatures):
                enough = len(corpus) >= options.tokens or time.monotonic() > deadline
                if enough and not answer.held_out:
                    return
                if answer.number not in done:
                    asked[str(answer.number)] = answer
                    yield _request(answer, options, target.context_length)

        def note(completion: Completion) -> None:
            answer = asked.pop(completion.request.id)
            corpus.add(replace(answer, tokens=tuple(completion.tokens)))
            bar.update(len(completion.tokens))

        with bar:
            run_requests(
                build_verifier(target, {}, Limits(max_running=options.together)),
                requests(),
                together=options.together,
                on_done=note,
            )

    # -- learning ------------------------------------------------------------------------------

    def _teach(self, target: Target, corpus: Corpus) -> None:
        with _bar(len(corpus.answers), "text", "teacher's laws") as bar:
            teach(target, corpus.training, self._work / "training", bar.update)
            teach(target, corpus.held_out, self._work / "held_out", bar.update)

    def _learn_table(self, corpus: Corpus) -> None:
        """The `ngram` draft, or a hybrid's member of that kind."""
        options = self._options
        # The end of the prompt is context for the first tokens of the answer.
        texts = [[*answer.prompt[-ORDER:], *answer.tokens] for answer in corpus.training]
        held_out = [answer.tokens for answer in corpus.held_out]
        texts += texts_beside(texts, held_out, self._tables.values())
        table = NgramTable.build(texts, self._vocabulary, {})
        self.facts["table_tokens"] = len(table)
        table.card = {
            "domain": options.domain,
            "prompts": options.source,
            "table_from": self._others(),
            **self.facts,
        }
        folder = member_folder(options.kind, self._draft, "ngram")
        table.save(folder)
        texts_held_out = [bare_text(answer) for answer in corpus.held_out]
        fit_calibration(texts_held_out, NgramMember(table), None).save(folder)

    def _learn(self, corpus: Corpus) -> None:
        """The other kinds of draft: all have a neural part."""
        options = self._options
        texts, held_out = taught(self._work / "training"), taught(self._work / "held_out")
        student = self._student(texts)
        self._train(student, texts, held_out)
        if isinstance(student, LMStudent):
            save_lm(student, self._draft, self._folder)
            return
        folder = member_folder(options.kind, self._draft, "eagle")
        save_eagle(student.model, folder, self._identity, self._vocabulary.size)
        fit_calibration(held_out, None, student).save(folder)
        if options.kind == "hybrid":
            self._learn_table(corpus)
            table = NgramTable.load(member_folder(options.kind, self._draft, "ngram"))
            fit_calibration(held_out, NgramMember(table), student).save(self._draft)

    def _student(self, texts: Sequence[TeacherText]) -> EagleStudent | LMStudent:
        options = self._options
        others = [text for table in self._tables.values() for text in table.sequences()]
        vocabulary = likeliest_tokens(texts, self._vocabulary.size, options.vocab, others)
        student: EagleStudent | LMStudent
        if options.kind == "lm":
            layers = options.layers or (0, self._model.num_hidden_layers - 1)
            student = LMStudent(self._folder, layers, vocabulary)
        else:
            student = EagleStudent(self._eagle(vocabulary))
        student.to(torch.device(options.target.device))
        return student

    def _eagle(self, vocabulary: Tensor) -> EagleModel:
        options = self._options
        config = _eagle_config(self._model, len(vocabulary))
        generator = torch.Generator().manual_seed(options.seed)
        model = new_eagle(self._folder, config, vocabulary, generator)
        if self._start is not None:
            continue_eagle(model, self._start, self._folder, "--start-from")
        return model

    def _train(
        self, student: Student, texts: Sequence[TeacherText], held_out: Sequence[TeacherText]
    ) -> None:
        options = self._options
        ahead = 1 if options.kind == "lm" else AHEAD
        steps = self._steps(student, texts, ahead)
        schedule = Schedule(steps, options.seed, ahead)
        trainer = Trainer(student, texts, schedule, self._work / "checkpoint.pt")
        with _bar(steps, "step", "training", trainer.step) as bar:

            def note(loss: float) -> None:
                bar.set_postfix(loss=f"{loss:.2f}", refresh=False)
                bar.update()

            trainer.run(note)
        found = score(student, held_out, 1 if options.kind == "lm" else SCORED_AHEAD)
        self.facts |= {
            "steps": steps,
            "vocabulary": len(student.vocabulary),
            "losses": trainer.curve(),
            **asdict(found),
        }

    def _steps(self, student: Student, texts: Sequence[TeacherText], ahead: int) -> int:
        """Of training; an interrupted run keeps to what it began with."""
        path, options = self._work / "steps.json", self._options
        if path.is_file():
            return int(json.loads(path.read_text(encoding="utf-8")))
        steps = options.steps or Trainer.steps_for(texts, EPOCHS)
        if options.steps is None and options.minutes is not None:
            left = self._deadline(1 - MEASURING_SHARE) - time.monotonic()
            steps = max(1, int(left / Trainer.seconds_per_step(student, texts, ahead)))
        path.write_text(json.dumps(steps), encoding="utf-8")
        return steps

    # -- measuring -----------------------------------------------------------------------------

    def _to_measure(self, target: Target, prompts: SplitPrompts) -> list[tuple[int, ...]]:
        options = self._options
        texts = (options.measured or prompts.held_out_texts)[: options.measured_limit]
        encoded = [chat_ids(target.tokenizer, text) for text in texts]
        longest = max(map(len, encoded))
        if longest >= target.context_length:
            raise ValueError(
                f"--measure-on: a prompt of {longest} tokens leaves no room for an answer in the "
                f"target's context of {target.context_length}; leave it out"
            )
        return encoded

    def _measure(self, target: Target, prompts: Sequence[tuple[int, ...]]) -> None:
        """The draft and its members, as `outrider bench decode` would measure them."""
        options = self._options
        specs = _measured_specs(options.kind, self._draft)
        witness = Witness()
        verifier = verifier_over(target, options.target, specs, witness)
        arms = {options.domain: [Arm(spec.name, spec.name) for spec in specs]}
        room = target.context_length - max(map(len, prompts))
        tokens = min(MEASURED_TOKENS, room)
        temperatures = sorted(set(options.temperatures))
        measured = {}
        with _bar(len(temperatures) * len(prompts), "prompt", "measuring") as bar:
            for temperature in temperatures:
                settings = Settings(tokens, MEASURED_BUDGET, temperature)
                encoded = {options.domain: prompts}
                results = measure(verifier, encoded, arms, settings, bar.update, witness)
                measured[str(temperature)] = summarise(results)["arms"]
        self.facts |= {
            "measured": measured,
            "measured_prompts": len(prompts),
            "measured_tokens": tokens,
        }

    def _card(self) -> dict[str, Any]:
        options = self._options
        return {
            "kind": options.kind,
            "domain": options.domain,
            "target": asdict(self._identity),
            "dtype": options.target.dtype,
            "prompts": options.source,
            "clauses": options.clauses,
            "start_from": _named(options.start_from),
            "table_from": self._others(),
            "temperatures": list(options.temperatures),
            "max_tokens": options.max_tokens,
            "seed": options.seed,
            **self.facts,
            "run": provenance(),
        }

    def _others(self) -> dict[str, str]:
        """Where other drafts' tables are from, and the prompts that they were made of."""
        return {str(own): _prompts_of(table.card) for own, table in self._tables.items()}

    def _deadline(self, share: float) -> float:
        """When a share of the minutes is over; never, where there are none."""
        minutes = self._options.minutes
        return float("inf") if minutes is None else self._began + 60 * minutes * share


def texts_beside(
    own: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    tables: Iterable[NgramTable],
) -> Iterator[list[int]]:
    """What other drafts' tables hold beside what is there already, but for answers that begin as
    held-out ones do: whoever knows them would look too good to be calibrated.
    """
    known = set(map(tuple, own))
    kept_apart = {tuple(tokens[:SAME]) for tokens in held_out}
    for table in tables:
        for text in map(tuple, table.sequences()):
            if text not in known and text[ORDER : ORDER + SAME] not in kept_apart:
                known.add(text)
                yield list(text)


def _table_folder(folder: Path) -> Path:
    """Where another draft has its table. Raises ValueError when it has none."""
    kind = kind_of(folder)
    if kind not in ("ngram", "hybrid"):
        raise ValueError(f"--table-from: {folder} holds no ngram or hybrid draft")
    return member_folder(kind, folder, "ngram")


def _prompts_of(card: Mapping[str, Any]) -> str:
    """Those of a table, and of others that it was learned from in turn."""
    named = [str(card.get("prompts")), *card.get("table_from", {}).values()]
    return ", ".join(dict.fromkeys(named))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _named(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def _request(answer: TargetAnswer, options: MakerOptions, context: int) -> GenerationRequest:
    return GenerationRequest(
        id=str(answer.number),
        prompt=answer.prompt,
        max_tokens=min(options.max_tokens, context - len(answer.prompt)),
        sampling=SamplingParams(seed=options.seed + answer.number, temperature=answer.temperature),
    )


def _feature_layers(model: Any) -> tuple[int, ...]:
    """An early, a middle and a late layer, as EAGLE-3 has it."""
    layers = model.num_hidden_layers
    return tuple(sorted({max(1, layers // 10), layers // 2 + 1, max(1, layers - 1)}))


def _eagle_config(model: Any, vocabulary: int) -> EagleConfig:
    _, kv_heads, head_dim = kv_shape(model)
    rope = getattr(model, "rope_parameters", None) or {}
    return EagleConfig(
        hidden_size=model.hidden_size,
        intermediate_size=max(32, 32 * int(model.intermediate_size * MLP_SHARE / 32)),
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        draft_vocab_size=vocabulary,
        feature_layers=_feature_layers(model),
    )


def _measured_specs(kind: DraftKind, draft: Path) -> list[DraftSpec]:
    """The draft, and a hybrid's members by themselves."""
    whole = DraftSpec(kind, kind, path=str(draft))
    if kind != "hybrid":
        return [whole]
    members: tuple[DraftKind, ...] = ("ngram", "eagle")
    alone = [DraftSpec(m, m, path=str(member_folder(kind, draft, m))) for m in members]
    return [whole, *alone]


def _bar(total: int, unit: str, what: str, done: int = 0) -> "tqdm[NoReturn]":
    return tqdm(total=total, initial=done, unit=unit, desc=what)

"""What the target said to the prompts, kept as it comes, so that an interrupted run goes on."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """number: which request it answers; held_out: for measuring, never learned from."""

    number: int
    held_out: bool
    temperature: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class Corpus:
    """A file of answers, one JSON object a line. Answers may end in another order than they began.

    finished: whether `finish` was called; then the answers are what will be learned from.

    Raises ValueError for a line that is no answer; a last line cut off in the middle is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = path.with_suffix(".finished")
        self.finished = self._mark.exists()
        self.answers: list[TargetAnswer] = list(_read(path)) if path.is_file() else []
        self._rewrite()

    def __len__(self) -> int:
        """Tokens said, held-out ones included."""
        return count_tokens(self.answers)

    @property
    def training(self) -> list[TargetAnswer]:
        """In the order of their requests."""
        return self._part(held_out=False)

    @property
    def held_out(self) -> list[TargetAnswer]:
        """In the order of their requests."""
        return self._part(held_out=True)

    def numbers(self) -> frozenset[int]:
        """Requests that are answered."""
        return frozenset(answer.number for answer in self.answers)

    def add(self, answer: TargetAnswer) -> None:
        self.answers.append(answer)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(answer))

    def finish(self, tokens: int) -> None:
        """Keep the first requests' answers, as many as it takes to hold so many tokens: which those
        are does not depend on how answers overlapped, or where a run was interrupted.
        """
        self.answers.sort(key=lambda answer: answer.number)
        said = itertools.accumulate((len(a.tokens) for a in self.answers), initial=0)
        self.answers = [a for a, before in zip(self.answers, said, strict=False) if before < tokens]
        self._rewrite()
        self.finished = True
        self._mark.touch()

    def _part(self, *, held_out: bool) -> list[TargetAnswer]:
        chosen = [answer for answer in self.answers if answer.held_out == held_out]
        return sorted(chosen, key=lambda answer: answer.number)

    def _rewrite(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: hours of answers must not be lost to a kill in between.
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(map(_line, self.answers)), encoding="utf-8")
        partial.rename(self._path)


def count_tokens(answers: Iterable[TargetAnswer]) -> int:
    return sum(len(answer.tokens) for answer in answers)


def _line(answer: TargetAnswer) -> str:
    return json.dumps(asdict(answer)) + "\n"


def _read(path: Path) -> Sequence[TargetAnswer]:
    lines = path.read_text(encoding="utf-8").split("\n")
    # Every whole line ends in a line break, so what follows the last one was cut off.
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _parse(path: Path, number: int, line: str) -> TargetAnswer:
    try:
        saved = json.loads(line)
        return TargetAnswer(
            int(saved["number"]),
            bool(saved["held_out"]),
            float(saved["temperature"]),
            tuple(saved["prompt"]),
            tuple(saved["tokens"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: line {number} is no answer of a target; delete it") from error

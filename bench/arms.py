"""Which drafts decode the prompts of a domain, by the names that users give them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from bench.decode import PLAIN, Arm
from deployments.config import DOMAINS
from deployments.pool import find_draft
from workers.draft import DraftSpec


@dataclass(frozen=True, slots=True)
class LineUp:
    """For one domain. drafts: what each arm decodes with, by the arm's name, None for plain
    decoding, those that only the matrix wants included; asked: the names of the other arms;
    columns: the arm of each column of the matrix, by the column's draft.
    """

    drafts: Mapping[str, DraftSpec | None]
    asked: tuple[str, ...]
    columns: Mapping[str, str]

    @classmethod
    def of(cls, names: Sequence[str], domain: str, target: str, *, matrix: bool) -> Self:
        """`matrix` adds the shipped draft of every domain, but for those that an arm has already.

        Raises ValueError for a name that is no draft.
        """
        drafts = {name: _find(name, domain, target) for name in names}
        arm_of = {spec: name for name, spec in drafts.items() if spec is not None}
        columns: dict[str, str] = {}
        for draft in DOMAINS if matrix else ():
            spec = find_draft(draft, target=target)
            columns[draft] = arm_of.get(spec, draft)
            drafts[columns[draft]] = spec
        return cls(drafts, tuple(names), columns)

    @property
    def arms(self) -> list[Arm]:
        return [
            Arm(name, None if spec is None else spec.name) for name, spec in self.drafts.items()
        ]


def all_drafts(line_ups: Sequence[LineUp]) -> list[DraftSpec]:
    """Every draft that some arm decodes with, once.

    Raises ValueError when two of them are called the same.
    """
    found = {spec for line_up in line_ups for spec in line_up.drafts.values() if spec is not None}
    check_unique("arms: two different drafts are called", [spec.name for spec in found])
    return sorted(found, key=lambda spec: spec.name)


def check_unique(complaint: str, names: Sequence[str]) -> None:
    """Raises ValueError where a name is there twice."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{complaint} {twice[0]!r}; their numbers would be mixed up")


def _find(name: str, domain: str, target: str) -> DraftSpec | None:
    if name == PLAIN:
        return None
    return find_draft(name, target=target, domain=domain, plain=PLAIN)

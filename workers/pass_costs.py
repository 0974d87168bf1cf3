"""What a step costs besides its drafts, by the rows of its pass: measured first, tracked live."""

from bisect import bisect_right
from collections.abc import Mapping
from time import perf_counter

from workers.engine.pack import Pack, Segment, chain_parents
from workers.target import Target

# Rows that are timed. Few rows matter most: there a row more or less is decided on.
_ROWS = (*range(1, 13), 14, 16, 20, 24, 28, 33, 40, 48, 64, 96)
# Behind that many tokens, as in the middle of an answer.
_CONTEXT = 256
_ROUNDS = 5
_TOKEN = 0
_PROBE = -1  # the number of no sequence
_ANY_S = 0.02
# How far an observation moves all of the curve, and its own place in addition.
_ALL, _OWN = 0.05, 0.1
# A step that took longer than so many times what was expected was disturbed: it counts as that.
_FAR = 1.5


class PassCosts:
    """seconds: by rows, at least one row count; between them costs are interpolated, beyond the
    last two they go on as they do there.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds, "costs of nothing say nothing"
        self._rows = sorted(seconds)
        self._seconds = [seconds[rows] for rows in self._rows]

    def at(self, rows: float) -> float:
        """Seconds of a step with so many rows."""
        place, share = self._place(rows)
        own = self._seconds[place]
        return own if share == 0 else own + share * (self._seconds[place + 1] - own)

    def observe(self, rows: int, seconds: float) -> None:
        """A step took that long. What all steps have in common (a longer context, a busier machine)
        moves the whole curve. One with more rows than the curve knows, a prompt's, tells nothing.
        """
        if rows > self._rows[-1]:
            return
        expected = self.at(rows)
        error = min(seconds, _FAR * expected) - expected
        place, share = self._place(rows)
        self._seconds = [cost + _ALL * error for cost in self._seconds]
        self._seconds[place] += _OWN * (1 - share) * error
        if share:
            self._seconds[place + 1] += _OWN * share * error

    def _place(self, rows: float) -> tuple[int, float]:
        """The row count before, and how far it is from there to the next, of which there is one
        unless that is 0.
        """
        if len(self._rows) == 1:
            return 0, 0.0
        place = min(max(bisect_right(self._rows, rows) - 1, 0), len(self._rows) - 2)
        before, after = self._rows[place : place + 2]
        return place, (rows - before) / (after - before)


def unknown_costs() -> PassCosts:
    """As if rows were free; what is observed will tell."""
    return PassCosts(dict.fromkeys(_ROWS, _ANY_S))


def measure_pass_costs(target: Target) -> PassCosts:
    """Time passes of a target that nobody uses meanwhile: the fastest of some for each row count.

    What its pool knows of former texts is lost.
    """
    pool = target.pool
    room = min(pool.pages_free * pool.page_size, target.context_length)
    context = max(1, min(_CONTEXT, room // 2))
    pool.open(_PROBE)
    try:
        _pass(target, context)
        target.commit(_PROBE, range(context), [_TOKEN] * context)
        sizes = [rows for rows in _ROWS if context + rows <= room] or [1]
        seconds = dict.fromkeys(sizes, float("inf"))
        for _ in range(_ROUNDS):
            for rows in sizes:
                seconds[rows] = min(seconds[rows], _pass(target, rows))
                pool.rollback(_PROBE)
    finally:
        pool.close(_PROBE)
        pool.end_step()
        pool.forget_unheld()
    return PassCosts(seconds)


def _pass(target: Target, rows: int) -> float:
    """Seconds of a pass over a chain, logits and all."""
    begun = perf_counter()
    start = target.pool.committed(_PROBE)
    target.pool.reserve(_PROBE, rows)
    extents = target.pool.extents(_PROBE)
    every = tuple(range(rows))
    chain = Segment((_TOKEN,) * rows, start, chain_parents(rows), extents, every)
    target.forward(Pack((chain,))).logits[-1, -1].item()  # an accelerator's pass is over with this
    return perf_counter() - begun

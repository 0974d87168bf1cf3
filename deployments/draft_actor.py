"""A draft in a process of its own: the actor's plain class, and the decode loop's end of the wire.

No torch here, nor in what an n-gram draft imports: those processes stay small.

The loop's thread pays one actor call a step. What the target said is kept back and travels with
the next `propose`, so that a step is one message there and one back. Nothing here blocks but the
waiter, and that one only for its timeout: a draft that is dead, restarting or slow costs its
guesses and nothing else.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from workers.draft import Draft, DraftRequest, DraftSpec, DraftUnavailable, DraftUpdate
from workers.load_draft import load_draft
from workers.speculation.tree import Proposal

PING_INTERVAL_S = 0.25
"""How often a draft that is away is asked whether it is back."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
"""How long a draft that failed or was late is left alone: twice as long each time in a row. Each
time the decode loop waits in vain costs everybody the whole timeout."""

RELOAD_INTERVAL_S = 10.0
"""How often one is asked whose loading failed: each time it tries again."""


class DraftWorker:
    """What runs in the actor. It loads at the first `ping`, so that a restarted one loads again."""

    def __init__(self, spec: DraftSpec, target: Path, dtype: str, threads: int) -> None:
        self._spec = spec
        self._target = target
        self._dtype = dtype
        self._threads = threads
        self._draft: Draft | None = None

    def ping(self) -> None:
        """Returns once the draft can be asked. Raises ValueError when it is not for the target."""
        if self._draft is None:
            self._draft = load_draft(
                self._spec, self._target, dtype=self._dtype, threads=self._threads
            )

    def propose(
        self, updates: Sequence[DraftUpdate], requests: Sequence[DraftRequest]
    ) -> list[Proposal | None]:
        """First learns, then guesses."""
        draft = self._loaded()
        if updates:
            draft.commit(updates)
        return draft.propose(requests)

    def forget(self, sequences: Sequence[int]) -> None:
        """Drops sequences."""
        self._loaded().forget(sequences)

    def _loaded(self) -> Draft:
        # Not an assert: the caller cannot know yet that this process is a new one.
        if self._draft is None:
            raise DraftUnavailable(f"draft {self._spec.name} was restarted and is not loaded yet")
        return self._draft


class Call(Protocol):
    """One method of an actor handle."""

    def remote(self, *args: Any) -> Any:
        """Calls it; the result has `future()`."""


class DraftHandle(Protocol):
    """The actor handle of a `DraftWorker`, as Ray makes it."""

    ping: Call
    propose: Call
    forget: Call


class RayDraft:
    """The `workers.draft.DraftClient` of an actor. Used by the decode loop's thread."""

    def __init__(
        self, name: str, actor: DraftHandle, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._actor = actor
        self._clock = clock
        self._updates: list[DraftUpdate] = []
        self._lock = threading.Lock()  # guards the ping
        self._ping: Future[None] | None = None
        self._asked_at = 0.0
        self._rest_s = FIRST_REST_S
        self._rests_until = clock()
        self._send_ping()

    @property
    def loading(self) -> "Future[None]":
        """Done when the draft is loaded, or cannot be; for whoever starts the pool."""
        assert self._ping is not None, "asked only before the draft's first use"
        return self._ping

    def ready(self) -> bool:
        """Whether the last ping came back. One that failed is sent again, now and then.

        Any thread may ask; somebody must, now and then, or a draft that died stays away.
        """
        with self._lock:
            if self._ping is None:
                return True
            if not self._ping.done():
                return False
            error = self._ping.exception()
            if error is None and self._clock() < self._rests_until:
                return False
            if error is None:
                self._ping = None
                return True
            failed = isinstance(error, RayTaskError)
            interval = RELOAD_INTERVAL_S if failed else PING_INTERVAL_S
            if self._clock() - self._asked_at >= interval:
                self._send_ping()
            return False

    def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Proposal | None]]:
        """Asks; the result waits."""
        updates, self._updates = self._updates, []
        call: Future[list[Proposal | None]] = self._actor.propose.remote(
            updates, list(requests)
        ).future()
        return lambda timeout: self._wait(call, timeout)

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        """Keeps what the target said for the next `propose`."""
        if self._ping is None:
            self._updates.extend(updates)

    def forget(self, sequences: Sequence[int]) -> None:
        """Tells at once: there may be no next `propose`."""
        gone = set(sequences)
        self._updates = [update for update in self._updates if update.sequence not in gone]
        if self._ping is None:
            self._actor.forget.remote(list(sequences))

    def _wait(self, call: "Future[list[Proposal | None]]", timeout: float) -> list[Proposal | None]:
        try:
            answer = call.result(timeout)
            self._rest_s = FIRST_REST_S
            return answer
        except TimeoutError as error:
            raise self._lost(f"did not answer within {timeout * 1000:.0f} ms") from error
        except RayTaskError as error:
            raise self._lost(f"failed: {error.cause!r}") from error
        except RayError as error:
            raise self._lost(f"died: {error}") from error

    def _lost(self, why: str) -> DraftUnavailable:
        # What it missed meanwhile is not kept: it will say that it does not know its sequences.
        self._updates = []
        with self._lock:
            self._rests_until = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            self._send_ping()
        return DraftUnavailable(f"draft {self.name} {why}")

    def _send_ping(self) -> None:
        self._asked_at = self._clock()
        self._ping = self._actor.ping.remote().future()

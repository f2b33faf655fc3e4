"""What the supervisor looks at of its own accord: launcher, ledger, catalogue of the store.

Each look runs beside the loop and comes back as an event, when it found something new.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from checkpointing.errors import StoreError
from checkpointing.quarantine import quarantined_places
from checkpointing.resolver import list_commits
from checkpointing.store.base import ObjectStore
from monitors.observations import Ok
from orchestrator.core import events as ev
from orchestrator.core.events import Event
from orchestrator.core.ledger import Entry, as_event
from orchestrator.core.node import Allocation
from orchestrator.core.state import State
from orchestrator.errors import LedgerUnavailable
from orchestrator.launch.launcher import Launcher
from orchestrator.ledger import Ledger
from orchestrator.supervisor.allocations import changes, needs_a_fresh_look
from orchestrator.supervisor.watch import Watch

log = logging.getLogger(__name__)

OBSERVE_S = 0.25
FRESH_S = 1.0
LEDGER_S = 2.0
CATALOGUE_LOOK_S = 0.5
CATALOGUE_RETRY_S = 3.0
QUARANTINE_S = 60.0

Places = tuple[tuple[int, int], ...]


class Looks:
    """The looks of one supervisor.

    Args:
        launcher: Says what became of allocations.
        ledger: What is known of nodes beyond this run.
        watch: Knows who is connected.
        state: Returns the state now.
        emit: Takes what was found.
    """

    def __init__(
        self,
        launcher: Launcher,
        ledger: Ledger,
        watch: Watch,
        state: Callable[[], State],
        emit: Callable[[Event], None],
    ) -> None:
        self._launcher = launcher
        self._ledger = ledger
        self._watch = watch
        self._state = state
        self._emit = emit
        self._now = asyncio.Event()
        self._fresh_at: dict[str, float] = {}
        self._wants_fresh = False
        self._answered_at = -float("inf")

    def hurry(self) -> None:
        """Ask the launcher at once: a connection has ended."""
        self._now.set()

    def has_answer_since(self, moment: float) -> bool:
        """Whether the launcher answered later than that (monotonic); if not, it is asked again."""
        if self._answered_at > moment:
            return True
        self._wants_fresh = True
        self._now.set()
        return False

    async def observe(self) -> None:
        """Ask the launcher now and then, and at once when told to hurry."""
        while True:
            self._now.clear()
            state = self._state()
            is_ending = state.outcome is not None  # then all of them go, as they should
            for known in () if is_ending else state.allocations:
                if known.job and (not known.is_over or needs_a_fresh_look(state, known)):
                    await self._look_at(known)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OBSERVE_S):
                    await self._now.wait()

    async def _look_at(self, known: Allocation) -> None:
        fresh = self._wants_fresh or needs_a_fresh_look(self._state(), known)
        now = time.monotonic()
        if fresh and now < self._fresh_at.get(known.job, 0.0):
            return
        if fresh:
            self._fresh_at[known.job] = now + FRESH_S
        seen = await asyncio.to_thread(self._launcher.observe, known.job, fresh=fresh)
        if not isinstance(seen, Ok):
            return
        if fresh:
            self._answered_at, self._wants_fresh = now, False
        state = self._state()
        silent_s = self._watch.silent_s(state.nodes, time.monotonic())
        for event in changes(state, seen.value, self._watch.connected_nodes, silent_s):
            self._emit(event)

    async def read_ledger(self) -> None:
        """Hear of what persons and other runs say of nodes; what cannot be read stays as it was."""
        problem = ""
        while True:
            try:
                entries = await asyncio.to_thread(self._ledger.entries)
            except LedgerUnavailable as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("%s", problem)
            else:
                if (said := self._new_in(entries)) is not None:
                    self._emit(said)
            await asyncio.sleep(LEDGER_S)

    def ledger_now(self) -> ev.LedgerRead | None:
        """Return what the ledger says, None for nothing new; a problem is told in `read_ledger`."""
        with contextlib.suppress(LedgerUnavailable):
            return self._new_in(self._ledger.entries())
        return None

    def _new_in(self, entries: Sequence[Entry]) -> ev.LedgerRead | None:
        state = self._state()
        said = as_event(entries, time.time(), state.policy.budget_window_s)
        known = ev.LedgerRead(excluded=state.ledger, excluded_lately=state.excluded_lately)
        return said if said != known else None

    async def read_catalogue(self, store: ObjectStore, run: str) -> None:
        """List the committed checkpoints when they are not known; no answer is no empty list."""
        problem = ""
        while True:
            if self._state().catalogue_read:
                problem = ""
                await asyncio.sleep(CATALOGUE_LOOK_S)
                continue
            try:
                found, quarantined = await asyncio.to_thread(_catalogue_of, store, run)
            except StoreError as error:
                if str(error) != problem:
                    problem = str(error)
                    self._emit(ev.CatalogueUnknown(why=problem))
                await asyncio.sleep(CATALOGUE_RETRY_S)
                continue
            self._emit(ev.CatalogueRead(commits=found, quarantined=quarantined))
            await asyncio.sleep(CATALOGUE_LOOK_S)

    async def read_quarantine(self, store: ObjectStore, run: str) -> None:
        """Hear of what persons and other runs put into quarantine; no answer changes nothing."""
        while True:
            await asyncio.sleep(QUARANTINE_S)
            state = self._state()
            if not state.catalogue_read:
                continue
            try:
                places = await asyncio.to_thread(quarantined_places, store, run)
            except StoreError as error:
                log.info("the quarantine cannot be read: %s", error)
                continue
            new = places & frozenset(state.commits) - state.in_quarantine
            if new:
                self._emit(ev.QuarantineRead(places=tuple(sorted(new, reverse=True))))


def _catalogue_of(store: ObjectStore, run: str) -> tuple[Places, Places]:
    """Return what may be restored and what may not, newest first."""
    usable = tuple(commit.place for commit in list_commits(store, run))
    return usable, tuple(sorted(quarantined_places(store, run), reverse=True))

"""Looks after a commit what no rule keeps any more; the journal and the rules do the rest."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from checkpointing.errors import CheckpointingError
from checkpointing.pruning import Tokens, plan_for, readable
from checkpointing.resolver import read_catalogue
from checkpointing.retention import RetentionPolicy
from checkpointing.store.base import ObjectStore
from orchestrator.core.events import Event, RetentionPlanned
from orchestrator.core.rules.retention import needed_places
from orchestrator.core.state import Place, State

log = logging.getLogger(__name__)

POLL_S: Final = 0.5
PAUSE_S: Final = 2.0
SHARE: Final = 0.1  # of the time that looks may take
LONGEST_S: Final = 600.0


class Retention:
    """One supervisor's looks at what may go, in a thread beside the loop.

    What goes wrong is said and tried again after the next commit, and ends nothing.

    Args:
        store: Holds the checkpoints.
        run: Name of the run.
        policy: What to keep.
        state: Returns the state now.
        emit: Takes what was found.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        policy: RetentionPolicy,
        state: Callable[[], State],
        emit: Callable[[Event], None],
    ) -> None:
        self._store = store
        self._run = run
        self._policy = policy
        self._state = state
        self._emit = emit
        self._tokens = Tokens(store)
        self._seen_at = 0.0
        self._problem = ""

    async def run(self) -> None:
        """Look once after each commit, though not too often."""
        while True:
            await asyncio.sleep(POLL_S)
            state = self._state()
            if not state.catalogue_read or state.committed_at <= self._seen_at or state.unkept:
                continue
            self._seen_at = state.committed_at
            begun = time.monotonic()
            await self._look(state)
            await asyncio.sleep(max(PAUSE_S, (time.monotonic() - begun) / SHARE))

    async def _look(self, state: State) -> None:
        try:
            async with asyncio.timeout(LONGEST_S):
                places = await asyncio.to_thread(self._find, state)
        except (CheckpointingError, TimeoutError) as error:
            self._failed(str(error) or f"the store needs more than {LONGEST_S:.0f} s")
        except Exception as error:
            log.exception("retention failed")
            self._failed(f"{type(error).__name__}: {error}")
        else:
            if places or self._problem:
                self._emit(RetentionPlanned(places=tuple(places)))
            self._problem = ""

    def _failed(self, why: str) -> None:
        log.warning("retention: %s", why)
        if why != self._problem:
            self._problem = why
            self._emit(RetentionPlanned(places=(), problem=why[:500]))

    def _find(self, state: State) -> list[Place]:
        needed = needed_places(state)
        plan = plan_for(
            self._store,
            self._run,
            self._policy,
            tokens_of=self._tokens.of,
            in_use=needed,
            shunned=state.in_quarantine,
        )
        unkept = {verdict.place for verdict in plan.delete} - needed
        if not unkept:
            return []
        return readable(self._store, read_catalogue(self._store, self._run), unkept)

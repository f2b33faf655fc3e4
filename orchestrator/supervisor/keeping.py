"""What a run changes in its store besides commits: quarantine and deletions."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from checkpointing.errors import CheckpointingError, StoreError
from checkpointing.pruning import delete_all
from checkpointing.quarantine import quarantine
from checkpointing.store.base import ObjectStore
from orchestrator.core.actions import Quarantine
from orchestrator.core.state import Place
from orchestrator.views.units import count, size

log = logging.getLogger(__name__)

TRIES = 8
PRUNE_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


async def put_in_quarantine(store: ObjectStore, run: str, spoilt: Quarantine) -> tuple[bool, str]:
    """Write the record that keeps all runs from a checkpoint; asks a silent store again."""
    write = partial(
        quarantine,
        store,
        run,
        spoilt.step,
        spoilt.attempt,
        why=spoilt.why,
        who=f"attempt {spoilt.found_by} of the run",
    )
    why = ""
    for tries in range(TRIES):
        try:
            is_new = await asyncio.to_thread(write)
        except StoreError as error:
            why = str(error)
            log.warning("step %d is not in quarantine yet: %s", spoilt.step, why)
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**tries))
        else:
            return True, "" if is_new else "it was there before"
    return False, why


async def prune(store: ObjectStore, run: str, places: Sequence[Place]) -> tuple[bool, str]:
    """Delete checkpoints in a thread, for a bounded time; what goes wrong is said, and is all.

    A supervisor that leaves stops behind the checkpoint at hand. The next one has the same order
    in its journal, and finishes what this one began.
    """
    gone = threading.Event()
    deadline = time.monotonic() + PRUNE_S

    def may_go_on() -> bool:
        return not gone.is_set() and time.monotonic() < deadline

    try:
        done, freed = await asyncio.to_thread(delete_all, store, run, places, may_go_on)
    except CheckpointingError as error:
        log.warning("retention: %s", error)
        return False, str(error)
    finally:
        gone.set()
    if done < len(places):
        text = f"{done} of {len(places)} deleted in {PRUNE_S:.0f} s; the others later"
        log.warning("retention: %s", text)
        return False, text
    return True, f"{count(done, 'checkpoint')}, {size(freed)} freed"

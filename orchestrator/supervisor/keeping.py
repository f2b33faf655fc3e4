"""What a run changes in its store besides commits: quarantine."""

import asyncio
import logging
from functools import partial

from checkpointing.errors import StoreError
from checkpointing.quarantine import quarantine
from checkpointing.store.base import ObjectStore
from orchestrator.core.actions import Quarantine

log = logging.getLogger(__name__)

TRIES = 8
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

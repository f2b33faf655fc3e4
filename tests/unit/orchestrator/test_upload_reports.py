import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import kept
from orchestrator.agent.uploads import Uploads, report_of
from orchestrator.core.events import ShardUploaded, UploadFailed
from orchestrator.process_id import start_time
from tests.unit.orchestrator.desk import until

UPLOADED = {
    "event": "uploaded",
    "rank": 1,
    "attempt": 2,
    "step": 40,
    "world": 4,
    "index_key": "big/data/step-40/rank-1.json",
    "index_crc64": 2**63 + 1,
    "nbytes": 10,
    "upload_s": 0.5,
    "staged_at": 100.0,
}
FAILED = {
    "event": "upload_failed",
    "rank": 1,
    "attempt": 2,
    "step": 40,
    "error": "s3://b: no answer",
    "final": False,
}


def test_an_upload_is_told_with_the_time_since_the_step() -> None:
    event = report_of(UPLOADED)
    assert isinstance(event, ShardUploaded)
    assert (event.rank, event.attempt, event.step, event.world) == (1, 2, 40, 4)
    assert event.index_crc64 == 2**63 + 1
    assert event.upload_s == 0.5


@pytest.mark.parametrize("wall", [50.0, 103.0, 1e9])
def test_the_wall_clock_bends_no_time(monkeypatch: pytest.MonkeyPatch, wall: float) -> None:
    monkeypatch.setattr(time, "time", lambda: wall)
    event = report_of({**UPLOADED, "upload_s": None})
    assert isinstance(event, ShardUploaded)
    assert math.isnan(event.upload_s)


def test_what_the_transfer_took_is_told_in_bounds() -> None:
    retries = {"x" * 99 + str(n): 1 for n in range(100)}
    sent = {"sent_nbytes": 9, "sent_s": 0.1, "hedges": 2, "plane": "awscrt", "retries": retries}
    event = report_of({**UPLOADED, **sent})
    assert isinstance(event, ShardUploaded)
    assert event.cost is not None
    assert (event.cost.sent_nbytes, event.cost.hedges, event.cost.plane) == (9, 2, "awscrt")
    assert len(event.cost.retries) <= 16
    assert all(len(code) <= 40 for code in event.cost.retries)


def test_a_failure_is_told_in_bounds() -> None:
    event = report_of({**FAILED, "error": "x" * 10_000})
    assert isinstance(event, UploadFailed)
    assert len(event.error) == 500


@pytest.mark.parametrize(
    "change",
    [
        {"event": "finished"},
        {"rank": "1"},
        {"rank": None},
        {"rank": 1.0},
        {"upload_s": "now"},
        {"upload_s": -1.0},
        {"upload_s": float("inf")},
        {"sent_nbytes": -1},
        {"retries": [1]},
        {"retries": {"503": "many"}},
        {"index_crc64": [1]},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        report_of({**UPLOADED, **change})
    with pytest.raises(KeyError):
        report_of({"event": "uploaded"})


def says(*lines: str, then: str = "import time; time.sleep(600)") -> list[str]:
    """An uploader that says these lines first."""
    code = "".join(f"print({line!r}, flush=True);" for line in lines)
    return [sys.executable, "-c", code + then]


class Keeper:
    """The keeper of an uploader that is not one."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.facts: list[Any] = []
        self.uploads = Uploads(folder, "{}", "big", self.facts.append)
        self.uploads._command = command

    @property
    def pid(self) -> int | None:
        process = self.uploads._process
        return process.pid if process is not None and process.returncode is None else None


def test_an_uploader_is_given_time_to_finish_and_is_ended_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "STOP_GRACE_S", 0.3)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('7', flush=True);"

    async def main() -> None:
        for then in ("import time; time.sleep(600)", deaf + "time.sleep(600)"):
            keeper = Keeper(tmp_path, says(json.dumps(UPLOADED), then=then))
            task = asyncio.ensure_future(keeper.uploads.run())
            await until(lambda keeper=keeper: keeper.facts)
            pid = keeper.pid
            assert pid is not None
            task.cancel()
            await asyncio.wait({task})
            assert start_time(pid) is None

    asyncio.run(main())

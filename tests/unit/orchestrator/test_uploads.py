"""The agent's side of the uploader, with small programs in its place."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import kept
from orchestrator.agent.uploads import Uploads
from orchestrator.core.events import ShardUploaded, UploadFailed
from tests.unit.orchestrator.desk import until

FAILED = '{"event": "upload_failed", "attempt": 1, "step": 2, "rank": 0, "error": "denied"}'


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Heard:
    """The facts that come of an uploader which is this program."""

    def __init__(self, folder: Path, program: str) -> None:
        self.facts: list[ShardUploaded | UploadFailed] = []
        self.uploads = Uploads(folder, "{}", "small", self.facts.append)
        self.uploads._command = [sys.executable, "-c", program]

    async def until(self, count: int) -> None:
        work = asyncio.ensure_future(self.uploads.run())
        try:
            await until(lambda: len(self.facts) >= count or work.done())
            assert not work.done(), work.exception()
        finally:
            work.cancel()
            await asyncio.wait({work})


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "RESTART_WAIT_S", 0.01)


def test_an_uploader_that_ends_is_started_again(tmp_path: Path) -> None:
    heard = Heard(tmp_path, f"print('{FAILED}')")
    play(heard.until(2))
    assert heard.facts[0] == UploadFailed(attempt=1, step=2, rank=0, error="denied")


@pytest.mark.parametrize("line", ["'x' * 2**20", "'[]'", "'{}'", "chr(0)"])
def test_what_is_no_report_is_left_out_and_the_ranks_go_on(tmp_path: Path, line: str) -> None:
    play(Heard(tmp_path, f"print({line}, flush=True); print('{FAILED}')").until(2))


def test_an_uploader_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """No room for another process, for a moment: no reason to end the ranks of the node."""
    heard = Heard(tmp_path, f"print('{FAILED}')")
    words = heard.uploads._command
    heard.uploads._command = [str(tmp_path / "later"), *words[1:]]

    async def main() -> None:
        later = asyncio.get_running_loop().call_later
        later(0.1, lambda: (tmp_path / "later").symlink_to(words[0]))
        await heard.until(1)

    play(main())


def test_an_uploader_that_hangs_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SILENCE_S", 2.0)
    program = f"import time; print('{FAILED}', flush=True); time.sleep(600)"
    play(Heard(tmp_path, program).until(2))


def test_an_uploader_that_only_says_that_it_lives_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SILENCE_S", 5.0)
    program = (
        "import time\n"
        "for _ in range(12):\n"
        '    print(\'{"event": "alive"}\', flush=True); time.sleep(0.5)\n'
        f"print('{FAILED}', flush=True)"
    )
    heard = Heard(tmp_path, program)
    play(heard.until(1))
    assert len(heard.facts) == 1


def test_what_it_says_while_it_ends_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "STOP_GRACE_S", 30.0)
    program = f"import sys; print('{FAILED}', flush=True); sys.stdin.read(); print('{FAILED}')"
    heard = Heard(tmp_path, program)
    play(heard.until(1))
    assert len(heard.facts) == 2


def test_it_is_deaf_to_the_signals_of_a_step_that_ends(tmp_path: Path) -> None:
    signals = "(signal.SIGTERM, signal.SIGUSR2)"
    program = (
        "import os, signal, sys, time\n"
        f"for signum in {signals}: os.kill(os.getpid(), signum)\n"
        f"print('{FAILED}', flush=True); sys.stdin.read()"
    )
    heard = Heard(tmp_path, program)
    play(heard.until(1))
    assert len(heard.facts) == 1

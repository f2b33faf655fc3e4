import asyncio
import sys
from pathlib import Path

import pytest

from orchestrator.agent import kept
from orchestrator.agent.uploads import Uploads
from orchestrator.core.events import ShardUploaded, UploadFailed
from tests.unit.orchestrator.desk import until

REPORT = '{"event": "upload_failed", "attempt": 1, "step": 2, "rank": 0, "error": "denied"}'


def test_an_uploader_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for another process, for a moment: no reason to end the ranks of the node."""
    monkeypatch.setattr(kept, "RESTART_WAIT_S", 0.01)
    program = tmp_path / "later"
    facts: list[ShardUploaded | UploadFailed] = []
    owner = Uploads(tmp_path, "{}", "small", facts.append)
    owner._command = [str(program), "-c", f"print('{REPORT}')"]

    async def main() -> None:
        work = asyncio.ensure_future(owner.run())
        await asyncio.sleep(0.1)
        program.symlink_to(sys.executable)
        await until(lambda: facts or work.done())
        assert not work.done()
        work.cancel()
        await asyncio.wait({work})

    asyncio.run(main())

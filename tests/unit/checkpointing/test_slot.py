import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointing import slot
from checkpointing.errors import SlotInvalid
from checkpointing.slot import Control, Phase, RankSlot, SlotReading, SlotView


@pytest.fixture
def path(tmp_path: Path) -> Path:
    slot.create(tmp_path / "slot-0")
    return tmp_path / "slot-0"


def test_a_fresh_slot_says_nothing(path: Path) -> None:
    view, rank = SlotView(path), RankSlot(path)
    assert view.read() is None
    assert rank.control() is None
    view.close()
    rank.close()


def test_what_the_rank_publishes_is_what_the_agent_reads(path: Path) -> None:
    view, rank = SlotView(path), RankSlot(path)
    reading = SlotReading(
        pid=os.getpid(),
        step=12,
        phase=Phase.EVAL,
        phase_since=3.5,
        allowed_s=600.0,
        loss=1.25,
        step_s=0.5,
        stall_s=0.01,
        stage_s=0.02,
        saved_step=10,
        saved_tokens=10**14,
        staged_nbytes=2**40,
        beats=40,
        saves=3,
        skipped_saves=1,
        tokens=10**15,
        guarded=True,
    )
    rank.publish(reading)
    assert view.read() == reading
    rank.publish(SlotReading(pid=1))
    read = view.read()
    assert read is not None
    assert not read.guarded
    view.close()
    rank.close()


def test_unmeasured_numbers_stay_unmeasured(path: Path) -> None:
    view, rank = SlotView(path), RankSlot(path)
    rank.publish(SlotReading(pid=1))
    read = view.read()
    assert read is not None
    assert math.isnan(read.loss)
    assert math.isnan(read.stall_s)
    assert math.isinf(read.allowed_s)
    assert read.step == -1
    view.close()
    rank.close()


def test_control_reaches_the_rank(path: Path) -> None:
    view, rank = SlotView(path), RankSlot(path)
    control = Control(interval_steps=20, effective_step=100, snapshot_step=110, stop_step=-1)
    for asked in (control, replace(control, terminate=True)):
        view.set_control(asked)
        assert rank.control() == asked
    view.close()
    rank.close()


def test_a_file_that_is_no_slot_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 4096)
    with pytest.raises(SlotInvalid):
        SlotView(other)
    other.write_bytes(b"short")
    with pytest.raises(SlotInvalid):
        SlotView(other)


def test_a_writer_killed_inside_a_heartbeat_leaves_no_half_record(path: Path) -> None:
    view = SlotView(path)
    rank = RankSlot(path)
    rank.publish(SlotReading(pid=1, step=1))
    rank._beat.begin()
    rank._beat._payload[8:16] = b"\xff" * 8
    assert view.read() is None
    rank.close()
    successor = RankSlot(path)
    successor.publish(SlotReading(pid=2, step=5))
    read = view.read()
    assert read is not None
    assert (read.pid, read.step) == (2, 5)
    successor.close()
    view.close()


WRITER = """
import sys
from pathlib import Path
from checkpointing.slot import RankSlot, SlotReading
rank = RankSlot(Path(sys.argv[1]))
n = 0
while True:
    n += 1
    rank.publish(SlotReading(pid=n, step=n, beats=n, saves=n, tokens=n, loss=float(n)))
"""


def test_a_reader_never_sees_a_mixture(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    view = SlotView(path)
    stop = threading.Timer(20, process.kill)
    stop.start()
    try:
        seen = 0
        while seen < 2000 and process.poll() is None:
            read = view.read()
            if read is not None:
                seen += 1
                assert read.pid == read.step == read.beats == read.saves == read.tokens == read.loss
    finally:
        stop.cancel()
        process.send_signal(signal.SIGKILL)
        process.wait()
        view.close()
    assert seen == 2000


def test_importing_the_small_parts_loads_nothing_heavy() -> None:
    code = (
        "import sys, checkpointing, checkpointing.slot, checkpointing.interval;"
        "heavy = {'numpy', 'boto3', 'botocore', 'torch', 'awscrt'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_uploader_loads_no_torch() -> None:
    code = "import sys, checkpointing.uploader.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

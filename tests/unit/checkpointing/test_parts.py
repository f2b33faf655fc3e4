import threading
import time

import pytest

from checkpointing.store.budget import Budget
from checkpointing.store.hedge import Hedger
from checkpointing.store.pace import Pacer
from checkpointing.store.parts import Parts, SendPart
from checkpointing.store.window import Body, Cancelled, Window, split


def _run(count: int, send: SendPart[int], may_hedge: bool = True) -> tuple[list[int], list[str]]:
    hedges: list[str] = []
    parts = Parts(
        count,
        send,
        threads=4,
        may_hedge=lambda: may_hedge,
        hedged=lambda: hedges.append(threading.current_thread().name),
    )
    return parts.run(), hedges


def test_the_answers_come_in_order() -> None:
    answers, hedges = _run(20, lambda index, _: index * index)
    assert answers == [index * index for index in range(20)]
    assert hedges == []


def test_a_late_part_is_sent_again_and_the_first_answer_counts() -> None:
    tries: list[int] = []
    told = threading.Event()

    def send(index: int, cancelled: threading.Event) -> int:
        tries.append(index)
        if index == 3 and tries.count(3) == 1:
            assert cancelled.wait(60), "nobody told the loser"
            told.set()
            raise Cancelled
        return 100 + index

    answers, hedges = _run(12, send)
    assert answers == list(range(100, 112))
    assert len(hedges) == 1
    assert tries.count(3) == 2
    assert told.wait(10)


def test_one_part_is_hedged_at_a_time_and_once() -> None:
    active, most = [0], [0]
    lock = threading.Lock()
    tries: dict[int, int] = {}

    def send(index: int, cancelled: threading.Event) -> int:
        with lock:
            tries[index] = tries.get(index, 0) + 1
            hedge = tries[index] > 1
            active[0] += hedge
            most[0] = max(most[0], active[0])
        if index >= 8:
            cancelled.wait(0.3 if hedge else 1.5)
        with lock:
            active[0] -= hedge
        return index

    answers, hedges = _run(12, send)
    assert answers == list(range(12))
    assert 1 <= len(hedges) <= 4
    assert most[0] == 1
    assert max(tries.values()) == 2


def test_under_a_limit_nothing_is_sent_twice() -> None:
    def send(index: int, cancelled: threading.Event) -> int:
        cancelled.wait(1.2 if index == 11 else 0)
        return index

    _, hedges = _run(12, send, may_hedge=False)
    assert hedges == []


def test_a_hedge_that_fails_leaves_the_first_sending_alone() -> None:
    tries: list[int] = []

    def send(index: int, cancelled: threading.Event) -> int:
        tries.append(index)
        if index == 11:
            if tries.count(11) > 1:
                raise OSError("the hedge")
            cancelled.wait(1.5)
        return index

    answers, hedges = _run(12, send)
    assert answers == list(range(12))
    assert len(hedges) == 1


def test_the_first_error_ends_it_and_the_others_are_told() -> None:
    told: list[int] = []

    def send(index: int, cancelled: threading.Event) -> int:
        if index == 1:
            time.sleep(0.05)
            raise OSError("broken")
        if cancelled.wait(60):
            told.append(index)
        raise Cancelled

    with pytest.raises(OSError, match="broken"):
        _run(20, send)
    assert sorted(told) == [0, 2, 3], "and no other was begun"


def test_late_is_twice_the_95th_percentile() -> None:
    hedger = Hedger()
    for second in range(1, 5):
        hedger.finished(second)
        assert hedger.late_after_s is None
    for second in range(5, 101):
        hedger.finished(second)
    assert hedger.late_after_s == 190


def test_a_body_gives_slices_of_the_memory_and_waits_for_the_budget() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace = Pacer(Budget(max_bytes_per_s=1 << 20), clock=lambda: now[0], sleep=sleep)
    memory = bytearray(range(256)) * 16384
    body = Body(Window([memoryview(memory)[:100], memoryview(memory)[100:]]), pace)
    got = b""
    while piece := body.read(10):
        assert isinstance(piece, memoryview)
        assert piece.obj is memory
        got += piece
    assert got == memory
    assert 3.5 < now[0] < 4.1, "4 MiB at 1 MiB/s"
    assert body.waited_s == pytest.approx(now[0])


def test_a_cancelled_body_ends_the_request_that_reads_it() -> None:
    cancelled = threading.Event()
    body = Body(Window([memoryview(bytes(100))]), cancelled=cancelled)
    assert len(body.read(10)) == 100
    body.seek(0)
    cancelled.set()
    with pytest.raises(Cancelled):
        body.read(10)


def test_windows_cover_the_pieces_exactly() -> None:
    memory = bytes(range(200))
    pieces = [memoryview(memory)[:7], memoryview(b""), memoryview(memory)[7:150]]
    windows = split([*pieces, memoryview(memory)[150:]], 16)
    assert [window.nbytes for window in windows] == [16] * 12 + [8]
    assert b"".join(bytes(Body(window).read()) for window in windows) == memory
    out = bytearray(30)
    assert Body(windows[0]).readinto(memoryview(out)) == 16

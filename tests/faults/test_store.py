"""What a store does when the line, the server or the credentials fail: both data planes."""

import logging
import re
import secrets
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from checkpointing.checksum import combine, crc64
from checkpointing.errors import ObjectConflict, ObjectCorrupt, StoreDenied, StoreUnavailable
from checkpointing.store import data_plane
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.store.budget import Budget
from checkpointing.store.pace import Pacer
from checkpointing.store.s3 import S3Store
from tests.faults.proxy import (
    Delay,
    Fault,
    FaultProxy,
    Flip,
    LoseAnswer,
    Reset,
    Rule,
    Say,
    Throttle,
    Truncate,
    expired_token,
    internal_error,
    skewed_clock,
    slow_down,
)

pytestmark = [pytest.mark.s3, pytest.mark.slow]
MIB = 1 << 20
PARTS = 3
BODY = secrets.token_bytes(34 * MIB)  # two whole parts, and one of 2 MiB
CRC = crc64(BODY)


@pytest.fixture(params=["boto3", "awscrt"])
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(data_plane.VARIABLE, request.param)
    return str(request.param)


@pytest.fixture
def store(behind: StoreConfig, plane: str) -> ObjectStore:
    return open_store(behind)


@pytest.fixture
def plain(direct: StoreConfig) -> ObjectStore:
    return open_store(direct)


def _impatient(config: StoreConfig, **more: float) -> S3Store:
    parts = urlsplit(config.url)
    return S3Store(
        bucket=parts.netloc,
        prefix=parts.path.strip("/") + "/",
        endpoint_url=config.endpoint_url,
        region=config.region,
        **{"read_timeout_s": 3.0, "attempts": 3, "deadline_s": 3.0, **more},  # type: ignore[arg-type]
    )


def _whole(store: ObjectStore, key: str = "big") -> bool:
    info = store.head(key)
    assert info is not None
    assert info.crc64 == CRC
    out = bytearray(len(BODY))
    store.read_into(key, 0, memoryview(out))
    return out == BODY and store.open_uploads("") == ()


PASSING: dict[str, tuple[Fault, str]] = {
    "503": (slow_down(), "SlowDown"),
    "500": (internal_error(), "InternalError"),
    "lost": (LoseAnswer(), ""),
    "reset-0": (Reset(after=0), ""),
    "reset-1M": (Reset(after=MIB), ""),
    "409": (Say(409, "OperationAborted"), "OperationAborted"),
    "408": (Say(400, "RequestTimeout"), "RequestTimeout"),
}
FAULTS = [
    pytest.param("CreateMultipartUpload", *PASSING[name], id=f"begin-{name}", marks=marks)
    for name, marks in (
        ("503", ()),
        ("500", pytest.mark.chaos),
        ("lost", ()),
        ("reset-0", ()),
        ("409", pytest.mark.chaos),
        ("408", pytest.mark.chaos),
    )
] + [pytest.param("UploadPart", *PASSING[name], id=f"part-{name}") for name in PASSING]


@pytest.mark.parametrize(("operation", "fault", "code"), FAULTS)
def test_parts_arrive_through_every_passing_fault(
    store: ObjectStore,
    plain: ObjectStore,
    proxy: FaultProxy,
    operation: str,
    fault: Fault,
    code: str,
    plane: str,
) -> None:
    rule = Rule(fault, operation, times=2)
    proxy.script(rule)
    sent = store.upload("big", [memoryview(BODY)], CRC)
    harmed = rule.hits
    proxy.script()
    assert _whole(plain)
    assert (sent.nbytes, sent.plane) == (len(BODY), plane)
    assert harmed == 2
    assert sum(sent.retries.values()) >= 2, "a busy machine may add a timeout of its own"
    if code:
        assert sent.retries[code] == 2


def test_a_lost_answer_of_the_completion_is_settled_without_sending_again(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.script(Rule(LoseAnswer(), "CompleteMultipartUpload"))
    store.upload("big", [memoryview(BODY)], CRC)
    assert _whole(plain)
    assert proxy.operations().count("UploadPart") == PARTS


def test_a_lost_answer_of_the_commit_is_a_success(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy
) -> None:
    store = open_store(behind)
    proxy.script(Rule(LoseAnswer(), "PutObject"))
    assert store.put_if_absent("commits/1", b"mine")
    assert plain.get("commits/1") == b"mine"
    proxy.script(Rule(LoseAnswer(), "PutObject"))
    assert not store.put_if_absent("commits/1", b"theirs")
    assert plain.get("commits/1") == b"mine"


@pytest.mark.parametrize("code", ["NoSuchUpload", "InvalidPart"])
@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_an_upload_that_others_aborted_begins_again(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy, operation: str, code: str
) -> None:
    rule = Rule(Say(404 if code == "NoSuchUpload" else 400, code), operation)
    proxy.script(rule)
    store.upload("big", [memoryview(BODY)], CRC)
    assert rule.hits == 1
    assert _whole(plain)
    assert proxy.operations().count("CreateMultipartUpload") == 2


def test_a_conflict_at_the_completion_begins_again_and_412_is_read_back(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.script(Rule(Say(409, "ConditionalRequestConflict"), "CompleteMultipartUpload"))
    store.upload("big", [memoryview(BODY)], CRC)
    assert proxy.operations().count("CreateMultipartUpload") == 2
    assert _whole(plain)
    other = bytes(len(BODY))
    with pytest.raises(ObjectConflict, match="request"):
        store.upload("big", [memoryview(other)], crc64(other))
    assert _whole(plain)


@pytest.mark.parametrize("operation", ["UploadPart", "HeadObject", "CompleteMultipartUpload"])
def test_an_expired_token_is_renewed_and_only_that_request_made_again(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy, operation: str
) -> None:
    rule = Rule(expired_token(), operation)
    proxy.script(rule)
    before = store._s3.client()  # type: ignore[attr-defined]
    store.upload("big", [memoryview(BODY)], CRC)
    assert rule.hits == 1
    assert store._s3.client() is not before  # type: ignore[attr-defined]
    assert _whole(plain)
    assert proxy.operations().count("UploadPart") == PARTS + (operation == "UploadPart")
    assert proxy.operations().count("CreateMultipartUpload") == 1


def test_a_token_that_stays_expired_is_said_soon_and_leaves_nothing(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.script(Rule(expired_token(), "UploadPart", times=10**6))
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="renew the credentials"):
        store.upload("big", [memoryview(BODY)], CRC)
    assert time.monotonic() - begun < 60, "long before the deadline"
    assert plain.head("big") is None
    assert plain.open_uploads("") == ()


def test_a_skewed_clock_is_signed_again_and_the_offset_is_told(
    store: ObjectStore,
    plain: ObjectStore,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    plane: str,
) -> None:
    proxy.script(Rule(skewed_clock(1200), "UploadPart"))
    with caplog.at_level(logging.WARNING):
        sent = store.upload("big", [memoryview(BODY)], CRC)
    assert sent.retries["RequestTimeTooSkewed"] == 1
    assert _whole(plain)
    assert any("set this host's clock" in record.message for record in caplog.records)
    if plane == "boto3":  # the native client keeps the answer's date to itself
        assert any(re.search(r"is 1(19\d|20\d) s behind", r.message) for r in caplog.records)


def test_a_final_error_names_bucket_key_request_and_fix_in_one_line(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.script(Rule(Say(403, "AccessDenied"), "UploadPart", times=10**6))
    with pytest.raises(StoreDenied) as caught:
        store.upload("run/big", [memoryview(BODY)], CRC)
    line = str(caught.value)
    assert "\n" not in line
    for part in ("everstep", "run/big", "AccessDenied", "UploadPart", "request PROXY1", "policy"):
        assert part in line
    assert plain.open_uploads("") == ()


def test_a_server_that_stays_broken_ends_at_the_deadline(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, plane: str
) -> None:
    proxy.script(Rule(slow_down(), "UploadPart", times=10**6))
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="SlowDown"):
        _impatient(behind).upload("big", [memoryview(BODY)], CRC)
    assert time.monotonic() - begun < 40
    assert plain.open_uploads("") == ()


def test_a_server_that_says_nothing_is_asked_again(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, plane: str
) -> None:
    rule = Rule(Delay(8.0), "UploadPart", skip=1)
    proxy.script(rule)
    _impatient(behind, deadline_s=60.0).upload("big", [memoryview(BODY)], CRC)
    assert rule.hits == 1
    assert _whole(plain)


def test_bytes_that_change_on_the_way_never_become_an_object(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.script(Rule(Flip(1000, of_request=True), "UploadPart", times=10**6))
    with pytest.raises(ObjectCorrupt):
        store.upload("big", [memoryview(BODY)], CRC)
    small = BODY[: MIB // 2]
    proxy.script(Rule(Flip(1000, of_request=True), "PutObject", times=10**6))
    with pytest.raises(ObjectCorrupt):
        store.upload("small", [memoryview(small)], crc64(small))
    assert plain.list("") == ()
    assert plain.open_uploads("") == ()


def test_a_truncated_answer_is_read_again(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy
) -> None:
    plain.put_if_absent("a", BODY[:MIB])
    store, out = open_store(behind), bytearray(MIB)
    for fault in (Truncate(100_000), Reset(), LoseAnswer(), internal_error(), expired_token()):
        proxy.script(Rule(fault, "GetObject", times=2))
        store.read_into("a", 0, memoryview(out))
        assert out == BODY[:MIB]
        out[:] = bytes(MIB)
        proxy.script(Rule(fault, "GetObject", times=2))
        assert store.get("a") == BODY[:MIB]


def test_a_wrong_answer_is_noticed_by_whoever_has_the_crc(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy
) -> None:
    plain.put_if_absent("a", BODY[:MIB])
    proxy.script(Rule(Flip(70_000), "GetObject"))
    out = bytearray(MIB)
    open_store(behind).read_into("a", 0, memoryview(out))
    assert crc64(out) != crc64(BODY[:MIB]), "the store itself promises bytes, not which"


def test_a_listing_that_fails_is_never_empty(behind: StoreConfig, proxy: FaultProxy) -> None:
    store = _impatient(behind)
    for fault in (slow_down(), internal_error(), Reset(), LoseAnswer(), expired_token()):
        proxy.script(Rule(fault, times=10**6))
        for ask in (store.list, store.open_uploads):
            with pytest.raises(StoreUnavailable):
                ask("")


def test_a_storm_of_503_lowers_the_budget_and_it_recovers(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, plane: str
) -> None:
    budget = Budget()
    store = open_store(behind, Pacer(budget))
    proxy.script(Rule(slow_down(), "UploadPart", times=8))
    sent = store.upload("big", [memoryview(BODY)], CRC)
    assert sent.retries["SlowDown"] == 8
    assert budget.bound
    assert _whole(plain)
    now = time.monotonic()
    for second in range(120):
        budget.nbytes.take(1, now + second)
    assert not budget.bound


def test_a_hard_cap_holds_for_all_uploads_together(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, plane: str
) -> None:
    cap = 20 * MIB
    store = open_store(behind, Pacer(Budget(max_bytes_per_s=cap)))
    begun = time.monotonic()
    threads = [
        threading.Thread(target=store.upload, args=(f"big-{i}", [memoryview(BODY)], CRC))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    # The native client sends a part at once; the rate holds over several of them.
    assert took > (2 * len(BODY) - 17 * MIB) / cap - 0.5
    assert _whole(plain, "big-0")


def test_a_part_that_is_late_is_sent_a_second_time(
    behind: StoreConfig, plain: ObjectStore, proxy: FaultProxy, plane: str
) -> None:
    body = BODY * 6  # 13 parts: enough of them to know how long one takes
    rule = Rule(Delay(50.0), "UploadPart", skip=9)
    proxy.script(rule)
    sent = open_store(behind).upload("big", [memoryview(body)], crc64(body))
    assert rule.hits == 1
    # On a busy machine the server may close the slow line first.
    assert sent.hedges + sum(sent.retries.values()) >= 1
    assert sent.seconds < 50, "nobody waited for the slow one"
    info = plain.head("big")
    assert info is not None
    assert info.crc64 == crc64(body)
    assert plain.open_uploads("") == ()


def test_through_a_line_of_5_mb_s_everything_arrives(
    store: ObjectStore, plain: ObjectStore, proxy: FaultProxy
) -> None:
    body = BODY[: 17 * MIB]
    proxy.script(Rule(Throttle(5e6), times=10**6))
    sent = store.upload("big", [memoryview(body)], crc64(body))
    assert sent.gb_per_s < 0.011, "two connections"
    info = plain.head("big")
    assert info is not None
    assert info.crc64 == crc64(body)


def test_memory_does_not_grow_with_what_is_sent(
    behind: StoreConfig, direct: StoreConfig, plane: str
) -> None:
    store = open_store(direct)
    store.upload("warm", [memoryview(BODY)], CRC)
    pieces = [memoryview(BODY)] * 6
    most, over, before = [0], threading.Event(), _private_nbytes()

    def look() -> None:
        while not over.wait(0.01):
            most[0] = max(most[0], _private_nbytes() - before)

    looker = threading.Thread(target=look)
    looker.start()
    store.upload("big", pieces, combine([(CRC, len(BODY))] * 6))
    over.set()
    looker.join()
    assert most[0] < (16 * MIB if plane == "boto3" else 96 * MIB), "nothing, or its buffers"


def _private_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def test_a_jump_of_the_clock_changes_no_measured_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return real() + (3600 if calls[0] % 2 else -3600)

    monkeypatch.setattr("checkpointing.store.transfer.time.time", jumping)
    sent = store.upload("small", [memoryview(BODY[:1000])], crc64(BODY[:1000]))
    assert 0 < sent.seconds < 120

import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpointing.checksum import crc64
from checkpointing.errors import (
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    StoreError,
    StoreMissing,
    StoreUnavailable,
)
from checkpointing.store import data_plane
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.store.s3 import S3Store
from deploy.demo.s3_server import S3Server

MIB = 1 << 20


@pytest.fixture(
    params=[
        "directory",
        pytest.param("boto3", marks=pytest.mark.s3),
        pytest.param("awscrt", marks=pytest.mark.s3),
    ]
)
def config(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StoreConfig:
    if request.param == "directory":
        return StoreConfig(url=tmp_path.as_uri())
    monkeypatch.setenv(data_plane.VARIABLE, request.param)
    server = request.getfixturevalue("s3_server")
    return StoreConfig(
        url=f"{server.store_url}/{secrets.token_hex(4)}",
        endpoint_url=server.url,
        region="us-east-1",
    )


@pytest.fixture
def store(config: StoreConfig) -> ObjectStore:
    return open_store(config)


def test_what_was_put_is_what_get_returns(store: ObjectStore) -> None:
    assert store.put_if_absent("run/a.json", b"one")
    assert store.get("run/a.json") == b"one"


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    assert store.put_if_absent("run/empty", b"")
    assert store.get("run/empty") == b""
    info = store.head("run/empty")
    assert info is not None
    assert info.nbytes == 0


def test_a_second_put_changes_nothing_and_says_so(store: ObjectStore) -> None:
    assert store.put_if_absent("run/a", b"one")
    assert not store.put_if_absent("run/a", b"two")
    assert store.get("run/a") == b"one"


def test_of_racing_puts_exactly_one_wins(store: ObjectStore) -> None:
    bodies = [f"writer {i}".encode() for i in range(6)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        won = list(pool.map(lambda body: store.put_if_absent("run/race", body), bodies))
    assert won.count(True) == 1
    assert store.get("run/race") == bodies[won.index(True)]


def test_a_missing_object_is_told_from_a_silent_store(store: ObjectStore) -> None:
    assert store.head("run/none") is None
    with pytest.raises(ObjectMissing):
        store.get("run/none")
    with pytest.raises(ObjectMissing):
        store.read_into("run/none", 0, memoryview(bytearray(4)))


@pytest.mark.parametrize("nbytes", [0, 1, 5 * MIB + 3, 33 * MIB + 1])
def test_an_upload_is_the_concatenation_of_its_parts(store: ObjectStore, nbytes: int) -> None:
    body = secrets.token_bytes(nbytes)
    cut = nbytes // 3
    parts = [memoryview(body)[:cut], memoryview(b""), memoryview(body)[cut:]]
    store.upload("run/big.bin", parts, crc64(body))
    info = store.head("run/big.bin")
    assert info is not None
    assert info.nbytes == nbytes
    assert info.crc64 in (None, crc64(body))
    out = bytearray(nbytes)
    store.read_into("run/big.bin", 0, memoryview(out))
    assert out == body


@pytest.mark.parametrize("nbytes", [1000, 20 * MIB])
def test_the_same_upload_again_succeeds_and_another_is_a_conflict(
    store: ObjectStore, nbytes: int
) -> None:
    body = secrets.token_bytes(nbytes)
    store.upload("run/x.bin", [memoryview(body)], crc64(body))
    store.upload("run/x.bin", [memoryview(body)], crc64(body))
    other = secrets.token_bytes(nbytes)
    with pytest.raises(ObjectConflict):
        store.upload("run/x.bin", [memoryview(other)], crc64(other))
    out = bytearray(nbytes)
    store.read_into("run/x.bin", 0, memoryview(out))
    assert out == body


@pytest.mark.parametrize("nbytes", [1000, 20 * MIB])
def test_bytes_that_do_not_have_the_promised_crc_create_nothing(
    store: ObjectStore, nbytes: int
) -> None:
    body = secrets.token_bytes(nbytes)
    with pytest.raises(ObjectCorrupt):
        store.upload("run/x.bin", [memoryview(body)], crc64(body) ^ 1)
    assert store.head("run/x.bin") is None


def test_a_range_is_read_into_place(store: ObjectStore) -> None:
    store.put_if_absent("run/a", b"0123456789")
    out = bytearray(4)
    store.read_into("run/a", 3, memoryview(out))
    assert out == b"3456"
    store.read_into("run/a", 3, memoryview(bytearray(0)))


def test_a_range_past_the_end_is_corrupt(store: ObjectStore) -> None:
    store.put_if_absent("run/a", b"0123456789")
    for offset in (8, 20):
        with pytest.raises(ObjectCorrupt):
            store.read_into("run/a", offset, memoryview(bytearray(4)))


def test_list_returns_every_key_below_a_prefix_sorted(store: ObjectStore) -> None:
    for name in ("run/commits/step-2", "run/commits/step-1", "run/data/x", "other/commits/step-1"):
        store.put_if_absent(name, b"12")
    found = store.list("run/commits/")
    assert [info.key for info in found] == ["run/commits/step-1", "run/commits/step-2"]
    assert {info.nbytes for info in found} == {2}
    assert store.list("run/nothing/") == ()
    assert len(store.list("run/")) == 3


def test_delete_removes_and_is_silent_about_nothing(store: ObjectStore) -> None:
    store.put_if_absent("run/a", b"1")
    store.delete("run/a")
    store.delete("run/a")
    assert store.head("run/a") is None
    assert store.put_if_absent("run/a", b"2")


def test_a_probe_leaves_nothing_behind(store: ObjectStore) -> None:
    store.probe()
    assert store.list("") == ()


@pytest.mark.parametrize("nbytes", [0, 1000, 20 * MIB])
def test_an_upload_tells_what_it_did(store: ObjectStore, nbytes: int, config: StoreConfig) -> None:
    body = secrets.token_bytes(nbytes)
    sent = store.upload("run/x.bin", [memoryview(body)], crc64(body))
    assert sent.nbytes == nbytes
    assert sent.seconds > 0
    assert (sent.gb_per_s > 0) == (nbytes > 0)
    assert sent.retries == {}
    assert sent.plane == ("directory" if config.endpoint_url is None else data_plane_name())


def data_plane_name() -> str:
    return os.environ[data_plane.VARIABLE]


def test_an_upload_that_was_left_open_is_seen_and_aborted(
    store: ObjectStore, config: StoreConfig, tmp_path: Path
) -> None:
    body = secrets.token_bytes(1000)
    store.upload("run/whole", [memoryview(body)], crc64(body))
    assert store.open_uploads("run/") == ()
    begun = time.time()
    if isinstance(store, S3Store):
        store._s3.client().create_multipart_upload(
            Bucket=store._s3.bucket, Key=store._s3.key("run/half")
        )
    else:
        (tmp_path / "run" / f".tmp-half-{'0' * 16}").write_bytes(b"half")
    assert store.open_uploads("other/") == ()
    (left,) = store.open_uploads("run/")
    assert left.key == "run/half"
    assert abs(left.started_at - begun) < 60
    store.abort_upload(left)
    store.abort_upload(left)
    assert store.open_uploads("run/") == ()
    assert [info.key for info in store.list("run/")] == ["run/whole"]


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/../b", "a b", "a/", "ü"])
def test_unsafe_keys_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(StoreError):
        store.put_if_absent(key, b"")


def test_a_missing_place_is_told_with_its_name(config: StoreConfig) -> None:
    gone = StoreConfig(
        url=config.url.replace("everstep", "no-such-bucket")
        if config.endpoint_url
        else f"{config.url}/no-such-folder",
        endpoint_url=config.endpoint_url,
        region=config.region,
    )
    store = open_store(gone)
    with pytest.raises(StoreMissing, match="no-such"):
        store.probe()
    with pytest.raises(StoreMissing):
        store.list("run/commits/")


@pytest.mark.s3
def test_no_answer_is_unavailable_never_empty(s3_server: S3Server) -> None:
    with socket.socket() as reserved:  # bound and never listening: connects are refused
        reserved.bind(("127.0.0.1", 0))
        _assert_unavailable(f"http://127.0.0.1:{reserved.getsockname()[1]}")


def _assert_unavailable(endpoint_url: str) -> None:
    store = S3Store(bucket="b-b-b", endpoint_url=endpoint_url, attempts=2)
    for act in (lambda: store.list("run/"), lambda: store.head("a"), store.probe):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
            act()


@pytest.mark.s3
def test_an_unknown_data_plane_is_said(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(data_plane.VARIABLE, "carrier-pigeon")
    store = S3Store(bucket=s3_server.bucket, endpoint_url=s3_server.url, region="us-east-1")
    with pytest.raises(StoreError, match="write auto, boto3 or awscrt"):
        store.upload("x", [memoryview(b"1")], crc64(b"1"))


def test_a_cap_is_part_of_the_configuration() -> None:
    config = StoreConfig(url="file:///x", max_bytes_per_s=5e6)
    assert StoreConfig.from_json(config.to_json()) == config
    for wrong in ("0", "-1", "true", '"fast"', "NaN"):
        with pytest.raises(ValueError, match="max_bytes_per_s"):
            StoreConfig.from_json(f'{{"url": "file:///x", "max_bytes_per_s": {wrong}}}')

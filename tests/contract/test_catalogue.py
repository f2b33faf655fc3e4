"""Quarantine, deletion, sweep, verify and average do on S3 what they do on a folder."""

import secrets
import time
from pathlib import Path

import pytest

from checkpointing import keys
from checkpointing.averaging import average
from checkpointing.deletion import delete_commit, finish_deletions
from checkpointing.export import export_safetensors
from checkpointing.manifest import read_manifest
from checkpointing.quarantine import lift, list_quarantined, quarantine
from checkpointing.resolver import find_commit, list_commits
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.sweep import find_orphans, sweep
from checkpointing.verify import verify
from tests.unit.checkpointing.saved import save, upload


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        return open_store(StoreConfig(url=(tmp_path / "store").as_uri()))
    server = request.getfixturevalue("s3_server")
    return open_store(
        StoreConfig(
            url=f"{server.store_url}/{secrets.token_hex(4)}",
            endpoint_url=server.url,
            region="us-east-1",
        )
    )


def test_a_checkpoint_from_its_commit_to_its_deletion(store: ObjectStore, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(store, "run", step)
    found = list_commits(store, "run")
    assert [commit.place for commit in found] == [(15, 1), (10, 1), (5, 1)]
    assert all(abs(time.time() - (commit.committed_at or 0.0)) < 600 for commit in found)
    assert all(verify(store, commit).problems == () for commit in found)
    assert quarantine(store, "run", 15, 1, why="x", who="y")
    assert not quarantine(store, "run", 15, 1, why="x", who="y")
    assert [record.place for record in list_quarantined(store, "run")] == [(15, 1)]
    assert [commit.place for commit in list_commits(store, "run")] == [(10, 1), (5, 1)]
    assert save(store, "run", 15, 2).committed
    manifests = [read_manifest(store, commit.key) for commit in list_commits(store, "run")]
    made = average(store, "run", manifests, label="a")
    assert verify(store, find_commit(store, made.run, 15)).problems == ()
    assert export_safetensors(store, manifests[0], tmp_path / "out").tensors == 4
    assert lift(store, "run", 15, 1)
    assert delete_commit(store, "run", 15, 1) > 0
    assert finish_deletions(store, "run") == ()
    assert not store.list(keys.data_prefix("run", 15, 1))
    assert store.list("run/deleting/") == ()
    assert [commit.place for commit in list_commits(store, "run")] == [(15, 2), (10, 1), (5, 1)]


def test_orphans_are_found_by_the_clock_of_the_store(store: ObjectStore) -> None:
    upload(store, "run", 3)
    time.sleep(1.1)  # clocks of stores tell whole seconds
    save(store, "run", 9)
    now = time.time()
    assert find_orphans(store, "run", now).orphans == ()
    plan = find_orphans(store, "run", now + 90_000)
    assert [orphan.place for orphan in plan.orphans] == [(3, 1)]
    assert sweep(store, "run", plan) > 0
    assert not store.list(keys.data_prefix("run", 3, 1))


@pytest.mark.s3
def test_an_upload_that_was_left_open_is_aborted(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    import boto3

    server = request.getfixturevalue("s3_server")
    prefix = secrets.token_hex(4)
    config = StoreConfig(
        url=f"{server.store_url}/{prefix}", endpoint_url=server.url, region="us-east-1"
    )
    store = open_store(config)
    bucket = server.store_url.removeprefix("s3://").partition("/")[0]
    path = config.url.removeprefix(f"s3://{bucket}/")
    client = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
    for run in ("run", "run2"):
        key = f"{path}/{keys.data_key(run, 3, 1, 0)}"
        client.create_multipart_upload(Bucket=bucket, Key=key)
    time.sleep(1.1)
    save(store, "run", 9)
    assert find_orphans(store, "run", time.time()).uploads == ()
    plan = find_orphans(store, "run", time.time() + 90_000)
    assert [upload.key for upload in plan.uploads] == [keys.data_key("run", 3, 1, 0)]
    sweep(store, "run", plan)
    assert store.open_uploads("run/") == ()
    assert len(store.open_uploads("run2/")) == 1

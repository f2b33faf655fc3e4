import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpointing import checksum
from checkpointing.errors import ObjectCorrupt, StoreMissing
from checkpointing.store.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    root = tmp_path / "store"
    root.mkdir()
    return DirectoryStore(root)


def test_bytes_that_change_while_they_are_written_create_nothing(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = bytearray(b"a" * 5000)
    real = Path.open

    def late(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name.startswith(".tmp-"):
            memory[:] = b"b" * 5000  # another save takes the slot
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", late)
    with pytest.raises(ObjectCorrupt, match="not those that were promised"):
        store.upload("x/data", [memoryview(memory)], checksum.crc64(bytes(memory)))
    assert store.list("") == ()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_what_a_killed_uploader_left_is_swept_by_the_next(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"a" * 5000

    def upload(key: str) -> None:
        store.upload(key, [memoryview(body)], checksum.crc64(body))

    with monkeypatch.context() as killed:
        killed.setattr(Path, "hardlink_to", lambda *_: None)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        upload("x/data")
        upload("x/data-2")
    folder = tmp_path / "store" / "x"
    assert len(list(folder.glob(".tmp-*"))) == 2
    upload("x/data")
    assert len(list(folder.glob(".tmp-data-2-*"))) == 1, "which may be another's, at work"
    upload("x/data-2")
    assert sorted(path.name for path in folder.iterdir()) == ["data", "data-2"]


def test_an_object_deleted_while_others_are_listed_is_left_out(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("c/a", "c/b"):
        store.put_if_absent(key, b"x")
    real = os.walk

    def slow(*arguments: Any, **named: Any) -> Any:
        for found in real(*arguments, **named):
            store.delete("c/a")
            yield found

    monkeypatch.setattr(os, "walk", slow)
    assert [info.key for info in store.list("c/")] == ["c/b"]


def test_a_folder_that_goes_while_it_is_listed_is_not_an_empty_one(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_if_absent("c/a", b"x")
    real = os.walk

    def gone(*arguments: Any, **named: Any) -> Any:
        shutil.rmtree(tmp_path / "store")
        return real(*arguments, **named)

    monkeypatch.setattr(os, "walk", gone)
    with pytest.raises(StoreMissing):
        store.list("c/")

"""Watched folders where something beside the trainer goes wrong: disks, deaths, long uploads."""

import os
from pathlib import Path

import pytest

from checkpointing.watched import attempts

SMALL = {"model.bin": b"m" * 5000, "sub/rng.bin": b"r" * 17, "empty": b""}


def test_an_attempt_after_a_torn_line_is_known(tmp_path: Path) -> None:
    path = tmp_path / "attempts"
    attempts.note(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"attempt": 2, "nod')
    attempts.note(path, 3, 2)
    assert [one.number for one in attempts.read(path)] == [1, 3]


def test_an_attempt_that_cannot_be_noted_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, bytes(data)[:7]) and 7)
    attempts.note(tmp_path / "attempts", 1, 2)
    assert [one.number for one in attempts.read(tmp_path / "attempts")] == [1]

"""What comes on standard input: the token, orders, nonsense, an end."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpointing.replicas import orders
from checkpointing.replicas.node import Node, Setting
from checkpointing.replicas.orders import Orders

TOKEN = b"a token of this run"


def given(*chunks: bytes) -> Orders:
    """Orders that come from a pipe which ends then."""
    reading, writing = os.pipe()
    for chunk in chunks:
        os.write(writing, chunk)
    os.close(writing)
    return Orders(reading)


def followed(found: Orders) -> list[bytes]:
    lines: list[bytes] = []
    stop = threading.Event()
    found.follow(lines.append, stop)
    assert stop.is_set()
    return lines


def test_the_first_line_is_the_token_and_the_others_are_orders() -> None:
    found = given(TOKEN + b"\n{}\n", b'\n{"do":', b'"clear"}\n', b"half a line")
    assert found.token() == TOKEN
    assert followed(found) == [b"{}", b'{"do":"clear"}']


@pytest.mark.parametrize("sent", [b"", TOKEN, b"\n", b"short\n"])
def test_without_a_token_there_is_no_start(sent: bytes) -> None:
    with pytest.raises(ValueError, match="token"):
        given(sent).token()


def test_a_token_that_does_not_come_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orders, "_TOKEN_S", 0.05)
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="no token came"):
        Orders(reading).token()
    os.close(reading)
    os.close(writing)


def test_a_line_without_an_end_is_an_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, TOKEN + b"\n")
    found = Orders(reading)
    found.token()
    filler = threading.Thread(target=os.write, args=(writing, b"x" * (100 << 10)))
    filler.start()
    assert followed(found) == []
    assert os.read(reading, 1) == b"x"  # the rest of it was not even read
    while filler.is_alive():
        os.read(reading, 1 << 16)
        filler.join(0.01)
    os.close(reading)
    os.close(writing)


def test_orders_that_are_none_are_told_and_a_disk_that_is_none_is_done_without(
    tmp_path: Path,
) -> None:
    said: list[Mapping[str, Any]] = []

    def emit(event: Mapping[str, Any]) -> bool:
        said.append(event)
        return True

    (tmp_path / "disk").write_bytes(b"no folder")
    setting = Setting(folder=tmp_path, run="r", host="127.0.0.1", disk=tmp_path / "disk")
    node = Node(setting, TOKEN, emit)
    nonsense = [
        b"{",
        b"[]",
        b"{}",
        b'{"do":"buddy","address":"nowhere"}',
        b'{"do":"buddy","address":7}',
        b'{"do":"fetch"}',
        b'{"do":"give_up"}',
        b'{"do":["clear"]}',
    ]
    for line in nonsense:
        node.obey(line)
    assert [event["event"] for event in said] == ["refused"] * len(nonsense)
    node.obey(b'{"do":"buddy","address":null}')
    node.obey(b'{"do":"give_up","id":3}')
    node.obey(b'{"do":"clear"}')
    assert len(said) == len(nonsense)
    stop = threading.Event()
    stop.set()
    node.run(stop)
    assert [event["event"] for event in said[len(nonsense) :]] == ["listening", "held"]

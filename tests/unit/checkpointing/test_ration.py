"""Two processes that send keep to one limit together."""

import math
from pathlib import Path

import pytest

from checkpointing.store.budget import Budget
from checkpointing.store.pace import Pacer
from checkpointing.store.ration import Ration

MB = 1_000_000


def test_who_shares_a_file_shares_its_limit(tmp_path: Path) -> None:
    now = 100.0
    one, two = (Ration(tmp_path / "budget", 10 * MB, lambda: now) for _ in range(2))
    waits = [who.take(5 * MB) for who in (one, two, one, two)]
    # A quarter of a second is saved up from the time in which nobody sent.
    assert waits == pytest.approx([0.0, 0.25, 0.75, 1.25])
    now = 200.0
    assert two.take(MB) == 0.0


@pytest.mark.parametrize("raw", [b"", b"short", b"\xff" * 8, b"\0" * 6 + b"\xf0\x7f"])
def test_a_file_with_anything_in_it_holds_nobody_up(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "budget").write_bytes(raw)
    ration = Ration(tmp_path / "budget", MB, lambda: 50.0)
    assert ration.take(MB) == 0.0
    assert math.isfinite(ration.take(MB))


def test_a_pacer_waits_for_the_stricter_of_both(tmp_path: Path) -> None:
    slept: list[float] = []
    ration = Ration(tmp_path / "budget", MB, lambda: 50.0)
    pacer = Pacer(Budget(max_bytes_per_s=100 * MB), lambda: 50.0, slept.append, ration)
    pacer.nbytes(MB)
    pacer.nbytes(MB)
    assert slept == pytest.approx([0.75])

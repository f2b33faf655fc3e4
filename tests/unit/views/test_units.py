import pytest

from orchestrator.views import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0 s"),
        (0.042, "42 ms"),
        (0.0999, "0.10 s"),
        (0.42, "0.42 s"),
        (0.999, "1.0 s"),
        (9.99, "10 s"),
        (59.7, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.9, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (86_399, "1 d 00 h"),
        (200_000, "2 d 08 h"),
    ],
)
def test_durations_read_well_and_never_say_sixty(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


def test_runs_of_ranks_are_shortened() -> None:
    assert units.ranks((0, 1, 2, 3, 8)) == "ranks 0-3, 8"
    assert units.ranks((5,)) == "rank 5"


def test_sizes_are_binary() -> None:
    assert units.size(14_000_000) == "13.4 MiB"
    assert units.size(12) == "12 B"


def test_rates_and_numbers() -> None:
    assert units.rate(61_234.0) == "61.2k/s"
    assert units.number(None) == "-"
    assert units.percent(0.639) == "63.9%"
    assert units.count(1, "node") == "1 node"

import pytest

from deploy.devcluster.errors import UsageError
from deploy.devcluster.traffic import drop_rules, qdisc


def test_a_rate_alone_needs_no_netem() -> None:
    assert qdisc("5mbit", None)[:3] == ("tbf", "rate", "5mbit")


def test_a_delay_goes_with_the_rate_into_netem() -> None:
    assert qdisc("1gbit", "20ms") == ("netem", "rate", "1gbit", "delay", "20ms")


@pytest.mark.parametrize(("rate", "least_bytes"), [("8kbit", 4000), ("1gbit", 1_250_000)])
def test_the_burst_lets_the_rate_be_reached(rate: str, least_bytes: int) -> None:
    words = qdisc(rate, None)
    assert int(words[words.index("burst") + 1]) >= least_bytes


@pytest.mark.parametrize("rate", ["", "fast", "0mbit", "5", "-1mbit", "5 mbit"])
def test_a_rate_that_tc_would_misread_is_refused(rate: str) -> None:
    with pytest.raises(UsageError, match="--rate"):
        qdisc(rate, None)


def test_a_delay_without_a_unit_is_refused() -> None:
    with pytest.raises(UsageError, match="--delay"):
        qdisc("5mbit", "20")


def test_a_port_is_dropped_in_both_directions_on_both_sides() -> None:
    rules = [line for line in drop_rules("node3", 5000, 100).splitlines() if "add rule" in line]
    assert len(rules) == 4
    assert sum('iifname "node3"' in rule for rule in rules) == 2
    assert sum("sport 5000" in rule for rule in rules) == 2
    assert not any("numgen" in rule for rule in rules)


def test_a_lossy_cable_drops_by_chance_whatever_the_port() -> None:
    rules = [line for line in drop_rules("node3", None, 30).splitlines() if "add rule" in line]
    assert len(rules) == 2
    assert all("numgen random mod 100 < 30" in rule and "port" not in rule for rule in rules)


@pytest.mark.parametrize(
    ("port", "percent", "option"),
    [(0, 100, "--port"), (70000, 100, "--port"), (80, 0, "--percent"), (80, 101, "--percent")],
)
def test_numbers_that_cannot_be_are_refused(port: int, percent: int, option: str) -> None:
    with pytest.raises(UsageError, match=option):
        drop_rules("node1", port, percent)

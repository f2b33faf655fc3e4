"""Which nodes are excluded, by whom, until when, and when the breaker opens."""

from math import inf

from orchestrator.core.ledger import (
    Entry,
    NodeExcluded,
    NodeIncident,
    NodeIncluded,
    as_event,
    excluded,
    excluded_by_runs,
    history,
    is_breaker_open,
    nodes,
)

DAY = 86_400.0


def incident(
    node: str = "a", at: float = 100.0, excluded_s: float = 0.0, number: int = 1, run: str = "moe"
) -> NodeIncident:
    return NodeIncident(
        at=at,
        node=node,
        run=run,
        incident=number,
        fault="gpu",
        cause="Xid 79",
        excluded_s=excluded_s,
    )


def by_person(node: str = "a", at: float = 100.0, until: float = inf) -> NodeExcluded:
    return NodeExcluded(at=at, node=node, by="ada", why="fan broken", until=until)


def include(node: str = "a", at: float = 100.0) -> NodeIncluded:
    return NodeIncluded(at=at, node=node, by="bob")


def until(*entries: Entry, now: float = 200.0) -> float | None:
    """Until when node `a` is excluded, None when it is not."""
    exclusion = excluded(entries, now).get("a")
    return exclusion.until if exclusion else None


def test_an_incident_alone_excludes_nothing() -> None:
    assert until(incident()) is None


def test_a_runs_exclusion_ends_by_itself() -> None:
    entry = incident(excluded_s=50.0)
    assert until(entry, now=149.9) == 150.0
    assert until(entry, now=150.0) is None


def test_a_persons_exclusion_lasts_until_included_or_as_long_as_said() -> None:
    assert until(by_person(), now=1e12) == inf
    assert until(by_person(until=150.0), now=149.0) == 150.0
    assert until(by_person(until=150.0), now=150.0) is None
    assert until(by_person(), include()) is None


def test_an_include_ends_everything_before_it_and_nothing_after_it() -> None:
    before = (incident(excluded_s=DAY), by_person(), incident(excluded_s=inf, number=2))
    assert until(*before, include()) is None
    assert until(include(), incident(excluded_s=DAY)) == 100.0 + DAY


def test_the_order_of_writing_counts_and_not_the_clocks_of_the_writers() -> None:
    assert until(by_person(at=900.0), include(at=100.0)) is None
    assert until(include(at=900.0), by_person(at=100.0)) == inf


def test_a_person_replaces_what_was_said_before_also_by_a_shorter_time() -> None:
    assert until(by_person(), by_person(until=300.0)) == 300.0
    assert until(incident(excluded_s=DAY), by_person(until=300.0)) == 300.0


def test_a_run_never_shortens_an_exclusion() -> None:
    assert until(by_person(), incident(excluded_s=DAY)) == inf
    assert until(incident(excluded_s=DAY), incident(excluded_s=150.0, run="other")) == 100.0 + DAY
    assert until(incident(excluded_s=150.0), incident(excluded_s=DAY)) == 100.0 + DAY
    assert until(by_person(until=300.0), incident()) == 300.0


def test_an_exclusion_says_who_why_and_on_what_evidence() -> None:
    forgotten, first, second = (incident(number=n, excluded_s=DAY * (n == 3)) for n in (1, 2, 3))
    entries = [forgotten, include(), first, incident("b"), second]
    found = excluded(entries, 200.0)["a"]
    assert (found.who, found.why) == ("run moe", "gpu, incident 3: Xid 79")
    assert found.evidence == (first, second)
    found = excluded([*entries, by_person()], 200.0)["a"]
    assert (found.who, found.why, found.evidence) == ("ada", "fan broken", (first, second))


def test_the_history_of_a_node_is_all_that_was_written_about_it() -> None:
    entries = [incident("b"), incident(), include("b"), by_person()]
    assert history(entries, "b") == (entries[0], entries[2])
    assert nodes(entries) == ("a", "b")


def test_the_same_node_counts_once_for_the_breaker() -> None:
    entries = [incident(excluded_s=DAY, number=n, at=100.0 + n) for n in range(3)]
    assert excluded_by_runs(entries, 200.0, DAY) == {"a": entries[-1]}
    assert not is_breaker_open(entries, 200.0, DAY, 2)


def test_the_breaker_opens_at_its_limit_and_closes_when_the_window_has_passed() -> None:
    entries = [incident(f"n{k}", excluded_s=60.0, at=100.0 + k) for k in range(5)]
    assert not is_breaker_open(entries[:4], 200.0, DAY, 5)
    assert is_breaker_open(entries, 200.0, DAY, 5)
    assert is_breaker_open(entries, 100.0 + DAY - 1, DAY, 5), "though no exclusion is in force"
    assert not is_breaker_open(entries, 100.0 + DAY, DAY, 5)


def test_a_limit_of_zero_lets_runs_exclude_nothing() -> None:
    assert is_breaker_open([], 200.0, DAY, 0)


def test_what_a_person_says_of_a_node_takes_it_out_of_the_breaker() -> None:
    runs = [incident("a", excluded_s=DAY), incident("b", excluded_s=DAY)]
    assert list(excluded_by_runs([*runs, by_person("c")], 200.0, DAY)) == ["a", "b"]
    assert list(excluded_by_runs([*runs, include("a")], 200.0, DAY)) == ["b"]
    assert list(excluded_by_runs([*runs, by_person("a")], 200.0, DAY)) == ["b"]


def test_a_run_is_told_the_same_as_long_as_nothing_changes_or_ends() -> None:
    entries = [incident(excluded_s=150.0), incident("b", excluded_s=DAY), by_person("c")]
    first = as_event(entries, 200.0, DAY)
    assert first.excluded["c"] == "ada: fan broken"
    assert first.excluded["b"] == "run moe: gpu, incident 1: Xid 79"
    assert first.excluded_lately == 2
    assert as_event(entries, 249.0, DAY) == first
    assert list(as_event(entries, 250.0, DAY).excluded) == ["b", "c"]

"""What holds for any ledger, whoever wrote what in which order."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.ledger import (
    Entry,
    NodeExcluded,
    NodeIncident,
    NodeIncluded,
    excluded,
    excluded_by_runs,
    history,
)
from orchestrator.ledger import TEXT_MAX, Ledger

times = st.floats(0, 1e10)
names = st.sampled_from(["n1", "n2", "n3"])
texts = st.text(max_size=TEXT_MAX)
excludes = st.builds(
    NodeExcluded, at=times, node=names, by=texts, why=texts, until=times | st.just(float("inf"))
)
includes = st.builds(NodeIncluded, at=times, node=names, by=texts, why=texts)
incidents = st.builds(
    NodeIncident,
    at=times,
    node=names,
    run=st.sampled_from(["r1", "r2"]),
    incident=st.integers(1, 10**6),
    fault=texts,
    cause=texts,
    excluded_s=st.just(0.0) | times,
)
entries_lists = st.lists(excludes | includes | incidents, max_size=12)


def once(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out an incident that was there already."""
    seen: set[object] = set()
    kept: list[Entry] = []
    for entry in entries:
        if isinstance(entry, NodeIncident):
            key = (entry.run, entry.incident, entry.node, entry.at)
            if key in seen:
                continue
            seen.add(key)
        kept.append(entry)
    return kept


@given(entries_lists)
@settings(max_examples=60, deadline=None)
def test_entries_are_read_in_the_order_in_which_they_were_written(entries: list[Entry]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = (Ledger(Path(folder) / "ledger") for _ in range(2))
        for k, entry in enumerate(entries):
            writer.note(entry)
            if k % 3 == 0:
                assert list(reader.entries()) == once(entries[: k + 1])
        for ledger in (writer, reader, Ledger(writer.path)):
            assert list(ledger.entries()) == once(entries)
            assert ledger.skipped == 0


@given(entries_lists, times, times)
def test_what_has_ended_stays_ended(entries: list[Entry], one: float, other: float) -> None:
    early, late = sorted((one, other))
    before, after = excluded(entries, early), excluded(entries, late)
    assert after.items() <= before.items()
    assert all(exclusion.until > late for exclusion in after.values())
    lately = excluded_by_runs(entries, late, 1e9)
    assert lately.keys() <= excluded_by_runs(entries, early, 1e9).keys()


@given(entries_lists, includes, times)
def test_an_include_wins_over_all_that_came_before(
    entries: list[Entry], include: NodeIncluded, now: float
) -> None:
    before, after = excluded(entries, now), excluded([*entries, include], now)
    assert after == {node: x for node, x in before.items() if node != include.node}
    assert include.node not in excluded_by_runs([*entries, include], now, 1e10)


@given(entries_lists, excludes, times)
def test_a_persons_exclude_says_until_when(
    entries: list[Entry], exclude: NodeExcluded, now: float
) -> None:
    found = excluded([*entries, exclude], now).get(exclude.node)
    assert (found is None) == (exclude.until <= now)
    assert found is None or (found.until, found.who) == (exclude.until, exclude.by)


@given(entries_lists, incidents, times)
def test_an_incident_never_shortens_an_exclusion(
    entries: list[Entry], incident: NodeIncident, now: float
) -> None:
    before, after = excluded(entries, now), excluded([*entries, incident], now)
    assert before.keys() <= after.keys()
    assert all(after[node].until >= x.until for node, x in before.items())


@given(entries_lists, st.randoms(use_true_random=False), times)
def test_how_entries_of_different_nodes_interleave_changes_nothing(
    entries: list[Entry], random, now: float
) -> None:
    queues = {node: list(history(entries, node)) for node in ("n1", "n2", "n3")}
    shuffled = []
    while left := sorted(node for node, queue in queues.items() if queue):
        shuffled.append(queues[random.choice(left)].pop(0))
    assert excluded(shuffled, now) == excluded(entries, now)
    assert excluded_by_runs(shuffled, now, 1e6) == excluded_by_runs(entries, now, 1e6)

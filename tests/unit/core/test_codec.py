"""Events to JSON values and back."""

import dataclasses
import json
import math
import typing
from enum import StrEnum
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Action, Decision, Finish, Outcome, StartRanks
from orchestrator.core.codec import CodecError, decode_event, decode_record, encode
from orchestrator.core.policy import Policy
from orchestrator.core.record import Origin, Record

KINDS = get_args(ev.Event)


def sample(hint: Any, full: bool) -> Any:
    """A value of a type, with optional parts present or absent."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if type(None) in args:
            return sample(args[0], full) if full else None
        return sample(args[0], full)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return (sample(args[0], full), sample(args[0], full)) if full else ()
        return tuple(sample(arg, full) for arg in args)
    if origin is dict:
        return {"k": sample(args[1], full)} if full else {}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: sample(kind, full) for name, kind in hints.items()})  # type: ignore[operator]
    if issubclass(hint, StrEnum):
        return list(hint)[-1]
    plain = {str: 'a "quoted"\nline \x1b \udc80 \u2028', int: 2**64 - 1, float: 0.1, bool: True}
    return plain[hint]


def again(value: Any) -> Any:
    """What a reader gets from the text that a writer wrote."""
    return json.loads(json.dumps(encode(value), allow_nan=False))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_comes_back_as_it_was(kind: type, full: bool) -> None:
    event = sample(kind, full)
    assert decode_event(again(event)) == event


@pytest.mark.parametrize("kind", get_args(Action), ids=lambda kind: kind.__name__)
def test_every_action_comes_back_as_it_was(kind: type) -> None:
    decision = Decision(key="k", rule="r", action=sample(kind, True), reason="x", evidence=(1, 2))
    event = ev.DecisionMade(decision=decision)
    assert decode_event(again(event)) == event


def test_a_record_comes_back_with_its_origin() -> None:
    record = Record(
        seq=1,
        at=1.5,
        epoch=2,
        event=ev.OperatorSaid(what="stop"),
        origin=Origin(node="n1", incarnation="i", n=3),
    )
    assert decode_record(again(record)) == record


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e-300, 5])
def test_every_number_comes_back_also_those_that_json_lacks(value: float) -> None:
    event = ev.AgentLost(node="n", incarnation="i", why="w", silent_s=value)
    found = decode_event(again(event))
    assert isinstance(found, ev.AgentLost)
    assert isinstance(found.silent_s, float)
    assert found.silent_s == value or (value != value and found.silent_s != found.silent_s)


def test_a_policy_without_limits_comes_back() -> None:
    event = ev.PolicySet(policy=Policy(budget={"node": 3}, max_lost_work_s=math.inf))
    assert decode_event(again(event)) == event


def test_what_has_a_default_may_be_missing_in_an_older_journal() -> None:
    value = again(ev.AgentJoined(node="n", incarnation="i", address="a", metrics_url="u"))
    del value["attempt"]
    del value["staged"]
    assert decode_event(value) == ev.AgentJoined(
        node="n", incarnation="i", address="a", metrics_url="u"
    )


def changed(event: ev.Event, **changes: Any) -> Any:
    return {**again(event), **changes}


STOP = ev.OperatorSaid(what="stop")
LOST = ev.AgentLost(node="n", incarnation="i", why="w", silent_s=1.0)
READ = ev.CatalogueRead(commits=((1, 2),))
MADE = ev.DecisionMade(
    decision=Decision(key="k", rule="r", action=Finish(outcome=Outcome.FAILED), reason="x")
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (changed(STOP, what=3), "event.what: expected str"),
        (changed(STOP, extra=1), "no unknown keys"),
        (changed(STOP, **{"is": "Nonsense"}), "unknown kind 'Nonsense'"),
        (changed(STOP, **{"is": ["OperatorSaid"]}), "unknown kind"),
        ({"is": "OperatorSaid"}, "what"),
        ({"what": "stop"}, "a tagged object"),
        ("stop", "a tagged object"),
        (None, "a tagged object"),
        (changed(LOST, silent_s="1"), "event.silent_s: expected float"),
        (changed(LOST, silent_s=True), "event.silent_s: expected float"),
        (changed(LOST, silent_s=10**400), "event.silent_s"),
        (changed(READ, commits=5), "event.commits: expected a list"),
        (changed(READ, commits=[[1]]), "event.commits[0]: expected 2 items"),
        (changed(READ, commits=[[1, True]]), "event.commits[0][1]: expected int"),
        (changed(READ, commits=[[1, 2.0]]), "event.commits[0][1]: expected int"),
        (changed(MADE, decision=None), "event.decision: expected an object"),
        (changed(MADE, decision=again(STOP)), "event.decision: expected Decision"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(value: Any, words: str) -> None:
    with pytest.raises(CodecError) as caught:
        decode_event(value)
    assert words in str(caught.value)


@pytest.mark.parametrize("word", ["later", 3, None, [], {}])
def test_an_unknown_word_of_an_enumeration_is_refused(word: Any) -> None:
    value = again(MADE)
    value["decision"]["action"]["outcome"] = word
    with pytest.raises(CodecError, match=r"action\.outcome: expected one of"):
        decode_event(value)


def test_an_absent_restore_is_none_and_not_missing() -> None:
    action = StartRanks(attempt=1, nodes=("n",), ranks_per_node=1, restore=None, interval_steps=10)
    event = ev.DecisionMade(decision=Decision(key="k", rule="r", action=action, reason="x"))
    value = again(event)
    assert value["decision"]["action"]["restore"] is None
    del value["decision"]["action"]["restore"]
    with pytest.raises(CodecError, match="restore"):
        decode_event(value)

"""Any event survives the journal; nothing else gets in."""

import json
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.codec import CodecError, decode_event, decode_record, encode
from orchestrator.core.events import Event
from orchestrator.core.record import Record
from orchestrator.supervisor.journal import parse, render

events = st.one_of(*(st.from_type(kind) for kind in get_args(Event)))
records = st.builds(Record, event=events, seq=st.integers(1), at=st.floats(0, 1e12))
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
json_values = st.recursive(
    leaves | st.sampled_from([{"is": kind.__name__} for kind in get_args(Event)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def text_of(value: Any) -> str:
    return json.dumps(encode(value), allow_nan=False, sort_keys=True)


@given(records)
@settings(max_examples=300, deadline=None)
def test_any_record_comes_back_from_its_line(record: Record) -> None:
    line = render(record)
    assert line.count(b"\n") == 1
    assert text_of(parse(line)) == text_of(record)


@given(json_values)
@settings(max_examples=300, deadline=None)
def test_any_other_value_is_refused_with_a_codec_error(value: Any) -> None:
    for decode in (decode_event, decode_record):
        try:
            found = decode(value)
        except CodecError:
            continue
        assert isinstance(found, (*get_args(Event), Record))


@given(events, st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_field_is_refused_or_fits_its_type(event: Event, data: st.DataObject) -> None:
    value = encode(event)
    field = data.draw(st.sampled_from(sorted(value)))
    value[field] = data.draw(json_values)
    try:
        found = decode_event(value)
    except CodecError:
        return
    assert text_of(decode_event(json.loads(text_of(found)))) == text_of(found)

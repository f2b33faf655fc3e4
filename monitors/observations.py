"""Readings with four values: ok, bad, unknown (asked, no answer) and not measured.

A question that got no answer is not an answer. `Unknown` and `NotMeasured` carry no value on
purpose: code that wants a number has to say what it does without one, so an outage can never turn
into zero, into "healthy" or into an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok(Generic[T]):
    """The source answered and nothing is wrong with the answer.

    Attributes:
        value: The reading, in base units (seconds, bytes, ratio 0..1, watts, celsius).
        source: Who said so, for a person: `nvml`, `squeue`, `agent n1`.
        at: Unix seconds at which the source was asked.
    """

    value: T
    source: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad(Generic[T]):
    """The source answered and the answer is judged to be a fault.

    Attributes:
        value: The reading that was judged.
        why: One line that says which limit it broke.
        source: Who said so.
        at: Unix seconds at which the source was asked.
    """

    value: T
    why: str
    source: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The source was asked and gave no usable answer.

    Attributes:
        why: One line that says what went wrong with the question.
        source: Who was asked.
        at: Unix seconds at which the source was asked.
    """

    why: str
    source: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """Nobody asked, because there is nothing to ask: no driver, no exporter, not configured.

    Attributes:
        why: One line that says what is not there.
        source: Who would have been asked.
        at: Unix seconds at which this was found.
    """

    why: str
    source: str
    at: float


# A judged reading may be Bad; a plain reading never is.
Observation: TypeAlias = Ok[T] | Unknown | NotMeasured
Judged: TypeAlias = Ok[T] | Bad[T] | Unknown | NotMeasured


def value_or(observation: Ok[T] | Bad[T] | Unknown | NotMeasured, missing: U) -> T | U:
    """Return the value that was read, or `missing` when there is none.

    `missing` has no default: the caller decides what an absent reading means.
    """
    if isinstance(observation, Ok | Bad):
        return observation.value
    return missing


def map_ok(observation: Observation[T], change: Callable[[T], U]) -> Observation[U]:
    """Apply `change` to the value of an `Ok`; anything else passes through as it is."""
    if isinstance(observation, Ok):
        return Ok(value=change(observation.value), source=observation.source, at=observation.at)
    return observation


def age_s(observation: Ok[T] | Bad[T] | Unknown | NotMeasured, now: float) -> float:
    """Return the seconds since the source was asked, never below zero (clocks step back)."""
    return max(0.0, now - observation.at)

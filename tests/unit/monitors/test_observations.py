from __future__ import annotations

import subprocess
import sys

import pytest

from monitors.faults import CLASS_OF, FaultKind
from monitors.observations import Bad, NotMeasured, Ok, Unknown, age_s, map_ok, value_or


def test_a_reading_without_a_value_gives_what_the_caller_chose() -> None:
    assert value_or(Ok(value=3, source="s", at=1.0), None) == 3
    assert value_or(Bad(value=4, why="w", source="s", at=1.0), None) == 4
    assert value_or(Unknown(why="w", source="s", at=1.0), None) is None
    assert value_or(NotMeasured(why="w", source="s", at=1.0), -1) == -1


def test_only_a_good_value_is_changed() -> None:
    unknown = Unknown(why="w", source="s", at=1.0)
    assert map_ok(unknown, str) is unknown
    assert map_ok(Ok(value=3, source="s", at=1.0), str) == Ok(value="3", source="s", at=1.0)


def test_an_age_is_never_negative() -> None:
    reading = Ok(value=3, source="s", at=10.0)
    assert age_s(reading, 12.5) == 2.5
    assert age_s(reading, 9.0) == 0.0


def test_every_fault_has_a_class() -> None:
    assert set(CLASS_OF) == set(FaultKind)


@pytest.mark.parametrize("module", ["monitors.observations", "monitors.faults"])
def test_what_the_core_imports_is_the_standard_library_alone(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('pydantic', 'prometheus_client', 'pynvml', 'tenacity', 'numpy', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"

from __future__ import annotations

from pathlib import Path

from monitors.host import read_host
from monitors.observations import Ok, Unknown


def test_this_machine_has_memory() -> None:
    host = read_host()
    assert isinstance(host, Ok)
    assert 0 < host.value.memory_available_bytes <= host.value.memory_total_bytes


def test_without_procfs_the_host_is_unknown(tmp_path: Path) -> None:
    host = read_host(proc=tmp_path, clock=lambda: 3.0)
    assert isinstance(host, Unknown)
    assert host.at == 3.0


def test_a_field_that_is_missing_is_unknown_and_not_zero(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.5 0.4 0.3 1/100 1\n")
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\n")
    assert isinstance(read_host(proc=tmp_path), Unknown)

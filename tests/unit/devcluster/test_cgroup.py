from pathlib import Path

import pytest

from deploy.devcluster.cgroup import Controller, parse

V1 = """\
28 21 0:24 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
29 28 0:25 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct
30 28 0:26 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
31 28 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_both_versions_are_found_where_they_are_mounted() -> None:
    assert parse(V1) == (Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup/unified"))
    assert parse(V2) == (None, Path("/sys/fs/cgroup"))
    assert parse("") == (None, None)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("cpus", [None, 0.25, 3.0])
def test_a_quota_reads_back_as_it_was_written(version: int, cpus: float | None) -> None:
    controller = Controller(mount=Path("/c"), version=version)
    assert controller.cpus(controller.quota(cpus)) == cpus


def test_no_quota_is_below_what_the_kernel_accepts() -> None:
    assert Controller(mount=Path("/c"), version=1).quota(0.000001) == "1000"

"""What the demo prints at its end, on a narrow and on a wide terminal."""

import io

import pytest
from rich.console import Console

from deploy.demo import screen
from orchestrator.views.incidents import PHASES

ROW = {
    "blow": "rank 1 got SIGKILL",
    "cause": "rank 1 on node0 after step 65: killed by SIGKILL",
    "decision": "restart in place",
    "reason": "rank 1 on node0 after step 65: killed by SIGKILL; restart on the same nodes",
    "steps_lost": 5,
    "phases": {name: 1.25 for name, _ in PHASES} | {"restore_s": None},
}


def console(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), highlight=False, force_terminal=False)


@pytest.mark.parametrize("width", [80, 139, 140, 160])
def test_the_incidents_can_be_read_at_any_width(width: int) -> None:
    to = console(width)
    screen.show_incidents(to, [ROW])
    shown = to.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for words in ("rank 1 got SIGKILL", "killed by SIGKILL", "restart in place", "1.25"):
        assert words in shown


def test_the_sums_are_whole_and_below_each_other_in_80_columns() -> None:
    to = console(80)
    parts = {"weights": "a" * 64, "optimizer": "b" * 64, "all": "c" * 64}
    assert screen.show_sums(to, {"broken": parts, "undisturbed": parts})
    lines = to.file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    for digest in parts.values():
        first, second = (k for k, line in enumerate(lines) if line.endswith(digest))
        assert second == first + 1

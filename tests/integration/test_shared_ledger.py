"""Several processes write one ledger at the same time, and some of them are killed."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.core.ledger import NodeIncident
from orchestrator.ledger import FILE_NAME, Ledger
from tests.integration.command_line import REPOSITORY

ENTRIES = 200
KILLS = 12

WRITER = """
import random
import sys
import time
from pathlib import Path
from orchestrator.core.ledger import NodeIncident
from orchestrator.ledger import Ledger

run, first, last = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ledger = Ledger(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(first, last + 1):
    ledger.note(NodeIncident(at=float(number), node=f"n{number % 7}", run=run, incident=number,
                             fault="gpu", cause="Xid 79 " * (number % 40)))
    print(number, flush=True)
    time.sleep(random.uniform(0.0, 0.002))  # the others get their turn
"""


@contextmanager
def writer(path: Path, run: str, first: int, last: int) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), run, str(first), str(last)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def go(*processes: "subprocess.Popen[str]") -> None:
    """Let processes that have started begin together."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def numbers(ledger: Ledger, run: str) -> list[int]:
    found = [e for e in ledger.entries() if isinstance(e, NodeIncident) and e.run == run]
    return [e.incident for e in found]


def test_two_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    watching = Ledger(path)
    with writer(path, "one", 1, ENTRIES) as one, writer(path, "two", 1, ENTRIES) as two:
        go(one, two)
        seen = 0
        while one.poll() is None or two.poll() is None:
            now = len(watching.entries())
            assert now >= seen
            seen = now
            time.sleep(0.01)
    assert (one.returncode, two.returncode) == (0, 0)
    for ledger in (watching, Ledger(path)):
        for run in ("one", "two"):
            assert numbers(ledger, run) == list(range(1, ENTRIES + 1))
        assert ledger.skipped == 0
    assert path.read_bytes().count(b"\n") == 2 * ENTRIES
    runs = [e.run for e in watching.entries() if isinstance(e, NodeIncident)]
    assert runs not in (sorted(runs), sorted(runs, reverse=True)), "they did not overlap"


def test_writers_killed_at_any_moment_harm_nobody_and_go_on_where_they_were(
    tmp_path: Path,
) -> None:
    path = tmp_path / FILE_NAME
    chance = random.Random(5)
    victims_said: list[int] = []
    with writer(path, "bystander", 1, 10**6) as bystander:
        go(bystander)
        for _ in range(KILLS):
            # A killed writer does not know whether its last entry arrived, and notes it again.
            first = max([1, *victims_said])
            with writer(path, "victim", first, 10**6) as victim:
                go(victim)
                time.sleep(chance.uniform(0.0, 0.05))
                victim.kill()
                victims_said += [int(line) for line in victim.stdout]
        bystander.kill()
        bystanders_said = [int(line) for line in bystander.stdout]
    ledger = Ledger(path)
    for run, said in (("victim", victims_said), ("bystander", bystanders_said)):
        found = numbers(ledger, run)
        assert found == list(range(1, len(found) + 1)), "once each, in order"
        # All that `note` returned from is there. More may be, of a victim that was killed before it
        # could say so; the next one notes that again.
        assert len(found) >= said[-1]
    assert len(found) <= bystanders_said[-1] + 1
    assert ledger.skipped <= KILLS + 1
    Ledger(path).note(NodeIncident(at=0.0, node="n1", run="x", incident=1, fault="f", cause=""))
    assert numbers(ledger, "x") == [1]

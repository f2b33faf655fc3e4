"""The agent's side of the replicas process, with a small program in its place."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import kept, loop
from orchestrator.agent.replicas import Place, Replicas, replica_of
from orchestrator.core.actions import Restore, Source
from orchestrator.core.events import RankExited, RanksGone, Replica, Replicated
from orchestrator.wire import Buddy, FetchedRank, FetchNode
from tests.unit.orchestrator.desk import until
from tests.unit.orchestrator.test_agent import STAGES, START, STOP, office, play, started

HELD = {"tier": "disk", "rank": 0, "world": 2, "step": 5, "attempt": 1, "nbytes": 9}
STAND_IN = """
import json, os, sys, time
def say(**event): print(json.dumps(event), flush=True)
token = sys.stdin.readline().strip()
heard = open(sys.argv[1], "a")
say(event="listening", address="127.0.0.1:7")
say(event="held", replicas=[json.loads(sys.argv[2])])
for line in sys.stdin:
    print(token, line.strip(), file=heard, flush=True)
    order = json.loads(line)
    if order["do"] != "fetch":
        continue
    source = order["from"][0]
    if source == "die:1" and not os.path.exists(sys.argv[1] + ".died"):
        open(sys.argv[1] + ".died", "w").close()
        os._exit(1)
    if source == "hang:1":
        continue
    ok = source != "bad:1"
    say(event="fetched", id=order["id"], ok=ok, error="" if ok else "no such replica")
"""


def stand_in_for(log: Path) -> list[str]:
    return [sys.executable, "-c", STAND_IN, str(log), json.dumps(HELD)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "RESTART_WAIT_S", 0.01)


def wanted(*sources: str, timeout_s: float = 20.0) -> FetchNode:
    ranks = tuple(FetchedRank(rank=r, sources=(at,) if at else ()) for r, at in enumerate(sources))
    return FetchNode(
        attempt=2, step=5, saved_by=1, world=len(ranks), ranks=ranks, timeout_s=timeout_s
    )


class Heard:
    """What a stand-in was told, and the facts that came of it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "heard"
        (folder / "token").write_text("the token\n")
        self.facts: list[Replicated] = []
        place = Place(
            node="n0",
            node_dir=folder,
            run="r",
            host="127.0.0.1",
            token_path=folder / "token",
            disk=None,
            bytes_per_s=1e9,
        )
        self.replicas = Replicas(place, self.facts.append)
        self.replicas._command = stand_in_for(self.log)

    def lines(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        found = self.log.read_text().splitlines()
        assert all(line.startswith("the token {") for line in found)
        return [json.loads(line.removeprefix("the token ")) for line in found]

    def play(self, story: Callable[[Replicas], Awaitable[None]]) -> None:
        async def main() -> None:
            work = asyncio.ensure_future(self.replicas.run())
            try:
                await self.replicas.ready()
                await story(self.replicas)
            finally:
                work.cancel()
                await asyncio.wait({work})

        asyncio.run(main())


def test_what_it_keeps_and_where_is_told(tmp_path: Path) -> None:
    heard = Heard(tmp_path)

    async def story(replicas: Replicas) -> None:
        copy = Replica(tier="disk", rank=0, step=5, attempt=1, world=2)
        assert (replicas.address, replicas.held) == ("127.0.0.1:7", (copy,))
        assert heard.facts[-1] == Replicated(node="n0", address="127.0.0.1:7", replicas=(copy,))

    heard.play(story)


def test_each_rank_gets_its_own_answer(tmp_path: Path) -> None:
    heard = Heard(tmp_path)

    async def story(replicas: Replicas) -> None:
        errors = await replicas.fetch(wanted("good:1", "bad:1", ""))
        assert errors == {
            1: "no such replica",
            2: "no node that had a copy is there any more",
        }

    heard.play(story)
    first, second = heard.lines()
    assert first == {
        "do": "fetch",
        "id": 1,
        "rank": 0,
        "world": 3,
        "step": 5,
        "attempt": 1,
        "from": ["good:1"],
        "arena": str(tmp_path / "arena-0"),
    }
    assert second["rank"] == 1


def test_one_that_dies_is_started_again_and_told_all_that_it_has_to_do(tmp_path: Path) -> None:
    heard = Heard(tmp_path)

    async def story(replicas: Replicas) -> None:
        replicas.point_at("b:2")
        assert await replicas.fetch(wanted("die:1")) == {}

    heard.play(story)
    assert [line["do"] for line in heard.lines()] == ["buddy", "fetch", "buddy", "fetch"]
    assert heard.lines()[2] == {"do": "buddy", "address": "b:2"}
    assert Replicated(node="n0", address="", replicas=heard.facts[-1].replicas) in heard.facts


def test_a_fetch_ends_in_time_and_when_nobody_needs_it(tmp_path: Path) -> None:
    heard = Heard(tmp_path)

    async def story(replicas: Replicas) -> None:
        assert await replicas.fetch(wanted("hang:1", timeout_s=0.2)) == {0: "no copy within 0.2 s"}
        work = asyncio.ensure_future(replicas.fetch(wanted("hang:1")))
        await until(lambda: len(heard.lines()) == 3)
        replicas.give_up()
        assert await work == {0: "given up"}
        await until(lambda: len(heard.lines()) == 4)

    heard.play(story)
    words = [(line["do"], line["id"]) for line in heard.lines()]
    assert words == [("fetch", 1), ("give_up", 1), ("fetch", 2), ("give_up", 2)]


@pytest.mark.parametrize(
    "wrong", [{"tier": "tape"}, {"rank": -1}, {"step": "5"}, {"world": True}, {"attempt": 10**15}]
)
def test_what_is_no_replica_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        replica_of({**HELD, **wrong})


def test_agents_of_one_machine_take_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the token")

    def folder(run_dir: Path = tmp_path) -> tuple[Replicas, str]:
        place = Place(
            node="n0",
            node_dir=tmp_path,
            run="r",
            host="127.0.0.1",
            token_path=run_dir / "token",
            disk=tmp_path / "disk",
            bytes_per_s=1e9,
        )
        made = Replicas(place, lambda _: None)
        return made, made._command[made._command.index("--disk") + 1]

    async def ends(replicas: Replicas) -> None:
        work = asyncio.ensure_future(replicas.run())
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})

    first, at = folder()
    assert folder()[1] != at
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "token").write_text("another run of this name")
    assert folder(tmp_path / "other")[1] not in (at, folder()[1])
    asyncio.run(ends(first))
    assert folder()[1] == at, "free again"


def test_a_disk_that_cannot_be_used_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the token")
    (tmp_path / "file").touch()
    place = Place(
        node="n0",
        node_dir=tmp_path,
        run="r",
        host="127.0.0.1",
        token_path=tmp_path / "token",
        disk=tmp_path / "file",
        bytes_per_s=1e9,
    )
    told: list[str] = []
    copies = Replicas(place, lambda fact: told.append(fact.problem))
    assert "--disk" not in copies._command
    copies.heard({"event": "listening", "address": "127.0.0.1:7"})
    assert told[0].startswith("to its disk: ")


def test_copies_that_fail_are_counted_and_the_last_one_that_came_is_known(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the token")
    place = Place(
        node="n0",
        node_dir=tmp_path,
        run="r",
        host="127.0.0.1",
        token_path=tmp_path / "token",
        disk=None,
        bytes_per_s=1e9,
    )
    told: list[str] = []
    copies = Replicas(place, lambda fact: told.append(fact.problem))
    for event in ("copy_failed", "copy_failed", "copied", "copied", "copy_failed"):
        copies.heard({"event": event, "tier": "peer", "error": "no room"})
    copies.heard({"event": "refused", "error": "no order"})
    assert copies.failed == {"peer": 3}
    assert set(copies.copied_at) == {"peer"}
    assert told == ["to its buddy: no room", "", "to its buddy: no room"]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let agents keep the stand-in; returns where it notes what it was told."""
    log = tmp_path / "heard"

    class Standing(Replicas):
        def _words(self) -> list[str]:
            return stand_in_for(log)

    monkeypatch.setattr(loop, "Replicas", Standing)
    return log


TIERS: dict[str, Any] = {
    "nodes": {"count": 2},
    "checkpoint": {"peer_interval_steps": 1},
}


def test_an_agent_says_hello_with_what_lies_there(tmp_path: Path, stand_in: Path) -> None:
    async def main() -> None:
        async with office(tmp_path, **TIERS) as desk:
            hello = desk.hellos[0]
            assert hello.replica_address == "127.0.0.1:7"
            assert [(r.tier, r.step) for r in hello.replicas] == [("disk", 5)]
            assert (await desk.orders("pair/n0", Buddy(attempt=1, address="b:2"))).ok
            await until(lambda: stand_in.exists() and "b:2" in stand_in.read_text())

    play(main())


def test_a_failed_fetch_is_a_failed_restore_of_that_rank(tmp_path: Path, stand_in: Path) -> None:
    async def main() -> None:
        async with office(tmp_path, **TIERS) as desk:
            outcome = await desk.orders("fetch", wanted("good:1", "bad:1"))
            assert (outcome.ok, outcome.detail) == (False, "rank 1: no such replica")
            await until(lambda: desk.facts_of(RankExited))
            (ended,) = desk.facts_of(RankExited)
            assert (ended.attempt, ended.rank, ended.note) == (2, 1, "restore_failed")
            assert ended.last_line.endswith(
                "could not be brought from another place: no such replica"
            )

    play(main())


def test_ranks_restore_from_their_memory_after_a_fetch(tmp_path: Path, stand_in: Path) -> None:
    """Where it came from is the agent's business; the arena is the rank's."""

    async def main() -> None:
        command = [sys.executable, "-c", STAGES]
        async with office(tmp_path, command, **TIERS) as desk:
            assert (await desk.orders("fetch", wanted("good:1", "good:1"))).ok
            restore = Restore(step=5, attempt=1, source=Source.PEER)
            await started(desk, replace(START, attempt=2, restore=restore))
            await until(lambda: len(desk.facts_of(RankExited)) == 2)
            last = desk.facts_of(RankExited)[0].last_line
            assert "restore failed" in last
            assert "memory" in last

    play(main())


def test_a_stop_ends_a_fetch_and_nothing_is_told_of_it(tmp_path: Path, stand_in: Path) -> None:
    async def main() -> None:
        async with office(tmp_path, **TIERS) as desk:
            work = asyncio.ensure_future(desk.orders("fetch", wanted("hang:1")))
            await until(lambda: stand_in.exists() and "hang:1" in stand_in.read_text())
            await desk.orders("stop/2", replace(STOP, attempt=2))
            assert (await work).detail == "attempt 2 is over"
            await until(lambda: desk.facts_of(RanksGone))
            assert not desk.facts_of(RankExited)

    play(main())

"""Who is given up and when, over a network made of numbers; nothing here waits."""

import pytest

from orchestrator.supervisor.liveness import MOST_AT_ONCE, OWN_DELAY_S, PROBES, SPAN_S, Liveness
from orchestrator.supervisor.probe import ANSWER_S, Answer, Answered, Probe
from orchestrator.supervisor.suspicion import Limits
from tests.simulated.network import network

QUICK_S = 3.0
LOST_S = 15.0


@pytest.mark.parametrize("seed", range(10))
def test_a_node_without_power_is_noticed_in_about_two_seconds(seed: int) -> None:
    net = network(seed=seed)
    net.machines["n1"].port = None
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert SPAN_S + ANSWER_S < took_s < QUICK_S
    (_, lost) = net.lost["n1"]
    assert "silent for" in lost.why
    assert "its machine does not answer (2" in lost.why
    assert lost.silent_s >= took_s
    assert list(net.lost) == ["n1"]


def test_a_machine_that_refuses_has_lost_its_agent() -> None:
    net = network()
    net.machines["n1"].port = Answer.REFUSED
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert took_s < 1.5
    assert "its agent's process is gone" in net.lost["n1"][1].why


def test_an_agent_that_leaves_is_asked_about_at_once() -> None:
    net = network()
    net.machines["n1"].port = Answer.REFUSED
    net.liveness.parted("n1", net.now)
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert took_s < 0.3
    assert net.lost["n1"][1].silent_s == pytest.approx(took_s, abs=0.06)


def test_a_busy_node_is_waited_for_until_agent_lost_s() -> None:
    net = network()
    net.machines["n1"].agent = False  # stopped, or without a share of the CPU
    net.run(LOST_S - 1.0)
    assert not net.lost
    assert net.busy == ["n1"], "told once"
    took_s = net.seconds_to_lose("n1", 3.0)
    assert took_s is not None
    assert "though its machine answers" in net.lost["n1"][1].why


def test_a_busy_node_is_asked_rarely() -> None:
    """Each answered probe waits in the agent's queue of connections, which is finite."""
    net = network(agent_lost_s=3600.0)
    net.machines["n1"].agent = False
    before = net.sent
    net.run(3500.0)
    assert not net.lost
    assert net.sent - before < 100


def test_a_busy_node_that_then_loses_power_is_noticed() -> None:
    net = network()
    net.machines["n1"].agent = False
    net.run(5.0)
    net.machines["n1"].port = None
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert took_s < QUICK_S + 1.0


@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_loses_a_third_of_its_packets_is_no_dead_node(seed: int) -> None:
    net = network(seed=seed)
    net.machines["n1"].loss = 0.3
    net.run(1200.0)
    assert not net.lost


def test_a_node_that_is_late_by_seconds_again_and_again_gets_more_time() -> None:
    net = network()
    net.machines["n1"].late_s = lambda: 4.0
    net.run(60.0)
    net.machines["n1"].port = None
    took_s = net.seconds_to_lose("n1", LOST_S + 1)
    assert took_s is not None
    assert took_s > 4.5


@pytest.mark.parametrize("gap_s", [0.3, 1.0, 1.3])
def test_a_cable_that_is_out_for_a_moment_loses_nobody(gap_s: float) -> None:
    net = network()
    for _ in range(20):
        net.machines["n1"].port = None
        net.run(gap_s)
        net.machines["n1"].port = Answer.CONNECTED
        net.run(2.0)
    assert not net.lost


def test_when_all_fall_silent_it_is_rather_the_supervisor_that_is_cut_off() -> None:
    net = network()
    net.is_up = False
    net.run(LOST_S - 1.0)
    assert not net.lost
    net.is_up = True
    net.run(120.0)
    assert not net.lost, "and what was not heard meanwhile counts for nothing"


def test_when_all_stay_silent_they_are_lost_in_the_end() -> None:
    net = network()
    net.is_up = False
    net.run(LOST_S + 1.0)
    assert len(net.lost) == 4


@pytest.mark.parametrize("outage_s", [0.5, 1.0, 1.5, 2.0, 3.0, 5.0])
def test_an_outage_of_the_supervisors_own_network_loses_nobody(outage_s: float) -> None:
    for seed in range(5):
        net = network(nodes=3, seed=seed)
        for _ in range(5):
            net.is_up = False
            net.run(outage_s)
            net.is_up = True
            net.run(7.0)
        assert not net.lost


def test_the_only_node_has_no_witness() -> None:
    net = network(nodes=1)
    net.machines["n0"].port = None
    took_s = net.seconds_to_lose("n0", 20.0)
    assert took_s is not None
    assert took_s > LOST_S - 1.0


def test_a_node_on_this_machine_needs_no_witness() -> None:
    net = network(nodes=1, here=True)
    net.machines["n0"].port = None
    took_s = net.seconds_to_lose("n0", 20.0)
    assert took_s is not None
    assert took_s < QUICK_S


def test_an_agent_on_this_machine_is_no_witness_for_the_network() -> None:
    """The supervisor runs on a node of its own, and that node's cable is out."""
    net = network(nodes=3)
    own = net.machines["n0"]
    own.here, own.address = True, ("10.0.0.1", 1)
    net.run(3.0)
    net.is_up = False
    net.run(LOST_S - 1.0)
    assert not net.lost


def test_two_of_four_at_once_are_noticed_and_most_of_many_are_not() -> None:
    net = network(nodes=4)
    net.machines["n1"].port = net.machines["n2"].port = None
    assert net.seconds_to_lose("n1", QUICK_S) is not None
    assert net.seconds_to_lose("n2", 0.5) is not None
    net = network(nodes=24)
    for n in range(20):
        net.machines[f"n{n}"].port = None
    net.run(LOST_S - 1.0)
    assert len(net.lost) == 0, "four cannot vouch for twenty"


def test_many_lost_at_once_are_asked_in_turns() -> None:
    net = network(nodes=3 * MOST_AT_ONCE)
    for n in range(2 * MOST_AT_ONCE):
        net.machines[f"n{n}"].port = None
    net.run(2 * QUICK_S)
    assert len(net.lost) == 2 * MOST_AT_ONCE


def test_a_port_that_never_answered_says_nothing() -> None:
    """A firewall between supervisor and node looks like a dead machine."""
    net = network(filtered=("n1",))
    net.machines["n1"].agent = False
    net.run(LOST_S - 1.0)
    assert not net.lost
    assert not net.busy


@pytest.mark.parametrize("frozen_s", [0.6, 1.5, 4.0, 20.0, 100.0])
def test_a_supervisor_that_did_not_run_blames_nobody(frozen_s: float) -> None:
    net = network()
    for _ in range(3):
        net.frozen_until = net.now + frozen_s
        net.run(frozen_s + 3.0)
    assert not net.lost
    net.machines["n1"].port = None
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert took_s < QUICK_S + 1.0, "its own absence is no jitter of theirs"


def test_a_node_that_died_while_the_supervisor_was_away_is_noticed_by_the_next() -> None:
    net = network()
    net.machines["n1"].port = None
    net.machines["n1"].agent = False
    net.liveness = Liveness(net.limits, net.now)
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert took_s < 2 * QUICK_S
    assert list(net.lost) == ["n1"]


def test_a_lost_node_is_known_anew_when_it_is_heard_again() -> None:
    net = network()
    net.machines["n1"].port = None
    net.run(30.0)
    del net.lost["n1"]
    net.machines["n1"].port = Answer.CONNECTED
    net.liveness.joined("n1", net.now)
    net.run(10.0)
    assert not net.lost
    net.machines["n1"].port = None
    took_s = net.seconds_to_lose("n1", LOST_S)
    assert took_s is not None
    assert took_s < QUICK_S, "the time in which it was lost is no jitter"


class Bare:
    """One silent node and a punctual one, and every answer as the test wants it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ports = {"n0": ("10.0.0.1", 1), "n1": ("10.0.0.2", 2)}
        self.liveness = Liveness(Limits(heartbeat_s=0.5, agent_lost_s=LOST_S), self.now)
        for node, address in self.ports.items():
            self.liveness.joined(node, self.now)
            probe = Probe(node=node, address=address, sent=self.now)
            self.liveness.answered(Answered(probe=probe, answer=Answer.CONNECTED), self.now)

    def run(self, seconds: float, answer: Answer | None) -> list[str]:
        """Let n0 be silent; its probes are answered at once, or never."""
        lost: list[str] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            self.liveness.heard("n1", self.now)
            look = self.liveness.look(self.ports, self.now)
            lost += [gone.node for gone in look.lost]
            for probe in look.probes:
                if answer is not None:
                    done = Answered(probe=probe, answer=answer)
                    self.liveness.answered(done, self.now + 0.001)
        return lost


def test_probes_on_their_way_decide_nothing() -> None:
    assert not Bare().run(LOST_S - 1, None)


def test_trouble_on_this_side_decides_nothing() -> None:
    assert not Bare().run(LOST_S - 1, Answer.UNKNOWN)


def test_answers_to_an_earlier_silence_decide_nothing() -> None:
    bare = Bare()
    bare.run(0.9, None)
    address = bare.ports["n0"]
    early = [Probe(node="n0", address=address, sent=bare.now) for _ in range(2 * PROBES)]
    bare.liveness.heard("n0", bare.now)
    bare.run(0.9, None)
    for probe in early:
        done = Answered(probe=probe, answer=Answer.REFUSED)
        bare.liveness.answered(done, bare.now)
    assert not bare.run(1.0, None)


def test_a_loop_that_is_late_by_itself_begins_anew() -> None:
    bare = Bare()
    assert not bare.run(1.9, Answer.NOTHING)
    bare.now += OWN_DELAY_S + 0.1
    assert not bare.run(SPAN_S - 0.2, Answer.NOTHING), "what was gathered before is not enough"
    assert "n0" in bare.run(2.0, Answer.NOTHING)

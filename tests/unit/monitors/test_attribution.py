from __future__ import annotations

from typing import Any

from monitors.attribution import judge
from monitors.faults import Evidence, EvidenceKind, FaultClass, FaultKind

GLOO = (
    "[rank{}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.2]:6055. This is typically caused by a remote worker crashing."
)


def exit_(seq: int, at: float, rank: int, node: str, **fields: Any) -> Evidence:
    return Evidence(seq=seq, at=at, kind=EvidenceKind.EXIT, rank=rank, node=node, **fields)


def line(seq: int, at: float, **fields: Any) -> Evidence:
    return Evidence(seq=seq, at=at, kind=EvidenceKind.SIGNATURE, **fields)


def peer_line(seq: int, at: float, rank: int, node: str) -> Evidence:
    return line(
        seq,
        at,
        rank=rank,
        node=node,
        signature="gloo_peer_closed",
        fault=FaultKind.NETWORK,
        secondary=True,
        confidence=0.9,
        text=GLOO.format(rank),
    )


def python_line(seq: int, at: float, rank: int, node: str, text: str, **fields: Any) -> Evidence:
    return line(
        seq,
        at,
        rank=rank,
        node=node,
        signature="python_exception",
        fault=FaultKind.RANK_CRASHED,
        confidence=fields.pop("confidence", 0.4),
        text=f"[rank{rank}]: {text}",
        culprit_node=node,
        culprit_rank=rank,
        **fields,
    )


def overdue(seq: int, rank: int, node: str, step: int, **fields: Any) -> Evidence:
    fields = {"at": 60.0, "phase": "step", "for_s": 12.0, **fields}
    return Evidence(seq=seq, kind=EvidenceKind.OVERDUE, rank=rank, node=node, step=step, **fields)


def test_a_killed_rank_is_the_culprit_although_its_peers_are_reported_first() -> None:
    verdict = judge(
        [
            peer_line(1, 10.000, 0, "n1"),
            exit_(2, 10.001, 0, "n1", code=1, step=40),
            peer_line(3, 10.002, 2, "n2"),
            exit_(4, 10.003, 2, "n2", code=1, step=40),
            exit_(5, 10.009, 1, "n1", signal=9, step=40),
        ],
        world_size=3,
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_KILLED, "n1", 1)
    assert verdict.fault_class is FaultClass.PROCESS
    assert verdict.evidence == (5,)
    assert verdict.cause == "rank 1 on n1 after step 40: killed by SIGKILL"
    assert "rank 0 on n1 ended with code 1 because a peer was gone" in verdict.discounted


def test_kills_of_several_ranks_of_one_node_name_the_node_and_no_rank() -> None:
    verdict = judge([exit_(1, 1.0, 0, "n1", signal=9), exit_(2, 1.2, 1, "n1", signal=9)])
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_KILLED, "n1", None)


def test_kills_on_several_nodes_at_once_name_nobody() -> None:
    verdict = judge([exit_(1, 1.0, 0, "n1", signal=9), exit_(2, 1.2, 1, "n2", signal=9)])
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_KILLED, None, None)


def test_a_python_error_on_one_rank_names_it_with_the_text() -> None:
    verdict = judge(
        [
            peer_line(1, 9.99, 0, "n1"),
            exit_(2, 10.0, 0, "n1", code=1, step=7),
            python_line(3, 10.0, 3, "n2", "KeyError: 'lr'"),
            exit_(4, 10.1, 3, "n2", code=1, step=7),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_CRASHED, "n2", 3)
    assert verdict.cause == "rank 3 on n2: KeyError: 'lr'"
    assert verdict.evidence == (3, 4)


def test_a_generic_error_after_a_connection_error_of_the_same_rank_is_passed_on() -> None:
    verdict = judge(
        [
            peer_line(1, 10.0, 0, "n1"),
            python_line(2, 10.0, 0, "n1", "RuntimeError: training failed"),
            exit_(3, 10.1, 0, "n1", code=1, step=7),
            exit_(4, 10.2, 1, "n1", signal=11, step=7),
        ]
    )
    assert (verdict.fault, verdict.rank) == (FaultKind.RANK_CRASHED, 1)
    assert "SIGSEGV" in verdict.cause


def test_the_same_error_on_every_rank_before_the_first_step_is_a_user_error() -> None:
    evidence = []
    for rank, node in enumerate(["n1", "n1", "n2", "n2"]):
        text = f"FileNotFoundError: [Errno 2] No such file: '/data/shard-{rank}.bin'"
        evidence.append(python_line(10 + rank, 5.0 + rank / 100, rank, node, text))
        evidence.append(exit_(20 + rank, 5.1 + rank / 100, rank, node, code=1, step=-1))
    verdict = judge(evidence, world_size=4)
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.USER_ERROR, None, None)
    assert verdict.fault_class is FaultClass.USER
    assert verdict.cause.startswith("all 4 ranks failed before the first step: FileNotFoundError")
    assert judge(evidence[:6], world_size=4).fault is FaultKind.RANK_CRASHED


def test_ranks_that_we_stopped_do_not_contradict_a_user_error() -> None:
    evidence = [
        python_line(1, 5.0, 0, "n1", "ValueError: no such preset"),
        exit_(2, 5.1, 0, "n1", code=1),
        python_line(3, 5.0, 1, "n1", "ValueError: no such preset"),
        exit_(4, 5.1, 1, "n1", code=1),
        exit_(5, 5.3, 2, "n2", signal=15, ours=True),
    ]
    assert judge(evidence, world_size=3).fault is FaultKind.USER_ERROR


def test_the_same_error_after_the_first_step_is_a_crash_without_a_name() -> None:
    verdict = judge(
        [
            python_line(1, 5.0, 0, "n1", "ValueError: bad batch"),
            exit_(2, 5.1, 0, "n1", code=1, step=12),
            python_line(3, 5.0, 1, "n2", "ValueError: bad batch"),
            exit_(4, 5.1, 1, "n2", code=1, step=12),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_CRASHED, None, None)
    assert verdict.cause == "ranks 0, 1: ValueError: bad batch"


def test_an_import_error_on_one_of_two_ranks_is_about_that_place() -> None:
    wrong = python_line(1, 5.0, 1, "n2", "ModuleNotFoundError: No module named 'x'", confidence=0.7)
    verdict = judge(
        [
            Evidence(**{**_fields(wrong), "fault": FaultKind.USER_ERROR}),
            exit_(2, 5.1, 1, "n2", code=1),
            peer_line(3, 5.2, 0, "n1"),
            exit_(4, 5.3, 0, "n1", code=1),
        ],
        world_size=2,
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_CRASHED, "n2", 1)


def _fields(evidence: Evidence) -> dict[str, Any]:
    return {name: getattr(evidence, name) for name in Evidence.__dataclass_fields__}


def test_a_usage_error_of_all_ranks_needs_no_text() -> None:
    same = [exit_(r, 1.0, r, "n1", code=2) for r in range(2)]
    assert judge(same, world_size=2).fault is FaultKind.USER_ERROR
    silent = [exit_(r, 1.0, r, "n1", code=1) for r in range(2)]
    assert judge(silent, world_size=2).fault is FaultKind.UNKNOWN


def test_a_lost_node_explains_the_exits_of_all_its_ranks() -> None:
    verdict = judge(
        [
            exit_(1, 10.0, 2, "n2", signal=9),
            exit_(2, 10.0, 3, "n2", signal=9),
            peer_line(3, 10.1, 0, "n1"),
            exit_(4, 10.1, 0, "n1", code=1),
            Evidence(
                seq=5, at=40.0, kind=EvidenceKind.NODE_LOST, node="n2", why="agent silent for 30 s"
            ),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.NODE_LOST, "n2", None)
    assert verdict.cause == "node n2 is gone: agent silent for 30 s; ranks 2, 3 went with it"
    assert verdict.fault_class is FaultClass.NODE


def test_exit_code_77_is_a_failed_restore_whatever_its_traceback_says() -> None:
    verdict = judge(
        [
            python_line(1, 1.0, 1, "n1", "OSError: checksum differs"),
            exit_(2, 1.1, 1, "n1", code=77, text="cannot restore step 40: checksum differs"),
            peer_line(3, 1.2, 0, "n1"),
            exit_(4, 1.3, 0, "n1", code=1),
        ]
    )
    assert (verdict.fault, verdict.rank) == (FaultKind.RESTORE_FAILED, 1)
    assert "cannot restore step 40" in verdict.cause


def test_exit_code_80_is_a_store_that_was_away() -> None:
    verdict = judge([exit_(r, 1.0, r, "n1", code=80, text="no such bucket") for r in range(2)])
    assert (verdict.fault, verdict.fault_class) == (FaultKind.STORE_AWAY, FaultClass.STORAGE)


def test_exit_code_78_on_all_ranks_of_a_node_is_storage_there() -> None:
    verdict = judge([exit_(r, 1.0, r, "n1", code=78) for r in range(2)])
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.STORAGE, "n1", None)


def test_a_node_without_room_for_what_found_room_before_is_to_blame() -> None:
    full = "cannot stage step 40: needs 2 GiB in /dev/shm"
    verdict = judge([exit_(r, 1.0, r, "n1", code=78, step=40, text=full) for r in range(2)])
    assert (verdict.fault, verdict.fault_class) == (FaultKind.NODE_FULL, FaultClass.NODE)
    assert verdict.node == "n1"
    assert "/dev/shm" in verdict.cause


def test_kills_that_we_sent_are_no_evidence() -> None:
    verdict = judge(
        [
            exit_(1, 1.0, 0, "n1", signal=9, ours=True),
            exit_(2, 1.0, 1, "n1", signal=15, ours=True),
        ]
    )
    assert verdict.fault is FaultKind.UNKNOWN
    assert verdict.cause == "nothing failed: we stopped these ranks"


def test_connection_errors_alone_blame_nobody() -> None:
    verdict = judge([peer_line(1, 1.0, 0, "n1"), exit_(2, 1.1, 0, "n1", code=1)])
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.UNKNOWN, None, None)


def test_no_evidence_is_unknown() -> None:
    verdict = judge([])
    assert (verdict.fault, verdict.cause) == (FaultKind.UNKNOWN, "no evidence")


def test_a_memory_kill_confirmed_by_the_kernel_names_the_rank_it_hit() -> None:
    verdict = judge(
        [
            exit_(1, 10.0, 4, "n3", signal=9),
            line(
                2,
                11.0,
                node="n3",
                signature="kernel_oom_kill",
                fault=FaultKind.HOST_OOM,
                confidence=0.9,
                text="Out of memory: Killed process 90422 (python)",
                culprit_node="n3",
            ),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.HOST_OOM, "n3", 4)


def test_a_gpu_off_the_bus_beats_the_errors_of_the_ranks() -> None:
    verdict = judge(
        [
            peer_line(1, 9.0, 0, "n1"),
            exit_(2, 9.1, 0, "n1", code=1),
            exit_(3, 9.2, 12, "n2", code=1),
            line(
                4,
                9.5,
                node="n2",
                signature="xid_79",
                fault=FaultKind.GPU,
                confidence=0.95,
                text="NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off the bus.",
                culprit_node="n2",
            ),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.GPU, "n2", 12)


def test_a_kernel_line_of_a_node_without_failed_ranks_is_somebody_elses() -> None:
    verdict = judge(
        [
            exit_(1, 9.0, 0, "n1", signal=9),
            line(2, 8.0, node="n9", fault=FaultKind.HOST_OOM, confidence=0.9, culprit_node="n9"),
        ]
    )
    assert (verdict.fault, verdict.rank) == (FaultKind.RANK_KILLED, 0)


def test_the_watchdog_that_reports_a_hang_is_not_blamed() -> None:
    verdict = judge(
        [
            line(
                1,
                600.0,
                rank=6,
                node="n1",
                signature="nccl_watchdog_timeout",
                fault=FaultKind.HANG,
                confidence=0.9,
                text="[Rank 6] Watchdog caught collective operation timeout",
            ),
            exit_(2, 601.0, 6, "n1", signal=6),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.HANG, None, None)


def test_a_hang_names_the_rank_that_is_behind_and_only_if_it_is_alone() -> None:
    behind = judge([overdue(1, 0, "n1", 40), overdue(2, 1, "n1", 39), overdue(3, 2, "n2", 40)])
    assert (behind.fault, behind.node, behind.rank) == (FaultKind.HANG, "n1", 1)
    level = judge([overdue(1, 0, "n1", 40), overdue(2, 1, "n1", 40)])
    assert (level.fault, level.node, level.rank) == (FaultKind.HANG, None, None)
    alone = judge([overdue(1, 0, "n1", 40)])
    assert (alone.fault, alone.node, alone.rank) == (FaultKind.HANG, None, None)


def test_a_stopped_process_is_named_among_waiting_ones() -> None:
    verdict = judge([overdue(1, 0, "n1", 40), overdue(2, 1, "n2", 40, why="process is stopped")])
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.HANG, "n2", 1)
    assert "process is stopped" in verdict.cause


def test_a_rank_that_left_without_a_word_explains_the_hang_that_follows() -> None:
    verdict = judge([exit_(1, 5.0, 3, "n2", code=3, step=40), overdue(2, 0, "n1", 40)])
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_CRASHED, "n2", 3)


def test_preemption_and_time_limit_are_nobodys_fault() -> None:
    verdict = judge(
        [
            peer_line(1, 9.0, 0, "n1"),
            exit_(2, 9.0, 0, "n1", code=1),
            exit_(3, 9.0, 1, "n2", signal=9),
            line(
                4,
                9.5,
                node="n2",
                signature="slurm_preempted",
                fault=FaultKind.PREEMPTED,
                confidence=0.95,
                text="slurmstepd: error: *** JOB 7 ON n2 CANCELLED AT 11:02 DUE TO PREEMPTION ***",
            ),
        ]
    )
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.PREEMPTED, None, None)
    assert verdict.fault_class is FaultClass.FREE


def test_a_broken_connection_names_a_peer_only_when_two_nodes_do() -> None:
    def report(seq: int, rank: int, node: str, peer: str) -> Evidence:
        return line(
            seq,
            1.0,
            rank=rank,
            node=node,
            signature="nccl_ib_retry_exceeded",
            fault=FaultKind.NETWORK,
            confidence=0.8,
            text=f"NET/IB : Got completion from peer {peer} with status=12",
            culprit_node=peer,
        )

    exits = [exit_(r, 2.0, r, f"n{r}", code=1) for r in (1, 2, 3)]
    one = judge([report(11, 1, "n1", "n4"), *exits[:1]])
    assert (one.fault, one.node) == (FaultKind.NETWORK, None)
    two = judge([report(11, 1, "n1", "n4"), report(12, 2, "n2", "n4"), *exits])
    assert (two.fault, two.node, two.rank) == (FaultKind.NETWORK, "n4", None)


def test_a_sure_line_of_a_living_rank_does_not_outweigh_a_dead_one() -> None:
    throttled = line(
        1,
        1.0,
        rank=3,
        node="n2",
        signature="s3_access_denied",
        fault=FaultKind.STORAGE,
        confidence=0.7,
        text="AccessDenied",
    )
    dead = judge([throttled, exit_(2, 5.0, 0, "n1", signal=9)])
    assert (dead.fault, dead.rank) == (FaultKind.RANK_KILLED, 0)
    assert judge([throttled]).fault is FaultKind.STORAGE


def test_a_cause_is_one_bounded_line() -> None:
    verdict = judge(
        [
            python_line(1, 1.0, 0, "n1", "ValueError: a\nb " + "x" * 1000),
            exit_(2, 1.1, 0, "n1", code=1),
        ]
    )
    assert "\n" not in verdict.cause
    assert len(verdict.cause) <= 300


def test_a_thousand_victims_give_a_page_and_not_a_book() -> None:
    evidence = [exit_(0, 1.0, 0, "n0", signal=9)]
    evidence += [exit_(rank, 1.1, rank, f"n{rank}", code=1) for rank in range(1, 1000)]
    assert len(judge(evidence).discounted) <= 20


def test_a_time_that_is_no_number_still_gives_a_verdict() -> None:
    for at in (float("inf"), float("nan")):
        verdict = judge([exit_(1, at, 0, "n1", code=77)])
        assert verdict.fault is FaultKind.RESTORE_FAILED
        assert verdict.rank == 0

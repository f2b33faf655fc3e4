from __future__ import annotations

import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitors.attribution import judge
from monitors.errors import SignatureTableInvalid
from monitors.faults import Evidence, EvidenceKind, FaultKind
from monitors.logs.scan import MAX_LINE_CHARS, MAX_TEXT_CHARS, Scanner
from monitors.logs.table import Culprit, Signature, load

SCANNER = Scanner()


@pytest.mark.parametrize("signature", SCANNER.table, ids=lambda s: s.id)
def test_every_signature_finds_its_own_example(signature: Signature) -> None:
    match = SCANNER.scan(signature.example)
    assert match is not None
    assert match.signature == signature.id
    assert any(anchor in signature.example for anchor in signature.anchors)


@pytest.mark.parametrize("signature", SCANNER.table, ids=lambda s: s.id)
def test_every_signature_names_a_public_source(signature: Signature) -> None:
    assert signature.source.startswith("https://")


HARMLESS = [
    "",
    "step 50 loss 9.871 error_rate=0.0000 timeouts=0",
    "launch error_handling=3 fail_fast=false max_failures=0",
    "n2:8802:8990 [1] NCCL INFO connect to 10.0.0.1<4521> returned Connection refused, retrying",
    "ckpt step_100 saved in 31.0 s, 0 errors, 0 retries",
    "train.py:88: DeprecationWarning: fatal_threshold is renamed to limit",
    "NCCL INFO TORCH_NCCL_ASYNC_ERROR_HANDLING: 3",
    "    raise ValueError('inside a traceback, not its last line')",
    "pcieport 0000:40:01.1: AER: Corrected error received: 0000:40:01.1",
    "CUDA kernel errors might be asynchronously reported at some other API call",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_no_match(line: str) -> None:
    assert SCANNER.scan(line) is None


def test_the_rank_comes_from_the_prefix_and_leaves_the_text() -> None:
    match = SCANNER.scan("[rank12]: KeyError: 'lr'\n")
    assert match is not None
    assert (match.rank, match.text) == (12, "KeyError: 'lr'")


def test_the_label_of_srun_is_no_part_of_the_error() -> None:
    match = SCANNER.scan("3: [rank3]: ValueError: bad preset")
    assert match is not None
    assert (match.rank, match.text) == (3, "ValueError: bad preset")


def test_groups_give_peer_node_and_xid() -> None:
    peer = SCANNER.scan(
        "NET/IB: Got completion from peer n4<1> with status=IBV_WC_RETRY_EXC_ERR(12)"
    )
    node = SCANNER.scan("srun: error: Node failure on n5")
    xid = SCANNER.scan("NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off the bus.")
    assert peer is not None
    assert node is not None
    assert xid is not None
    assert (peer.peer, peer.culprit) == ("n4", Culprit.PEER)
    assert (node.peer, node.culprit) == ("n5", Culprit.NODE)
    assert xid.xid == 79


@pytest.mark.parametrize(
    ("number", "signature", "secondary"),
    [
        (79, "xid_gpu_lost", False),
        (48, "xid_memory", False),
        (64, "xid_memory", False),
        (95, "xid_memory", False),
        (94, "xid_memory_contained", False),
        (63, "xid_memory_noted", True),
        (74, "xid_nvlink", False),
        (31, "xid_program", False),
        (13, "xid_program", False),
        (45, "xid_other", True),
        (999, "xid_other", True),
    ],
)
def test_driver_errors_are_told_apart_by_number(
    number: int, signature: str, secondary: bool
) -> None:
    match = SCANNER.scan(f"kernel: NVRM: Xid (PCI:0000:3b:00): {number}, pid=77, name=python")
    assert match is not None
    assert (match.signature, match.secondary) == (signature, secondary)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    "text",
    [
        GLOO
        + "Read error [127.0.0.1]:43909: Connection reset by peer. This is typically caused by "
        "a remote worker hanging or bugs in the application.",
        GLOO + "Connection closed by peer [127.0.0.1]:6055. This is typically caused by a remote "
        "worker crashing.",
    ],
)
def test_what_gloo_says_about_a_dead_peer_is_a_consequence(text: str) -> None:
    match = SCANNER.scan(f"[rank0]: RuntimeError: {text} GLHF!")
    assert match is not None
    assert (match.signature, match.secondary) == ("gloo_peer_closed", True)


def test_a_message_behind_a_long_progress_bar_is_found_and_cut() -> None:
    bar = "\r".join(f"{i:3}%|####      | {i}/100" for i in range(2000))
    line = bar + "[rank5]:[E] [Rank 5] Watchdog caught collective operation timeout: " + "y" * 200
    assert len(line) > MAX_LINE_CHARS
    match = SCANNER.scan(line)
    assert match is not None
    assert match.signature == "collective_timeout"
    assert "Watchdog" in match.text
    assert len(match.text) <= MAX_TEXT_CHARS


def test_bytes_that_are_no_text_do_not_stop_the_scan() -> None:
    match = SCANNER.scan(b"[rank1]: \xff\xfe RuntimeError: CUDA error: GPU is lost \xf0\x9f")
    assert match is not None
    assert match.signature == "cuda_device_lost"


@given(st.binary(max_size=300), st.sampled_from([s.example for s in SCANNER.table]))
def test_no_line_ever_raises(noise: bytes, example: str) -> None:
    for line in (noise, noise + example.encode() + noise):
        match = SCANNER.scan(line)
        assert match is None or len(match.text) <= MAX_TEXT_CHARS


def test_matches_make_evidence_that_blames_nobody_for_a_dead_peer() -> None:
    lines = [
        (0, "n1", f"[rank0]: RuntimeError: {GLOO}Connection closed by peer [10.0.0.2]:1"),
        (1, "n1", "[rank1]: KeyError: 'lr'"),
    ]
    evidence = []
    for seq, (rank, node, text) in enumerate(lines):
        match = SCANNER.scan(text)
        assert match is not None
        evidence.append(match.evidence(seq=seq, at=1.0, node=node, rank=rank))
        evidence.append(
            Evidence(seq=10 + seq, at=1.1, kind=EvidenceKind.EXIT, node=node, rank=rank, code=1)
        )
    verdict = judge(evidence)
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.RANK_CRASHED, "n1", 1)


def row(**changes: object) -> str:
    values: dict[str, object] = {
        "id": "x",
        "anchors": ["anchor"],
        "pattern": "anchor",
        "fault": "gpu",
        "secondary": False,
        "culprit": "none",
        "confidence": 0.5,
        "action": "find_root",
        "source": "https://example.org",
        "example": "anchor",
    }
    values.update(changes)
    lines = [
        f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in values.items()
    ]
    return "[[signature]]\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (row(fault="flood"), "flood"),
        (row(pattern="("), "x"),
        (row(anchors=["no"]), "anchors"),
        (row(confidence=0), "confidence"),
        (row(colour="red"), "colour"),
        (row() + row(), "twice"),
        ("[[signature]\n", "TOML"),
    ],
)
def test_a_broken_table_is_refused_with_the_place(text: str, word: str) -> None:
    with pytest.raises(SignatureTableInvalid, match=word):
        load(text)


def test_an_empty_table_finds_nothing() -> None:
    assert Scanner(load("")).scan("CUDA error: GPU is lost") is None


def test_the_table_is_shipped_with_the_package() -> None:
    text = resources.files("monitors.logs").joinpath("signatures.toml").read_text("utf-8")
    assert len(tomllib.loads(text)["signature"]) == len(SCANNER.table)

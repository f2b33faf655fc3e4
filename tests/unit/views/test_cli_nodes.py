"""`everstep nodes`: what it shows, what it writes, and what it says to wrong input."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator import cli
from orchestrator.config import load
from orchestrator.core.ledger import Entry, NodeExcluded, NodeIncident, NodeIncluded
from orchestrator.core.policy import Policy
from orchestrator.exit_codes import ExitCode
from orchestrator.ledger import FILE_NAME, TEXT_MAX, Ledger, ledger_of
from orchestrator.views.node_tables import node_view, nodes_view
from orchestrator.views.nodes import natural, overview, told

NOW = 1_790_000_000.0
DAY = 86_400.0
POLICY = Policy(budget={}, exclusion_limit=2)


def incident(node: str, at: float = NOW, **changes: Any) -> NodeIncident:
    values = {"run": "moe", "incident": 3, "fault": "gpu", "cause": "Xid 79: fell off the bus"}
    return NodeIncident(at=at, node=node, **{**values, **changes})


STORY: list[Entry] = [
    incident("n10", NOW - 40 * DAY, incident=1, fault="hang"),
    incident("n10", NOW - 3600, excluded_s=DAY),
    NodeExcluded(at=NOW - 60, node="n2", by="ada", why="fan [bold]broken[/bold]"),
    incident("n1", NOW - 30, incident=4, fault="network"),
    NodeExcluded(at=NOW - 20, node="n3", by="ada", why="firmware", until=NOW + 3600),
    NodeIncluded(at=NOW - 10, node="n3", by="bob", why="updated"),
]


def text(view, width: int = 160) -> str:
    console = Console(
        width=width, file=io.StringIO(), markup=False, highlight=False, force_terminal=False
    )
    console.print(view)
    return console.file.getvalue()


def listed(entries: list[Entry], skipped: int = 0) -> dict[str, Any]:
    about = {"ledger": "runs/node-ledger.jsonl", "skipped_lines": skipped}
    return {**about, **overview(entries, NOW, POLICY)}


def test_the_list_has_excluded_nodes_first_and_counts_thirty_days() -> None:
    body = listed(STORY)
    assert [node["name"] for node in body["nodes"]] == ["n2", "n10", "n1", "n3"]
    rows = {node["name"]: node for node in body["nodes"]}
    assert (rows["n10"]["state"], rows["n10"]["who"]) == ("excluded", "run moe")
    assert rows["n10"]["until"] == NOW - 3600 + DAY
    assert (rows["n10"]["incidents_30d"], rows["n10"]["last_fault"]) == (1, "gpu")
    assert (rows["n2"]["state"], rows["n2"]["until"]) == ("excluded", None)
    assert (rows["n1"]["state"], rows["n1"]["incidents_30d"]) == ("ok", 1)
    assert (rows["n3"]["state"], rows["n3"]["last_fault"]) == ("ok", None)
    json.dumps(body, allow_nan=False)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_list_is_shown_as_it_is_at_any_width(width: int) -> None:
    shown = text(nodes_view(listed(STORY)), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "1 node excluded by runs in the last 24 h; at 2 the breaker opens" in " ".join(
        shown.split()
    )
    if width == 160:
        assert "until included by ada" in shown
        assert "fan [bold]broken[/bold]" in shown
        assert "gpu, incident 3: Xid 79: fell off the bus" in shown


def test_an_open_breaker_says_what_a_person_must_do() -> None:
    body = listed([*STORY, incident("n1", excluded_s=60.0)])
    assert body["breaker"]["open"]
    assert body["breaker"]["nodes"] == ["n1", "n10"]
    shown = " ".join(text(nodes_view(body)).split())
    assert "breaker open: 2 nodes excluded by runs in the last 24 h, limit 2" in shown
    assert "include or exclude each" in shown


def test_lines_that_could_not_be_read_are_told() -> None:
    shown = " ".join(text(nodes_view(listed([], skipped=2))).split())
    assert "nothing is known of any node yet" in shown
    assert "2 lines of runs/node-ledger.jsonl could not be read and did not count" in shown


def test_the_history_of_a_node_has_its_evidence() -> None:
    about = {"ledger": "x", "skipped_lines": 0}
    shown = text(node_view({**about, **told(STORY, "n10", NOW)}))
    assert "excluded until" in shown
    assert "incident 1 of run moe: hang" in shown
    assert "incident 3 of run moe: gpu; excluded for 1 d 00 h" in shown
    assert shown.count("Xid 79: fell off the bus") == 3
    shown = text(node_view({**about, **told(STORY, "n3", NOW)}))
    lines = [" ".join(line.split()[3:]) for line in shown.splitlines() if "  " in line]
    assert lines[-4].startswith("excluded by ada until")
    assert "included by bob" in lines[-2]


def test_times_that_no_calendar_has_are_shown_as_unknown() -> None:
    entries = [incident("n1", 1e300), incident("n1", -5.0, excluded_s=float("inf"))]
    body = {"ledger": "x", "skipped_lines": 0, **told(entries, "n1", NOW)}
    shown = text(node_view(body))
    assert "excluded until included by run moe" in shown
    assert shown.count("excluded until included") == 2
    json.dumps(body, allow_nan=False)


def test_names_are_sorted_as_people_count() -> None:
    names = ["node10", "node2", "gpu-1-10", "gpu-1-9", "7", "x"]
    assert sorted(names, key=natural) == ["7", "gpu-1-9", "gpu-1-10", "node2", "node10", "x"]


@pytest.fixture
def nodes(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGNAME", "ada")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["everstep", "nodes", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


def as_json(answer: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_person_excludes_and_includes_a_node_without_any_run(nodes, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, out, err = nodes("exclude", "n7", "--why", " fan \n broken ", "--hours", "2.5")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.startswith("n7: excluded until ")
    (entry,) = Ledger(tmp_path / "runs" / FILE_NAME).entries()
    assert isinstance(entry, NodeExcluded)
    assert (entry.node, entry.by, entry.why) == ("n7", "ada", "fan broken")
    assert entry.until - entry.at == pytest.approx(9000)
    assert as_json(nodes("ls", "--json"))["nodes"][0]["state"] == "excluded"
    code, out, _ = nodes("include", "n7", "--why", "new fan")
    assert (code, out) == (0, "n7: ok; runs may use it again\n")
    body = as_json(nodes("why", "n7", "--json"))
    assert body["state"] == "ok"
    assert [(line["what"], line["why"]) for line in body["history"]] == [
        ("excluded", "fan broken"),
        ("included", "new fan"),
    ]


def test_an_exclusion_without_hours_lasts_until_included(nodes, tmp_path: Path) -> None:
    body = as_json(nodes("exclude", "n7", "--why", "RMA", "--dir", str(tmp_path), "--json"))
    assert (body["state"], body["until"], body["who"]) == ("excluded", None, "ada")


def test_the_directory_is_found_by_a_run_file_or_one_of_its_runs(nodes, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    (folder / "moe").mkdir(parents=True)
    (folder / "moe" / "journal.jsonl").touch()
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "moe"\ndir = "state"\n[job]\ncommand = ["true"]\n'
        '[nodes]\nlauncher = "slurm"\n'
        "[budget]\nexclusion_limit = 1\nwindow_h = 2.0\n"
    )
    Ledger(folder / FILE_NAME).note(incident("n1", time.time() - 60, excluded_s=60.0))
    for where in (folder, folder / "moe", file):
        body = as_json(nodes("ls", "--json", "--dir", str(where)))
        assert [node["name"] for node in body["nodes"]] == ["n1"]
        assert body["breaker"]["open"] == (where == file)
    code, out, _ = nodes("ls", "--dir", str(file))
    assert code == 0
    assert "in the last 2 h" in " ".join(out.split())


def test_a_local_run_is_asked_for_its_own_ledger(nodes, tmp_path: Path) -> None:
    run_dir = tmp_path / "state" / "moe"
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").touch()
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "moe"\ndir = "state"\n[job]\ncommand = ["true"]\n')
    assert nodes("exclude", "node1", "--why", "x", "--dir", str(file))[0] == 0
    (entry,) = ledger_of(load(file)).entries()
    assert (entry.node, ledger_of(load(file)).path) == ("node1", run_dir / FILE_NAME)
    body = as_json(nodes("ls", "--json", "--dir", str(run_dir)))
    assert [node["name"] for node in body["nodes"]] == ["node1"]
    assert as_json(nodes("ls", "--json", "--dir", str(run_dir.parent)))["nodes"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls"], ExitCode.NOT_FOUND, "runs: no directory of runs; give --dir DIR"),
        (["ls", "--dir", "no.toml"], ExitCode.NOT_FOUND, "no.toml: no such file"),
        (["exclude", "n1"], ExitCode.USAGE, "--why: missing; say why no run may use n1"),
        (["exclude", "n1", "--why", " "], ExitCode.USAGE, "--why: missing"),
        (["exclude", "n1", "--why", "x" * (TEXT_MAX + 1)], ExitCode.USAGE, "--why: give at most"),
        (["exclude", "n1", "--why", "a\x1b[2Jb"], ExitCode.USAGE, "printable characters"),
        (["exclude", "n[1-4]", "--why", "x"], ExitCode.USAGE, "'n[1-4]': no name of one node"),
        (["exclude", "", "--why", "x"], ExitCode.USAGE, "no name of one node"),
        (["exclude", "n1", "--why", "x", "--hours", "0"], ExitCode.USAGE, "--hours: 0: give hours"),
        (["exclude", "n1", "--why", "x", "--hours", "nan"], ExitCode.USAGE, "--hours: nan"),
        (["exclude", "n1", "--why", "x", "--hours", "9e9"], ExitCode.USAGE, "between 0 and 8760"),
        (["exclude", "n1", "--why", "x"], ExitCode.NOT_FOUND, "runs: no directory of runs"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(
    nodes, tmp_path: Path, arguments: list[str], code: ExitCode, words: str
) -> None:
    found, out, err = nodes(*arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert words in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_node_is_told_with_the_known_ones(nodes, tmp_path: Path) -> None:
    for verb in ("why", "include"):
        code, out, err = nodes(verb, "n7", "--dir", str(tmp_path))
        assert (code, out) == (ExitCode.NOT_FOUND, "")
        assert err.endswith("says nothing of it; it knows no node\n")
    ledger = Ledger(tmp_path / FILE_NAME)
    for k in range(22):
        ledger.note(incident(f"n{k}", incident=k))
    code, _, err = nodes("why", "n77", "--dir", str(tmp_path))
    assert code == ExitCode.NOT_FOUND
    assert err.startswith("everstep: n77: ")
    assert "it knows n0, n1, n2, " in err
    assert err.endswith(", n19 and 2 more\n")
    assert len(ledger.entries()) == 22


def test_a_ledger_that_cannot_be_read_is_one_line(nodes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    for arguments in (["ls"], ["why", "n1"], ["include", "n1"], ["exclude", "n1", "--why", "x"]):
        code, out, err = nodes(*arguments, "--dir", str(tmp_path))
        assert (code, out, err.count("\n")) == (ExitCode.PRECONDITION, "", 1)
        assert "node-ledger.jsonl: cannot be" in err

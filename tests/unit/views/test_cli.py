import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from orchestrator import app as application
from orchestrator import cli, cli_reading
from orchestrator.core.actions import Outcome
from orchestrator.exit_codes import MEANING, ExitCode
from orchestrator.supervisor.journal import FileJournal
from orchestrator.views.history import History
from tests.unit.views.story import Story, restamp, whole_story

HEAVY = ("torch", "boto3", "submitit", "aiohttp", "matplotlib", "numpy", "pydantic")


def written(run_dir: Path, story: Story, records=None) -> Path:
    run_dir.mkdir(parents=True)
    journal = FileJournal(run_dir / "journal.jsonl")
    journal.append(story.records if records is None else records)
    journal.close()
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return written(tmp_path / "moe-demo", whole_story())


@pytest.fixture
def everstep(monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["everstep", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from orchestrator import cli\n"
        "sys.argv = ['everstep', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('heavy:', sorted(set(sys.modules) & set({HEAVY!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("heavy: []\n")


def test_help_documents_every_exit_code(everstep) -> None:
    code, out, _ = everstep("--help")
    assert code == 0
    for number, meaning in MEANING.items():
        assert f"{int(number)}  {meaning.split(';')[0].split('`')[0].strip()}" in out


def test_help_has_its_short_name(everstep) -> None:
    for arguments in (("-h",), ("run", "-h")):
        code, out, _ = everstep(*arguments)
        assert code == 0
        assert "Usage: " in out


def test_the_version_is_told(everstep) -> None:
    code, out, _ = everstep("--version")
    assert code == 0
    assert out == f"everstep {version('everstep')}\n"


def test_the_commands_are_these(everstep) -> None:
    names = {command.callback.__name__ for command in cli.app.registered_commands}
    wanted = "run submit check status why events replay report stop snapshot"
    assert names == set(wanted.split())


@pytest.mark.parametrize("command", ["status", "why", "replay", "report"])
def test_every_table_has_json(everstep, run_dir: Path, command: str) -> None:
    extra = ["--no-png"] if command == "report" else []
    code, out, _ = everstep(command, str(run_dir), "--json", *extra)
    assert code == 0
    assert isinstance(json.loads(out), dict)
    code, table, _ = everstep(command, str(run_dir), *extra)
    assert code == 0
    assert table.strip()


def test_what_an_earlier_journal_covers_is_said_first(everstep, run_dir: Path) -> None:
    body = json.loads(everstep("status", str(run_dir), "--json")[1])
    assert body["earlier"] == []
    written(run_dir / "before", whole_story())
    (run_dir / "before" / "journal.jsonl").rename(run_dir / "journal-0001.jsonl")
    for command in (["status"], ["report", "--no-png"]):
        _, out, _ = everstep(command[0], str(run_dir), *command[1:])
        words = " ".join(out.split())
        assert "covers only what came since the start at " in words
        assert f"{len(whole_story().state.incidents)} incidents, in journal-0001.jsonl" in words
    assert "in journal-0001.jsonl." in (run_dir / "report.html").read_text("utf-8")


def test_events_are_lines_or_json_lines_and_can_be_filtered(everstep, run_dir: Path) -> None:
    _, out, _ = everstep("events", str(run_dir), "--json", "--kind", "fault_judged")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["kind"] for row in rows] == ["fault_judged"] * 2
    _, out, _ = everstep("events", str(run_dir))
    assert len(out.splitlines()) == len(whole_story().records)


def test_a_reader_who_leaves_is_no_failed_run(run_dir: Path) -> None:
    """As in `everstep events RUN | head`; 141 is what a shell has for SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "orchestrator", "events", str(run_dir)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_following_a_run_that_is_over_ends(everstep, run_dir: Path) -> None:
    code, out, _ = everstep("events", str(run_dir), "--follow", "--kind", "decision_made")
    assert code == 0
    assert "end the run as finished" in out.splitlines()[-1]


def test_an_unknown_kind_is_one_line_with_the_known_ones(everstep, run_dir: Path) -> None:
    code, _, err = everstep("events", str(run_dir), "--kind", "explosion")
    assert code == ExitCode.USAGE
    assert err.startswith("everstep: --kind explosion: unknown; one of run_requested")
    assert err.count("\n") == 1


def test_an_unknown_run_is_one_line_and_code_5(everstep, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = everstep("status", "nope")
    assert code == ExitCode.NOT_FOUND
    assert out == ""
    assert err.startswith("everstep: no run nope")
    assert err.count("\n") == 1


def test_an_empty_journal_is_said_to_be_empty(everstep, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    code, _, err = everstep("status", str(tmp_path))
    assert code == ExitCode.NOT_FOUND
    assert "nothing has happened yet" in err


def test_a_damaged_journal_is_one_line_and_never_a_traceback(everstep, run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b"moe-demo", b"moe-dome", 1))
    code, _, err = everstep("status", str(run_dir))
    assert code == ExitCode.INTERNAL
    assert "line 1" in err
    assert "Traceback" not in err


def test_replay_of_a_changed_decision_exits_with_7(everstep, tmp_path: Path) -> None:
    records = list(whole_story().records)
    place = next(k for k, r in enumerate(records) if "Launch" in repr(r.event))
    records[place] = restamp(records[place], "because of the moon")
    run_dir = written(tmp_path / "changed", whole_story(), records)
    code, out, _ = everstep("replay", str(run_dir))
    assert code == ExitCode.DIFFERENT
    assert "because of the moon" in out


def test_why_of_an_unknown_incident_is_a_usage_error(everstep, run_dir: Path) -> None:
    code, _, err = everstep("why", str(run_dir), "--incident", "9")
    assert code == ExitCode.USAGE
    assert err.startswith("everstep: --incident 9: no such decision")


def test_report_writes_its_files_where_it_is_told(everstep, run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "out" / "deep"
    code, out, _ = everstep("report", str(run_dir), "--output", str(folder))
    assert code == 0
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.png"}
    assert "report.png" in out


def test_report_without_matplotlib_still_writes_the_page(
    everstep, run_dir: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = everstep("report", str(run_dir))
    assert code == 0
    assert (run_dir / "report.html").exists()
    assert "pip install 'everstep[demo]'" in err


def test_a_comparison_without_losses_names_the_missing_file(everstep, run_dir: Path) -> None:
    code, _, err = everstep("report", str(run_dir), "--compare", str(run_dir), "--no-png")
    assert code == ExitCode.NOT_FOUND
    assert "metrics.jsonl" in err


def test_a_bug_is_one_line_that_says_where_the_traceback_is(
    everstep, run_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    def broken(_: str) -> Path:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(application, "find_run", broken)
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))
    code, _, err = everstep("status", str(run_dir))
    assert code == ExitCode.INTERNAL
    assert err.count("\n") == 1
    place = Path(err.strip().rsplit(" ", 1)[1])
    assert "ZeroDivisionError" in place.read_text()


def test_a_wrong_option_is_a_usage_error(everstep) -> None:
    code, _, err = everstep("status", "x", "--jsno")
    assert code == ExitCode.USAGE
    assert "--jsno" in err


def test_stop_without_a_supervisor_is_code_5(everstep, run_dir: Path) -> None:
    for command in ("stop", "snapshot"):
        code, _, err = everstep(command, str(run_dir))
        assert code == ExitCode.NOT_FOUND
        assert err.startswith("everstep: ")


def test_a_supervisor_is_looked_for_without_a_proxy(tmp_path: Path, monkeypatch) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1" if name == "http_proxy" else "")
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "supervisor.json").write_text(json.dumps({"url": url}))
        assert cli_reading.supervisor(tmp_path) == {"url": url, "alive": True}
        server.shutdown()


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def test_stop_asks_the_supervisor(everstep, run_dir: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(application, "ask", lambda where, what: asked.append((where, what)))
    code, out, _ = everstep("stop", str(run_dir))
    assert code == 0
    assert asked == [(run_dir, "stop")]
    assert out.startswith("asked moe-demo to stop")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.FINISHED, ExitCode.OK),
        (Outcome.FAILED, ExitCode.RUN_FAILED),
        (Outcome.STOPPED, ExitCode.STOPPED),
    ],
)
def test_run_ends_with_the_code_of_its_outcome(
    everstep, run_dir: Path, monkeypatch, outcome: Outcome, code: ExitCode
) -> None:
    def run(_: Path, *, watcher, standby, more) -> Outcome:
        state, history = History.of(whole_story().records)
        watcher(state, history, whole_story().records)
        return outcome

    monkeypatch.setattr(application, "run", run)
    monkeypatch.setattr(application, "find_run", lambda _: run_dir)
    found, out, _ = everstep("run", "run.toml", "--plain")
    assert found == code
    assert "verdict on attempt 1" in out
    assert "steps lost" in out


def test_run_with_json_keeps_standard_output_for_the_report(
    everstep, run_dir: Path, monkeypatch
) -> None:
    def run(_: Path, *, watcher, standby, more) -> Outcome:
        state, history = History.of(whole_story().records)
        watcher(state, history, whole_story().records)
        return Outcome.FINISHED

    monkeypatch.setattr(application, "run", run)
    monkeypatch.setattr(application, "find_run", lambda _: run_dir)
    _, out, err = everstep("run", "run.toml", "--json")
    assert json.loads(out)["outcome"] == "finished"
    assert "verdict on attempt 1" in err


def test_an_interrupted_run_is_code_130(everstep, monkeypatch) -> None:
    def run(_: Path, *, watcher, standby, more) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(application, "run", run)
    code, _, err = everstep("run", "run.toml", "--plain")
    assert code == ExitCode.INTERRUPTED
    assert err == "everstep: interrupted; the ranks go on, `everstep run run.toml` adopts them\n"


def test_check_names_the_wrong_key(everstep, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "a"\n[job]\ncommand = ["true"]\nworkers = 3\n')
    code, _, err = everstep("check", str(path))
    assert code == ExitCode.USAGE
    assert "job.workers" in err
    assert err.count("\n") == 1


def test_check_shows_the_timeouts_and_starts_nothing(everstep, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "a"\n[job]\ncommand = ["true"]\n')
    code, out, _ = everstep("check", str(path))
    assert code == 0
    assert "kill_grace_s" in out
    assert "nothing was started" in out
    code, out, _ = everstep("check", str(path), "--json")
    assert json.loads(out)["config"]["run"]["name"] == "a"
    assert list(tmp_path.iterdir()) == [path]


def test_check_names_the_variables_of_the_ranks_and_shows_no_value(
    everstep, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    job = '[job]\ncommand = ["true"]\n[job.env]\nAPI_TOKEN = "verysecret"\n'
    path.write_text(f'[run]\nname = "a"\n{job}')
    for options in ((), ("--json",)):
        code, out, _ = everstep("check", str(path), *options)
        assert code == 0
        assert "verysecret" not in out
    assert json.loads(out)["config"]["job"]["env"] == ["API_TOKEN"]


def test_a_missing_run_file_is_not_found(everstep, tmp_path: Path) -> None:
    code, _, err = everstep("check", str(tmp_path / "none.toml"))
    assert code == ExitCode.NOT_FOUND
    assert "none.toml: no such file" in err

import json
import os
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from checkpointing.store.base import ObjectStore
from orchestrator import app
from orchestrator.config import RunConfig, freeze
from orchestrator.core import events as ev
from orchestrator.core.actions import Decision, Finish, Launch, Outcome
from orchestrator.core.events import Event
from orchestrator.core.policy import Policy
from orchestrator.core.record import Record
from orchestrator.errors import (
    AlreadyRunning,
    ConfigError,
    NotFound,
    PreconditionError,
)
from orchestrator.launch.slurm_commands import SlurmUnavailable
from orchestrator.preflight import SLURM_PROGRAMS, preflight, timeouts_table
from orchestrator.supervisor.journal import FileJournal
from orchestrator.supervisor.lease import Lease
from tests.unit.orchestrator.desk import needs_ipv6, run_config


def with_command(folder: Path, *command: str, **job: Any) -> RunConfig:
    config = run_config(folder, list(command))
    return config.model_copy(update={"job": config.job.model_copy(update=job)}) if job else config


def executable(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def refused(config: RunConfig) -> str:
    with pytest.raises(PreconditionError) as caught:
        preflight(config)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_script_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    preflight(with_command(tmp_path, "python", "train.py"))
    preflight(with_command(tmp_path, "python", "-u", "train.py"))
    preflight(with_command(tmp_path, "python", str(tmp_path / "train.py")))


@pytest.mark.parametrize(
    "words",
    [["train.py"], ["-u", "train.py"], ["-X", "dev", "train.py"], ["sub/train.py", "--lr", "1"]],
)
def test_a_missing_script_is_named_with_its_directory(tmp_path: Path, words: list[str]) -> None:
    line = refused(with_command(tmp_path, "python", *words))
    assert line.startswith("job.command: no script ")
    assert f"train.py in {tmp_path}" in line


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "train.py"],
        ["-c", "pass", "train.py"],
        ["-um", "train.py"],
        ["-"],
        [],
        ["folder"],
    ],
)
def test_what_is_no_script_is_not_looked_for(tmp_path: Path, words: list[str]) -> None:
    preflight(with_command(tmp_path, "python", *words))


def test_an_argument_of_another_program_is_not_a_script(tmp_path: Path) -> None:
    preflight(with_command(tmp_path, "true", "made.py"))


def test_a_program_is_found_as_the_ranks_will_find_it(tmp_path: Path) -> None:
    tool = executable(tmp_path / "bin" / "tool")
    preflight(with_command(tmp_path, str(tool)))
    preflight(with_command(tmp_path, "./bin/tool"))
    preflight(with_command(tmp_path, "bin/tool"))
    preflight(with_command(tmp_path, "tool", env={"PATH": str(tool.parent)}))


@pytest.mark.parametrize("word", ["tool", "./tool", "bin/plain", "/nonexistent", "bin"])
def test_a_program_that_the_ranks_will_not_find_is_refused(tmp_path: Path, word: str) -> None:
    executable(tmp_path / "bin" / "tool")
    (tmp_path / "bin" / "plain").touch()
    line = refused(with_command(tmp_path, word))
    assert line.startswith("job.command: no program ")
    assert repr(word) in line


def test_a_program_beside_the_working_directory_is_no_program_in_path(tmp_path: Path) -> None:
    executable(tmp_path / "tool")
    refused(with_command(tmp_path, "tool"))


def test_a_missing_working_directory_is_named(tmp_path: Path) -> None:
    line = refused(with_command(tmp_path, "true", workdir=tmp_path / "nowhere"))
    assert line.startswith("job.workdir: ")
    assert str(tmp_path / "nowhere") in line


def test_a_file_in_place_of_the_run_directory_is_named(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    (tmp_path / "file").touch()
    section = config.run.model_copy(update={"dir": tmp_path / "file" / "runs"})
    line = refused(config.model_copy(update={"run": section}))
    assert line.startswith("run.dir: ")
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_a_memory_folder_that_is_none_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    config = run_config(tmp_path)
    nodes = config.nodes.model_copy(update={"memory_dir": tmp_path / place})
    line = refused(config.model_copy(update={"nodes": nodes}))
    assert line.startswith("nodes.memory_dir: ")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_memory_that_somebody_else_put_there_is_not_used(tmp_path: Path) -> None:
    """Its name can be known before, and /dev/shm is everybody's."""
    config = run_config(tmp_path)
    config.memory_root.mkdir()
    preflight(config)
    os.chown(config.memory_root, 12_345, 12_345)
    line = refused(config)
    assert line.startswith("nodes.memory_dir: ")
    assert str(config.memory_root) in line


def test_too_little_room_is_said_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 3 << 20

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    line = refused(run_config(tmp_path))
    assert line.startswith("run.dir: only 3 MiB free")
    assert "64 needed" in line


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(run_config(tmp_path, server={"port": port}))
    assert line.startswith(f"server.port: cannot listen on 127.0.0.1:{port}")
    assert "or 0 for any free one" in line


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named(tmp_path: Path, host: str) -> None:
    line = refused(run_config(tmp_path, server={"host": host}))
    assert line.startswith("server.host: ")
    assert host in line
    assert "Unknown error" not in line
    assert "give one of this machine" in line


@needs_ipv6
def test_a_port_may_be_one_of_ipv6(tmp_path: Path) -> None:
    preflight(run_config(tmp_path, server={"host": "::1"}))


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_a_store_that_is_no_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    config = run_config(tmp_path, checkpoint={"store": (tmp_path / place).as_uri()})
    line = refused(config)
    assert line.startswith("checkpoint.store: ")
    assert place in line


def test_a_store_beside_a_watched_folder_is_fine(tmp_path: Path) -> None:
    """A trainer may write beside the run and its store, and into the run's directory."""
    (tmp_path / "store").mkdir()
    for folder in (tmp_path, tmp_path / "out", tmp_path / "small" / "output"):
        preflight(watching(tmp_path, folder))


def watching(folder: Path, place: Path, pattern: str = "checkpoint-*") -> RunConfig:
    watch = {"dir": str(place), "pattern": pattern, "delete": True}
    store = (folder / "store").as_uri()
    disk = str(folder / "disk")
    return run_config(folder, checkpoint={"store": store, "disk_dir": disk, "watch": watch})


@pytest.mark.parametrize(
    ("place", "pattern"),
    [
        ("file", "*"),
        ("file/below", "*"),
        ("/proc/1/task", "*"),
        ("store", "*"),
        ("store/small/watched", "c*"),
        ("link", "*"),
        ("", "s*"),
        ("", "[d-e]*"),
        ("small", "*"),
        ("small/nodes", "*"),
        ("disk/out", "*"),
    ],
)
def test_a_folder_that_cannot_be_watched_is_named(tmp_path: Path, place: str, pattern: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store/small")
    line = refused(watching(tmp_path, tmp_path / place, pattern))
    assert line.startswith("checkpoint.watch.dir: ")
    assert "; " in line


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/disk", "dangling"])
def test_a_disk_that_takes_no_file_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    line = refused(run_config(tmp_path, checkpoint={"disk_dir": str(tmp_path / place)}))
    assert line.startswith("checkpoint.disk_dir: ")
    assert line.endswith("; choose another")


def test_disks_of_other_machines_are_theirs_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    config = slurm_here(tmp_path, monkeypatch, 30.0)
    disk = config.checkpoint.model_copy(update={"disk_dir": tmp_path / "file"})
    preflight(config.model_copy(update={"checkpoint": disk}))


def story(config: RunConfig, *events: Event) -> Path:
    """Write the journal of a run that things happened to."""
    path = config.run_dir / "journal.jsonl"
    requested = ev.RunRequested(
        run="small", nodes=1, spares=0, ranks_per_node=1, interval_steps=100, checkpoints=False
    )
    journal = FileJournal(path)
    told = (requested, ev.PolicySet(policy=Policy(budget={})), *events)
    journal.append(
        [Record(seq=n, at=float(n), epoch=1, event=event) for n, event in enumerate(told, start=1)]
    )
    journal.close()
    return path


def over(outcome: Outcome) -> tuple[Event, ...]:
    action = Finish(outcome=outcome)
    decision = Decision(key="small/3/finish/1", rule="r", action=action, reason="so")
    return (ev.DecisionMade(decision=decision), ev.ActionDone(key=decision.key, ok=True))


def test_a_new_run_begins_with_nothing(tmp_path: Path) -> None:
    state, history = app.prepare(run_config(tmp_path))
    assert state.run is None
    assert not history.attempts


def test_an_empty_journal_is_a_new_run(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    (config.run_dir / "journal.jsonl").touch()
    assert app.prepare(config)[0].run is None


def test_a_run_under_way_is_taken_up_where_it_stands(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    launch = Decision(key="small/0/launch/1", rule="launch", action=Launch(nodes=1), reason="so")
    done = ev.ActionDone(key=launch.key, ok=True, detail="7")
    story(config, ev.DecisionMade(decision=launch), done)
    state, _ = app.prepare(config)
    assert ([a.job for a in state.living_allocations], state.over) == (["7"], False)


def test_a_run_is_taken_up_while_its_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    config = run_config(tmp_path, checkpoint={"store": f"file://{store}"})
    (tmp_path / "run.toml").touch()
    monkeypatch.setattr(app, "read", lambda _: config)
    taken: list[ObjectStore | None] = []

    def supervise(*parts: Any) -> Outcome:
        taken.append(parts[2])
        return Outcome.FINISHED

    monkeypatch.setattr(app, "_run", supervise)
    with pytest.raises(PreconditionError, match=r"checkpoint\.store: "):
        app.run(tmp_path / "run.toml")
    assert not taken
    story(config)
    assert app.run(tmp_path / "run.toml") is Outcome.FINISHED
    assert taken[0] is not None
    assert "going on without the store until it is back" in caplog.text
    store.mkdir()
    assert taken[0].probe() is None


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    path = story(config, *over(Outcome.FINISHED))
    before = path.read_bytes()
    with pytest.raises(PreconditionError, match=r"run small is finished; .*run\.name.*remove"):
        app.prepare(config)
    assert path.read_bytes() == before


@pytest.mark.parametrize("aside", [False, True])
def test_a_new_journal_knows_what_the_old_one_saw_on_disks(tmp_path: Path, aside: bool) -> None:
    config = run_config(tmp_path)
    copy = ev.Replica(tier=ev.DISK, rank=0, step=30, attempt=3, world=1)
    joined = ev.AgentJoined(
        node="n1",
        incarnation="i1",
        address="",
        metrics_url="",
        replicas=(copy,),
        replica_address="n1:7",
    )
    path = story(config, ev.CatalogueRead(commits=((9, 3),)), joined, *over(Outcome.FAILED))
    if aside:
        path.rename(path.with_name("journal-0001.jsonl"))
    state, _ = app.prepare(config)
    assert (state.last_attempt, state.on_disks, state.run) == (3, (30, 3), None)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.STOPPED])
def test_an_ended_run_goes_on_in_a_new_journal_and_keeps_the_old_one(
    tmp_path: Path, outcome: Outcome
) -> None:
    config = run_config(tmp_path)
    for number in (1, 2):
        path = story(config, *over(outcome))
        content = path.read_bytes()
        for folder in ("submitit", "nodes"):
            (config.run_dir / folder).mkdir()
        state, _ = app.prepare(config)
        assert state.run is None
        kept = path.with_name(f"journal-{number:04d}.jsonl")
        assert kept.read_bytes() == content
        assert not path.exists()
        assert not (config.run_dir / "nodes").exists()


def test_a_finished_run_goes_on_when_more_is_wanted_of_it(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    read = ev.CatalogueRead(commits=((40, 3),))
    path = story(config, read, *over(Outcome.FINISHED))
    with pytest.raises(PreconditionError, match="--more"):
        app.prepare(config)
    state, _ = app.prepare(config, more=True)
    assert (state.run, state.last_attempt) == (None, 3)
    assert path.with_name("journal-0001.jsonl").exists()


@pytest.mark.parametrize("empty", [True, False])
def test_attempts_are_counted_on_after_a_start_that_failed_before_its_first_record(
    tmp_path: Path, empty: bool
) -> None:
    """What earlier attempts uploaded lies under their numbers."""
    config = run_config(tmp_path)
    read = ev.CatalogueRead(commits=((40, 3),))
    path = story(config, read, *over(Outcome.STOPPED))
    assert app.prepare(config)[0].last_attempt == 3
    if empty:
        path.touch()
    state, _ = app.prepare(config)
    assert (state.run, state.last_attempt, state.committed_before) == (None, 3, 40)


@pytest.mark.parametrize(("key", "value"), [("count", 2), ("spares", 1), ("ranks_per_node", 4)])
def test_a_living_run_does_not_change_its_shape(tmp_path: Path, key: str, value: int) -> None:
    config = run_config(tmp_path)
    story(config)
    nodes = config.nodes.model_copy(update={key: value})
    with pytest.raises(ConfigError, match=rf"nodes\.{key}: {value}, but .* small has"):
        app.prepare(config.model_copy(update={"nodes": nodes}))


TOML = '[run]\nname = "small"\ndir = "runs"\n[job]\ncommand = ["true"]\n'


def test_a_run_that_somebody_else_just_started_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw no run directory; the other one made it and got the lease."""
    toml = tmp_path / "run.toml"
    toml.write_text(TOML)
    run_dir = tmp_path / "runs" / "small"

    def other_was_faster(folder: Path, _behind: int) -> Lease:
        folder.mkdir(parents=True)
        (folder / "epoch-00000001.json").write_text("{}")
        raise AlreadyRunning("another supervisor just took small")

    monkeypatch.setattr(app.Lease, "take", other_was_faster)
    with pytest.raises(AlreadyRunning):
        app.run(toml)
    assert (run_dir / "lease" / "epoch-00000001.json").exists()


def test_a_start_that_fails_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TOML)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "run.json")

    monkeypatch.setattr(app, "freeze", full)
    with pytest.raises(PreconditionError, match=r"run\.json: No space left on device; ") as caught:
        app.run(toml)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_run_is_found_by_directory_by_file_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TOML)
    run_dir = tmp_path / "runs" / "small"
    monkeypatch.chdir(tmp_path)
    for name in (str(run_dir), str(toml), "small"):
        with pytest.raises(NotFound, match="no run "):
            app.find_run(name)
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").touch()
    for name in (str(run_dir), str(toml), "small"):
        assert app.find_run(name).resolve() == run_dir
    with pytest.raises(NotFound):
        app.find_run("other")


def test_nobody_to_ask_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no supervisor to ask"):
        app.ask(tmp_path, "stop")
    (tmp_path / "token").write_text("x")
    for text in ("{", "{}", "[]", '{"url": 7}'):
        (tmp_path / "supervisor.json").write_text(text)
        with pytest.raises(NotFound, match="no supervisor to ask"):
            app.ask(tmp_path, "stop")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    (tmp_path / "supervisor.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    with pytest.raises(NotFound, match="no supervisor answers"):
        app.ask(tmp_path, "stop")


@pytest.mark.parametrize(("status", "wanted"), [(401, PreconditionError), (200, None)])
def test_a_supervisor_is_asked_with_the_runs_token_and_not_through_a_proxy(
    tmp_path: Path,
    status: int,
    wanted: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    heard: list[tuple[str | None, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.append((self.headers["Authorization"], body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "supervisor.json").write_text(json.dumps({"url": url}))
        (tmp_path / "token").write_text("secret\n")
        if wanted is None:
            app.ask(tmp_path, "snapshot")
        else:
            with pytest.raises(wanted, match="token"):
                app.ask(tmp_path, "snapshot")
        thread.join()
    assert heard == [("Bearer secret", b'{"say": "snapshot"}')]


def test_the_configuration_of_a_run_is_what_was_frozen(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    assert app.configuration(config.run_dir) is None
    freeze(config, config.run_dir / "run.json")
    assert app.configuration(config.run_dir) == config


def test_checking_starts_nothing(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    store = tmp_path / "store"
    store.mkdir()
    toml.write_text(f'{TOML}[checkpoint]\nstore = "{store.as_uri()}"\n')
    before = sorted(os.walk(tmp_path))
    checked = app.check(toml)
    assert "reachable" in checked.store
    assert checked.timeouts == timeouts_table(checked.config)
    assert sorted(os.walk(tmp_path)) == before, "not even a probe object"


def on_slurm(folder: Path, host: str) -> RunConfig:
    config = with_command(folder, "true")
    nodes = config.nodes.model_copy(update={"launcher": "slurm"})
    server = config.server.model_copy(update={"host": host})
    return config.model_copy(update={"nodes": nodes, "server": server})


def test_a_machine_without_slurms_commands_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(executable(tmp_path / "bin" / "true").parent))
    line = refused(on_slurm(tmp_path, "127.0.0.1"))
    assert line.startswith("nodes.launcher: no sbatch, srun, squeue, scontrol, scancel in PATH")


def test_a_name_that_means_this_machine_only_here_is_no_address_for_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("true", *SLURM_PROGRAMS):
        executable(tmp_path / "bin" / name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    line = refused(on_slurm(tmp_path, "localhost"))
    assert line.startswith("server.host: localhost is ")
    assert "Slurm's nodes can connect to" in line


def slurm_here(folder: Path, monkeypatch: pytest.MonkeyPatch, kill_wait: float | None) -> RunConfig:
    """A run on a machine whose Slurm has this KillWait, or does not answer."""

    def ask() -> float:
        if kill_wait is None:
            raise SlurmUnavailable("scontrol: Unable to contact slurm controller")
        return kill_wait

    for name in ("true", *SLURM_PROGRAMS):
        executable(folder / "bin" / name)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setattr("orchestrator.preflight.is_reachable", lambda _: True)
    monkeypatch.setattr("orchestrator.preflight.kill_wait_s", ask)
    return on_slurm(folder, "localhost")


@pytest.mark.parametrize("kill_wait", [20.0, 25.0])
def test_agents_that_slurm_would_kill_before_they_have_left_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_wait: float
) -> None:
    line = refused(slurm_here(tmp_path, monkeypatch, kill_wait))
    assert line == (
        f"timeouts.leave_s: 25 s, but Slurm here kills {kill_wait:g} s after SIGTERM (its "
        f"KillWait); choose less than {kill_wait:g}, and timeouts.kill_grace_s below it"
    )


def test_agents_that_leave_in_time_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(slurm_here(tmp_path, monkeypatch, 30.0))


def test_a_slurm_that_cannot_be_asked_is_no_place_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refused(slurm_here(tmp_path, monkeypatch, None))
    assert line.startswith("nodes.launcher: cannot ask Slurm for its KillWait: scontrol: Unable")

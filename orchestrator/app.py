"""The composition root: which adapter goes where. Everything the command line can do is here."""

import asyncio
import contextlib
import json
import shutil
import signal
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Literal

from checkpointing.store.base import ObjectStore
from orchestrator.address import with_address
from orchestrator.config import RunConfig, freeze, load, thaw
from orchestrator.core import disks
from orchestrator.core.actions import Outcome
from orchestrator.core.events import RunRequested
from orchestrator.core.record import Record
from orchestrator.core.state import State
from orchestrator.errors import (
    AlreadyRunning,
    ConfigError,
    EverstepError,
    LeaseLost,
    NotFound,
    PreconditionError,
)
from orchestrator.launch.launcher import Launcher
from orchestrator.launch.local import LocalLauncher
from orchestrator.preflight import preflight, timeouts_table
from orchestrator.supervisor.journal import FileJournal, Journal, read_records, state_of
from orchestrator.supervisor.lease import Holder, Lease, Said
from orchestrator.supervisor.loop import Supervisor, Watcher
from orchestrator.supervisor.sessions import read_or_make_token
from orchestrator.views.history import History

ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What `check` found; nothing was started.

    Attributes:
        config: The run with defaults filled in and absolute paths.
        timeouts: (name, seconds, meaning), shortest first.
        store: One line about the store.
    """

    config: RunConfig
    timeouts: tuple[tuple[str, float, str], ...]
    store: str


def check(config_path: Path) -> Checked:
    """Check a run file and everything it names, without starting anything.

    Raises:
        ConfigError: A key is wrong.
        PreconditionError: The store, the script, a directory or the port cannot be used.
        NotFound: There is no such file.
    """
    config = load(config_path)
    store = preflight(with_address(config))
    text = f"{config.checkpoint.store}: reachable, writable, conditional puts work"
    return Checked(
        config=config,
        timeouts=timeouts_table(config),
        store=text if store else _without_store(config),
    )


def _without_store(config: RunConfig) -> str:
    if config.checkpoint.has_replicas:
        return "none: a restart has only what nodes keep in memory and on disks"
    return "none: nothing is saved, every restart begins at step 0"


def run(
    config_path: Path,
    *,
    watcher: Watcher | None = None,
    standby: Said | None = None,
    more: bool = False,
) -> Outcome:
    """Supervise a run in the foreground until it is over.

    A run whose supervisor died is taken up where it stands; one that was stopped or failed goes
    on from its newest checkpoint.

    Args:
        config_path: A run file, or one that was frozen.
        watcher: Sees all that happens.
        standby: Wait for a living supervisor to end, which this is told of, instead of giving up.
        more: Let a finished run go on, too.

    Raises:
        EverstepError: See `orchestrator.errors`; nothing half-made is left behind.
        KeyboardInterrupt: Interrupted; the ranks go on.
    """
    config = read(config_path)
    bound = with_address(config)
    run_dir = config.run_dir
    store = preflight(bound, needs_store=not _has_records(run_dir))
    is_new = not run_dir.exists() and standby is None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return _run(config, bound, store, watcher, standby, more)
    except (EverstepError, KeyboardInterrupt, OSError) as error:
        is_ours = not isinstance(error, AlreadyRunning | LeaseLost)
        if is_new and is_ours and not _has_records(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)
        if isinstance(error, OSError):
            why = error.strerror or type(error).__name__
            text = f"{error.filename or run_dir}: {why}; put that right and start again"
            raise PreconditionError(text) from error
        raise


def _run(
    config: RunConfig,
    bound: RunConfig,
    store: ObjectStore | None,
    watcher: Watcher | None,
    standby: Said | None,
    more: bool,
) -> Outcome:
    """Hold the lease and supervise; `bound` has the supervisor's address."""
    run_dir = config.run_dir
    before = state_in(run_dir)
    lease, has_waited = _lease(run_dir, standby, before.epoch)
    try:
        if has_waited and not before.over and (outcome := outcome_of(run_dir)) is not None:
            return outcome
        state, history = prepare(config, more=more)
        freeze(config, run_dir / "run.json")
        with contextlib.closing(FileJournal(run_dir / "journal.jsonl")) as journal:
            final = serve(compose(bound, state, history, journal, lease, store, watcher))
    finally:
        lease.release()
    assert final.outcome is not None
    return final.outcome


def _lease(run_dir: Path, standby: Said | None, behind: int) -> tuple[Lease, bool]:
    """Return the lease, and whether it was waited for; SIGTERM ends that as Ctrl-C does."""
    if standby is None:
        return Lease.take(run_dir / "lease", behind), False
    told: list[Holder] = []

    def said(holder: Holder) -> None:
        told.append(holder)
        standby(holder)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return Lease.wait(run_dir / "lease", said, behind), bool(told)
    finally:
        signal.signal(signal.SIGTERM, before)


def read(path: Path) -> RunConfig:
    """Read a run file, or one that was frozen; raises as `load` and `thaw` do."""
    return thaw(path) if path.suffix == ".json" else load(path)


def state_in(run_dir: Path) -> State:
    """Return where a run's journal says that it stands; a run never started has an empty state."""
    path = run_dir / "journal.jsonl"
    return state_of(read_records(path) if path.exists() else ())


def outcome_of(run_dir: Path) -> Outcome | None:
    """Return what became of a run, None for one that lives or was never started."""
    state = state_in(run_dir)
    return state.outcome if state.over else None


def compose(
    config: RunConfig,
    state: State,
    history: History,
    journal: Journal,
    lease: Lease,
    store: ObjectStore | None,
    watcher: Watcher | None = None,
) -> Supervisor:
    """Put a supervisor together from its parts."""
    return Supervisor(
        config,
        state=state,
        history=history,
        journal=journal,
        lease=lease,
        launcher=launcher_of(config),
        store=store,
        token=read_or_make_token(config.run_dir / "token"),
        watcher=watcher,
    )


def launcher_of(config: RunConfig) -> Launcher:
    """Return what the run file chose."""
    if config.nodes.launcher == "slurm":
        from orchestrator.launch.slurm import SlurmLauncher

        return SlurmLauncher(config.run_dir, config.slurm.plain())
    return LocalLauncher(config.run_dir, config.memory_root)


def serve(supervisor: Supervisor) -> State:
    """Run a supervisor; SIGTERM and Ctrl-C end it and leave the ranks alone.

    Raises:
        KeyboardInterrupt: On either signal.
    """

    async def main() -> State:
        task = asyncio.ensure_future(supervisor.run())
        loop = asyncio.get_running_loop()

        def end() -> None:
            if not task.cancelling():  # a second signal must not break off the farewell
                task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, end)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    return asyncio.run(main())


def prepare(config: RunConfig, *, more: bool = False) -> tuple[State, History]:
    """Read the journal of a run that is taken up; put that of an ended one aside.

    Raises:
        PreconditionError: The run is finished, and `more` is not wanted of it.
        ConfigError: The run's shape in the TOML is not the one in the journal.
    """
    path = config.run_dir / "journal.jsonl"
    records: tuple[Record, ...] = read_records(path) if path.exists() else ()
    state, history = History.of(records)
    if state.run is None:
        return _carried_on(_kept(path)), History()
    if state.over and state.outcome is Outcome.FINISHED and not more:
        raise finished(config)
    if state.over:
        _put_aside(path)
        return _carried_on(state), History()
    _same_shape(config, state.run)
    return state, history


def finished(config: RunConfig) -> PreconditionError:
    """Say what can be done about a run that has come to its end."""
    return PreconditionError(
        f"run {config.run.name} is finished; choose another run.name, remove {config.run_dir}, or, "
        "to train on from its last checkpoint, have job.command do more steps and add --more to "
        "`everstep run`"
    )


def _put_aside(path: Path) -> None:
    """Forget an ended run's allocation, and keep its journal under a number.

    In this order: its job's id would pass for that of the next allocation.
    """
    for name in ("submitit", "nodes"):
        shutil.rmtree(path.parent / name, ignore_errors=True)
    number = 1
    while (kept := path.with_name(f"journal-{number:04d}.jsonl")).exists():
        number += 1
    path.rename(kept)


def _carried_on(before: State) -> State:
    """Return what a new journal begins with: what counts on, and what may lie on disks."""
    return State(
        last_attempt=before.last_attempt,
        committed_before=max([before.committed_before, *(step for step, _ in before.commits)]),
        on_disks=disks.newest(before),
    )


def _kept(path: Path) -> State:
    """Return where the newest of the journals put aside ended.

    A start may end between that and the first record of its own, which repeats what goes on.
    """
    kept = sorted(path.parent.glob("journal-*.jsonl"))
    return History.of(read_records(kept[-1]))[0] if kept else State()


def _same_shape(config: RunConfig, run: RunRequested) -> None:
    wanted = {
        "count": (config.nodes.count, run.nodes),
        "spares": (config.nodes.spares, run.spares),
        "ranks_per_node": (config.nodes.ranks_per_node, run.ranks_per_node),
    }
    for key, (new, old) in wanted.items():
        if new != old:
            raise ConfigError(
                f"nodes.{key}: {new}, but the living run {run.run} has {old}; "
                "stop it first, or choose another run.name"
            )


def _has_records(run_dir: Path) -> bool:
    path = run_dir / "journal.jsonl"
    return path.exists() and path.stat().st_size > 0


def ask(run_dir: Path, what: Literal["stop", "snapshot"]) -> None:
    """Tell the run's supervisor what the operator wants; returns once it is in the journal's way.

    Raises:
        NotFound: No supervisor answers.
        PreconditionError: The supervisor refuses the token.
    """
    try:
        url = json.loads((run_dir / "supervisor.json").read_text(encoding="utf-8"))["url"]
        token = (run_dir / "token").read_text(encoding="utf-8").strip()
        request = urllib.request.Request(  # noqa: S310 - the address is our own supervisor's
            f"{url}/api/operator",
            data=json.dumps({"say": what}).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NotFound(f"{run_dir.name} has no supervisor to ask; start it first") from error
    # The supervisor is near, and its token is nobody else's business: no proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        why = "the token in its run directory is another one; does it belong to this run?"
        text = why if error.code == HTTPStatus.UNAUTHORIZED else f"HTTP {error.code}"
        raise PreconditionError(f"the supervisor at {url} refused: {text}") from error
    except OSError as error:
        raise NotFound(
            f"no supervisor answers at {url}; `everstep run` of its run file, then again"
        ) from error


def find_run(name_or_path: str) -> Path:
    """Return the directory of a run given by directory, by run file or by name under ./runs.

    Raises:
        NotFound: None of them.
    """
    given = Path(name_or_path)
    if (given / "journal.jsonl").exists():
        return given
    if given.is_file() and given.suffix in (".toml", ".json"):
        given = read(given).run_dir
        if (given / "journal.jsonl").exists():
            return given
    if (Path("runs") / name_or_path / "journal.jsonl").exists():
        return Path("runs") / name_or_path
    raise NotFound(f"no run {name_or_path}: give its directory, its run file or its name in ./runs")


def configuration(run_dir: Path) -> RunConfig | None:
    """Return the frozen configuration of a run, None when it cannot be read."""
    with contextlib.suppress(EverstepError):
        return thaw(run_dir / "run.json")
    return None

import itertools
import json
import stat
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from checkpointing.tiers import Rhythm
from orchestrator.config import RunConfig, freeze, load, parse, thaw
from orchestrator.config_base import Section
from orchestrator.errors import ConfigError, NotFound
from orchestrator.preflight import timeouts_table

LEAST = '[run]\nname = "r"\n[job]\ncommand = ["true"]\n'
KEEP = LEAST + '[checkpoint]\nstore = "file:///s"\n[checkpoint.keep]\n'
SLURM = LEAST + '[nodes]\nlauncher = "slurm"\n'
STORED = LEAST + '[checkpoint]\nstore = "file:///s"\n'
WATCH = '[checkpoint.watch]\ndir = "out"\npattern = "c-*"\n'
ON_SLURM = SLURM + '[server]\nhost = "10.0.0.1"\n[slurm]\n'


NUMBER = {int, float}


def scalars(field: FieldInfo) -> tuple[Any, ...]:
    """Return a field's type, or those of its union, without what is said about them."""
    inside = typing.get_args(field.annotation) or (field.annotation,)
    return tuple(getattr(kind, "__origin__", kind) for kind in inside)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


# Each mistake, the key that the line must name, and a word of the fix.
MISTAKES = [
    ('[job]\ncommand = ["true"]', "run", "missing"),
    ('[run]\nname = "r"', "job", "missing"),
    ('[run]\n[job]\ncommand = ["true"]', "run.name", "missing"),
    ('[run]\nname = "r"\n[job]\n', "job.command", "missing"),
    ('[run]\nname = "Big One"\n[job]\ncommand = ["true"]', "run.name", "lower-case"),
    ('[run]\nname = ""\n[job]\ncommand = ["true"]', "run.name", "lower-case"),
    ('[run]\nname = "../up"\n[job]\ncommand = ["true"]', "run.name", "lower-case"),
    (f'[run]\nname = "{"a" * 49}"\n[job]\ncommand = ["true"]', "run.name", "at most 48"),
    ("[run]\nname = 7\n[job]\ncommand = ['true']", "run.name", "string"),
    ('[run]\nname = "r"\n[job]\ncommand = []', "job.command", "at least 1"),
    ('[run]\nname = "r"\n[job]\ncommand = "python train.py"', "job.command", "write a list"),
    ('[run]\nname = "r"\n[job]\ncommand = ["a", 1]', "job.command.1", "string"),
    (LEAST + "comand = []", "job.comand", "spelling"),
    (LEAST + "[job.env]\nA = 1", "job.env.A", "string"),
    (LEAST + '[job.env]\nA = "a\\u0000b"', "job.env.A", "NUL"),
    (LEAST + '[job.env]\n"A=B" = "c"', "job.env.A=B", "'='"),
    (LEAST + '[job.env]\n"" = "c"', "job.env", "no name"),
    (LEAST + '[job.env]\nRANK = "0"', "job.env.RANK", "each rank its own"),
    (LEAST + '[job.env]\nEVERSTEP_SLOT = "/s"', "job.env.EVERSTEP_SLOT", "each rank its own"),
    ('[run]\nname = "r"\n[job]\ncommand = ["a\\u0000b"]', "job.command.0", "NUL"),
    (LEAST + "[node]\ncount = 2", "node", "spelling"),
    (LEAST + "[nodes]\ncout = 2", "nodes.cout", "spelling"),
    (LEAST + "[nodes]\ncount = 0", "nodes.count", "greater than or equal to 1 (got 0)"),
    (LEAST + "[nodes]\ncount = 1.5", "nodes.count", "integer"),
    (LEAST + '[nodes]\ncount = "two"', "nodes.count", "'two'"),
    (LEAST + "[nodes]\nspares = -1", "nodes.spares", "greater than or equal to 0"),
    (LEAST + "[nodes]\nranks_per_node = 65", "nodes.ranks_per_node", "64"),
    (LEAST + '[nodes]\nlauncher = "pbs"', "nodes.launcher", "'local'"),
    (LEAST + '[checkpoint]\nstore = "s3:/bucket"', "checkpoint.store", "s3://bucket/prefix"),
    (LEAST + '[checkpoint]\nstore = "file://folder"', "checkpoint.store", "file:///absolute"),
    (LEAST + '[checkpoint]\nstore = "/folder"', "checkpoint.store", "file:///absolute"),
    (LEAST + "[checkpoint]\ninterval_steps = 0", "checkpoint.interval_steps", "to 1"),
    (
        LEAST + "[checkpoint]\ninterval_steps = 9223372036854775808",
        "checkpoint.interval_steps",
        "to 1",
    ),
    (LEAST + "[checkpoint]\nmax_overhead = 1.0", "checkpoint.max_overhead", "less than 1"),
    (LEAST + "[checkpoint]\nmax_lost_work_s = 0", "checkpoint.max_lost_work_s", "greater than 0"),
    (LEAST + "[checkpoint]\nmax_lost_work_s = nan", "checkpoint.max_lost_work_s", "nan"),
    (LEAST + '[checkpoint]\nstage_policy = "drop"', "checkpoint.stage_policy", "'replace'"),
    (LEAST + "[checkpoint]\nstage_wait_s = 9", "checkpoint", 'stage_policy = "wait"'),
    (LEAST + '[checkpoint]\non_other_world = "cast"', "checkpoint.on_other_world", "'fresh'"),
    (LEAST + "[checkpoint]\nmax_bytes_per_s = 0", "checkpoint.max_bytes_per_s", "to 1"),
    (LEAST + "[checkpoint]\nmax_bytes_per_s = inf", "checkpoint.max_bytes_per_s", "finite"),
    (LEAST + '[checkpoint]\ndisk_dir = "d"', "checkpoint", "absolute"),
    (LEAST + '[checkpoint]\ndisk_dir = "/d\\u0000"', "checkpoint", "NUL"),
    (LEAST + '[nodes]\nmemory_dir = "/d\\u0000"', "nodes", "NUL"),
    (LEAST + "[checkpoint]\ndisk_interval_steps = 9", "checkpoint", "needs disk_dir"),
    (LEAST + "[checkpoint]\npeer_interval_steps = -1", "checkpoint.peer_interval_steps", "to 0"),
    (
        LEAST + "[checkpoint]\nmax_copy_bytes_per_s = 9",
        "checkpoint.max_copy_bytes_per_s",
        "5000000",
    ),
    (LEAST + "[checkpoint.keep]\nlast = 3", "checkpoint", "keep needs a store"),
    (KEEP + "last = -1", "checkpoint.keep.last", "to 0"),
    (KEEP + "ages_factor = 1", "checkpoint.keep.ages_factor", "to 2"),
    (KEEP + "ages_s = nan", "checkpoint.keep.ages_s", "nan"),
    (KEEP + "average_last = 6", "checkpoint.keep", "average_every_tokens"),
    (KEEP + "every = 100", "checkpoint.keep.every", "spelling"),
    (LEAST + "[timeouts]\nstep_s = inf", "timeouts.step_s", "finite"),
    (LEAST + "[timeouts]\nstep_s = -1", "timeouts.step_s", "greater than 0"),
    (LEAST + "[timeouts]\nheartbeat_s = 20", "timeouts", "less than agent_lost_s (15)"),
    (LEAST + "[timeouts]\nstep_s = 0.4", "timeouts", "less than step_s (0.4)"),
    (LEAST + "[timeouts]\nagent_lost_s = 90000", "timeouts", "less than supervisor_lost_s"),
    (LEAST + "[nodes]\ncount = true", "nodes.count", "integer (got True)"),
    (LEAST + '[nodes]\ncount = "2"', "nodes.count", "integer (got '2')"),
    (LEAST + "[nodes]\nreplace = 1", "nodes.replace", "boolean (got 1)"),
    (LEAST + "[timeouts]\nstep_s = true", "timeouts.step_s", "number (got True)"),
    (
        LEAST + "[checkpoint]\ninterval_steps = 9\nmemory_interval_steps = 10",
        "checkpoint",
        "must not be more than interval_steps (9)",
    ),
    (LEAST + "[checkpoint]\npeer_interval_steps = 1", "checkpoint.peer_interval_steps", "2 or"),
    (LEAST + "[budget]\nwindow_h = inf", "budget.window_h", "finite"),
    (LEAST + "[budget]\nnode_strikes = 0", "budget.node_strikes", "greater than or equal to 1"),
    (LEAST + "[budget]\nwindow_h = 0", "budget.window_h", "greater than 0"),
    (LEAST + "[server]\nport = 65536", "server.port", "less than or equal to 65535"),
    (SLURM + '[server]\nhost = "localhost"', "server.host", "cannot be reached"),
    (SLURM + '[server]\nhost = "127.0.0.1"', "server.host", 'write "auto"'),
    (SLURM + '[server]\nhost = "::"', "server.host", 'write "auto"'),
    (LEAST + '[server]\nhost = "0.0.0.0"', "server.host", "others could connect to"),
    (LEAST + '[server]\nhost = "[::]"', "server.host", "others could connect to"),
    (LEAST + '[server]\nhost = ""', "server.host", "others could connect to"),
    (LEAST + '[server]\nhost = "auto"', "server.host", 'nodes.launcher = "slurm"'),
    ("server = 7\n" + SLURM, "server", "dictionary"),
    (LEAST + '[slurm]\npartition = "p"', "slurm", "nodes.launcher"),
    (ON_SLURM + 'partiton = "p"', "slurm.partiton", "spelling"),
    (ON_SLURM + 'partition = "p\\n#SBATCH --uid=0"', "slurm.partition", "one line"),
    (ON_SLURM + "time_min = 0", "slurm.time_min", "greater than or equal to 1"),
    (ON_SLURM + "options = { nodes = 4 }", "slurm.options.nodes", "everstep sets this"),
    (ON_SLURM + 'options = { "--mem" = "0" }', "slurm.options.--mem", "without dashes"),
    (ON_SLURM + "options = { exclusive = false }", "slurm.options.exclusive", "left out"),
    (ON_SLURM + "options = { mem = 1.5 }", "slurm.options.mem", "whole number"),
    (ON_SLURM + 'options = { mem = "1\\n2" }', "slurm.options.mem", "one line"),
    (ON_SLURM + "account = 'a\\b'", "slurm.account", "backslash"),
    (ON_SLURM + "options = { mail-user = 'a\\b' }", "slurm.options.mail-user", "backslash"),
    (SLURM.replace("[job]", "dir = '/big/100%u'\n[job]"), "run.dir", "choose a directory"),
    (SLURM.replace("[job]", "dir = '/big/a\\b'\n[job]"), "run.dir", "choose a directory"),
    (SLURM.replace("[job]", 'dir = "/big/a\\nb"\n[job]'), "run.dir", "choose a directory"),
    (ON_SLURM + 'prologue = "module load x"', "slurm.prologue", "write a list"),
    (ON_SLURM + "supervisor = { time_min = 9 }", "slurm.supervisor.time_min", "equal to 10"),
    (ON_SLURM + "supervisor = { nodes = 2 }", "slurm.supervisor.nodes", "unknown key"),
    (
        ON_SLURM + "supervisor = { options = { requeue = true } }",
        "slurm.supervisor.options.requeue",
        "everstep sets this",
    ),
    (LEAST + WATCH, "checkpoint", "watch needs store"),
    (STORED + WATCH + 'finished = "marker"', "checkpoint.watch", "go together"),
    (STORED + WATCH + 'marker = "done"', "checkpoint.watch", "go together"),
    (STORED + WATCH + 'finished = "marker"\nmarker = "../x"', "checkpoint.watch", "inside"),
    (STORED + WATCH.replace("c-*", "a/*"), "checkpoint.watch", "directly in dir"),
    (STORED + WATCH + "keep = -1", "checkpoint.watch.keep", "greater"),
    (STORED + WATCH + "[nodes]\ncount = 2", "checkpoint.watch.shared", "when each has its own"),
]


def keys(section: type[BaseModel], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        for table in tables:
            yield from keys(table, f"{before}{name}.")
        if not tables:
            yield f"{before}{name}", field


KEYS = tuple(keys(RunConfig))
LOOKS = [
    *[(key, value) for key, field in KEYS if NUMBER & set(scalars(field)) for value in (True, "5")],
    *[(key, value) for key, field in KEYS if bool in scalars(field) for value in (1, "true")],
]


@pytest.mark.parametrize("value", [True, "5", 1, "true"])
def test_nothing_is_taken_for_a_number_or_a_word_of_truth(value: object) -> None:
    """As a key is wrong by its type alone, what else is wrong with the file does not matter."""
    wrong = [key for key, looks in LOOKS if looks is value]
    assert len(wrong) > 3
    for key in wrong:
        *tables, last = key.split(".")
        raw: dict[str, Any] = {}
        table = raw
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
        with pytest.raises(ValidationError) as caught:
            RunConfig.model_validate(raw)
        kinds = {".".join(map(str, one["loc"])): one["type"] for one in caught.value.errors()}
        assert kinds[key] in ("int_type", "float_type", "bool_type")


@pytest.mark.parametrize(("text", "key", "fix"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key_and_the_fix(
    tmp_path: Path, text: str, key: str, fix: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: {key}: ")
    assert fix in line
    assert "\n" not in line


def test_a_directory_that_slurm_would_take_for_another_is_refused_on_slurm(tmp_path: Path) -> None:
    folder = tmp_path / "100%user"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"run.dir: .*100%user/runs"):
        load(write(folder, SLURM))
    assert load(write(folder, LEAST)).run.dir == folder / "runs"


def test_with_slurm_the_address_is_found_where_the_supervisor_runs(tmp_path: Path) -> None:
    assert load(write(tmp_path, SLURM)).server.host == "auto"
    assert load(write(tmp_path, SLURM + "[server]\nport = 80")).server.host == "auto"
    assert load(write(tmp_path, ON_SLURM)).server.host == "10.0.0.1"
    assert load(write(tmp_path, LEAST)).server.host == "127.0.0.1"


def test_the_supervisors_job_has_the_runs_partition_and_account_but_its_own_size(
    tmp_path: Path,
) -> None:
    text = 'partition = "gpu"\naccount = "lab"\nqos = "big"\nconstraint = "h200"\ntime_min = 90\n'
    slurm = load(write(tmp_path, ON_SLURM + text + 'prologue = ["true"]')).slurm
    small = slurm.plain_supervisor()
    assert (small.partition, small.account, small.prologue) == ("gpu", "lab", ("true",))
    assert (small.qos, small.constraint, small.time_min) == ("", "", 0)
    assert small.options == {"mem": "2048M", "cpus-per-task": 1}
    text += '[slurm.supervisor]\npartition = "cpu"\nqos = "long"\noptions = { mem = 0 }'
    own = load(write(tmp_path, ON_SLURM + text)).slurm.plain_supervisor()
    assert (own.partition, own.account, own.qos) == ("cpu", "lab", "long")
    assert own.options["mem"] == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store", "s3://key:hidden@bucket/prefix"),
        ("endpoint_url", "http://key:hidden@s3.example"),
        ("endpoint_url", "http://hidden@s3.example"),
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(
    tmp_path: Path, key: str, value: str
) -> None:
    """It would show in arguments, pages and the frozen configuration."""
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}: .*environment") as caught:
        load(write(tmp_path, f'{LEAST}[checkpoint]\n{key} = "{value}"'))
    assert "hidden" not in str(caught.value)


def test_further_mistakes_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, LEAST + "[nodes]\ncount = 0\nspares = -1\n[server]\nport = -1\n")
    with pytest.raises(ConfigError, match=r"nodes.count.*\(and 2 more\)$"):
        load(path)


@pytest.mark.parametrize("text", ["[run", "run = {", "a = 1\na = 2", "\x00"])
def test_what_is_no_toml_is_said_with_its_place(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_utf8_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'[run]\nname = "\xff"\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(path)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"run\.toml: no such file"):
        load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path)


def test_the_least_file_is_enough(tmp_path: Path) -> None:
    config = load(write(tmp_path, LEAST))
    assert config.nodes.count == 1
    assert config.checkpoint.store is None
    assert not config.policy().tune_interval, "nothing to tune without a store"


def test_relative_paths_are_relative_to_the_file_wherever_it_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    text = '[run]\nname = "r"\ndir = "out"\n[job]\ncommand = ["true"]\nworkdir = "../src"\n'
    write(folder, text + '[nodes]\nmemory_dir = "memory"\n')
    monkeypatch.chdir(tmp_path)
    config = load(Path("here/run.toml"))
    assert config.run_dir == folder / "out" / "r"
    assert config.job.workdir == folder / "../src"
    assert config.nodes.memory_dir == folder / "memory"


def test_absolute_paths_stay_as_they_are(tmp_path: Path) -> None:
    text = f'[run]\nname = "r"\ndir = "{tmp_path}/out"\n[job]\ncommand = ["true"]\nworkdir = "/"\n'
    config = load(write(tmp_path, text))
    assert config.run_dir == tmp_path / "out" / "r"
    assert config.job.workdir == Path("/")
    assert config.nodes.memory_dir == Path("/dev/shm")


@pytest.mark.parametrize("first", ["python", "python3"])
def test_python_means_the_interpreter_that_everstep_runs_in(first: str) -> None:
    config = parse({"run": {"name": "r"}, "job": {"command": [first, "a.py"]}}, "x")
    assert config.argv == (sys.executable, "a.py")


def test_any_other_program_is_left_alone() -> None:
    config = parse({"run": {"name": "r"}, "job": {"command": ["python3.9", "python"]}}, "x")
    assert config.argv == ("python3.9", "python")


def test_timeouts_are_listed_shortest_first_and_all_of_them() -> None:
    config = parse({"run": {"name": "r"}, "job": {"command": ["true"]}}, "x")
    table = timeouts_table(config)
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(table))
    assert {name for name, _, _ in table} == set(type(config.timeouts).model_fields)
    assert {name: value for name, value, _ in table} == config.timeouts.model_dump()


def full(tmp_path: Path) -> RunConfig:
    text = LEAST + (
        '[job.env]\nA = "b"\n[nodes]\ncount = 3\n[checkpoint]\nstore = "s3://b/p"\n'
        'endpoint_url = "http://127.0.0.1:1"\n[timeouts]\nstep_s = 9.5\n[budget]\nnode = 0\n'
    )
    return load(write(tmp_path, text))


def test_tiers_are_kept_only_where_the_file_names_them(tmp_path: Path) -> None:
    plain = load(write(tmp_path, LEAST))
    assert plain.checkpoint.rhythm == Rhythm()
    assert not plain.checkpoint.has_replicas
    assert not plain.policy().peers
    text = "[nodes]\ncount = 2\n[checkpoint]\nmemory_interval_steps = 5\npeer_interval_steps = 10\n"
    tiered = load(write(tmp_path, LEAST + text + f'disk_dir = "{tmp_path}"\n'))
    assert tiered.checkpoint.rhythm == Rhythm(memory=5, peer=10, disk=1)
    assert tiered.policy().peers
    freeze(plain, tmp_path / "run.json")
    assert thaw(tmp_path / "run.json") == plain


def test_a_frozen_configuration_thaws_to_the_same(tmp_path: Path) -> None:
    config = full(tmp_path)
    freeze(config, tmp_path / "run.json")
    assert thaw(tmp_path / "run.json") == config


def test_freezing_again_replaces_the_file_at_once(tmp_path: Path) -> None:
    config = full(tmp_path)
    path = tmp_path / "run.json"
    freeze(config, path)
    changed = config.model_copy(update={"server": config.server.model_copy(update={"port": 1})})
    freeze(changed, path)
    assert thaw(path).server.port == 1


def test_a_frozen_configuration_is_for_its_owner_only(tmp_path: Path) -> None:
    """The environment of the ranks may hold secrets."""
    path = tmp_path / "run.json"
    path.write_text("{}")
    freeze(load(write(tmp_path, LEAST)), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_another_version_froze_is_refused_with_the_file_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(NotFound, match="is this a run directory"):
        thaw(path)
    path.write_text(json.dumps({"run": {"name": "r"}, "future": 1}))
    with pytest.raises(ConfigError, match=r"run\.json: written by another version") as caught:
        thaw(path)
    assert "\n" not in str(caught.value)


def test_the_policy_holds_what_the_file_says(tmp_path: Path) -> None:
    config = full(tmp_path)
    policy = config.policy()
    assert policy.budget == {"process": 10, "node": 0, "storage": 3}
    assert policy.budget_window_s == 86_400
    assert policy.tune_interval
    assert policy.kill_grace_s == config.timeouts.kill_grace_s


def test_the_slurm_table_becomes_the_launchers_options(tmp_path: Path) -> None:
    text = ON_SLURM + 'partition = "p"\noptions = { mem = 0, exclusive = true, gres = "x:1" }\n'
    config = load(write(tmp_path, text + 'prologue = ["module load x"]'))
    path = tmp_path / "run.json"
    freeze(config, path)
    assert thaw(path) == config
    options = config.slurm.plain()
    assert (options.partition, options.time_min, options.prologue) == ("p", 0, ("module load x",))
    assert options.options == {"mem": 0, "exclusive": True, "gres": "x:1"}
    assert options.options["exclusive"] is True

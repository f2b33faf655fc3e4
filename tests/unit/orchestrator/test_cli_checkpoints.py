"""`everstep checkpoints`: what it shows, what it changes, and what it says to wrong input."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing import keys
from checkpointing.quarantine import quarantine
from checkpointing.resolver import list_commits
from checkpointing.store.directory import DirectoryStore
from orchestrator import cli
from orchestrator.exit_codes import ExitCode
from tests.unit.checkpointing.saved import save, store_at, upload, weights

Call = Callable[..., tuple[int, str, str]]
RUN_FILE = (
    '[run]\nname = "moe"\ndir = "runs"\n[job]\ncommand = ["true"]\n[checkpoint]\nstore = "{}"\n'
)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["everstep", "checkpoints", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


@pytest.fixture
def moe(call: Call, store: DirectoryStore, tmp_path: Path) -> Call:
    """Call a command on the run `moe` of the store."""

    def run(verb: str, *arguments: str) -> tuple[int, str, str]:
        where = ["--store", f"file://{tmp_path}/store", "--run", "moe"]
        return call(verb, *where, *arguments)

    return run


def as_json(answer: tuple[int, str, str], code: int = 0) -> dict[str, Any]:
    found, out, err = answer
    assert found == code, err
    body: dict[str, Any] = json.loads(out)
    return body


def flip(tmp_path: Path, key: str) -> None:
    path = tmp_path / "store" / key
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def cut(tmp_path: Path, key: str) -> None:
    path = tmp_path / "store" / key
    path.write_bytes(path.read_bytes()[:-8])


def test_checkpoints_are_listed_with_quarantine_and_averages(
    moe: Call, store: DirectoryStore
) -> None:
    code, out, err = moe("ls")
    assert (code, err) == (0, "")
    assert "".join(out.split()) == f"moe:nothingiscommittedin{_url(moe)}"
    for step in (10, 20, 30):
        save(store, "moe", step)
    quarantine(store, "moe", 30, 1, why="crc of w", who="attempt 2")
    assert moe("average", "--last", "2")[0] == 0
    body = as_json(moe("ls", "--json"))
    rows = [(row["step"], row["attempt"], row["state"]) for row in body["checkpoints"]]
    assert rows == [(30, 1, "quarantined"), (20, 1, "committed"), (10, 1, "committed")]
    assert body["checkpoints"][0]["why"] == "crc of w"
    assert [(made["label"], made["of"]) for made in body["averages"]] == [("last-2", [20, 10])]
    _, out, _ = moe("ls", "--last", "1")
    assert "quarantined: crc of w" in out
    assert "and 2 older" in out
    assert "average last-2 at step 20" in out


def _url(moe: Call) -> str:
    url: str = as_json(moe("ls", "--json"))["store"]
    return url


def test_a_damaged_manifest_of_the_newest_is_damage(
    moe: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    for step in (10, 20):
        save(store, "moe", step)
    flip(tmp_path, list_commits(store, "moe")[0].key)
    code, out, err = moe("verify")
    assert code == ExitCode.DAMAGED
    assert err.endswith("everstep: moe: 1 damaged, named above\n")
    words = " ".join(out.split())
    assert "step 20 of attempt 1: damaged" in words
    assert "step 10 of attempt 1: sound" in words
    assert moe("verify", "--step", "10")[0] == 0


def test_a_checkpoint_is_told_in_full(moe: Call, store: DirectoryStore) -> None:
    save(store, "moe", 10)
    body = as_json(moe("show", "--json"))
    assert (body["step"], body["attempt"], body["ranks"]) == (10, 1, 2)
    assert [group["name"] for group in body["groups"]] == ["model", "optimizer"]
    assert body["values"] == {"epoch": "10", "optimizer/lr": "0.1"}
    assert body["tensors"][0] == {
        "name": "model/layers.0.w",
        "dtype": "float32",
        "shape": [6, 2],
        "nbytes": 48,
        "pieces": 1,
    }
    _, out, _ = moe("show", "--step", "10/1")
    assert "step 10 of attempt 1" in out
    assert "model/layers.0.w" in out


def test_damage_is_named_with_an_own_exit_code(
    moe: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    for step in (10, 20):
        save(store, "moe", step)
    code, out, err = moe("verify")
    assert (code, err) == (0, "")
    assert out.startswith("step 20 of attempt 1: sound")
    flip(tmp_path, keys.data_key("moe", 20, 1, 0))
    code, out, err = moe("verify", "--all")
    assert (code, err) == (ExitCode.DAMAGED, "everstep: moe: 1 damaged, named above\n")
    words = " ".join(out.split())
    assert "step 20 of attempt 1: damaged" in words
    assert "model/layers.0.w: bytes 0 to 47 of moe/data/" in words
    assert "step 10 of attempt 1: sound" in words
    body = as_json(moe("verify", "--quarantine", "--json"), ExitCode.DAMAGED)
    assert body["checkpoints"][0]["quarantined"]
    assert [commit.step for commit in list_commits(store, "moe")] == [10]
    assert moe("verify")[0] == 0
    code, _, err = moe("export", "--step", "20/1", "--to", "out")
    assert code == ExitCode.DAMAGED
    assert "fail their CRC" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_checkpoint_is_not_exported_and_said_in_one_line(
    moe: Call,
    store: DirectoryStore,
    tmp_path: Path,
    form: str,
    damage: Callable[[Path, str], None],
) -> None:
    save(store, "moe", 20)
    damage(tmp_path, keys.data_key("moe", 20, 1, 0))
    code, out, err = moe("export", "--to", str(tmp_path / "out"), "--format", form)
    assert (code, out) == (ExitCode.DAMAGED, ""), err
    assert err.startswith("everstep: ")
    assert err.count("\n") == 1
    assert "--to" not in err
    assert not (tmp_path / "out").exists()


def test_two_checkpoints_are_compared(moe: Call, store: DirectoryStore) -> None:
    save(store, "moe", 10)
    save(store, "moe", 20, state=lambda _: {**weights(10), "epoch": 20})
    save(store, "moe", 30)
    body = as_json(moe("diff", "--steps", "10", "20", "--json"), ExitCode.DIFFERENT)
    assert (body["equal"], body["tensors"]) == (5, [])
    assert body["values"] == [{"path": "epoch", "first": "10", "second": "20"}]
    assert moe("diff", "--steps", "10", "20", "--subtree", "model")[0] == 0
    body = as_json(moe("diff", "--json"), ExitCode.DIFFERENT)
    assert (body["first"]["step"], body["second"]["step"], body["equal"]) == (20, 30, 0)
    assert {row["kind"] for row in body["tensors"]} == {"changed"}
    code, out, _ = moe("diff")
    assert code == ExitCode.DIFFERENT
    assert "0 tensors equal, 5 not" in out


def test_pruning_tells_first_and_deletes_when_told(
    moe: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    for step in range(10, 70, 10):
        save(store, "moe", step)
    before = store.list("")
    rules = ("--keep-last", "2", "--ages-h", "0", "--keep-every", "30")
    code, out, _ = moe("prune", *rules)
    assert code == 0
    assert "nothing was deleted; --yes does it" in out
    assert store.list("") == before
    body = as_json(moe("prune", *rules, "--yes", "--json"))
    assert [row["step"] for row in body["delete"]] == [40, 20]
    assert body["deleted"]
    assert [commit.step for commit in list_commits(store, "moe")] == [60, 50, 30, 10]
    assert not [info for info in store.list("") if "000040/" in info.key]
    code, out, _ = moe("prune", *rules)
    assert "nothing to delete" in out


def test_what_the_run_restored_from_is_never_pruned(
    call: Call, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30, 40):
        save(store, "moe", step)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(f"file://{tmp_path}/store"))
    monkeypatch.setattr("orchestrator.pruning.in_use", lambda _: {(10, 1)})
    rules = ("--keep-last", "1", "--ages-h", "0", "--json")
    body = as_json(call("prune", "run.toml", *rules))
    assert {row["step"]: row["why"] for row in body["keep"]} == {
        40: "the newest, one of the last 1",
        30: "the fallback of the newest",
        10: "in use",
    }


def test_orphans_are_swept(moe: Call, store: DirectoryStore, tmp_path: Path) -> None:
    import os

    upload(store, "moe", 5)
    old = time.time() - 2 * 86_400
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            os.utime(path, (old, old))
    save(store, "moe", 10)
    body = as_json(moe("prune", "--json"))
    assert [(row["step"], row["objects"]) for row in body["orphans"]] == [(5, 4)]
    assert as_json(moe("prune", "--orphans-h", "72", "--json"))["orphans"] == []
    assert as_json(moe("prune", "--orphans-h", "0", "--json"))["orphans"] == []
    assert as_json(moe("prune", "--yes", "--json"))["freed_bytes"] > 0
    assert not [info for info in store.list("") if "000005/" in info.key]


def test_an_average_is_made_shown_verified_and_exported(
    moe: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save(store, "moe", step)
    code, out, err = moe("average", "--last", "3", "--label", "swa")
    assert (code, err) == (0, "")
    assert "average swa of steps 30, 20, 10: 4 tensors averaged, 0 copied" in " ".join(out.split())
    _, out, _ = moe("average", "--last", "3", "--label", "swa")
    assert "it was there before" in " ".join(out.split())
    assert as_json(moe("show", "--average", "swa", "--json"))["average_of"] == [
        [30, 1],
        [20, 1],
        [10, 1],
    ]
    assert moe("verify", "--average", "swa")[0] == 0
    body = as_json(moe("export", "--average", "swa", "--to", str(tmp_path / "out"), "--json"))
    assert (body["tensors"], body["files"]) == (4, ["model.safetensors"])
    assert [commit.step for commit in list_commits(store, "moe")] == [30, 20, 10]


def test_a_run_file_says_where_the_store_is(
    call: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    save(store, "moe", 10)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(f"file://{tmp_path}/store"))
    assert as_json(call("ls", "run.toml", "--json"))["checkpoints"][0]["step"] == 10


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls"], ExitCode.USAGE, "RUN: missing; or give --store URL with --run NAME"),
        (["ls", "--store", "file:///x"], ExitCode.USAGE, "RUN: missing"),
        (["ls", "moe", "--run", "moe"], ExitCode.USAGE, "RUN: give either RUN, or"),
        (["ls", "moe"], ExitCode.NOT_FOUND, "no run moe"),
        (["ls", "--store", "ftp://x", "--run", "m"], ExitCode.USAGE, "--store: store url"),
        (["ls", "--store", "file:///x", "--run", "../m"], ExitCode.USAGE, "--run: '../m' is no"),
        (["ls", "--store", "file:///no-such", "--run", "m"], ExitCode.PRECONDITION, "no such fold"),
        (["ls", "MOE", "--last", "0"], ExitCode.USAGE, "--last: 0: give at least 1"),
        (["show", "MOE"], ExitCode.NOT_FOUND, "moe: no usable checkpoint in"),
        (["show", "MOE", "--step", "5"], ExitCode.NOT_FOUND, "moe: step 5 is not committed"),
        (["show", "MOE", "--step", "5x"], ExitCode.USAGE, "--step: '5x': write STEP or STEP/ATT"),
        (["show", "MOE", "--average", "a/b"], ExitCode.USAGE, "--average: 'a/b' is no label"),
        (["show", "MOE", "--average", "a"], ExitCode.NOT_FOUND, "averages/a: no usable"),
        (["verify", "MOE", "--all"], ExitCode.NOT_FOUND, "moe: no checkpoint in"),
        (["verify", "MOE", "--all", "--step", "5"], ExitCode.USAGE, "either --all or --step"),
        (["diff", "MOE"], ExitCode.NOT_FOUND, "moe: 0 usable steps in"),
        (["diff", "MOE", "--steps", "a", "b"], ExitCode.USAGE, "--steps: 'a': write STEP"),
        (["average", "MOE"], ExitCode.NOT_FOUND, "6 asked for"),
        (["average", "MOE", "--last", "0"], ExitCode.USAGE, "--last: 0"),
        (["average", "MOE", "--label", "../x"], ExitCode.USAGE, "is no label"),
        (["prune", "MOE", "--keep-last", "-1"], ExitCode.USAGE, "retention: counts are 0 or more"),
        (["prune", "MOE", "--ages-h", "nan"], ExitCode.USAGE, "--ages-h: nan: give 0 or more"),
        (["prune", "MOE", "--orphans-h", "-2"], ExitCode.USAGE, "--orphans-h: -2"),
        (["prune", "MOE", "--average-every-tokens", "-5"], ExitCode.USAGE, "counts are 0 or more"),
        (["export", "MOE", "--to", "out"], ExitCode.NOT_FOUND, "no usable checkpoint"),
        (["export", "MOE", "--to", "out", "--shard-gb", "0"], ExitCode.USAGE, "--shard-gb: 0"),
        (
            ["export", "MOE", "--to", "out", "--format", "dcp", "--strip", "x"],
            ExitCode.USAGE,
            "--strip: only for safetensors",
        ),
    ],
)
def test_wrong_input_is_one_line_and_changes_nothing(
    call: Call,
    store: DirectoryStore,
    tmp_path: Path,
    arguments: list[str],
    code: ExitCode,
    words: str,
) -> None:
    given = []
    for argument in arguments:
        moe = ["--store", f"file://{tmp_path}/store", "--run", "moe"]
        given += moe if argument == "MOE" else [argument]
    found, out, err = call(*given)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    assert not list((tmp_path / "store").iterdir())


def test_what_cannot_be_exported_is_one_line(
    moe: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    save(store, "moe", 10)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    code, _, err = moe("export", "--to", "full")
    assert (code, err.count("\n")) == (ExitCode.USAGE, 1)
    assert "everstep: full: exists and is no empty folder" in err
    code, _, err = moe("export", "--to", "out", "--subtree", "weights")
    assert (code, err) == (ExitCode.USAGE, "everstep: no tensors below 'weights'\n")
    (tmp_path / "file").touch()
    code, _, err = moe("export", "--to", "file/out")
    assert (code, err.count("\n")) == (ExitCode.PRECONDITION, 1)


def test_pruning_follows_the_runs_own_rules_but_for_what_is_given(
    call: Call, store: DirectoryStore, tmp_path: Path
) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        save(store, "moe", step)
    toml = tmp_path / "moe.toml"
    toml.write_text(
        f'[run]\nname = "moe"\n[job]\ncommand = ["true"]\n'
        f'[checkpoint]\nstore = "{(tmp_path / "store").as_uri()}"\n'
        "[checkpoint.keep]\nlast = 2\nages_s = 0\nevery_steps = 20\n",
        encoding="utf-8",
    )

    def left(*words: str) -> list[int]:
        body = as_json(call("prune", str(toml), *words, "--json"))
        return [row["step"] for row in body["keep"]]

    assert left() == [60, 50, 40, 20, 10]
    assert left("--keep-every", "0") == [60, 50]
    assert left("--keep-last", "3") == [60, 50, 40, 20, 10]

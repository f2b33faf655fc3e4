"""A trainer with its own checkpoints under everstep: its folders are in the store at the end."""

import json
from pathlib import Path

import pytest

from checkpointing.store.directory import DirectoryStore
from checkpointing.watched import verbs
from tests.integration.command_line import everstep, python
from tests.unit.checkpointing.watched import content

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Each rank writes its part of two checkpoints, and dies once in between.
TRAINER = """
import os, pathlib, sys
rank, attempt = os.environ["RANK"], int(os.environ["EVERSTEP_ATTEMPT"])
out = pathlib.Path(sys.argv[1].replace("NODE", os.environ["GROUP_RANK"]))
for step in (1, 2):
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.bin").write_bytes(f"{rank} {step} {attempt}".encode() * 1000)
    if step == 1 and attempt == 1 and rank == "1":
        sys.exit(1)
"""


def whole(step: int, attempt: int) -> dict[str, bytes]:
    return {f"rank-{r}.bin": f"{r} {step} {attempt}".encode() * 1000 for r in range(2)}


@pytest.mark.parametrize("shared", [True, False])
def test_folders_of_two_nodes_are_committed_and_the_old_one_deleted(
    tmp_path: Path, shared: bool
) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "store").mkdir()
    out = str(tmp_path / ("out" if shared else "out-NODE"))
    # On one machine the nodes can only have folders of their own by their names.
    watched = "out" if shared else "out-0"
    (tmp_path / "run.toml").write_text(f"""
[run]
name = "small"
dir = "runs"
[job]
command = ["python", "train.py", "{out}"]
preload = []
[nodes]
count = {2 if shared else 1}
ranks_per_node = {1 if shared else 2}
[checkpoint]
store = "{(tmp_path / "store").as_uri()}"
[checkpoint.watch]
dir = "{watched}"
pattern = "checkpoint-*"
quiet_s = 1
delete = true
shared = {json.dumps(shared)}
""")
    done = everstep("run", tmp_path / "run.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    store = DirectoryStore(tmp_path / "store")
    assert [row["entry"] for row in verbs.rows(store, "small")] == ["checkpoint-2", "checkpoint-1"]
    left = [path.name for path in (tmp_path / watched).glob("checkpoint-*")]
    assert left == ["checkpoint-2"]
    assert content(tmp_path / watched / "checkpoint-2") == whole(2, 2)
    told = json.loads(everstep("status", tmp_path / "run.toml", "--json").stdout)
    assert told["folders"]["last"] in ("checkpoint-1", "checkpoint-2")  # in any order, at the end
    assert told["folders"]["age_s"] is not None
    assert told["folders"]["removed"] == 1
    assert f"{told['folders']['last']}, " in everstep("status", tmp_path / "run.toml").stdout
    back = python(
        *("-m", "checkpointing.watched", "restore", "checkpoint-1", "--name", "small"),
        *("--store", (tmp_path / "store").as_uri(), "--dir", tmp_path / "back"),
    )
    assert back.returncode == 0, back.stderr
    assert content(tmp_path / "back/checkpoint-1") == whole(1, 2)

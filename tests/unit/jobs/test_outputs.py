import json

import pytest
import torch

from jobs.digest import tensor_sha256
from jobs.errors import OutputError
from jobs.outputs import Outputs, StepRecord

pytestmark = pytest.mark.torch


def record(step):
    return StepRecord(
        step=step, loss=2.5, grad_norm=1.0, lr=1e-3, max_violation=0.5, step_s=0.1, tokens=64 * step
    )


def outputs(folder, **changed):
    fields = {"active": True, "attempt": 2, "steps": 3, "plain": True, "log_every": 1}
    return Outputs(folder, **{**fields, **changed})


def test_metrics_have_one_json_object_a_line_and_attempts_append(tmp_path):
    for attempt in (1, 2):
        out = outputs(tmp_path, attempt=attempt)
        out.record(record(attempt))
        out.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["step"], line["tokens"]) for line in lines] == [
        (1, 1, 64),
        (2, 2, 128),
    ]
    assert {"loss", "step_s", "at"} <= set(lines[0])


def test_torn_last_line_of_a_killed_attempt_does_not_spoil_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"attempt": 1, "step": 1, "lo')
    out = outputs(tmp_path)
    out.record(record(2))
    out.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2
    assert len(lines) == 2


def test_final_file_is_replaced_whole_and_leaves_no_partial(tmp_path):
    out = outputs(tmp_path)
    out.finish(steps=3, loss=2.0, tokens=9, sha256={"weights": "a", "optimizer": "b"})
    out.close()
    assert json.loads((tmp_path / "final.json").read_text()) == {
        "steps": 3,
        "loss": 2.0,
        "tokens": 9,
        "sha256": {"weights": "a", "optimizer": "b"},
    }
    assert {path.name for path in tmp_path.iterdir()} == {"final.json", "metrics.jsonl"}


def test_a_full_disk_is_one_line_that_names_the_folder(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    out = outputs(tmp_path)
    with pytest.raises(OutputError, match="No space left on device; make room") as caught:
        out.record(record(1))
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        outputs(tmp_path / "file")


def test_other_ranks_write_nothing(tmp_path):
    out = outputs(tmp_path / "none", active=False)
    out.record(record(1))
    out.finish(steps=3, loss=2.0, tokens=9, sha256={"weights": "a", "optimizer": "b"})
    out.close()
    assert not (tmp_path / "none").exists()


def test_digest_sees_names_types_shapes_and_bits_but_not_the_order():
    base = {"a": torch.zeros(2, 3), "b": {"c": torch.ones(4)}}
    same = {"b": {"c": torch.ones(4)}, "a": torch.zeros(2, 3), "n": 5}
    assert tensor_sha256(base) == tensor_sha256(same)
    others = [
        {"x": torch.zeros(2, 3), "b": {"c": torch.ones(4)}},
        {"a": torch.zeros(3, 2), "b": {"c": torch.ones(4)}},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": {"c": torch.ones(4)}},
        {"a": -torch.zeros(2, 3), "b": {"c": torch.ones(4)}},
    ]
    assert len({tensor_sha256(state) for state in [base, *others]}) == 5

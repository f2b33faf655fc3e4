"""The demo's run, without what it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.demo import run as demo
from deploy.demo.run import DemoError, Run, write_toml
from orchestrator.config import load
from orchestrator.core.events import OperatorSaid
from orchestrator.core.record import Record
from orchestrator.supervisor.journal import FileJournal


def toml(folder: Path) -> Path:
    return write_toml(folder / "r.toml", "r", ["true"], "s3://b", "http://127.0.0.1:1")


@pytest.mark.parametrize("name", ["a b", 'a"b', "a\\b", "caf\u00e9 \U0001f600"])
def test_the_demo_may_be_started_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    assert load(toml(tmp_path)).job.workdir == tmp_path / name


@pytest.mark.parametrize("has_news", [True, False])
def test_patience_ends_without_news_and_not_with_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_news: bool
) -> None:
    monkeypatch.setattr(demo, "PATIENCE_S", 0.5)

    def look(run: Run) -> None:
        if has_news:
            record = Record(seq=run.state.seq + 1, at=0.0, epoch=1, event=OperatorSaid(what="stop"))
            journal.append([record])

    run = Run(toml(tmp_path), {}, look)
    run.config.run_dir.mkdir(parents=True)
    journal = FileJournal(run.config.run_dir / "journal.jsonl")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"]) as process:
        run._process = process
        try:
            if has_news:
                run.join()
            else:
                with pytest.raises(DemoError, match="r ended with None"):
                    run.join()
        finally:
            process.kill()
            journal.close()

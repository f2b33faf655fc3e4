import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.devcluster import __file__ as package
from deploy.devcluster import cli, packages

SCRIPT = Path(package).parent / "devcluster"
# Names that no cluster of a person would have, in case a test did reach the machine.
NAME = "--name=unittest0"


def test_a_cluster_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for words in (["env"], ["status"], ["heal", "node1"], ["shell", "node1"], ["preempt", "7"]):
        assert cli.main([*words, NAME]) == 5
        assert "no cluster unittest0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "down", "status", "check", "stop-slurmctld"])
def test_without_root_it_says_so_and_does_nothing(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main([command, NAME]) == 3
    assert "root" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = packages.find
    monkeypatch.setattr(packages, "find", lambda name: real(name) if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if real("apt-get") is None:
        pytest.skip("no apt-get here")
    with pytest.raises(packages.PreconditionError, match=r"apt-get install .*munge.*slurmctld"):
        packages.ensure(accounting=False)


def test_accounting_needs_more_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find", lambda _: None)
    more = set(packages.missing(accounting=True)) - set(packages.missing(accounting=False))
    assert more == {"slurmdbd", "mariadb-server-core", "mariadb-client-core"}


def test_a_wrong_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", NAME, "--nodes", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["", "..", "../../etc", "a/b", "A"])
@pytest.mark.parametrize("command", ["up", "down", "env"])
def test_a_name_that_is_no_name_is_refused_before_anything_else(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cli.main([command, f"--name={name}"]) == 2
    assert "--name" in capsys.readouterr().err


def test_what_follows_two_dashes_is_left_alone() -> None:
    words = ["shell", "node1", NAME, "--", "ls", "--name", "x", "--", "y"]
    options = cli.parser().parse_args(words[: words.index("--")])
    assert options.node == "node1"
    assert options.name == "unittest0"


def test_the_script_finds_an_interpreter_and_needs_no_site_packages(tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "power-off" in done.stdout
    bare = [sys.executable, "-S", "-m", "deploy.devcluster", "--help"]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60, cwd=SCRIPT.parents[2])
    assert done.returncode == 0

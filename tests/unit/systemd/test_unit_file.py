import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.exit_codes import FINAL, OUTCOME_CODE, ExitCode

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "everstep@.service"
ANALYZE = shutil.which("systemd-analyze")


def section(name: str) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser[name]


def verified(unit: Path, folder: Path) -> str:
    """What systemd says against a unit file; it exits with 0 all the same."""
    assert ANALYZE is not None
    done = subprocess.run(
        [ANALYZE, "--user", "verify", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit {done.returncode}")


@pytest.mark.skipif(
    ANALYZE is None, reason="THE UNIT FILE IS NOT VERIFIED: systemd-analyze is missing"
)
def test_systemd_has_nothing_to_say_against_the_unit(tmp_path: Path) -> None:
    assert verified(UNIT, tmp_path) == ""
    wrong = tmp_path / UNIT.name
    wrong.write_text(UNIT.read_text().replace("KillMode=process", "KilMode=process"))
    assert "KilMode" in verified(wrong, tmp_path), "it does look"


def test_what_starting_again_cannot_change_is_not_started_again() -> None:
    given = {int(word) for word in section("Service")["RestartPreventExitStatus"].split()}
    assert given == {int(code) for code in FINAL} - {0}
    assert section("Service")["Restart"] == "on-failure"


def test_every_way_in_which_a_run_ends_is_final() -> None:
    assert set(OUTCOME_CODE.values()) <= FINAL
    assert ExitCode.ALREADY_RUNNING not in FINAL, "a deposed supervisor stands by again"
    assert ExitCode.PRECONDITION not in FINAL, "the store may be back in a minute"


def test_stopping_the_unit_leaves_the_ranks_alone() -> None:
    assert section("Service")["KillMode"] == "process"
    assert section("Service")["OOMPolicy"] == "continue"


def test_the_instance_is_the_path_of_the_run_file() -> None:
    assert section("Service")["ExecStart"].split()[1:] == [
        *("everstep", "run", "%f", "--standby", "--plain")
    ]

"""`python -m deploy.demo`: trains, breaks and recovers a real MoE run, and proves it lost nothing.

Exit codes: 0 both runs ended in the same bits, 1 they did not or a recovery failed, 2 wrong
arguments, 130 interrupted.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NoReturn

from checkpointing.content import content_sha256
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.run import DemoError, Run, write_toml
from deploy.demo.s3_server import S3Server, ServerError
from deploy.demo.scenario import Blow, break_it
from deploy.demo.screen import Screen, show_result

LEAST_STEPS = 200
_ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo-out"), help="where everything goes")
    add("--data", type=Path, help="text or token file to train on; default: Python's own sources")
    add("--steps", type=int, default=400, help=f"steps of each run, at least {LEAST_STEPS}")
    add("--preset", default="demo", help="model preset of jobs.moe")
    add("--plain", action="store_true", help="lines for a log instead of a live screen")
    options = parser.parse_args(arguments)
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps}: the three incidents need at least {LEAST_STEPS}")
    return options


def main() -> int:
    """Run the demo and return its exit code."""
    options = parse()
    out = options.out.resolve()
    if out.exists() and not (out / "demo.txt").exists():
        sys.stderr.write(f"demo: --out {out} exists and is no earlier demo; choose another\n")
        return 2
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "demo.txt").write_text("Made by python -m deploy.demo; may be removed.\n", "utf-8")
    for signum in _ENDS:
        signal.signal(signum, _interrupt)
    try:
        return demo(options, out)
    except (DemoError, ServerError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("demo: interrupted; everything it started has been ended\n")
        return 130


def _interrupt(_signum: int, _frame: object) -> NoReturn:
    """End what was started, once: a second signal must not break that off, and it takes seconds."""
    for signum in _ENDS:
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


def demo(options: argparse.Namespace, out: Path) -> int:
    """Do both runs, compare them and show what came of it."""
    began = time.monotonic()
    command = ["python", "-m", "jobs.moe", "--plain", "--preset", options.preset]
    command += ["--steps", str(options.steps)]
    if options.data is not None:
        command += ["--data", str(options.data.resolve())]
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(plain=options.plain))
        screen.say("starting a real S3 server (SeaweedFS) on loopback")
        (out / "s3").mkdir()
        server = stack.enter_context(S3Server(out / "s3"))
        os.environ |= server.environment()
        runs = [
            Run(
                write_toml(out / f"{name}.toml", name, command, server.store_url, server.url),
                server.environment(),
                screen.show,
            )
            for name in ("broken", "undisturbed")
        ]
        for run in runs:
            stack.callback(run.close)
        broken, calm = runs
        blows = _broken(broken, screen)
        screen.say("the same job again, undisturbed, to compare with")
        calm.start()
        calm.join()
        sums = _sums(server, broken, calm, options.steps)
        _report(broken, calm, out)
    shutil.rmtree(out / "s3", ignore_errors=True)
    return show_result(broken, blows, sums, out, time.monotonic() - began)


def _broken(run: Run, screen: Screen) -> tuple[Blow, ...]:
    screen.say("training on two nodes with two ranks each, one spare node")
    run.start()
    blows = break_it(run, screen.say)
    run.join()
    return blows


def _sums(server: S3Server, broken: Run, calm: Run, steps: int) -> dict[str, dict[str, str]]:
    """Read both final checkpoints back from S3 and sum up weights and optimizer state."""
    store = open_store(
        StoreConfig(url=server.store_url, endpoint_url=server.url, region="us-east-1")
    )
    return {run.name: content_sha256(store, run.name, steps) for run in (broken, calm)}


def _report(broken: Run, calm: Run, out: Path) -> None:
    command = [sys.executable, "-m", "orchestrator", "report", str(broken.config.run_dir)]
    command += ["--compare", str(calm.config.run_dir), "--output", str(out)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    if done.returncode != 0:
        raise DemoError(f"no report: {done.stderr.decode(errors='replace').strip()[-300:]}")


if __name__ == "__main__":
    sys.exit(main())

"""A script forked from the zygote runs as `python SCRIPT` would, and a broken zygote is no loss."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.agent.lifeline import Orphans, become_subreaper
from orchestrator.agent.process import RankProcess
from orchestrator.agent.zygote import Zygote, can_fork
from orchestrator.process_id import start_time

PATIENCE_S = 60.0
SCRIPTS = {
    "says what it sees": """
        import atexit, os, sys
        atexit.register(lambda: print("bye", __name__))
        print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ["WHO"])
        print(repr(sys.stdin.read()), sys.modules["__main__"].__file__)
        print("to stderr", file=sys.stderr)
    """,
    "exits with a number": "import sys; sys.exit(7)",
    "exits with a text": "import sys; sys.exit('no data')",
    "exits with nothing": "raise SystemExit",
    "raises": """
        def inner():
            raise KeyError("boom")
        inner()
    """,
    "raises in exit": "import atexit; atexit.register(lambda: 1 / 0); print('done')",
    "does not compile": "def broken(:\n    pass",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "writes to a closed pipe": """
        import os, signal
        print(signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGTERM))
        print(os.getsid(0) == os.getpid())
    """,
    "tells what becomes of signals": """
        import os, signal
        os.kill(os.getpid(), signal.SIGUSR2)
        print(signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGTERM))
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        import subprocess
        subprocess.run(["grep", "^Sig[BIC]", "/proc/self/status"], check=True)
    """,
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "uses a pool of processes": """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
}


@pytest.fixture(autouse=True)
def _subreaper() -> Iterator[None]:
    become_subreaper()
    yield
    Orphans().reap()


def with_zygote(work: Callable[[Zygote], Awaitable[None]], *preload: str) -> None:
    async def main() -> None:
        zygote = Zygote(preload, {**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(zygote)
        finally:
            await zygote.close()

    asyncio.run(main())


async def outcome(argv: tuple[str, ...], folder: Path, zygote: Zygote | None) -> tuple[str, int]:
    env = {**os.environ, "WHO": "me", "PYTHONUNBUFFERED": "1"}
    process = await RankProcess.start(argv, env, folder, zygote)
    output = await process.output.read()
    code = await process.wait()
    process.close()
    return re.sub("0x[0-9a-f]+", "0x", output.decode()), code


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_forked_script_does_what_a_started_one_does(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPTS[name]))
    argv = (sys.executable, "job.py", "--lr", "1")

    async def compare(zygote: Zygote) -> None:
        started = await outcome(argv, tmp_path, None)
        assert await outcome(argv, tmp_path, zygote) == started

    with_zygote(compare)


def test_a_forked_module_does_what_a_started_one_does(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(3)")
    argv = (sys.executable, "-m", "tool", "x")

    async def compare(zygote: Zygote) -> None:
        started = await outcome(argv, tmp_path, None)
        assert started == ("__main__ ['x']\n", 3)
        assert await outcome(argv, tmp_path, zygote) == started

    with_zygote(compare)


def test_random_numbers_of_two_forked_ranks_differ(tmp_path: Path) -> None:
    script = "import numpy, random; print(random.random(), numpy.random.rand())"
    (tmp_path / "job.py").write_text(script)

    async def twice(zygote: Zygote) -> None:
        argv = (sys.executable, "job.py")
        first, second = [await outcome(argv, tmp_path, zygote) for _ in range(2)]
        assert not set(first[0].split()) & set(second[0].split())

    with_zygote(twice, "numpy")


def test_what_was_preloaded_need_not_be_imported_again(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys; print('decimal' in sys.modules)")

    async def look(zygote: Zygote) -> None:
        argv = (sys.executable, "job.py")
        assert await outcome(argv, tmp_path, zygote) == ("True\n", 0)

    with_zygote(look, "decimal", "no_such_module_anywhere")


def test_ranks_outlive_their_zygote_and_the_next_one_comes_by_itself(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys, time; print('up'); time.sleep(600)")

    async def kill_it(zygote: Zygote) -> None:
        argv = (sys.executable, "job.py")
        rank = await RankProcess.start(argv, os.environ, tmp_path, zygote)
        assert await rank.output.readline() == b"up\n"
        assert zygote._process is not None
        zygote._process.kill()
        await zygote._process.wait()
        assert rank.is_running
        another = await RankProcess.start(argv, os.environ, tmp_path, zygote)
        assert await another.output.readline() == b"up\n"
        for process in (rank, another):
            await process.stop(grace_s=5.0)
            assert await process.wait() == -signal.SIGTERM
            process.close()

    with_zygote(kill_it)


def test_a_zygote_that_was_killed_comes_back_before_it_is_needed(tmp_path: Path) -> None:
    async def kill_it(zygote: Zygote) -> None:
        zygote.warm_up()
        await zygote._until_ready()
        assert zygote._process is not None
        first = zygote._process.pid
        zygote.revive()
        assert zygote._process.pid == first
        zygote._process.kill()
        await zygote._process.wait()
        zygote.revive()
        await zygote._until_ready()
        assert zygote._process.pid != first

    with_zygote(kill_it)


def test_a_zygote_that_was_never_fit_is_not_started_again_and_again() -> None:
    async def try_it(zygote: Zygote) -> None:
        zygote._was_ready = False
        zygote.revive()
        assert zygote._ready is None or zygote._ready.done()

    with_zygote(try_it)


def test_the_signals_of_a_step_that_ends_leave_the_zygote_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time; print('up'); time.sleep(600)")

    async def signal_it(zygote: Zygote) -> None:
        argv, env = (sys.executable, "job.py"), {**os.environ, "PYTHONUNBUFFERED": "1"}
        zygote.warm_up()
        await zygote._until_ready()
        process = zygote._process
        assert process is not None
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            process.send_signal(signum)
        rank = await RankProcess.start(argv, env, tmp_path, zygote)
        assert await rank.output.readline() == b"up\n"
        assert zygote._process is process
        assert process.returncode is None
        await rank.stop(grace_s=PATIENCE_S)
        assert await rank.wait() == -signal.SIGTERM
        rank.close()

    with_zygote(signal_it)


def test_a_rank_that_is_stopped_as_soon_as_it_is_forked_ends_by_the_first_signal(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.py").write_text("import time; time.sleep(600)")

    async def stop_it(zygote: Zygote) -> None:
        for _ in range(10):
            rank = await RankProcess.start((sys.executable, "job.py"), os.environ, tmp_path, zygote)
            await rank.stop(grace_s=PATIENCE_S)
            assert await rank.wait() == -signal.SIGTERM
            rank.close()

    with_zygote(stop_it)


def test_a_zygote_with_threads_forks_nothing_and_the_rank_starts_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = (
        "from threading import Timer\ntimer = Timer(600, print)\ntimer.daemon = True\ntimer.start()"
    )
    (tmp_path / "busy_module.py").write_text(starts)
    (tmp_path / "job.py").write_text("import sys; print('busy_module' in sys.modules)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def try_it(zygote: Zygote) -> None:
        argv = (sys.executable, "job.py")
        assert await outcome(argv, tmp_path, zygote) == ("False\n", 0)

    with_zygote(try_it, "busy_module")


def test_forked_ranks_die_with_the_agent(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time; print(os.getpid()); time.sleep(600)")
    agent = textwrap.dedent(f"""
        import asyncio, os, signal
        from pathlib import Path
        from orchestrator.agent.lifeline import become_subreaper
        from orchestrator.agent.process import RankProcess
        from orchestrator.agent.zygote import Zygote
        async def main():
            become_subreaper()
            zygote = Zygote((), dict(os.environ))
            rank = await RankProcess.start(
                ({sys.executable!r}, "job.py"), {{**os.environ, "PYTHONUNBUFFERED": "1"}},
                Path({str(tmp_path)!r}), zygote)
            print((await rank.output.readline()).decode().strip(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-c", agent], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + PATIENCE_S
    while start_time(int(done.stdout)) is not None:
        assert time.monotonic() < deadline, "the rank outlived its agent"
        time.sleep(0.02)


def test_only_python_scripts_and_modules_of_this_interpreter_are_forked() -> None:
    assert can_fork((sys.executable, "train.py", "--lr", "1"))
    assert can_fork((sys.executable, "-m", "jobs.moe"))
    for argv in (("bash", "x.py"), (sys.executable,), (sys.executable, "-c", "1")):
        assert not can_fork(argv)

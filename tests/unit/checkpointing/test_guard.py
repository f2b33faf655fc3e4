"""A rank with a Checkpointer outlives a SIGTERM that is not its agent's, and no other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from checkpointing import slot
from checkpointing.slot import Control, SlotReading, SlotView
from checkpointing.store.base import StoreConfig

PATIENCE_S = 30.0
HEAD = """
import os, select, signal, sys, threading, time
from checkpointing import Checkpointer

def say(word):
    print(word, flush=True)

def until_told():
    select.select([sys.stdin], [], [])
    return sys.stdin.readline().strip()
"""
# The sleep of the C library, so that the main thread is not between two instructions.
SLEEPS_IN_C = "import ctypes; ctypes.CDLL(None).sleep(600)"


class Rank:
    """A process with a slot, which says one word a line and goes on when told."""

    def __init__(self, folder: Path, script: str) -> None:
        path = folder / "slot-0"
        slot.create(path)
        self.view = SlotView(path)
        self.view.set_control(Control(interval_steps=0))
        environ = {
            **os.environ,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "EVERSTEP_RUN": "r",
            "EVERSTEP_ATTEMPT": "1",
            "EVERSTEP_SLOT": str(path),
            "EVERSTEP_ARENA": str(folder / "arena-0"),
            "EVERSTEP_STORE": StoreConfig(url=(folder / "store").as_uri()).to_json(),
            "EVERSTEP_RESTORE": "null",
            "EVERSTEP_STEP_TIMEOUT_S": "60",
        }
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HEAD + script],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def says(self, word: str) -> None:
        assert self.output.readline() == f"{word}\n", self.errors.read_text()

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def tell(self, word: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def reading(self) -> SlotReading:
        reading = self.view.read()
        assert reading is not None
        return reading

    def announce(self) -> None:
        self.view.set_control(Control(interval_steps=0, terminate=True))


@contextmanager
def rank(folder: Path, script: str) -> Iterator[Rank]:
    started = Rank(folder, script)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        started.view.close()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sigterm_that_was_not_announced_is_survived_and_noted_once(tmp_path: Path) -> None:
    script = """
ck = Checkpointer.from_env(); say("up")
while until_told() != "end":
    ck.step(1); say("on")
"""
    with rank(tmp_path, script) as it:
        it.says("up")
        assert it.reading().guarded
        for _ in range(2):
            it.process.terminate()
            eventually(lambda: "did not announce" in it.errors.read_text())
            it.tell()
            it.says("on")
        it.tell("end")
        assert it.process.wait(PATIENCE_S) == 0
        assert len(it.errors.read_text().splitlines()) == 1


def test_an_announced_sigterm_ends_the_process_as_the_default_action_does(tmp_path: Path) -> None:
    script = """
import atexit; atexit.register(say, "exit functions do not run")
Checkpointer.from_env(); say("up"); time.sleep(600)
"""
    with rank(tmp_path, script) as it:
        it.says("up")
        it.announce()
        it.process.terminate()
        assert it.process.wait(PATIENCE_S) == -signal.SIGTERM
        assert not it.output.read()
        assert not it.errors.read_text()


def test_a_handler_of_the_script_is_kept_and_the_slot_says_so(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: say("mine"))
ck = Checkpointer.from_env(); say("up"); until_told()
"""
    with rank(tmp_path, script) as it:
        it.says("up")
        assert not it.reading().guarded
        it.process.terminate()
        it.says("mine")


def test_a_handler_that_the_script_installs_later_is_seen_at_the_next_step(tmp_path: Path) -> None:
    script = """
ck = Checkpointer.from_env(); ck.step(1); say("up"); until_told()
signal.signal(signal.SIGTERM, lambda *_: say("mine")); ck.step(2); say("done"); until_told()
"""
    with rank(tmp_path, script) as it:
        it.says("up")
        assert it.reading().guarded
        it.tell()
        it.says("done")
        assert not it.reading().guarded


def test_an_ignored_sigterm_stays_ignored(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Checkpointer.from_env(); say(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
"""
    with rank(tmp_path, script) as it:
        it.says("True")
        assert not it.reading().guarded


def test_without_everstep_and_off_the_main_thread_nothing_is_installed(tmp_path: Path) -> None:
    script = """
before = signal.getsignal(signal.SIGTERM)
Checkpointer.from_env({})
thread = threading.Thread(target=Checkpointer.from_env); thread.start(); thread.join()
say(signal.getsignal(signal.SIGTERM) is before)
"""
    with rank(tmp_path, script) as it:
        it.says("True")
        assert not it.reading().guarded


def test_a_second_checkpointer_takes_the_guard_over(tmp_path: Path) -> None:
    script = """
first = Checkpointer.from_env(); Checkpointer.from_env(); say("up"); until_told()
"""
    with rank(tmp_path, script) as it:
        it.says("up")
        assert it.reading().guarded
        it.announce()
        it.process.terminate()
        assert it.process.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize("work", ["os.read(pipe, 1)", SLEEPS_IN_C])
def test_a_forked_child_ends_by_sigterm_whatever_it_waits_for(tmp_path: Path, work: str) -> None:
    script = f"""
Checkpointer.from_env()
pipe, _ = os.pipe()
child = os.fork()
if child == 0:
    os.write(1, b"child\\n")
    {work}
    os._exit(0)
until_told()
os.kill(child, signal.SIGTERM)
say(-os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    with rank(tmp_path, script) as it:
        it.says("child")
        it.tell()
        it.says(str(-signal.SIGTERM))


def test_a_multiprocessing_child_can_be_terminated(tmp_path: Path) -> None:
    script = """
import multiprocessing
Checkpointer.from_env()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start(); child.terminate(); child.join(); say(child.exitcode)
"""
    with rank(tmp_path, script) as it:
        it.says(str(-signal.SIGTERM))


def test_a_started_program_has_the_default_action(tmp_path: Path) -> None:
    script = """
import subprocess
Checkpointer.from_env()
child = subprocess.Popen(["sleep", "600"]); child.terminate(); say(child.wait())
"""
    with rank(tmp_path, script) as it:
        it.says(str(-signal.SIGTERM))


def test_a_wait_inside_a_library_goes_on_behind_the_signal(tmp_path: Path) -> None:
    """Libraries seldom expect to be interrupted: they never were, the process died of it."""
    script = """
import ctypes
Checkpointer.from_env()
reading, writing = os.pipe()
def later():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    os.write(writing, b"x")
threading.Thread(target=later).start()
say(ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1))
"""
    with rank(tmp_path, script) as it:
        it.says("1")
        it.process.wait(PATIENCE_S)
        assert "did not announce" in it.errors.read_text()

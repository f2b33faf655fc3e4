"""The zygote process: has imported what a rank needs, and forks ranks on demand.

Importing torch takes seconds and a restart would pay them again in every rank. This process pays
them once, before anything fails. It must stay safe to fork: one thread, no CUDA context.

It talks over one Unix socket (SOCK_SEQPACKET, given as a descriptor number): a request is a JSON
object with the descriptor of the rank's output attached; the answer carries the pid or an error.
A rank is forked twice, so that the agent, which is its subreaper, becomes its parent: it reaps the
rank itself, and the rank outlives this process.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.agent.lifeline import die_with_parent

MAX_REQUEST_BYTES = 1 << 20
ADOPTION_S = 10.0
NOT_STARTED_EXIT = 127


class Rank:
    """What one forked child is to become."""

    def __init__(self, request: dict[str, Any], output: int) -> None:
        self.argv: list[str] = request["argv"]
        self.env: dict[str, str] = request["env"]
        self.cwd: str = request["cwd"]
        self.parent: int = request["parent"]
        self.output = output


def main() -> None:
    """Import, report readiness, serve; in a forked child: become the rank."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    preload(sys.argv[2:])
    channel.send(json.dumps({"ready": True, "threads": threads()}).encode())
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, pages shared with the ranks
    rank = serve(channel)
    if rank is not None:
        channel.close()
        become(rank)


def preload(names: list[str]) -> None:
    """Import what is there; a missing module is the script's business, not ours."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def threads() -> int:
    """Count the threads of this process; more than one makes a fork unsafe."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def serve(channel: socket.socket) -> Rank | None:
    """Answer requests until the agent closes the socket; returns a Rank in each child."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 1)
        if not data:
            return None
        rank = Rank(json.loads(data), descriptors[0])
        if threads() > 1:
            answer: dict[str, Any] = {"error": "a preloaded module has started a thread"}
            channel.send(json.dumps(answer).encode())
        elif _fork_twice(channel):
            return rank
        os.close(rank.output)


def _fork_twice(channel: socket.socket) -> bool:
    """Fork; True in the grandchild. The pid is told by the child in between, which knows it."""
    child = os.fork()
    if child > 0:
        os.waitpid(child, 0)
        return False
    grandchild = os.fork()
    if grandchild == 0:
        return True
    channel.send(json.dumps({"pid": grandchild}).encode())
    os._exit(0)


def become(rank: Rank) -> NoReturn:
    """Turn this process into `python ARGV...` as a shell would have started it."""
    _adopted_by(rank.parent)
    os.setsid()
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.dup2(rank.output, 1)
    os.dup2(rank.output, 2)
    os.close(silence)
    os.close(rank.output)
    _restore_signals()
    os.environ.clear()
    os.environ.update(rank.env)
    try:
        os.chdir(rank.cwd)
    except OSError as error:
        sys.stderr.write(f"cannot start in {rank.cwd}: {error.strerror}\n")
        sys.exit(NOT_STARTED_EXIT)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks would share the zygote's state
    gc.unfreeze()
    run(rank.argv)


def _restore_signals() -> None:
    """Take back what a preloaded module installed; what is ignored stays so, as over an exec."""
    for signum in signal.valid_signals() - {signal.SIGINT}:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Held back in the zygote, see start_as_zygote: one that came for this rank ends it here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _adopted_by(agent: int) -> None:
    """Wait until the agent is the parent, then die with it."""
    deadline = time.monotonic() + ADOPTION_S
    while os.getppid() != agent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent()
    if os.getppid() != agent:  # it died between the two calls
        os._exit(1)


def run(argv: list[str]) -> NoReturn:
    """Run `-m MODULE ...` or `SCRIPT ...` as `__main__` and exit as the interpreter does."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            _run_script(argv[0])
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises ends it
        error.__traceback__ = _own_frames_removed(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_sigint()
        sys.exit(1)
    sys.exit(0)


def _run_script(path: str) -> None:
    path = str(Path.cwd() / path)  # absolute, as `__file__` of a script is since Python 3.9
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module  # stays: what the script registered for exit may need it
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, module.__dict__)  # noqa: S102 - the user's own script, as `python SCRIPT` runs it


def _own_frames_removed(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen runpy"):
        trace = trace.tb_next
    return trace


def _end_by_sigint() -> None:
    """End as the interpreter does after Ctrl-C, so that the parent sees the signal."""
    atexit._run_exitfuncs()  # noqa: SLF001 - its only name; the signal would skip them
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()

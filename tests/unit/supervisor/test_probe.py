"""Real sockets on loopback."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from orchestrator.supervisor import probe
from orchestrator.supervisor.probe import Address, Answer, Answered, Probe, Prober, address_of, ask
from tests.unit.orchestrator.desk import free_port, needs_ipv6, until


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def to(address: Address) -> Probe:
    return Probe(node="n0", address=address, sent=0.0)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:9100/metrics", ("10.0.0.1", 9100)),
        ("http://[fe80::1]:9100/metrics", ("fe80::1", 9100)),
        ("http://node1:9100/metrics", None),
        ("http://10.0.0.1/metrics", None),
        ("http://10.0.0.1:x/metrics", None),
        ("http://fe80::1:9100/metrics", None),
        ("", None),
    ],
)
def test_only_numbers_are_asked(url: str, address: Address | None) -> None:
    assert address_of(url) == address


def test_a_listening_port_connects_although_nobody_accepts() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            answered = await ask(to(server.getsockname()[:2]))
        assert (answered.answer, answered.here) == (Answer.CONNECTED, True)

    play(main())


@needs_ipv6
def test_ipv6_is_asked_as_well() -> None:
    async def main() -> None:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            answered = await ask(to(server.getsockname()[:2]))
        assert (answered.answer, answered.here) == (Answer.CONNECTED, True)

    play(main())


def test_a_stopped_process_still_has_a_kernel() -> None:
    program = "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
    program += "print(s.getsockname()[1], flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGSTOP)
        assert asyncio.run(ask(to(address))).answer is Answer.CONNECTED
        process.kill()
        process.wait()
    assert asyncio.run(ask(to(address))).answer is Answer.REFUSED


def test_a_closed_port_refuses() -> None:
    assert asyncio.run(ask(to(("127.0.0.1", free_port())))).answer is Answer.REFUSED


def test_no_answer_is_waited_for_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of connections drops what comes, as a machine without power does."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.2)

    async def main() -> None:
        came: list[Answered] = []
        prober = Prober(lambda answered, _: came.append(answered))
        with socket.socket() as server, socket.socket() as first, socket.socket() as second:
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            address = server.getsockname()
            for one in (first, second):
                one.setblocking(False)
                one.connect_ex(address)
            began = time.monotonic()
            for _ in range(20):
                prober.send(to(address))
            assert time.monotonic() - began < 0.1, "nothing is waited for"
            await until(lambda: len(came) == 20)
        assert {each.answer for each in came} == {Answer.NOTHING}
        await prober.close()

    play(main())


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (errno.EHOSTUNREACH, Answer.NOTHING),
        (errno.ETIMEDOUT, Answer.NOTHING),
        (errno.ENETUNREACH, Answer.UNKNOWN),
        (errno.EADDRNOTAVAIL, Answer.UNKNOWN),
        (errno.EPERM, Answer.UNKNOWN),
    ],
)
def test_trouble_on_this_side_is_no_answer_of_theirs(number: int, answer: Answer) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:

            async def fail(*_: object) -> None:
                raise OSError(number, os.strerror(number))

            patch.setattr(loop, "sock_connect", fail)
            assert (await ask(to(("127.0.0.1", 1)))).answer is answer

    play(main())


def test_without_a_free_handle_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe.socket, "socket", fail)
            assert (await ask(to(("127.0.0.1", 1)))).answer is Answer.UNKNOWN

    play(main())


def test_a_prober_that_closes_leaves_nothing_behind() -> None:
    async def main() -> None:
        came: list[Answered] = []
        prober = Prober(lambda answered, _: came.append(answered))
        prober.send(to(("127.0.0.1", free_port())))
        await prober.close()
        assert not came
        assert len(asyncio.all_tasks()) == 1

    play(main())

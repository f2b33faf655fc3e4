"""Reads the GPUs of this node through NVML, the library that comes with the NVIDIA driver.

Three things are told apart: no driver (nothing to measure), a driver that fails (unknown), and a
GPU that does not answer while the others do. A sick driver may never return from a call, so calls
run in a thread of their own and a read that takes too long is an answer as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml

from monitors.gpu.readings import GpuReading, unanswered
from monitors.observations import NotMeasured, Observation, Ok, Unknown

SOURCE = "nvml"
RETRY_S = 60.0
TIMEOUT_S = 5.0

# The library is not there, or it is there and the kernel module is not.
_ABSENT = (
    pynvml.NVMLError_LibraryNotFound,
    pynvml.NVMLError_DriverNotLoaded,
)
_UNSUPPORTED = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)
_MILLIWATTS = 1000.0


class NvmlProbe:
    """Reads all GPUs of this node; safe to build and call where there is no driver.

    Attributes:
        driver: The driver's version after the last read; `NotMeasured` when there is none,
            `Unknown` when it fails or does not return.
    """

    driver: Observation[str]

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._timeout_s = timeout_s
        self._worker: threading.Thread | None = None
        self._answer: tuple[GpuReading, ...] | None = None
        self._known: tuple[tuple[int, str], ...] = ()
        self._started = False
        self._next_try = float("-inf")
        self.driver = NotMeasured(why="not asked yet", source=SOURCE, at=clock())

    def read(self) -> tuple[GpuReading, ...]:
        """Return one reading for each GPU; () when there is no driver, see `driver` for why.

        Without a driver it is looked for again once a minute. GPUs that were seen before and now
        cannot be read stay in the answer, as unknown.
        """
        if not self._started and self._monotonic() < self._next_try:
            return ()
        if self._worker is None:
            self._answer = None
            self._worker = threading.Thread(target=self._work, name="nvml", daemon=True)
            self._worker.start()
        self._worker.join(self._timeout_s)
        if self._worker.is_alive():
            return self._fail(f"NVML did not answer within {self._timeout_s:g} s")
        self._worker = None
        if self._answer is None:
            return self._fail("the NVML thread ended without an answer")
        return self._answer

    def _work(self) -> None:
        try:
            self._answer = self._read_all()
        except _ABSENT as error:
            self._next_try = self._monotonic() + RETRY_S
            self.driver = NotMeasured(why=f"no driver: {error}", source=SOURCE, at=self._clock())
            self._answer = ()
        except pynvml.NVMLError as error:
            self._started = False
            self._next_try = self._monotonic() + RETRY_S
            self._answer = self._fail(str(error))

    def _read_all(self) -> tuple[GpuReading, ...]:
        if not self._started:
            pynvml.nvmlInit()
            self._started = True
        version = pynvml.nvmlSystemGetDriverVersion()
        self.driver = Ok(value=_text(version), source=SOURCE, at=self._clock())
        readings = tuple(self._read_one(i) for i in range(pynvml.nvmlDeviceGetCount()))
        self._known = tuple((r.index, r.uuid) for r in readings)
        return readings

    def _read_one(self, index: int) -> GpuReading:
        uuid = dict(self._known).get(index, "")
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            why = Unknown(why=str(error), source=SOURCE, at=self._clock())
            return unanswered(index, uuid, why)
        memory = self._ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        return GpuReading(
            index=index,
            uuid=uuid,
            busy_ratio=self._number(
                lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
            ),
            memory_used_bytes=_part(memory, "used"),
            memory_total_bytes=_part(memory, "total"),
            power_watts=self._number(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / _MILLIWATTS),
            temperature_celsius=self._number(lambda: _temperature(handle)),
        )

    def _number(self, call: Callable[[], Any]) -> Observation[float]:
        answer = self._ask(call)
        return _as_float(answer) if isinstance(answer, Ok) else answer

    def _ask(self, call: Callable[[], Any]) -> Observation[Any]:
        at = self._clock()
        try:
            return Ok(value=call(), source=SOURCE, at=at)
        except _UNSUPPORTED as error:
            return NotMeasured(why=str(error), source=SOURCE, at=at)
        except pynvml.NVMLError as error:
            return Unknown(why=str(error), source=SOURCE, at=at)

    def _fail(self, why: str) -> tuple[GpuReading, ...]:
        unknown = Unknown(why=why, source=SOURCE, at=self._clock())
        self.driver = unknown
        return tuple(unanswered(index, uuid, unknown) for index, uuid in self._known)


def _text(value: bytes | str) -> str:
    """NVML bindings return bytes or text, depending on their version."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _as_float(answer: Ok[Any]) -> Ok[float]:
    return Ok(value=float(answer.value), source=answer.source, at=answer.at)


def _part(answer: Observation[Any], name: str) -> Observation[float]:
    if not isinstance(answer, Ok):
        return answer
    return Ok(value=float(getattr(answer.value, name)), source=answer.source, at=answer.at)


def _temperature(handle: Any) -> int:
    """The versioned call is newer than some drivers in use, the plain one is going away."""
    try:
        value: int = pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)
    except _UNSUPPORTED:
        value = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    return value

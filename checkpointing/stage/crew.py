"""The threads that copy: as many as this rank's share of the cores."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], None]


def share_of_cores(local_world: int) -> int:
    """Return how many cores each of a node's ranks may keep busy: at least one."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_world))


class Crew:
    """Runs tasks on plain threads, which leaves torch's own thread pools as they are."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        """Do all tasks, the calling thread among the workers; the first error is raised."""
        shift = _Shift(tasks)
        helpers = min(self._threads, len(tasks)) - 1
        futures = [self._executor().submit(shift.work) for _ in range(helpers)]
        shift.work()
        for future in futures:
            future.result()
        if shift.errors:
            raise shift.errors[0]

    def start(self, tasks: Sequence[Task], then: Callable[[BaseException | None], None]) -> None:
        """Begin all tasks; the last worker that is done calls `then`, with the first error."""
        shift = _Shift(tasks)
        workers = max(1, min(self._threads, len(tasks)))
        left, lock = workers, threading.Lock()

        def work() -> None:
            nonlocal left
            shift.work()
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                then(shift.errors[0] if shift.errors else None)

        for _ in range(workers):
            self._executor().submit(work)

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="stage")
        return self._pool


class _Shift:
    """Tasks that several threads take from; after an error nobody takes another."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = iter(list(tasks))  # the iterator of a list hands out each item once
        self.errors: list[BaseException] = []

    def work(self) -> None:
        for task in self._tasks:
            if self.errors:
                return
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - raised where the tasks came from
                self.errors.append(error)
                return

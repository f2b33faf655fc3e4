"""Keeps the finished entries of a directory: upload, verify, commit, and only then delete."""

import logging
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from checkpointing.errors import (
    CheckpointingError,
    ManifestInvalid,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
)
from checkpointing.store.base import ObjectStore
from checkpointing.watched import names
from checkpointing.watched.claim import Lock, OtherFolder, claim
from checkpointing.watched.commits import Committed, at_version, read_part
from checkpointing.watched.disk import Look, entries, look
from checkpointing.watched.keeping import Keeper, Uploaded, Waiting
from checkpointing.watched.removing import delete, finish, left_over
from checkpointing.watched.rules import Rules, to_stay
from checkpointing.watched.sending import Changed, Stopped

_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_LAST_QUIET_S: Final = 5.0
_NOTHING: Final = Look(single=False, files={})
_log = logging.getLogger(__name__)

Tell = Callable[[Mapping[str, Any]], bool]
"""Reports an event; False when nobody listens any more."""


@dataclass(slots=True)
class _State:
    """An entry, or the directory as a whole, as this process knows it."""

    seen: Look
    since: float
    uploaded: Uploaded | None = None
    committed: Committed | None = None
    tries: int = 0
    again_at: float = 0.0
    said: set[str] = field(default_factory=set)


class Watching:
    """One look after the other, by one thread.

    Args:
        rules: What to do.
        store: Where to.
        tell: Takes the events.
        stopped: Tells whether to give up.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        rules: Rules,
        store: ObjectStore,
        tell: Tell,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._store = store
        self._tell = tell
        self._stopped = stopped
        self._clock = clock
        self._keeper = Keeper(rules, store, stopped)
        self._lock = Lock(rules.directory)
        self._ready = self._looked = False
        self._states: dict[str, _State] = {}
        self._unread: set[str] = set()
        self._general = _State(_NOTHING, 0.0)

    @property
    def done(self) -> bool:
        """Tell whether this has looked, and all that is finished was committed."""
        return self._looked and not self.pending

    @property
    def pending(self) -> tuple[str, ...]:
        """Name what is not committed and will be if nothing happens to it."""
        quiet = self._rules.finished.how == "quiet"
        return tuple(
            name
            for name, state in self._states.items()
            if name in self._unread
            or (
                state.committed is None
                and not state.seen.temporary
                and (quiet or self._rules.finished(state.seen, 0.0))
            )
        )

    def hurry(self) -> None:
        """Nobody writes any more: what is quiet now stays so."""
        finished = self._rules.finished
        finished = replace(finished, quiet_s=min(finished.quiet_s, _LAST_QUIET_S))
        self._rules = replace(self._rules, finished=finished)

    def close(self) -> None:
        """Let others watch."""
        self._lock.release()

    def poll(self) -> None:
        """Look once, and do what is to be done; what fails is said and tried again later.

        Raises:
            OtherFolder: The store keeps another folder under this name.
        """
        if self._clock() < self._general.again_at:
            return
        try:
            if not self._is_there():
                self._looked = True
                return
            if not self._lock.take():
                return
            self._begin()
            self._look_at_all()
            self._looked = True
        except OtherFolder:
            raise
        except (CheckpointingError, OSError) as error:
            self._failed("", self._general, error)
            return
        self._general.tries = 0
        self._general.said.clear()
        for name in sorted(self._states, key=names.age, reverse=True):
            if name not in self._unread and not self._stopped():
                self._attend(name, self._states[name])
        self._delete()

    def _is_there(self) -> bool:
        """Tell whether the trainer has made the directory; OSError when nobody can tell."""
        try:
            return stat.S_ISDIR(self._rules.directory.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _begin(self) -> None:
        if self._ready:
            return
        self._store.probe()
        if self._rules.shared:
            claim(self._store, self._rules.prefix, self._rules.directory)
        for trash, name, version in left_over(self._rules.directory):
            self._go_on_deleting(trash, name, version)
        self._ready = True

    def _look_at_all(self) -> None:
        found: dict[str, _State] = {}
        self._unread.clear()
        for name in entries(self._rules.directory, self._rules.pattern):
            try:
                seen = look(self._rules.directory / name)
            except FileNotFoundError:
                continue  # it is being written, or somebody deletes it
            except OSError as error:
                self._unread.add(name)
                found[name] = self._states.get(name) or _State(_NOTHING, self._clock())
                self._say(name, found[name], f"cannot be read: {error}")
                continue
            before = self._states.get(name)
            if before is not None and before.seen == seen:
                found[name] = before
                continue
            found[name] = _State(seen, self._clock())
            if before is not None and before.uploaded is not None:
                self._say(name, found[name], "changed after it was uploaded: it is kept anew")
        self._states = found

    def _attend(self, name: str, state: _State) -> None:
        now, finished = self._clock(), self._rules.finished
        if state.committed is not None or now < state.again_at:
            return
        if state.seen.temporary and now - state.since >= finished.quiet_s:
            self._say(name, state, f"not finished: {state.seen.temporary[0]} is in it")
        if not finished(state.seen, now - state.since):
            return
        try:
            self._keep(name, state)
        except Stopped:
            return
        except (Changed, FileNotFoundError) as error:
            state.since = self._clock()
            self._say(name, state, str(error))
        except Waiting as error:
            state.again_at = self._clock() + _FIRST_WAIT_S
            self._say(name, state, str(error))
        except (CheckpointingError, OSError) as error:
            self._failed(name, state, error)

    def _keep(self, name: str, state: _State) -> None:
        if state.uploaded is None:
            begun = self._clock()
            state.uploaded = self._keeper.upload(name, state.seen)
            nbytes, took_s = state.uploaded.part.nbytes, self._clock() - begun
            if state.uploaded.committed is None:
                self._event("uploaded", name, nbytes=nbytes, upload_s=took_s)
        before = state.uploaded.committed
        done = before or self._keeper.commit(state.uploaded)
        state.committed, state.tries = done, 0
        word = "committed" if before is None else "known"
        age_s = 0.0 if before is None else done.age_s
        self._event(word, name, nbytes=done.commit.nbytes, version=done.version, age_s=age_s)
        if odd := state.seen.odd:
            self._say(name, state, f"{odd[0]} is no file of it and not kept: it is not deleted")

    def _delete(self) -> None:
        if not self._rules.delete:
            return
        done = {name: one for name, one in self._states.items() if one.committed is not None}
        ages = {name: state.seen.newest_ns for name, state in done.items()}
        for name in sorted(done.keys() - to_stay(ages, self._rules.keep), key=names.age):
            state = done[name]
            if name in self._unread or state.seen.odd or self._stopped():
                continue
            if self._clock() < state.again_at:
                continue
            try:
                self._delete_one(name, state)
            except FileNotFoundError:
                continue  # the trainer deletes it too
            except (CheckpointingError, OSError) as error:
                self._failed(name, state, error)

    def _delete_one(self, name: str, state: _State) -> None:
        assert state.committed is not None
        version = state.committed.version
        there = at_version(self._store, self._rules.prefix, name, version)
        if there is None or there.commit != state.committed.commit:
            self._say(name, state, "its commit is gone from the store: it is kept anew")
            state.committed = state.uploaded = None
        elif delete(self._rules.directory / name, state.seen, version):
            self._event("removed", name, version=version)
        else:
            self._say(name, state, "changed after it was uploaded: what did stays")

    def _go_on_deleting(self, trash: Path, name: str, version: int) -> None:
        """Finish a deletion that was interrupted, or take it back when nothing is committed."""
        prefix, target = self._rules.prefix, self._rules.directory / name
        found = at_version(self._store, prefix, name, version)
        part = None
        if found is not None:
            mine = [ref for ref in found.commit.parts if ref.node == self._rules.writer]
            with suppress(ManifestInvalid, ObjectMissing, ObjectCorrupt, ObjectConflict):
                part = read_part(self._store, prefix, found.commit, mine[0]) if mine else None
        if part is None:
            if not target.exists():
                trash.rename(target)
            self._say(name, self._general, "a deletion was interrupted and cannot be finished")
        elif finish(trash, target, part):
            self._event("removed", name, version=version)
        else:
            self._say(name, self._general, "changed after it was uploaded: what did stays")

    def _failed(self, name: str, state: _State, error: CheckpointingError | OSError) -> None:
        if isinstance(error, ObjectMissing):
            state.uploaded = None  # somebody deleted what was uploaded
        longest = min(_FIRST_WAIT_S * 2**state.tries, _LONGEST_WAIT_S)
        state.tries = min(state.tries + 1, 16)
        state.again_at = self._clock() + longest * (0.5 + secrets.randbelow(1000) / 2000)
        self._say(name, state, f"{error}; tried again", "failed")

    def _say(self, name: str, state: _State, why: str, event: str = "said") -> None:
        line = " ".join(why.split())
        if line not in state.said:
            state.said.add(line)
            _log.warning("%s: %s", name or self._rules.directory, line)
            self._event(event, name, why=line)

    def _event(self, event: str, name: str, **fields: object) -> None:
        self._tell({"event": event, "entry": name, "node": self._rules.node, **fields})

"""Takes one finished entry to a commit: upload, verify, store this node's part, commit."""

from collections.abc import Callable
from dataclasses import dataclass

from checkpointing.errors import CommitRefused
from checkpointing.store.base import ObjectStore
from checkpointing.watched import attempts
from checkpointing.watched.commits import Committed, commit, gather, newest, put_part, read_part
from checkpointing.watched.disk import Look, look
from checkpointing.watched.documents import Part, PartRef
from checkpointing.watched.rules import Rules
from checkpointing.watched.sending import Changed, Sending


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """An entry whose bytes are in the store, verified.

    Attributes:
        part: What this node has of it.
        ref: Names the stored part; None when it was committed before.
        nodes: How many nodes' parts make it whole.
        committed: The commit that has it already.
    """

    part: Part
    ref: PartRef | None
    nodes: int
    committed: Committed | None


class Waiting(CommitRefused):
    """Other nodes have not stored their parts yet."""


class Keeper:
    """Keeps entries of one directory.

    Args:
        rules: What is watched.
        store: Where to.
        stopped: Tells whether to give up.
    """

    def __init__(self, rules: Rules, store: ObjectStore, stopped: Callable[[], bool]) -> None:
        self._rules = rules
        self._store = store
        self._stopped = stopped

    def upload(self, name: str, seen: Look) -> Uploaded:
        """Upload what was seen. What is there already is only verified.

        Raises:
            Changed: It is not as it was seen.
            CommitRefused: Nobody knows which attempt wrote it.
            StoreError: The store could not take it.
        """
        rules = self._rules
        number, nodes = self._attempt(name, seen)
        path = rules.directory / name
        sending = Sending(self._store, rules.prefix, name, rules.writer, self._stopped)
        part = sending.run(path, seen, number)
        if look(path) != seen:
            raise Changed("something was added or taken away while it was uploaded")
        committed = self._known(part)
        ref = put_part(self._store, rules.prefix, part) if committed is None else None
        return Uploaded(part=part, ref=ref, nodes=nodes, committed=committed)

    def commit(self, uploaded: Uploaded) -> Committed:
        """Commit it when all parts are in.

        Raises:
            Waiting: They are not.
            CommitRefused: A later attempt has committed this entry.
            StoreError: The store could not do it; do it again.
        """
        assert uploaded.ref is not None
        nodes, part = uploaded.nodes, uploaded.part
        wanted, there = gather(self._store, self._rules.prefix, part, uploaded.ref, nodes)
        if wanted is None:
            raise Waiting(f"{there} of {nodes} nodes have their part in the store")
        return commit(self._store, self._rules.prefix, wanted)

    def _attempt(self, name: str, seen: Look) -> tuple[int, int]:
        """Return the attempt that wrote an entry, and its number of nodes."""
        rules = self._rules
        if rules.shared:
            return 0, 1
        if rules.attempts is None:
            return 0, rules.nodes
        found = attempts.of(attempts.read(rules.attempts), seen.newest_ns)
        if found is not None:
            return found.number, found.nodes
        if rules.nodes > 1:
            raise CommitRefused(
                f"{name} was written before the first attempt that is known here: the other "
                "nodes' parts may be those of another one"
            )
        return 0, 1

    def _known(self, part: Part) -> Committed | None:
        """Return the newest commit of the entry when it has all of this."""
        found = newest(self._store, self._rules.prefix, part.entry)
        if found is None:
            return None
        refs = found.commit.parts
        held = [read_part(self._store, self._rules.prefix, found.commit, ref) for ref in refs]
        if len(held) == 1 or any(one.node == part.node for one in held):
            same = any(one.node == part.node and _content(one) == _content(part) for one in held)
            return found if same else None
        # A node that took another's place has fetched what all of them wrote.
        files = {file for one in held for file in one.files}
        links = {link for one in held for link in one.links}
        return found if files.issuperset(part.files) and links.issuperset(part.links) else None


def _content(part: Part) -> tuple[object, ...]:
    return part.single, part.files, part.folders, part.links

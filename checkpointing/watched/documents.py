"""What is stored of a folder besides its bytes: a part per node, and the commit that names them.

Both are sealed JSON. No key is read from them: each is derived from names, numbers and sums.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from checkpointing import checked
from checkpointing.errors import ObjectCorrupt, ObjectMissing
from checkpointing.sealed import seal, unseal
from checkpointing.store.base import ObjectStore

PIECE: Final = 32 << 20
"""Bytes of an object. What several threads hold of them is all the memory that is needed."""

_PART: Final = "everstep-watched-part/1"
_COMMIT: Final = "everstep-watched-commit/1"
_MOST_NODES: Final = 100_000
_MOST_ATTEMPTS: Final = 999_999
_MOST_NS: Final = 1 << 63
_FILE_FIELDS: Final = frozenset(("path", "nbytes", "crc64", "mtime_ns", "mode"))
_PART_FIELDS: Final = frozenset(
    ("entry", "node", "attempt", "single", "files", "folders", "links", "pieces")
)
_COMMIT_FIELDS: Final = frozenset(("entry", "attempt", "nbytes", "parts"))
_REF_FIELDS: Final = frozenset(("node", "number", "crc64"))


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a folder; its path has "/" between its parts and stays inside."""

    path: str
    nbytes: int
    crc64: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some of the bytes of all files in a row."""

    nbytes: int
    crc64: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one node has of an entry.

    Attributes:
        entry: Name of the folder or file in the watched directory.
        node: The node, "" when one writer keeps it for all.
        attempt: Attempt of the run that wrote it, 0 when nobody said.
        single: The entry is a file.
        files: All files, by path.
        folders: All folders below it.
        links: Symbolic links that stay inside, with their targets.
        pieces: The bytes of all files in that order, cut into objects.
    """

    entry: str
    node: str
    attempt: int
    single: bool
    files: tuple[File, ...]
    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(piece.nbytes for piece in self.pieces)

    def pack(self) -> bytes:
        """Return the stored form."""
        return seal(_PART, asdict(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Part":
        """Read the stored form.

        Raises:
            ManifestInvalid: Not a part, altered, or with paths that lead out of its folder.
        """
        raw = unseal(packed, _PART)
        checked.exactly(raw, _PART_FIELDS, "a part")
        if type(raw["single"]) is not bool:
            checked.refuse("single", raw["single"])
        part = cls(
            entry=entry_name(raw["entry"]),
            node=checked.text(raw["node"], "node", longest=255),
            attempt=checked.number(raw["attempt"], "attempt", most=_MOST_ATTEMPTS),
            single=raw["single"],
            files=tuple(_file(one) for one in checked.items(raw["files"], "files")),
            folders=tuple(_path(one) for one in checked.items(raw["folders"], "folders")),
            links=tuple(_link(one) for one in checked.items(raw["links"], "links")),
            pieces=tuple(_piece(one) for one in checked.items(raw["pieces"], "pieces")),
        )
        _fits(part)
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """Names a part: node, which of its parts in that attempt, and the CRC of its document."""

    node: str
    number: int
    crc64: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """An entry that can be had back: all its parts are in the store and were verified."""

    entry: str
    attempt: int
    nbytes: int
    parts: tuple[PartRef, ...]

    def pack(self) -> bytes:
        """Return the stored form."""
        return seal(_COMMIT, asdict(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Commit":
        """Read the stored form.

        Raises:
            ManifestInvalid: Not a commit, or altered.
        """
        raw = unseal(packed, _COMMIT)
        checked.exactly(raw, _COMMIT_FIELDS, "a commit")
        refs = checked.items(raw["parts"], "parts")
        if not 1 <= len(refs) <= _MOST_NODES:
            checked.refuse(f"{len(refs)} parts")
        parts = tuple(map(_ref, refs))
        if len({ref.node for ref in parts}) != len(parts):
            checked.refuse("a node has two parts")
        return cls(
            entry=entry_name(raw["entry"]),
            attempt=checked.number(raw["attempt"], "attempt", most=_MOST_ATTEMPTS),
            nbytes=checked.number(raw["nbytes"], "nbytes"),
            parts=parts,
        )


def read_document(store: ObjectStore, key: str) -> bytes:
    """Return a document, whose size is known before any of it is read.

    Raises:
        ObjectMissing: There is none.
        ObjectCorrupt: It is too large to be one.
    """
    info = store.head(key)
    if info is None:
        raise ObjectMissing(f"{key}: does not exist")
    if info.nbytes > checked.MOST_BYTES:
        raise ObjectCorrupt(f"{key}: {info.nbytes} bytes are no document")
    return store.get(key)


def entry_name(value: object) -> str:
    """Check the name of an entry of a directory."""
    name = checked.text(value, "entry", longest=255)
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        checked.refuse("no name of a folder", name)
    return name


def leads_out(link: str, target: str) -> bool:
    """Tell whether the target of a link at this path may lie outside of the folder.

    Where a ".." behind a name leads depends on what that name is: it counts as outside.
    """
    steps = target.split("/")
    ups = next((at for at, step in enumerate(steps) if step != ".."), len(steps))
    return (
        not target
        or target.startswith("/")
        or "\0" in target
        or ups > link.count("/")
        or ".." in steps[ups:]
    )


def _file(raw: Any) -> File:
    checked.exactly(raw, _FILE_FIELDS, "a file")
    return File(
        path=_path(raw["path"]),
        nbytes=checked.number(raw["nbytes"], "nbytes"),
        crc64=checked.crc(raw["crc64"], "crc64"),
        mtime_ns=checked.number(raw["mtime_ns"], "mtime_ns", least=-_MOST_NS, most=_MOST_NS - 1),
        mode=checked.number(raw["mode"], "mode", most=0o777),
    )


def _path(value: object) -> str:
    path = checked.text(value, "path")
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        checked.refuse("no path inside of a folder", path)
    return path


def _link(raw: object) -> tuple[str, str]:
    pair = checked.items(raw, "a link")
    if len(pair) != 2:
        checked.refuse("a link", pair)
    path, target = _path(pair[0]), checked.text(pair[1], "target of a link")
    if leads_out(path, target):
        checked.refuse("a link that leads out of its folder", target)
    return path, target


def _piece(raw: Any) -> Piece:
    checked.exactly(raw, frozenset(("nbytes", "crc64")), "a piece")
    nbytes = checked.number(raw["nbytes"], "nbytes of a piece", least=1, most=PIECE)
    return Piece(nbytes=nbytes, crc64=checked.crc(raw["crc64"], "crc64"))


def _ref(raw: Any) -> PartRef:
    checked.exactly(raw, _REF_FIELDS, "a part")
    return PartRef(
        node=checked.text(raw["node"], "node", longest=255),
        number=checked.number(raw["number"], "number", most=_MOST_ATTEMPTS),
        crc64=checked.crc(raw["crc64"], "crc64"),
    )


def _fits(part: Part) -> None:
    if sum(file.nbytes for file in part.files) != part.nbytes:
        checked.refuse("files and pieces have other sizes")
    files = [file.path for file in part.files]
    if part.single and (files != [part.entry] or part.folders or part.links):
        checked.refuse("a single file with something beside it")
    leaves = [*files, *(path for path, _ in part.links)]
    if len(set(leaves)) != len(leaves):
        checked.refuse("a path is there twice")
    check_paths(leaves, part.folders)


def check_paths(leaves: Iterable[str], folders: Iterable[str]) -> None:
    """Check that paths can be one folder: nothing lies below a file or a link.

    Raises:
        ManifestInvalid: They cannot.
    """
    taken, wanted = set(leaves), set(folders)
    if odd := taken & wanted:
        checked.refuse("a folder and something else at one path", min(odd))
    for path in taken | wanted:
        if any(above in taken for above in _above(path)):
            checked.refuse("a path below something that is no folder", path)


def _above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path

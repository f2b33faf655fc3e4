"""Documents made to harm are refused in one line, and nothing is executed or allocated."""

import base64
import contextlib
import gzip
import json
import os
import pickle
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import keys
from checkpointing.checksum import crc64
from checkpointing.deletion import delete_commit
from checkpointing.errors import ArenaInvalid, ManifestInvalid, RestoreFailed
from checkpointing.extents import Extent, Extents
from checkpointing.manifest import Index, Manifest, Shard, read_manifest
from checkpointing.quarantine import Quarantined
from checkpointing.resolver import list_commits
from checkpointing.restore import Point, restore_from_store
from checkpointing.stage.meta import Meta
from tests.unit.checkpointing.saved import save, store_at

PREFIX = keys.data_prefix("run", 5, 1)
SHARD = Shard(
    rank=0,
    index_key=PREFIX + "rank-00000.json",
    index_crc64=1,
    data_key=PREFIX + "rank-00000.bin",
    data_nbytes=56,
    data_crc64=2,
)
SKELETON = {
    "t": "dict",
    "k": ["w", "s", 3, "x"],
    "v": [
        {"t": "tensor", "n": "w"},
        {"t": "object", "v": {"t": "shard", "n": "s"}},
        {"t": "list", "v": [1.5, None, {"t": "bytes", "v": "eg=="}, {"t": "int", "v": "0x10"}]},
        {"t": "tuple", "v": [{"t": "float", "v": "nan"}, True, "text"]},
    ],
}
EXTENT = Extent(
    name="w", kind="replica", owner=0, dtype="float32", shape=(2, 4), offset=0, nbytes=32, crc64=7
)
PIECE = Extent(
    name="s",
    kind="shard",
    owner=0,
    dtype="int64",
    shape=(3,),
    offset=32,
    nbytes=24,
    crc64=8,
    whole=(3,),
    start=(0,),
)
MANIFEST = Manifest(
    run="run",
    step=5,
    attempt=1,
    world=1,
    write_id="w",
    nbytes=56,
    shards=(SHARD,),
    skeleton=SKELETON,
    tensors=(EXTENT, PIECE),
    average_of=((4, 1), (3, 1)),
    tokens=40_960,
)
INDEX = Index(
    run="run",
    step=5,
    attempt=1,
    rank=0,
    world=1,
    data_key=SHARD.data_key,
    data_nbytes=56,
    data_crc64=2,
    skeleton=SKELETON,
    skeleton_crc64=3,
    local_skeleton={"t": "dict", "k": [], "v": []},
    extents=(EXTENT, PIECE),
)
RECORD = Quarantined(run="run", step=5, attempt=1, why="w", who="p", at=1.0)
OLD = Path(__file__).parents[1] / "data" / "first_format"
OLD_MANIFEST = (OLD / "hostile-manifest.json").read_bytes()
OLD_INDEX = (OLD / "hostile-index.json").read_bytes()
META = Meta(
    short=SKELETON,
    local_short={"t": "dict", "k": [], "v": []},
    extents=Extents.of((EXTENT, PIECE)),
)
READERS: list[tuple[bytes, Callable[[bytes], object]]] = [
    (MANIFEST.pack(), Manifest.unpack),
    (INDEX.pack(), Index.unpack),
    (OLD_MANIFEST, Manifest.unpack),
    (OLD_INDEX, Index.unpack),
    (RECORD.pack(), Quarantined.unpack),
]
documents = st.sampled_from(READERS)

numbers = st.one_of(st.integers(), st.sampled_from([-1, 1 << 62, 1 << 63, 1 << 64, 10**30]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../x", "/etc/passwd", "run/../y", "object", "float_power", "dict", ""]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["t", "v", "k", "n", "shape", "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)


def sealed(body: object) -> bytes:
    """Give a document the right CRC, as who writes to the store can."""
    packed = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return b'{"body":%s,"crc64":%d}' % (packed, crc64(packed))


def body_of(packed: bytes) -> Any:
    return json.loads(packed)["body"]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(value, dict):
        found += [p for key, child in value.items() for p in places(child, (*at, key))]
    elif isinstance(value, list):
        found += [p for number, child in enumerate(value) for p in places(child, (*at, number))]
    return found


def changed(body: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[place[0]] = changed(body[place[0]] if len(place) > 1 else None, place[1:], new)
    return copy


def unpack(read: Callable[[bytes], object], packed: bytes) -> object:
    """Return what was read, None when it was refused; anything else fails the test."""
    try:
        return read(packed)
    except ManifestInvalid as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 800
    return None


def test_the_documents_are_read_as_they_are() -> None:
    assert Manifest.unpack(MANIFEST.pack()) == MANIFEST
    assert Index.unpack(INDEX.pack()) == INDEX
    assert Manifest.unpack(OLD_MANIFEST) == MANIFEST
    assert Index.unpack(OLD_INDEX) == INDEX
    assert Meta.unpack(META.pack()) == META
    assert Quarantined.unpack(RECORD.pack()) == RECORD
    assert sealed(body_of(MANIFEST.pack())) == MANIFEST.pack()


@settings(max_examples=300, deadline=None)
@given(documents, st.binary(max_size=200))
def test_any_bytes_are_refused(
    document: tuple[bytes, Callable[[bytes], object]], raw: bytes
) -> None:
    assert unpack(document[1], raw) is None


@settings(max_examples=300, deadline=None)
@given(documents, st.data())
def test_any_changed_byte_is_refused(
    document: tuple[bytes, Callable[[bytes], object]], data: st.DataObject
) -> None:
    packed, read = document
    at = data.draw(st.integers(0, len(packed) - 1))
    bits = data.draw(st.integers(1, 255))
    assert unpack(read, packed[:at] + bytes([packed[at] ^ bits]) + packed[at + 1 :]) is None
    assert unpack(read, packed[:at]) is None
    assert unpack(read, packed[:at] + packed[at : at + 1] + packed[at:]) is None


@settings(max_examples=1000, deadline=None)
@given(documents, st.data(), trees)
def test_anything_in_any_place_is_refused_or_sound(
    document: tuple[bytes, Callable[[bytes], object]], data: st.DataObject, new: Any
) -> None:
    packed, read = document
    body = body_of(packed)
    place = data.draw(st.sampled_from(places(body)))
    found = unpack(read, sealed(changed(body, place, new)))
    if isinstance(found, Manifest):
        _is_sound(found)
    elif isinstance(found, Index):
        assert found.data_key == "" or found.data_key.startswith(keys.data_prefix(*_place(found)))


@settings(max_examples=300, deadline=None)
@given(documents, trees)
def test_any_json_with_the_right_sum_is_refused(
    document: tuple[bytes, Callable[[bytes], object]], body: Any
) -> None:
    assert unpack(document[1], sealed(body)) is None
    form = body_of(document[0])["format"]
    extra = body if isinstance(body, dict) else {"x": body}
    assert unpack(document[1], sealed({"format": form, **extra})) is None


def _place(found: Index | Manifest) -> tuple[str, int, int]:
    return found.run, found.step, found.attempt


def _is_sound(found: Manifest) -> None:
    prefix = keys.data_prefix(*_place(found))
    for shard in found.shards:
        assert shard.index_key.startswith(prefix)
        assert shard.data_key == "" or shard.data_key.startswith(prefix)
        assert ".." not in shard.index_key + shard.data_key
    for tensor in found.tensors:
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes
        assert tensor.offset + tensor.nbytes <= found.shards[tensor.owner].data_nbytes
        assert all(size >= 0 for size in tensor.shape)


def with_changes(packed: bytes, *changes: tuple[tuple[Any, ...], Any]) -> bytes:
    body = body_of(packed)
    for place, new in changes:
        body = changed(body, place, new)
    return sealed(body)


def deep(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = {"t": "list", "v": [node]}
    return {**SKELETON, "v": [*SKELETON["v"][:3], node]}  # type: ignore[index]


def short(names: list[Any], prefix: str = "", kind: Any = "tensor") -> tuple[Any, ...]:
    """Put a mapping in short form into the skeleton."""
    inner = {"t": "dict", "k": names, "l": kind}
    node = {"t": "dict", "k": [prefix], "v": [inner]} if prefix else inner
    return ("skeleton", "v", 3), node


def column(name: str, numbers: list[int]) -> tuple[Any, ...]:
    width = {"kind": "<u1", "offset": "<i8", "crc64": "<u8", "blocks": "<u8"}.get(name, "<i4")
    return ("tensors", name), base64.b64encode(np.array(numbers, width).tobytes()).decode()


HUGE = 1 << 61
CASES = {
    "path traversal": ((("shards", 0, "data_key"), PREFIX + "../../../../etc/passwd"),),
    "another run's key": ((("shards", 0, "data_key"), "other/data/x.bin"),),
    "an absolute key": ((("shards", 0, "index_key"), "/etc/passwd"),),
    "another step's key": ((("shards", 0, "index_key"), keys.index_key("run", 6, 1, 0)),),
    "a run outside": ((("run",), "../run"),),
    "a float for a number": ((("step",), 5.0),),
    "true for a number": ((("attempt",), True),),
    "text for a list": ((("tensors",), "abc"),),
    "a list of lists": ((("tensors",), [[]]),),
    "many ranks": ((("world",), 1 << 40),),
    "a tensor of no name": ((("skeleton", "v", 0, "n"), "y"),),
    "a tensor twice": ((("skeleton", "v", 1, "v", "n"), "w"),),
    "an unknown tag": ((("skeleton", "v", 0), {"t": "pickle", "v": "gASVBAAAAAAAAABLAS4="}),),
    "keys that do not pair": ((("skeleton", "k"), ["w"]),),
    "one key twice": ((("skeleton", "k"), ["w", "w", 3, "x"]),),
    "a list as a key": ((("skeleton", "k"), [[], "s", 3, "x"]),),
    "too deep": ((("skeleton",), deep(330)),),
    "a bad number": ((("skeleton", "v", 2, "v", 3, "v"), "__import__('os')"),),
    "bad bytes": ((("skeleton", "v", 2, "v", 2, "v"), "!!"),),
    "short forms of other names": (short(["a", "b"]),),
    "short forms of one name": (short([1, "1"]),),
    "short forms of no kind": (short(["w"], kind="dict"),),
    "short forms with lists as keys": (short([[]]),),
    "short forms of a kind that is a list": (short(["w"], kind=["tensor"]),),
    "short forms that grow": (short([str(n) for n in range(10_000)], "x" * 1000),),
    "short forms at a long path": (short(["w"], "x" * 2000),),
}
OLD_CASES = {
    "a huge size": (
        (("nbytes",), HUGE),
        (("shards", 0, "data_nbytes"), HUGE),
        (("tensors", 0, "nbytes"), HUGE),
    ),
    "a huge shape": ((("tensors", 0, "shape"), [1 << 40, 1 << 40]),),
    "a negative size": ((("tensors", 0, "shape"), [-2, -4]),),
    "a negative offset": ((("tensors", 0, "offset"), -2),),
    "no offset": ((("tensors", 0, "offset"), -1),),
    "an offset beyond": ((("tensors", 0, "offset"), 40),),
    "a foreign owner": ((("tensors", 0, "owner"), 1),),
    "an owner that is no rank": ((("tensors", 0, "owner"), 1 << 40),),
    "a function for a type": ((("tensors", 0, "dtype"), "load"),),
    "a wrong width": ((("tensors", 0, "dtype"), "float64"),),
    "a piece beyond": ((("tensors", 1, "start"), [1]),),
    "half a tensor": ((("tensors", 1, "whole"), [6]),),
    "too many sums": ((("tensors", 1, "blocks"), [1, 2]),),
}
COLUMN_CASES = {
    "a huge size": (
        (("nbytes",), HUGE),
        (("shards", 0, "data_nbytes"), HUGE),
        (("tensors", "forms", 0, 2), HUGE),
    ),
    "a huge shape": ((("tensors", "forms", 0, 1), [1 << 40, 1 << 40]),),
    "a huge shape of the right size": ((("tensors", "forms", 0), ["int8", [HUGE], HUGE]),),
    "a huge piece with sums": (
        (("tensors", "forms", 1), ["int8", [HUGE], HUGE]),
        (("tensors", "places", 0), [[HUGE], [0]]),
    ),
    "a negative size": ((("tensors", "forms", 0, 1), [-2, -4]),),
    "a form too many": ((("tensors", "forms"), [["int8", [1], 1]] * 3),),
    "a form too few": ((("tensors", "forms"), [["float32", [2, 4], 32]]),),
    "a form of two": ((("tensors", "forms", 0), ["float32", [2, 4]]),),
    "a negative form": (column("form", [0, -1]),),
    "an unknown kind": (column("kind", [0, 3]),),
    "an own tensor": (column("kind", [2, 1]),),
    "a piece without a place": (column("place", [-1, -1]),),
    "a place of what is whole": (column("place", [0, 0]),),
    "a place beyond": (column("place", [-1, 1]),),
    "a negative offset": (column("offset", [-2, 32]),),
    "no offset": (column("offset", [-1, 32]),),
    "an offset beyond": (column("offset", [40, 32]),),
    "an offset that wraps": (column("offset", [(1 << 63) - 1, 32]),),
    "a foreign owner": (column("owner", [0, 1]),),
    "an owner that is no rank": (column("owner", [0, -1]),),
    "a column too short": (column("owner", [0]),),
    "a column too long": (column("crc64", [0, 1, 2]),),
    "a column of numbers": ((("tensors", "owner"), [0, 0]),),
    "no base64": ((("tensors", "owner"), "!!!!!!!!!!A="),),
    "letters beyond ASCII": ((("tensors", "owner"), "\u00e4" * 12),),
    "padding in the middle": ((("tensors", "owner"), "AAA=AAAAAAA="),),
    "a name too many": ((("tensors", "names"), ["w", "s", "t"]),),
    "one name twice": ((("tensors", "names"), ["w", "w"]),),
    "a name that is none": ((("tensors", "names"), ["w", 1]),),
    "a function for a type": ((("tensors", "forms", 0, 0), "load"),),
    "a list for a type": ((("tensors", "forms", 0, 0), []),),
    "a wrong width": ((("tensors", "forms", 0, 0), "float64"),),
    "a piece beyond": ((("tensors", "places", 0, 1), [1]),),
    "a piece of other dimensions": ((("tensors", "places", 0), [[3, 1], [0, 0]]),),
    "half a tensor": ((("tensors", "places", 0, 0), [6]),),
    "too many sums": (column("blocks", [1, 2]),),
    "too few sums of blocks": (
        (("tensors", "forms", 0), ["uint8", [HUGE], HUGE]),
        (("nbytes",), HUGE + 32),
        (("shards", 0, "data_nbytes"), HUGE + 32),
        column("blocks", [1] * 1000),
    ),
    "a field too many": ((("tensors", "pickle"), "gASVBAAAAAAAAABLAS4="),),
}
HOSTILE = {
    **{f"{name}, now": (MANIFEST.pack(), case) for name, case in (CASES | COLUMN_CASES).items()},
    **{f"{name}, before": (OLD_MANIFEST, case) for name, case in (CASES | OLD_CASES).items()},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused_and_takes_no_memory(name: str) -> None:
    packed = with_changes(HOSTILE[name][0], *HOSTILE[name][1])
    tracemalloc.start()
    try:
        with pytest.raises(ManifestInvalid) as refused:
            Manifest.unpack(packed)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value)


@settings(max_examples=300, deadline=None)
@given(st.data(), trees)
def test_a_meta_with_anything_in_any_place_is_refused_or_sound(
    data: st.DataObject, new: Any
) -> None:
    body = json.loads(META.pack())
    place = data.draw(st.sampled_from(places(body)[1:]))
    with contextlib.suppress(ArenaInvalid):
        found = Meta.unpack(json.dumps(changed(body, place, new)).encode())
        assert len(list(found.extents)) == 2


def long_manifest() -> Manifest:
    many = [replace(EXTENT, name=f"layers/{n}/w", offset=32 * n) for n in range(2000)]
    skeleton = {"t": "dict", "k": [], "v": []}
    layers = [{"t": "dict", "k": ["w"], "v": [{"t": "tensor", "n": e.name}]} for e in many]
    skeleton = {"t": "dict", "k": ["layers"], "v": [{"t": "list", "v": layers}]}
    size = 32 * len(many)
    return replace(
        MANIFEST,
        skeleton=skeleton,
        tensors=tuple(many),
        nbytes=size,
        shards=(replace(SHARD, data_nbytes=size),),
    )


def test_a_long_manifest_is_a_gzip_and_refused_when_any_byte_of_it_is_changed() -> None:
    manifest = long_manifest()
    packed = manifest.pack()
    assert b'"layers/1999/w"' in gzip.decompress(packed)
    assert Manifest.unpack(packed) == manifest
    for at in (*range(40), *range(40, len(packed), 97), *range(len(packed) - 12, len(packed))):
        spoilt = packed[:at] + bytes([packed[at] ^ 4]) + packed[at + 1 :]
        assert unpack(Manifest.unpack, spoilt) is None
    for cut in (0, 1, 5, 20, 30, len(packed) - 1):
        assert unpack(Manifest.unpack, packed[:cut]) is None
    assert unpack(Manifest.unpack, packed + b"x") is None


def gzipped(body: bytes, says: int | None = None) -> bytes:
    """A gzip with the right sums, as who writes to the store can make it."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    raw = squeeze.compress(body) + squeeze.flush()
    raw += struct.pack("<II", zlib.crc32(body), len(body) if says is None else says)
    head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff" + struct.pack("<H2sHQ", 12, b"EV", 8, crc64(raw))
    return head + raw


@pytest.mark.parametrize("says", [None, 0, 100, 1 << 20])
def test_a_gzip_that_grows_is_refused_and_takes_no_memory(says: int | None) -> None:
    packed = gzipped(b" " * (50 << 20), says)
    for _, read in READERS:
        tracemalloc.start()
        try:
            with pytest.raises(ManifestInvalid):
                read(packed)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/everstep-was-here",)


@pytest.mark.parametrize(
    "packed",
    [
        pickle.dumps(Bomb()),
        b'{"body":' + b"[" * 100_000 + b',"crc64":1}',
        sealed("[" * 1000),
        b'{"body":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b',"crc64":1}',
        b"",
        b"null",
        b"\xff\xfe",
    ],
)
def test_pickles_and_other_bytes_are_refused(packed: bytes) -> None:
    for _, read in READERS:
        with pytest.raises(ManifestInvalid):
            read(packed)
    assert not Path("/tmp/everstep-was-here").exists()


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"1e999", b"9" * 5000])
def test_numbers_that_are_none_are_refused(text: bytes) -> None:
    for packed, read in READERS:
        body = packed[len(b'{"body":') : packed.rindex(b',"crc64"')]
        for old in (b'"step":5', b'"attempt":1', b'"at":1.0', b'"v":[1.5'):
            new = body.replace(old, old.rstrip(b"0123456789.") + text)
            if new != body:
                with pytest.raises(ManifestInvalid):
                    read(b'{"body":%s,"crc64":%d}' % (new, crc64(new)))


def test_nesting_with_the_right_sum_is_refused() -> None:
    for text in (b"[" * 200_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(ManifestInvalid):
            Manifest.unpack(b'{"body":%s,"crc64":%d}' % (text, crc64(text)))


def test_a_hostile_manifest_is_passed_over_and_deletes_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    save(store, "run", 4)
    (tmp_path / "store" / "precious.bin").write_bytes(b"x")
    body = changed(body_of(MANIFEST.pack()), ("shards", 0, "data_key"), "precious.bin")
    key = keys.manifest_key("run", 5, 1)
    store.put_if_absent(key, sealed(body))
    assert [commit.step for commit in list_commits(store, "run")] == [4]
    with pytest.raises(ManifestInvalid):
        read_manifest(store, key)
    with pytest.raises(ManifestInvalid):
        delete_commit(store, "run", 5, 1)
    with pytest.raises(RestoreFailed, match="data_key is not below"):
        restore_from_store(store, "run", Point(step=5, attempt=1), 0, 1, {"w": np.zeros(8)}, None)
    assert (tmp_path / "store" / "precious.bin").exists()

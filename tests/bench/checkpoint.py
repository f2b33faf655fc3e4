"""What a save costs: ``python -m tests.bench.checkpoint [--quick] [--json]``.

The stall of a save against a plain copy of the same bytes; upload and restore against boto3 alone
with the same server. What is compared runs in turn, and the medians count, so a neighbour on the
machine slows both.
"""

import argparse
import io
import json
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from checkpointing.commit import UploadRecord, commit
from checkpointing.restore import Point, restore_from_store
from checkpointing.stage.arena import MappedArena, UploadState
from checkpointing.stage.stager import Stager
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.uploader.send import Sent, send
from deploy.demo.s3_server import S3Server

MIB = 1 << 20
TENSORS = 128


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    state = _state(options.mib * MIB)
    with _folder() as folder:
        rows += _stalls(folder, state, options.repeats)
        # The server's data are no business of shared memory.
        with tempfile.TemporaryDirectory() as data, S3Server(Path(data)) as server:
            os.environ.update(server.environment())
            rows += _transfers(folder, state, server, options.repeats)
    if options.json:
        print(json.dumps({"bench": "checkpoint", "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['figure']}: {row['value']:.4g} {row['unit']}; {row['peer']}: "
            f"{row['peer_value']:.4g}; ratio {row['ratio']:.2f} "
            f"(target {row['target']}, {'met' if row['met'] else 'missed'})"
        )


def _stalls(folder: Path, state: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Time saves into a warm arena, and copies of the same tensors into warm shared memory."""
    nbytes = _nbytes(state)
    path = folder / "arena-0"
    stager = Stager(path, attempt=1, rank=0, world=1)
    stager.prepare(state, None)
    shared = np.memmap(folder / "copy", np.uint8, "w+", shape=(nbytes,))

    def save(step: int) -> None:
        stager.stage(step, state, None)

    saves, copies = [], []
    for step in range(1, repeats + 3):
        saves.append(_timed(save, step))
        _mark_uploaded(path)
        copies.append(_timed(_copy, state, shared))
    stall_s, copy_s = statistics.median(saves[2:]), statistics.median(copies[2:])
    del shared
    (folder / "copy").unlink()
    path.unlink()
    figure = f"stall of a save of {nbytes // MIB} MiB in {TENSORS} tensors"
    return [
        _row(figure, stall_s, "s", "plain copy of the same bytes", copy_s, 1.5, lower=True),
    ]


def _copy(state: dict[str, Any], out: "np.memmap[Any, Any]") -> None:
    at = 0
    for tensor in state["model"].values():
        data = tensor.view(np.uint8).reshape(-1)
        np.copyto(out[at : at + data.nbytes], data)
        at += data.nbytes


def _transfers(
    folder: Path, state: dict[str, Any], server: S3Server, repeats: int
) -> list[dict[str, Any]]:
    """Time upload, boto3's own two ways to put, restore, and a plain get, in turn."""
    mib = _nbytes(state) / MIB
    body = b"".join(tensor.tobytes() for tensor in state["model"].values())
    config = StoreConfig(
        url=f"{server.store_url}/bench", endpoint_url=server.url, region="us-east-1"
    )
    store = open_store(config)
    store.probe()  # makes the connection, as boto3's is made below
    client = boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    times: dict[str, list[float]] = {"upload": [], "put": [], "multipart": [], "restore": []}
    times["get"] = []
    for step in range(1, repeats // 2 + 1):
        arena, key = _arena(folder, state, step), f"bench/plain/parts-{step}"
        puts: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = [
            ("upload", send, (store, "b", *arena)),
            ("put", _put, (client, server.bucket, body)),
            ("multipart", _multipart, (client, server.bucket, body, key)),
        ]
        for name, action, arguments in puts[step % 3 :] + puts[: step % 3]:  # none is always first
            times[name].append(_timed(action, *arguments))
        _commit(store, step, send(store, "b", *arena))  # again: finds it there
        arena[0].close()
        (folder / "arena-0").unlink()
        target, out = _state(1, like=state), bytearray(len(body))
        gets: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = [
            ("restore", _restore, (store, step, target)),
            ("get", _get, (client, server.bucket, out, key)),
        ]
        for name, action, arguments in gets[step % 2 :] + gets[: step % 2]:
            times[name].append(_timed(action, *arguments))
        assert np.array_equal(target["model"]["w0"], state["model"]["w0"])
        for info in store.list(""):
            store.delete(info.key)
    rate = {name: mib / statistics.median(values) for name, values in times.items()}
    return [
        _row("verified upload", rate["upload"], "MiB/s", "boto3 put_object", rate["put"], 1.0),
        _row(
            "verified upload",
            rate["upload"],
            "MiB/s",
            "boto3 upload_fileobj, 8 threads, 16 MiB parts",
            rate["multipart"],
            1.0,
        ),
        _row(
            "verified restore from S3",
            rate["restore"],
            "MiB/s",
            "boto3 get_object into memory, not verified",
            rate["get"],
            1.0,
        ),
    ]


def _arena(folder: Path, state: dict[str, Any], step: int) -> tuple[MappedArena, Any]:
    Stager(folder / "arena-0", attempt=1, rank=0, world=1).stage(step, state, None)
    arena = MappedArena(folder / "arena-0")
    return arena, arena.staged()[0]


def _put(client: Any, bucket: str, body: bytes) -> None:
    client.put_object(Bucket=bucket, Key=f"bench/plain/{secrets.token_hex(4)}", Body=body)


def _multipart(client: Any, bucket: str, body: bytes, key: str) -> None:
    parts = TransferConfig(multipart_chunksize=16 * MIB, max_concurrency=8)
    client.upload_fileobj(io.BytesIO(body), bucket, key, Config=parts)


def _get(client: Any, bucket: str, out: bytearray, key: str) -> None:
    view, done = memoryview(out), 0
    with client.get_object(Bucket=bucket, Key=key)["Body"] as stream:
        while count := stream.readinto(view[done:]):
            done += count


def _commit(store: ObjectStore, step: int, sent: Sent) -> None:
    record = UploadRecord(rank=0, index_key=sent.index_key, index_crc64=sent.index_crc64)
    assert commit(store, "b", step, 1, [record], 1, "w").committed


def _restore(store: ObjectStore, step: int, state: dict[str, Any]) -> None:
    restore_from_store(store, "b", Point(step=step, attempt=1), 0, 1, state, None)


def _state(nbytes: int, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return tensors of uneven sizes, or empty ones of the shapes of another state."""
    if like is not None:
        return {"model": {name: np.zeros_like(x) for name, x in like["model"].items()}, "step": 0}
    generator = np.random.default_rng(0)
    weights = generator.pareto(1.5, TENSORS) + 0.05
    sizes = (weights / weights.sum() * nbytes / 4).astype(int) + 1
    model = {f"w{i}": generator.random(int(size), np.float32) for i, size in enumerate(sizes)}
    return {"model": model, "step": 7}


def _nbytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state["model"].values())


def _mark_uploaded(path: Path) -> None:
    arena = MappedArena(path)
    for staged in arena.staged():
        arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
    arena.close()


def _timed(action: Callable[..., object], *arguments: object) -> float:
    begun = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begun


def _row(
    figure: str,
    value: float,
    unit: str,
    peer: str,
    peer_value: float,
    target: float,
    *,
    lower: bool = False,
) -> dict[str, Any]:
    ratio = value / peer_value
    return {
        "figure": figure,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "target": f"{'<=' if lower else '>='} {target}",
        "met": ratio <= target if lower else ratio >= target,
    }


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.checkpoint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a coarse answer within a minute")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    options = parser.parse_args()
    options.mib, options.repeats = (96, 12) if options.quick else (256, 12)
    return options


if __name__ == "__main__":
    main()

"""The front against a real S3 server."""

import secrets
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.dcp import EverstepReader, EverstepWriter
from checkpointing.dcp.location import Location
from deploy.demo.s3_server import S3Server
from tests.integration.checkpointing.dcp import cases
from tests.integration.checkpointing.dcp.conftest import MakeRanks
from tests.integration.checkpointing.dcp.states import blank, nested, sums

pytestmark = [
    pytest.mark.torch,
    pytest.mark.s3,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A prefix of its own; the server's address is all that the environment has to tell."""
    for name, value in variables(s3_server).items():
        monkeypatch.setenv(name, value)
    return f"{s3_server.store_url}/{secrets.token_hex(4)}/step-100"


def variables(s3_server: S3Server) -> dict[str, str]:
    return {**s3_server.environment(), "AWS_ENDPOINT_URL": s3_server.url}


def test_one_argument_saves_and_loads(url: str) -> None:
    state = nested(3)
    dcp.save(state, storage_writer=EverstepWriter(url))
    loaded = blank(nested(1))
    dcp.load(loaded, storage_reader=EverstepReader(url))
    assert sums(loaded) == sums(state)


def test_a_large_state_is_sent_and_read_in_parts(url: str) -> None:
    state = {"large": torch.arange(6 << 20), "half": torch.ones(9 << 20, dtype=torch.bfloat16)}
    future = dcp.async_save(state, storage_writer=EverstepWriter(url))
    future.result(timeout=120)  # type: ignore[union-attr]
    loaded = blank(state)
    dcp.load(loaded, storage_reader=EverstepReader(url))
    assert sums(loaded) == sums(state)


def test_sharded_trainings_change_worlds_through_s3(
    ranks: MakeRanks, url: str, s3_server: S3Server
) -> None:
    environment = variables(s3_server)
    (saved, *_) = ranks(4).run(cases.with_environment, environment, "save_training", url, "fsdp", 1)
    for world, layout in ((2, "fsdp"), (4, "hsdp"), (1, "plain")):
        found = ranks(world).run(cases.with_environment, environment, "load_training", url, layout)
        assert found == [saved] * world


def test_the_newest_of_several_saves_is_read(url: str) -> None:
    for value in (1.0, 2.0):
        dcp.save({"a": torch.full((4,), value)}, storage_writer=EverstepWriter(url))
        state = {"a": torch.zeros(4)}
        dcp.load(state, storage_reader=EverstepReader(url))
        assert state["a"].tolist() == [value] * 4
    found = Location(url=url).open().list("")
    assert sorted(info.key.partition("/")[0] for info in found) == ["commits"] * 2 + ["data"] * 2


def test_what_is_not_there_is_named(url: str) -> None:
    with pytest.raises(CheckpointException, match=rf"{url}: no checkpoint, nothing is committed"):
        dcp.load({"a": torch.zeros(4)}, storage_reader=EverstepReader(url))

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.store.base import StoreConfig
from deploy.demo.s3_server import S3Server
from tests.integration.checkpointing.node import Node


@pytest.fixture
def node_folder() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"everstep-test-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        before = dict(os.environ)
        os.environ.update(running.environment())
        yield running
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def s3_node(node_folder: Path, server: S3Server) -> Iterator[Node]:
    config = StoreConfig(
        url=f"{server.store_url}/{secrets.token_hex(4)}",
        endpoint_url=server.url,
        region="us-east-1",
    )
    node = Node(node_folder, config)
    yield node
    node.close()


@pytest.fixture
def node(node_folder: Path, tmp_path: Path) -> Iterator[Node]:
    root = tmp_path / "store"
    root.mkdir()
    node = Node(node_folder, StoreConfig(url=root.as_uri()))
    yield node
    node.close()

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


@pytest.fixture
def s3_node(node_folder: Path, s3_server: S3Server) -> Iterator[Node]:
    config = StoreConfig(
        url=f"{s3_server.store_url}/{secrets.token_hex(4)}",
        endpoint_url=s3_server.url,
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

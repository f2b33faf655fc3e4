import secrets
from collections.abc import Iterator

import pytest

from checkpointing.store.base import StoreConfig
from deploy.demo.s3_server import S3Server
from tests.faults.proxy import FaultProxy


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.url) as running:
        yield running


@pytest.fixture
def behind(s3_server: S3Server, proxy: FaultProxy) -> StoreConfig:
    """A fresh prefix, reached through the proxy."""
    return StoreConfig(
        url=f"{s3_server.store_url}/{secrets.token_hex(4)}",
        endpoint_url=proxy.url,
        region="us-east-1",
    )


@pytest.fixture
def direct(s3_server: S3Server, behind: StoreConfig) -> StoreConfig:
    """The same prefix without the proxy."""
    return StoreConfig(url=behind.url, endpoint_url=s3_server.url, region="us-east-1")

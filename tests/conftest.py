from collections.abc import Iterator

import pytest

from deploy.demo.s3_server import S3Server


@pytest.fixture(scope="session")
def running_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_server(running_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server, with its credentials in the environment of this test alone."""
    for name, value in running_s3.environment().items():
        monkeypatch.setenv(name, value)
    return running_s3

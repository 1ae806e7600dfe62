"""The S3 server that the tests talk to: moto's, or the one that ROLLFLOW_TEST_S3 names."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

BUCKET = "rollflow-tests"
VARIABLE = "ROLLFLOW_TEST_S3"


@dataclass(frozen=True)
class S3Server:
    """A server that runs, and the keys it takes."""

    endpoint: str
    access_key: str = "the-key-id"
    secret_key: str = "the-secret-key"

    @property
    def environment(self) -> dict[str, str]:
        """What points a process at it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def make_bucket(self, name: str = BUCKET) -> None:
        """Create a bucket."""
        import boto3  # here, so that tests without a server do not pay for it

        session = boto3.Session(self.access_key, self.secret_key, region_name="us-east-1")
        session.client("s3", endpoint_url=self.endpoint).create_bucket(Bucket=name)


def use_server(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    """Point this process at an S3 server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)


@contextlib.contextmanager
def running() -> Iterator[S3Server]:
    """Start the server, with one bucket."""
    kind = os.environ.get(VARIABLE) or "moto"
    with contextlib.ExitStack() as stack:
        if kind == "ceph":
            from tests.servers import ceph

            server = S3Server(stack.enter_context(ceph.running()), ceph.ACCESS_KEY, ceph.SECRET_KEY)
        elif kind == "moto":
            from tests.servers import moto

            server = S3Server(stack.enter_context(moto.running()))
        else:
            raise ValueError(f"{VARIABLE}: expected moto or ceph, got {kind}")
        server.make_bucket()
        yield server

"""Real stores for the tests: a folder, memory, and S3 servers that run on the loopback interface."""

import http.server
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

import pytest

from data_contracts.records import BatchRef, Commit, Consumed, GroupRef, ObjectRef, PolicyRef
from infra import settings
from infra.processes import free_port
from infra.services import Services, down, up
from infra.store import Store, open_store
from tests.servers.s3 import S3Server, use_server


def _use_server(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    use_server(monkeypatch, S3Server(endpoint))


@pytest.fixture(params=["folder", "memory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh store of every kind."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{uuid4().hex}"
    return request.getfixturevalue("s3_url")


@pytest.fixture
def store(store_url: str) -> Store:
    """A fresh, open store of every kind."""
    return open_store(store_url)


class SmallS3(http.server.ThreadingHTTPServer):
    """The part of S3 that a store needs, in memory, and able to misbehave.

    `faults` maps a method to what happens to its next requests, in turn: "503", "409", "403" answer so and
    do nothing; "no reply" does nothing and hangs up; "lost reply" does it and hangs up; "late" answers 409
    to a put, and the last "late" in turn then lets a rival's object b"theirs" appear there; "" is no fault.
    """

    daemon_threads = True

    def __init__(
        self,
        *,
        keeps_condition: bool = True,
        races: bool = False,
        lists: bool = True,
        alter: Callable[[bytes], bytes] = lambda body: body,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _SmallS3Handler)
        self.keeps_condition = keeps_condition
        self.races = races  # looks whether an object exists, and writes it some time later
        self.lists = lists
        self.alter = alter
        self.seconds = 0.0  # that every request takes
        self.num_open = self.most_open = 0
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.faults: dict[str, list[str]] = {}
        self.requests: Counter[str] = Counter()
        self.authorizations: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        pass  # a client that hangs up is part of the tests


class _SmallS3Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: SmallS3

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        secret = "<AWSAccessKeyId>the-key-id</AWSAccessKeyId><StringToSign>the-secret-key</StringToSign>"
        self.answer(status, f"<Error><Code>{code}</Code>{secret}</Error>".encode())

    def do(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            server.requests[self.command] += 1
            server.authorizations.append(self.headers.get("Authorization", ""))
            turn = server.faults.get(self.command, [])
            fault = turn.pop(0) if turn else ""
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
        time.sleep(server.seconds)
        with server.lock:
            server.num_open -= 1
        if fault == "no reply":
            self.close_connection = True
        elif fault == "lost reply":
            self.close_connection = True
            self.answer, self.refuse = (lambda *_, **__: None), (lambda *_: None)  # type: ignore[method-assign]
            self.serve(body)
        elif fault == "late":
            self.refuse(409, "ConditionalRequestConflict")
            with server.lock:
                if "late" not in turn:
                    server.objects[self.path] = b"theirs"
        elif fault:
            self.refuse(int(fault), {"503": "SlowDown", "403": "AccessDenied"}.get(fault, "Conflict"))
        else:
            self.serve(body)

    do_PUT = do_GET = do_HEAD = do_DELETE = do_POST = do

    def create(self, path: str, body: bytes) -> bool:
        if self.server.races and path not in self.server.objects:
            time.sleep(0.1)
            self.server.objects[path] = self.server.alter(body)
            return True
        with self.server.lock:
            if path in self.server.objects:
                return False
            self.server.objects[path] = self.server.alter(body)
            return True

    def serve(self, body: bytes) -> None:
        objects = self.server.objects
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.command == "PUT":
            if self.server.keeps_condition and self.headers.get("If-None-Match") == "*":
                if not self.create(path, body):
                    self.refuse(412, "PreconditionFailed")
                    return
            else:
                objects[path] = self.server.alter(body)
            self.answer(200, ETag='"1"')
        elif self.command == "POST":  # DeleteObjects
            for key in re.findall(rb"<Key>([^<]*)</Key>", body):
                objects.pop(f"{path.rstrip('/')}/{key.decode()}", None)
            self.answer(200, b"<DeleteResult></DeleteResult>")
        elif self.command == "DELETE":
            objects.pop(path, None)
            self.answer(204)
        elif "list-type" in parse_qs(url.query):
            self.serve_list(path.strip("/"), parse_qs(url.query).get("prefix", [""])[0])
        elif path not in objects:
            self.refuse(404, "NoSuchKey")
        else:
            found = objects[path]
            self.answer(200, found, ETag='"1"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

    def serve_list(self, bucket: str, prefix: str) -> None:
        keys = sorted(key.removeprefix(f"/{bucket}/") for key in self.server.objects)
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>1</ETag><Size>{len(self.server.objects[f'/{bucket}/{key}'])}</Size></Contents>"
            for key in keys
            if self.server.lists and key.startswith(prefix)
        )
        self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())


@pytest.fixture
def small_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SmallS3]]:
    """Starts a SmallS3, which the AWS variables then point to; its buckets exist by being named."""
    running: list[tuple[SmallS3, threading.Thread]] = []

    def start(**options) -> SmallS3:
        server = SmallS3(**options)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        _use_server(monkeypatch, server.endpoint)
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Servers:
    """Prefect and MLflow, as `up` started them below `home`."""

    home: Path
    services: Services

    def up(self) -> Services:
        """Start again whatever does not run, where it ran."""
        return up(self.home)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A Prefect and an MLflow server; a test that stops one starts it again."""
    settings.apply_defaults()
    home = tmp_path_factory.mktemp("servers")
    try:
        yield Servers(home, up(home, free_port(), free_port()))
    finally:
        down(home)


@pytest.fixture
def make_commit() -> Callable[..., Commit]:
    """Build the commit of a version: it consumed one group of a batch of its own, at a time of its own."""

    def make(version: int, **fields: object) -> Commit:
        group = GroupRef(ticket=version, attempt=0, first_row=0, num_rows=8)
        batch = BatchRef(key=f"batch/{version:064x}.arrow", num_bytes=10, sha256=f"{version:064x}", num_rows=8)
        weights = ObjectRef(key=f"policy/{version}-w/model.safetensors", num_bytes=10, sha256="0" * 64)
        return Commit.model_validate(
            {
                "writer": "trainer",
                "at": 1_000_000_000.5 + version,
                "version": version,
                "status": "trained" if version else "initial",
                "consumed": [Consumed(ticket=version, attempt=0, batch=batch, group=group)] if version else [],
                "weights": PolicyRef(
                    kind="full", objects=(weights,), digest=f"digest-{version}", dtype="float32", num_parameters=10
                ),
                "checkpoint_version": 0,
                "num_trained": version,
                "num_tokens": 10 * version,
                "metrics": {"reward/mean": version / 100, "loss/total": -version / 10},
                **fields,
            }
        )

    return make

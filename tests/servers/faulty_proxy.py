"""A proxy in front of an S3 server that does to requests what networks and busy servers do. A process of its own.

Every request draws one fault, or none, from the rates that were posted to /_faults:

    slowdown, error, throttle   answered 503 SlowDown, 500 InternalError, 429; nothing is forwarded
    conflict                    a create-only put answered 409; nothing is forwarded
    reset                       the connection is reset; nothing is forwarded
    hang                        no answer for `hang_s`, then hangs up; nothing is forwarded
    lost                        forwarded, then the connection is reset instead of an answer
    torn                        forwarded, then half of the answer's body and a reset

Uses the stdlib alone, so that it starts at once: `python -m tests.servers.faulty_proxy UPSTREAM` prints its port.
"""

import contextlib
import http.client
import http.server
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

ANSWERS = {"slowdown": (503, "SlowDown"), "error": (500, "InternalError"), "throttle": (429, "TooManyRequests")}
CONFLICT = (409, "ConditionalRequestConflict")
FAULTS = (*ANSWERS, "conflict", "reset", "hang", "lost", "torn")


class Proxy:
    """A running proxy, as its tests see it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def set(self, *, seed: int = 0, hang_s: float = 2.0, **rates: float) -> None:
        """Say how often each fault strikes from now on, as a share of requests; none for those not named."""
        body = json.dumps({"seed": seed, "hang_s": hang_s, "rates": rates}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/_faults", data=body), timeout=30).close()

    def counts(self) -> dict[str, int]:
        """Return how often each fault struck since the last `set`, and "none" for untouched requests."""
        with urllib.request.urlopen(f"{self.endpoint}/_faults", timeout=30) as reply:
            return json.load(reply)


@contextlib.contextmanager
def running(upstream: str) -> Iterator[Proxy]:
    """Start a proxy to `upstream`, without faults at first."""
    command = [sys.executable, "-m", "tests.servers.faulty_proxy", upstream]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Proxy(f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.lock = threading.Lock()
        self.configure({"seed": 0, "hang_s": 2.0, "rates": {}})

    def configure(self, told: dict[str, Any]) -> None:
        unknown = set(told["rates"]) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such fault: {unknown}")
        self.random, self.hang_s, self.rates = random.Random(told["seed"]), told["hang_s"], told["rates"]
        self.counts: Counter[str] = Counter()

    def draw(self, is_create: bool, is_get: bool) -> str:
        with self.lock:
            none = 1.0 - sum(self.rates.values())
            (fault,) = self.random.choices([*self.rates, "none"], [*self.rates.values(), none])
            if (fault == "conflict" and not is_create) or (fault == "torn" and not is_get):
                fault = "none"
            self.counts[fault] += 1
            return fault

    def handle_error(self, request, client_address) -> None:
        pass  # a client that hangs up is part of the tests


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/_faults":
            self.control(body)
            return
        is_create = self.command == "PUT" and self.headers.get("If-None-Match") == "*"
        fault = self.server.draw(is_create, self.command == "GET")
        if fault in ANSWERS or fault == "conflict":
            status, code = ANSWERS.get(fault, CONFLICT)
            self.answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
        elif fault == "reset":
            self.reset()
        elif fault == "hang":
            time.sleep(self.server.hang_s)
            self.reset()
        else:
            status, headers, reply = self.forward(body)
            if fault == "lost":
                self.reset()
            else:
                self.answer(status, headers, reply, is_torn=fault == "torn")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do

    def control(self, body: bytes) -> None:
        if self.command == "POST":
            with self.server.lock:
                self.server.configure(json.loads(body))
        with self.server.lock:
            self.answer(200, {}, json.dumps(self.server.counts).encode())

    def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            reply = upstream.getresponse()
            hop = ("connection", "transfer-encoding", "keep-alive", "content-length", "date", "server")
            headers = {name: value for name, value in reply.getheaders() if name.lower() not in hop}
            if self.command == "HEAD":
                headers["Content-Length"] = reply.getheader("Content-Length") or "0"
            return reply.status, headers, reply.read()
        finally:
            upstream.close()

    def answer(self, status: int, headers: dict[str, str], body: bytes, *, is_torn: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if is_torn else body)
        if is_torn:
            self.reset()

    def reset(self) -> None:
        """Close the connection so that the other side sees a reset and no end."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


def main() -> None:
    """Serve until killed."""
    with _Server(sys.argv[1]) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

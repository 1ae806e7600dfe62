"""A small HTTP server that speaks as much of vLLM's protocol as Rollflow uses, for tests of everything around vLLM.

It samples no model: the n-th token of a sample is `seed + n`, its log-probability -1 / (n + 1). What it does hold to is
the protocol: it serves nothing while paused, answers with the label of the weights that it was given last, forgets all
when it is started again, and can be told to hold or to die in the middle of a response.
"""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_LENGTH = 32


class LittleVllm:
    """One server on one port; `start` after `stop` gives a new server that knows nothing."""

    def __init__(self) -> None:
        self.port = 0
        self.digest_of = lambda files: "none"
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.die_after_tokens: int | None = None
        self.after_death = lambda: None
        self.answer: tuple[int, str] | None = None
        self.hold_at: int | None = None
        self.hold = threading.Event()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.label, self.running = "default", threading.Event()
        self.running.set()
        little = self

        class Handler(_Handler):
            pass

        Handler.little = little
        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    little: LittleVllm

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._say(200, {"data": [{"max_model_len": MAX_LENGTH}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        little = self.little
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        path, _, query = self.path.partition("?")
        little.calls.append(path if not query else f"{path}?{query}")
        if little.answer is not None and path in ("/inference/v1/generate", "/collective_rpc"):
            code, text = little.answer
            self._say(code, {"error": text})
        elif path == "/inference/v1/generate":
            little.bodies.append(body)
            with contextlib.suppress(OSError):
                self._generate(body)
        elif path == "/collective_rpc":
            self._say(200, {"results": [{"digest": little.digest_of(body["kwargs"]["files"])}]})
        else:
            if path == "/update_weight_version":
                little.label = body["new_version"]
            if path in ("/pause", "/resume"):
                (little.running.clear if path == "/pause" else little.running.set)()
            self._say(200, {"success": True})

    def _generate(self, body: dict[str, Any]) -> None:
        sampling = body["sampling_params"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        spans: list[dict[str, Any]] = []
        for n in range(sampling["max_tokens"]):
            if n == self.little.hold_at:
                self.little.hold.wait()
            self.little.running.wait()
            if self.little.die_after_tokens == n:
                self.little.die_after_tokens = None
                self.little.stop()
                self.little.after_death()
                return  # which closes the connection
            if not spans or spans[-1]["version"] != self.little.label:
                spans.append({"version": self.little.label, "start": n, "end": n})
            spans[-1]["end"] = n + 1
            is_last = n + 1 == sampling["max_tokens"]
            for index in range(sampling["n"]):
                token = sampling["seed"] + index + n
                choice = {
                    "index": index,
                    "token_ids": [token],
                    "logprobs": {"content": [{"token_id": token, "logprob": -1 / (n + 1)}]},
                    "finish_reason": "length" if is_last else None,
                    "weight_versions": spans if is_last else None,
                }
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.001)
        if self.little.hold_at == sampling["max_tokens"]:
            self.little.hold.wait()
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, code: int, body: Any) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

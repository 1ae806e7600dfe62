"""Talks to a vLLM server: tokens in, tokens out, and the few calls that put another version of the weights in.

Samples of one prompt are one request, so they share its forward pass; each arrives when it ends, not when the last
does. The server says for every token which weights sampled it (`label`, see `set_label`).

Sources: vLLM 0.32, entrypoints/scale_out/token_in_token_out, entrypoints/rl and entrypoints/serve/dev.
"""

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from data_contracts.errors import ConfigError, EngineError, RollflowError, ServiceError

STREAM_TOKENS = 16
"""Tokens of a response that are told at once: often enough to see progress, seldom enough to cost nothing."""

_CONNECT_S = 10.0
_CALL_S = 600.0  # loading and digesting weights


@dataclass(frozen=True)
class Sampling:
    """The distribution of one request, and where its samples end."""

    seed: int
    """Of the first sample; the i-th has seed + i."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response; the model's own end of sequence does not count unless it is named."""
    stop_texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one sample has got since the piece before."""

    index: int
    """Which sample of the request."""
    token_ids: list[int]
    logprobs: list[float]
    """Nats, under the distribution sampled from."""
    finish_reason: str
    """Empty while the sample goes on."""
    spans: list[tuple[str, int, int]]
    """(label of the weights, first token, token after the last) over the whole sample; of the last piece alone."""


class VllmClient:
    """One server at one address; safe to use from several threads."""

    def __init__(self, url: str, connections: int) -> None:
        """Prepare; nothing is asked. `connections` is how many requests may be in flight at once, beside calls."""
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._http = httpx.Client(base_url=self.url, limits=limits, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Drop every connection; requests in flight fail with ServiceError, and the server aborts them."""
        self._http.close()

    def max_length(self) -> int:
        """Return the server's limit on prompt and response together, in tokens.

        Raises:
            ConfigError: what answers is no vLLM server.
        """
        try:
            return int(self._call("GET", "/v1/models").json()["data"][0]["max_model_len"])
        except (EngineError, ValueError, LookupError, TypeError) as cause:
            raise ConfigError(f"rollout.engine.url {self.url}: what answers there is no vLLM server") from cause

    def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, salt: str
    ) -> Generator[Piece, None, None]:
        """Yield the pieces of all samples as they come.

        Args:
            prompt_ids: at least one token.
            num_samples: responses wanted.
            sampling: see there.
            salt: prompts share what was computed for them only with those of the same salt.

        Raises:
            EngineError: the server refuses the request.
            ServiceError: the server is gone, or broke off.
        """
        body = request_body(prompt_ids, num_samples, sampling, salt)
        try:
            with self._http.stream("POST", "/inference/v1/generate", json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    reply.read()
                    self._refuse("a request", reply)
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield from self._pieces(json.loads(line.removeprefix("data: ")))
        except RollflowError:
            raise
        except (httpx.HTTPError, RuntimeError, ValueError) as cause:  # RuntimeError: the client was closed meanwhile
            raise ServiceError(f"vLLM server {self.url} broke off: {type(cause).__name__}: {cause}") from cause
        raise ServiceError(f"vLLM server {self.url} broke off: a response did not end")

    def pause(self) -> None:
        """Stop stepping, with all sequences where they are; return when the last step is over."""
        self._call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    def resume(self) -> None:
        """Step again."""
        self._call("POST", "/resume")

    def set_label(self, label: str) -> None:
        """Name the weights that sample from now on."""
        self._call("POST", "/update_weight_version", json={"new_version": label})

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Forget what was computed for prompts; return whether that was possible.

        Args:
            running: also compute everything again that belongs to sequences in flight. Otherwise their blocks are in
                the way, and nothing is forgotten while there are any.
        """
        reply = self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": str(running).lower()})
        return bool(reply.json()["success"])

    def call_worker(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of the server's workers and return the answer of each.

        Raises:
            ConfigError: the server does not offer this.
            ServiceError: the method failed, or the server is gone.
        """
        try:
            reply = self._call("POST", "/collective_rpc", json={"method": method, "kwargs": arguments})
        except EngineError as cause:
            raise ConfigError(
                f"vLLM server {self.url} does not take weights from Rollflow: start it as README says, with "
                f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls ({cause})"
            ) from cause
        return reply.json()["results"]

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            reply = self._http.request(method, path, timeout=httpx.Timeout(_CALL_S, connect=_CONNECT_S), **arguments)
        except (httpx.HTTPError, RuntimeError) as cause:
            raise ServiceError(f"vLLM server {self.url} does not answer: {type(cause).__name__}: {cause}") from cause
        if reply.status_code != httpx.codes.OK:
            self._refuse(path, reply)
        return reply

    def _refuse(self, what: str, reply: httpx.Response) -> NoReturn:
        said = f"{reply.status_code}: {' '.join(reply.text.split())[:500]}"
        if reply.is_server_error:
            raise ServiceError(f"vLLM server {self.url} failed at {what} with {said}")
        raise EngineError(f"vLLM server {self.url} refused {what} with {said}")

    def _pieces(self, event: dict[str, Any]) -> Iterator[Piece]:
        if "error" in event:
            raise ServiceError(f"vLLM server {self.url} broke off: {event['error']}")
        for choice in event["choices"]:
            yield read_piece(choice)


def request_body(prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, salt: str) -> dict[str, Any]:
    """Return a request as /inference/v1/generate takes it."""
    return {
        "token_ids": list(prompt_ids),
        "cache_salt": salt,
        "stream": True,
        "sampling_params": {
            "n": num_samples,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0,  # of the sampled token alone
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop_texts),
            "detokenize": bool(sampling.stop_texts),
            "stream_interval": STREAM_TOKENS,
        },
    }


def read_piece(choice: dict[str, Any]) -> Piece:
    """Return one choice of a streamed event.

    Raises:
        EngineError: tokens and log-probabilities do not belong together.
    """
    tokens = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != tokens:
        raise EngineError(f"vLLM gave {len(tokens)} tokens and {len(content)} log-probabilities that are not theirs")
    return Piece(
        index=choice["index"],
        token_ids=tokens,
        logprobs=[entry["logprob"] for entry in content],
        finish_reason=choice["finish_reason"] or "",
        spans=[(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()],
    )

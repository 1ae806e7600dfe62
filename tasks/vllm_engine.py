"""Generation by a vLLM server, behind what the rollout role asks of any engine.

What is in flight is in tasks/vllm_streams.py. New weights go in while the server is paused: it holds all sequences
where they are, loads, says the digest of what it then computes with, and goes on. Prompts are salted with the version,
so none ever goes on from what another version has computed, also where the prefix cache cannot be emptied because
sequences are in flight.

A server that dies is started again, and one that was away is waited for. It gets the weights first; then everything
that was in flight is asked for once more. The same happens when a response names weights that are not ours.

step   waits for: a piece of a response, at most STEP_S.   unblocked by: the server.
"""

import shutil
import tempfile
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_contracts import config as settings
from data_contracts.errors import ConfigError, DigestMismatch, EngineError, ServiceError
from data_contracts.records import Commit
from infra.settings import home
from infra.vllm_client import Piece, Sampling, VllmClient
from infra.vllm_command import make_server
from infra.vllm_server import SupervisedServer, answers
from models.policy import Policy, end_ids
from models.requests import Finished, Request, check_request
from tasks.full_weights import WeightsFinder
from tasks.role import Role
from tasks.vllm_streams import Sample, Streams

STEP_S = 0.1
WATCH_S = 2.0
RETRY_S = 1.0


class VllmEngine:
    """One server, its weights and what it samples; used by one thread."""

    def __init__(
        self,
        role: Role,
        config: settings.VllmEngine,
        policy: Policy,
        files: Mapping[str, bytes],
        weights: WeightsFinder,
    ) -> None:
        """Start the server, or connect to the one that runs. It holds no weights of this run yet.

        Raises:
            ConfigError: there is no vLLM in the environment, or no vLLM server at the address.
            ServiceError: the server cannot be started or reached.
        """
        self._role = role
        self._config = config
        self._weights = weights
        self._end_ids = end_ids(policy)
        self._stop_texts = role.config.rollout.sampling.stop
        self._vocab_size = policy.model.config.get_text_config().vocab_size
        self._folder = Path(tempfile.mkdtemp(prefix="rollflow-vllm-", dir=config.folder or None))
        self._version = self._held = -1
        self._digests: dict[int, str] = {}
        self._pending: list[Request] = []
        self._streams = Streams(config.slots, self._sampling)
        self._losses = 0
        self._num_tokens = 0
        self._watched_at = time.monotonic()
        self._silent_s = 0.0
        self._server: SupervisedServer | None = None
        self._client: VllmClient | None = None
        try:
            if not config.url:
                threads, log = role.config.rollout.threads, home() / "logs" / f"vllm-{role.writer}.log"
                dtype = str(policy.model.dtype).removeprefix("torch.")
                self._server = make_server(config, files, self._folder, dtype=dtype, threads=threads, log=log)
            self._connect()
            self._max_length = min(self._api.max_length(), config.max_length or 1 << 30)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled under."""
        return self._version

    @property
    def digest(self) -> str:
        """Digest that the server computed over the weights it holds."""
        return self._digests[self._version]

    @property
    def max_length(self) -> int:
        """Limit on prompt and response together, in tokens."""
        return self._max_length

    @property
    def num_in_flight(self) -> int:
        """Sequences that the server has."""
        return len(self._streams.samples)

    @property
    def num_queued(self) -> int:
        """Requests that the next step hands over."""
        return len(self._pending)

    @property
    def num_free(self) -> int:
        """Sequences that the server has room for; one group more than it samples, so that a free slot never waits."""
        room = self._config.slots + self._role.config.samples_per_group
        return max(0, room - self.num_in_flight - self.num_queued)

    @property
    def num_tokens(self) -> int:
        """Tokens received since the start."""
        return self._num_tokens

    @property
    def server(self) -> SupervisedServer | None:
        """The server that was started; None when one that runs is used."""
        return self._server

    def progress(self) -> Mapping[Hashable, int]:
        """Return the number of tokens received so far for each sequence in flight."""
        return {key: len(sample.token_ids) for key, sample in self._streams.samples.items()}

    def submit(self, request: Request) -> None:
        """Queue a request for the next step.

        Raises:
            EngineError: it cannot be answered; see `check_request`.
        """
        check_request(request, max_length=self._max_length, vocab_size=self._vocab_size)
        self._pending.append(request)

    def step(self) -> list[Finished]:
        """Hand over what is queued, and return what ended; wait a moment when nothing has.

        Raises:
            EngineError: the server refuses a request, or its output is not finite.
            ServiceError: the server was lost more often than `max_restarts` allows.
        """
        self._hand_over()
        finished: list[Finished] = []
        try:
            for sample, piece in self._streams.hear(STEP_S):
                self._silent_s = 0.0
                self._num_tokens += len(piece.token_ids)
                if piece.finish_reason:
                    finished.append(self._finish(sample, piece))
                    self._streams.end(sample)
            self._watch()
        except ServiceError as cause:
            self._recover(cause)
        return finished

    def take(self, version: int) -> bool:
        """Put a committed version in; sequences in flight go on under it. See RolloutEngine.

        Raises:
            DigestMismatch: the server computes with other weights than those committed.
            ServiceError: the server was lost more often than `max_restarts` allows.
        """
        published = self._weights.find_published(version, self._held)
        if published is None:
            return False
        self._version = version
        try:
            self._load(published)
        except ServiceError as cause:
            self._recover(cause)
        return True

    def abort(self, keys: Iterable[Hashable]) -> list[Finished]:
        """Take requests out and return what has come of them; of its tokens nobody knows which version sampled them."""
        wanted = set(keys)
        taken = [Sample(request, 0.0) for request in self._pending if request.key in wanted]
        taken += self._streams.drop(wanted)
        self._pending = [request for request in self._pending if request.key not in wanted]
        return [
            Finished(
                request=sample.request,
                response_ids=np.asarray(sample.token_ids, np.int32),
                logprobs=np.asarray(sample.logprobs, np.float32),
                versions=np.full(len(sample.token_ids), -1, np.int32),
                digests={},
                finish_reason="aborted",
                started_at=sample.submitted_at,
                finished_at=time.time(),
            )
            for sample in taken
        ]

    def close(self) -> None:
        """Break off what is in flight, stop the server that was started, and remove the files it was given."""
        self._streams.forget()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _api(self) -> VllmClient:
        if self._client is None:
            raise EngineError("the vLLM engine is closed")
        return self._client

    # Weights

    def _load(self, published: Sequence[tuple[Commit, str, bytes]]) -> None:
        """Bring the server from the version it holds to the one it should, and make sure that it did."""
        if not published:
            return
        self._held = -1  # whatever happens now, only a load that ends well leaves weights that are known
        files = []
        for commit, kind, body in published:
            path = self._folder / f"{commit.version}.safetensors"
            path.write_bytes(body)
            files.append((kind, str(path.absolute())))
        self._api.pause()
        answers_of = self._api.call_worker("rollflow_take", files=files)
        for _, path in files:
            Path(path).unlink()
        if len(answers_of) != 1:
            raise ConfigError(f"vLLM server has {len(answers_of)} workers, expected 1: run it without parallelism")
        digest, expected = answers_of[0]["digest"], published[-1][0].weights.digest
        if digest != expected:
            raise DigestMismatch(f"vLLM server computes with weights {digest}, version {self._version} is {expected}")
        self._api.set_label(self._label(self._version))
        self._api.reset_prefix_cache(running=self._config.in_flight == "recompute")
        self._api.resume()
        self._held = self._version
        self._digests[self._version] = digest
        self._silent_s = 0.0

    def _label(self, version: int) -> str:
        return f"{self._role.writer}-{version}"  # vLLM allows no slash in a salt

    # Requests

    def _hand_over(self) -> None:
        """Send what is queued."""
        pending, self._pending = self._pending, []
        if pending and not self._streams.samples:
            self._silent_s = 0.0
        self._streams.send(self._api, pending, self._label(self._version))

    def _sampling(self, request: Request) -> Sampling:
        return Sampling(
            seed=request.seed,
            max_tokens=min(request.max_new_tokens, self._max_length - len(request.prompt_ids)),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_ids=tuple(sorted({*self._end_ids, *request.stop_ids})),
            stop_texts=self._stop_texts,
        )

    def _finish(self, sample: Sample, last: Piece) -> Finished:
        if last.finish_reason not in ("stop", "length"):
            raise ServiceError(f"vLLM server ended a response with {last.finish_reason!r}")
        logprobs = np.asarray(sample.logprobs, np.float32)
        if not np.isfinite(logprobs).all() or (logprobs < -9000).any():  # vLLM writes -9999 for what is not finite
            raise EngineError(
                f"request {sample.request.key}: log-probabilities are not finite: the weights in the engine are broken"
            )
        versions = self._versions_of(last.spans, len(logprobs))
        return Finished(
            request=sample.request,
            response_ids=np.asarray(sample.token_ids, np.int32),
            logprobs=np.minimum(logprobs, 0.0),
            versions=versions,
            digests={version: self._digests[version] for version in np.unique(versions).tolist()},
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            started_at=sample.submitted_at,
            finished_at=time.time(),
        )

    def _versions_of(self, spans: Sequence[tuple[str, int, int]], num_tokens: int) -> np.ndarray:
        """Return the version that sampled each token, int32 [T], as the server tells it."""
        versions = np.full(num_tokens, -1, np.int32)
        for label, first, stop in spans:
            writer, _, version = label.rpartition("-")
            if writer != self._role.writer:
                raise ServiceError(f"vLLM server sampled under weights {label!r}, which are not of this process")
            versions[first:stop] = int(version)
        if (versions < 0).any():
            raise EngineError(f"vLLM server named the weights of {spans}, not of all {num_tokens} tokens")
        return versions

    # The server

    def _watch(self) -> None:
        """Raise ServiceError when the server has died, or has been silent with requests in flight."""
        now = time.monotonic()
        if now - self._watched_at < WATCH_S:
            return
        # Never much more than one look: a machine that slept, and this process with it, says nothing of the server.
        self._silent_s += min(now - self._watched_at, 2 * WATCH_S)
        self._watched_at = now
        if self._server is not None and not self._server.is_alive():
            raise ServiceError("vLLM server ended")
        if self._streams.samples and self._silent_s > self._config.stall_limit_s:
            raise ServiceError(f"vLLM server has sampled nothing for {self._silent_s:.0f} s")

    def _recover(self, cause: ServiceError) -> None:
        """Get a server that holds the current weights, and queue again what the lost one had in flight."""
        while True:
            self._losses += 1
            if self._losses > self._config.max_restarts:
                lines = f"; its last lines:\n{self._server.last_lines()}" if self._server else ""
                raise ServiceError(f"vLLM server was lost {self._losses} times: {cause}{lines}") from cause
            self._role.progressed(f"vLLM server lost ({cause}): getting another")
            self._pending = self._streams.forget() + self._pending
            self._api.close()
            self._held = -1
            try:
                self._connect()
                self._reload()
                return
            except ServiceError as again:
                cause = again

    def _reload(self) -> None:
        """Give a new server the version that the lost one had, when it can be had."""
        while self._version >= 0:
            published = self._weights.find_published(self._version, -1)
            if published is not None:
                self._load(published)
                return
            self._role.wait(f"version {self._version} in full", on=("train",))

    def _connect(self) -> None:
        """Start the server, or wait until the one that runs answers."""
        if self._server is not None:
            self._role.progressed("starting the vLLM server")
            self._server.start(self._role.check)
            url = self._server.url
        else:
            url = self._config.url.rstrip("/")
            self._wait_for(url)
        self._client = VllmClient(url, self._config.slots)
        self._watched_at = time.monotonic()

    def _wait_for(self, url: str) -> None:
        # A server that never answered is a wrong address, and said at once; one that did may be coming back.
        until = time.monotonic() + (self._config.start_limit_s if self._losses else 0.0)
        while not answers(url):
            self._role.check()
            if time.monotonic() > until:
                raise ServiceError(
                    f"rollout.engine.url {url}: no server answers there; start it or correct the address"
                )
            time.sleep(RETRY_S)

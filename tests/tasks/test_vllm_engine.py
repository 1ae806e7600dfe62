"""The vLLM engine against a small real server: what it asks for, and what it does when the server is lost."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from data_contracts.config import TinyModel, VllmEngine
from data_contracts.errors import ConfigError, DigestMismatch, EngineError, ServiceError
from data_contracts.records import Commit
from infra.log import Log
from infra.store import Store, open_store
from infra.vllm_command import server_command, server_environment
from models.delta import apply_delta, delta_from_bytes
from models.digest import weights_digest
from models.policy import build_policy, named_weights, policy_files, weights_from_bytes
from models.requests import Finished, Request
from models.tiny import build_model, build_tokenizer
from tasks import vllm_engine
from tasks.full_weights import WeightsFinder
from tasks.role import Role
from tasks.weights import Weights, publish_delta, publish_full
from tests.harness import tiny_config
from tests.infra.little_vllm import LittleVllm

TINY = TinyModel(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1)


def commit_versions(store: Store) -> tuple[dict[str, bytes], list[str]]:
    """Commit three versions, the later ones as differences; return the model's files and the digests."""
    torch.manual_seed(0)
    model = build_model(TINY, seed=0)
    files, log = policy_files(model, build_tokenizer(TINY.characters)), Log(store, "log/commit", Commit)
    weights: Weights = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    reference = publish_full(store, 0, "w", weights, files=files)
    digests = []
    for version in range(3):
        if version:
            new = {name: tensor + (name.endswith("norm.weight")) for name, tensor in weights.items()}
            reference, _ = publish_delta(store, version, "w", new, weights)
            weights = new
        digests.append(reference.digest)
        log.append(
            version,
            Commit(
                writer="w", version=version, status="initial" if not version else "trained", consumed=(),
                weights=reference, checkpoint_version=0, num_trained=0, num_tokens=0,
            ),
        )  # fmt: skip
    return files, digests


class Held:
    """The weights in the little server: it digests what it was really given."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.kinds: list[str] = []

    def take(self, files: list[list[str]]) -> str:
        for kind, path in files:
            self.kinds.append(kind)
            with open(path, "rb") as file:
                body = file.read()
            self.weights = (
                weights_from_bytes(body) if kind == "full" else apply_delta(self.weights, delta_from_bytes(body))
            )
        return weights_digest(self.weights)


class Setup:
    def __init__(self, tmp_path) -> None:
        self.config = tiny_config(str(tmp_path / "store"), rollout={"engine": {"type": "vllm", "slots": 16}})
        self.store = open_store(self.config.store).at("run")
        self.files, self.digests = commit_versions(self.store)
        self.held = Held()
        self.server = LittleVllm()
        self.server.digest_of = self.held.take
        self.server.start()
        self.folder = tmp_path / "seen_by_both"
        self.folder.mkdir()
        self.made: list[vllm_engine.VllmEngine] = []

    def engine(self, **changes) -> vllm_engine.VllmEngine:
        policy = build_policy(self.files, "float32", device="meta")
        config = VllmEngine.model_validate({"slots": 16, "url": self.server.url, "folder": str(self.folder)} | changes)
        role = Role("rollout", self.store, self.config)
        self.made.append(vllm_engine.VllmEngine(role, config, policy, self.files, WeightsFinder(role)))
        return self.made[-1]

    def restart(self) -> None:
        """Another server at the same address, which knows nothing."""
        self.server.stop()
        self.held.weights = {}
        self.server.start()


@pytest.fixture
def setup(tmp_path):
    made = Setup(tmp_path)
    yield made
    made.server.hold.set()
    for engine in made.made:
        engine.close()
    made.server.stop()


def requests(num: int, prompt: tuple[int, ...] = (3, 4), first: int = 0, tokens: int = 4) -> list[Request]:
    return [Request((prompt, first + i), prompt, seed=first + i, max_new_tokens=tokens) for i in range(num)]


def run(engine: vllm_engine.VllmEngine, until: Callable[[], bool] = lambda: False) -> list[Finished]:
    """Step until nothing is left to sample, or `until` holds."""
    finished: list[Finished] = []
    give_up = time.monotonic() + 60
    while (engine.num_in_flight or engine.num_queued) and not until():
        finished += engine.step()
        assert time.monotonic() < give_up
    return finished


def test_samples_of_a_prompt_are_one_request_and_come_back_with_version_and_digest(setup):
    engine = setup.engine()
    engine.take(0)
    for request in [*requests(3), *requests(2, prompt=(5,), first=7)]:
        engine.submit(request)
    finished = {result.key: result for result in run(engine)}
    assert sorted(body["sampling_params"]["n"] for body in setup.server.bodies) == [2, 3]
    assert len(finished) == 5
    result = finished[((5,), 8)]
    assert result.response_ids.tolist() == [8, 9, 10, 11]  # the little server's tokens: seed + n
    np.testing.assert_allclose(result.logprobs, [-1, -1 / 2, -1 / 3, -1 / 4], rtol=1e-6)
    assert result.versions.tolist() == [0] * 4
    assert result.digests == {0: setup.digests[0]}
    assert result.finish_reason == "length"
    assert engine.num_tokens == 20


def test_versions_go_in_as_what_was_published_and_the_server_is_paused_meanwhile(setup):
    engine = setup.engine()
    engine.take(0)
    engine.take(2)
    assert setup.held.kinds == ["full", "delta", "delta"]
    assert engine.digest == setup.digests[2]
    asked = [call for call in setup.server.calls if call != "/v1/models"]
    assert asked[len(asked) // 2 :] == [
        "/pause?mode=keep&clear_cache=false", "/collective_rpc", "/update_weight_version",
        "/reset_prefix_cache?reset_running_requests=false", "/resume",
    ]  # fmt: skip
    assert not list(setup.folder.glob("*/*.safetensors"))


def test_tokens_in_flight_say_which_version_sampled_them(setup):
    engine = setup.engine(in_flight="recompute")
    engine.take(0)
    setup.server.hold_at = 3
    engine.submit(requests(1, tokens=8)[0])
    run(engine, until=lambda: sum(engine.progress().values()) == 3)
    engine.take(1)
    setup.server.hold.set()
    (result,) = run(engine)
    assert result.versions.tolist() == [0] * 3 + [1] * 5
    assert result.digests == {0: setup.digests[0], 1: setup.digests[1]}
    assert "/reset_prefix_cache?reset_running_requests=true" in setup.server.calls


def test_groups_that_nobody_wants_are_hung_up_on_and_the_others_go_on(setup):
    engine = setup.engine()
    engine.take(0)
    setup.server.hold_at = 2
    for request in [*requests(2, prompt=(5,), first=7), *requests(2)]:
        engine.submit(request)
    run(engine, until=lambda: list(engine.progress().values()) == [2] * 4)
    engine.submit(requests(1, prompt=(9,))[0])
    gone = engine.abort([((5,), 7), ((5,), 8), ((9,), 0), "unknown"])
    assert sorted(len(result.response_ids) for result in gone) == [0, 2, 2]
    assert {result.finish_reason for result in gone} == {"aborted"}
    assert (engine.num_in_flight, engine.num_queued) == (2, 0)
    setup.server.hold.set()
    assert {result.key for result in run(engine)} == {((3, 4), 0), ((3, 4), 1)}


def test_a_key_may_come_again_before_the_stream_of_its_first_request_has_ended(setup):
    engine = setup.engine()
    engine.take(0)
    setup.server.hold_at = 4  # all tokens are there, the end of the stream is not
    for request in requests(2):
        engine.submit(request)
    assert len(run(engine)) == 2
    late_end, setup.server.hold = setup.server.hold, threading.Event()
    setup.server.hold_at = 2
    for request in requests(2):
        engine.submit(request)
    run(engine, until=lambda: list(engine.progress().values()) == [2] * 2)
    late_end.set()
    for _ in range(5):
        assert not engine.step()
    assert list(engine.progress().values()) == [2] * 2
    setup.server.hold.set()
    assert [result.response_ids.tolist() for result in run(engine)] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert setup.server.calls.count("/collective_rpc") == 1, "the server was not taken for lost"


def test_prompts_of_different_versions_share_nothing(setup):
    engine = setup.engine()
    for version in (0, 1):
        engine.take(version)
        engine.submit(requests(1)[0])
        run(engine)
    salts = [body["cache_salt"] for body in setup.server.bodies]
    assert salts[0] != salts[1]


def test_a_server_that_dies_in_the_middle_comes_back_with_the_weights_before_anything_is_asked_again(setup):
    engine = setup.engine()
    engine.take(1)
    setup.server.die_after_tokens = 2
    setup.server.after_death = setup.restart
    for request in requests(3):
        engine.submit(request)

    setup.server.calls.clear()
    finished = run(engine)
    asked = [call for call in setup.server.calls if call in ("/collective_rpc", "/inference/v1/generate")]
    assert asked == ["/inference/v1/generate", "/collective_rpc", "/inference/v1/generate"]
    assert setup.held.kinds == ["full", "delta"] * 2
    assert sorted(result.request.seed for result in finished) == [0, 1, 2]
    assert {result.response_ids.tolist()[0] for result in finished} == {0, 1, 2}


def test_a_server_that_was_exchanged_unseen_is_found_by_what_it_says_of_its_weights(setup):
    engine = setup.engine()
    engine.take(0)
    setup.restart()
    engine.submit(requests(1)[0])
    (result,) = run(engine)
    assert result.digests == {0: setup.digests[0]}
    assert setup.held.kinds == ["full", "full"]  # it had none, and got them before it was asked again


def test_weights_that_are_not_those_committed_are_refused_and_nothing_is_sampled_from_them(setup):
    engine = setup.engine()
    setup.server.digest_of = lambda files: "bfloat16:0"
    with pytest.raises(DigestMismatch, match="vLLM server computes with weights bfloat16:0, version 0 is float32:"):
        engine.take(0)
    assert "/resume" not in setup.server.calls


def test_a_silent_server_is_taken_for_dead_and_after_a_number_of_losses_the_role_says_so(setup, monkeypatch):
    monkeypatch.setattr(vllm_engine, "WATCH_S", 0.1)
    engine = setup.engine(stall_limit_s=0.2, max_restarts=1)
    engine.take(0)
    setup.server.hold_at = 1
    engine.submit(requests(1)[0])
    with pytest.raises(ServiceError, match="vLLM server was lost 2 times: vLLM server has sampled nothing for"):
        run(engine)


def test_a_request_that_cannot_be_answered_is_refused_before_it_is_sent(setup):
    engine = setup.engine()
    engine.take(0)
    with pytest.raises(EngineError, match="prompt has 40 tokens, expected 1 to 31"):
        engine.submit(Request("long", [1] * 40, seed=0, max_new_tokens=1))
    setup.server.answer = (400, "no")
    engine.submit(requests(1)[0])
    with pytest.raises(EngineError, match="refused a request with 400"):
        run(engine)


def test_a_wrong_address_and_a_missing_environment_are_one_sentence(setup):
    with pytest.raises(ServiceError, match="rollout.engine.url http://127.0.0.1:9: no server answers there"):
        setup.engine(url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="rollout.engine.environment nowhere: there is no vLLM in it; `make vllm`"):
        setup.engine(url="", environment="nowhere")
    assert not list(setup.folder.iterdir())


def test_the_server_is_started_with_what_the_records_need(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    config = VllmEngine(slots=8, max_length=64, arguments=("--block-size", "32"))
    command = server_command(tmp_path / "python", tmp_path / "model", 9000, config, "bfloat16")
    words = " ".join(command)
    for wanted in (
        "--host 127.0.0.1 --port 9000", "--dtype bfloat16", "--load-format dummy", "--max-num-seqs 8",
        "--logprobs-mode processed_logprobs", "--max-model-len 64", "--generation-config vllm", "--block-size 32",
        "--worker-extension-cls models.vllm_extension.WeightsExtension", "--enforce-eager --no-enable-chunked-prefill",
    ):  # fmt: skip
        assert wanted in words
    variables = server_environment(config, 2)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "--enforce-eager" not in server_command(
        tmp_path / "python", tmp_path, 9000, VllmEngine(device="cuda"), "bfloat16"
    )

"""The real vLLM: its weights, its probabilities, and a run that samples through it and loses it on the way.

Needs the environment that `make vllm` builds; run by `make test-vllm`.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from data_contracts.config import VllmEngine as VllmConfig
from data_contracts.errors import ConfigError
from data_contracts.records import Commit
from infra.log import Log
from infra.store import Store, open_store
from infra.vllm_command import vllm_python
from models.policy import build_policy, end_ids, named_weights, policy_files
from models.requests import Finished, Request
from models.tiny import build_model, build_tokenizer
from tasks.engine import make_engine
from tasks.full_weights import WeightsFinder
from tasks.model_files import read_model_files
from tasks.role import Role
from tasks.vllm_engine import VllmEngine
from tasks.weights import PolicyReader, Weights, publish_delta, publish_full
from tests.harness import ROLES, held, tiny_config

pytestmark = pytest.mark.slow

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 256,
    "warm_start_max_steps": 40,
}
ENGINE = {"type": "vllm", "slots": 16, "max_length": 256, "cache_gib": 1}


def is_built() -> bool:
    try:
        vllm_python(VllmConfig().environment)
    except ConfigError:
        return False
    return True


if not is_built():
    pytest.skip("make vllm has not been run", allow_module_level=True)


def commit_versions(store: Store, num: int) -> list[str]:
    """Commit random versions of a tiny policy, in full and then as differences; return their digests."""
    config = tiny_config("unused", model=MODEL).model
    assert config.type == "tiny"
    model = build_model(config, seed=0)
    files, log = policy_files(model, build_tokenizer(config.characters)), Log(store, "log/commit", Commit)
    weights: Weights = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    reference = publish_full(store, 0, "w", weights, files=files)
    digests = []
    for version in range(num):
        if version:
            torch.manual_seed(version)
            new = {
                name: torch.where(torch.rand(tensor.shape) < 0.2, tensor + 0.3 * torch.randn(tensor.shape), tensor)
                for name, tensor in weights.items()
            }
            reference, _ = publish_delta(store, version, "w", new, weights)
            weights = new
        digests.append(reference.digest)
        status = "trained" if version else "initial"
        fields = {"consumed": (), "checkpoint_version": 0, "num_trained": 0, "num_tokens": 0}
        log.append(
            version,
            Commit.model_validate(
                {"writer": "w", "version": version, "status": status, "weights": reference, **fields}
            ),
        )
    return digests


class Setup:
    def __init__(self, folder: Path) -> None:
        self.config = tiny_config(str(folder / "store"), model=MODEL, rollout={"engine": ENGINE})
        self.store = open_store(self.config.store).at("run")
        self.digests = commit_versions(self.store, 4)
        self.files = read_model_files(self.store)
        self.policy = build_policy(self.files, "float32")
        self.reader = PolicyReader(self.store)
        engine = self.config.rollout.engine
        assert engine.type == "vllm"
        role = Role("rollout", self.store, self.config)
        self.engine = VllmEngine(role, engine, self.policy, self.files, WeightsFinder(role))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(tmp_path_factory.mktemp("vllm"))
    yield made
    made.engine.close()


def run(engine, requests: list[Request]) -> dict[object, Finished]:
    for request in requests:
        engine.submit(request)
    finished: dict[object, Finished] = {}
    while engine.num_in_flight or engine.num_queued:
        finished |= {result.key: result for result in engine.step()}
    return finished


def requests(num: int, tokens: int, temperature: float = 1.0, prompt: tuple[int, ...] = (3, 4, 13, 5)) -> list[Request]:
    return [Request(i, prompt, seed=i, max_new_tokens=tokens, temperature=temperature) for i in range(num)]


def trainer_logprobs(setup: Setup, version: int, result: Finished, temperature: float) -> np.ndarray:
    """Log-probabilities of a response under a version, by the library that the trainer uses."""
    weights, _ = PolicyReader(setup.store).weights(version)
    model = build_policy(setup.files, "float32", weights).model
    ids = torch.tensor([[*result.request.prompt_ids, *result.response_ids.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(result.request.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(result.request.prompt_ids) :, None])[:, 0].numpy()


@pytest.mark.parametrize("version", [0, 1, 3])
def test_the_server_computes_with_the_committed_weights(setup, version):
    """By digest, by the most likely tokens, and by the probability of what it samples."""
    setup.engine.take(version)
    assert setup.engine.digest == setup.digests[version]
    torch_engine = make_engine(setup.config, build_policy(setup.files, "float32"))
    torch_engine.load_weights(setup.reader.weights(version)[0], version)
    greedy = run(setup.engine, requests(1, 12, temperature=0.0))[0]
    assert greedy.response_ids.tolist() == run(torch_engine, requests(1, 12, temperature=0.0))[0].response_ids.tolist()
    for result in run(setup.engine, requests(8, 12, temperature=0.7)).values():
        np.testing.assert_allclose(result.logprobs, trainer_logprobs(setup, version, result, 0.7), atol=2e-4)
        assert result.digests == {version: setup.digests[version]}


def test_samples_end_with_the_end_of_sequence_token_and_keep_it(setup):
    setup.engine.take(0)
    ends = set(end_ids(setup.policy))
    results = run(setup.engine, requests(16, 27)).values()
    for result in results:
        inner = result.response_ids[:-1].tolist()
        assert not ends & set(inner)
        assert (result.finish_reason == "stop") == (int(result.response_ids[-1]) in ends)
    assert {result.finish_reason for result in results} == {"stop", "length"}


def test_the_same_seed_draws_the_same_sample_and_another_seed_another(setup):
    setup.engine.take(0)
    first, second = run(setup.engine, requests(8, 12)), run(setup.engine, requests(8, 12))
    texts = [tuple(first[i].response_ids.tolist()) for i in range(8)]
    assert texts == [tuple(second[i].response_ids.tolist()) for i in range(8)]
    assert len(set(texts)) > 4


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_weights_change_under_sequences_in_flight_and_every_token_says_which_sampled_it(setup, in_flight, monkeypatch):
    monkeypatch.setattr(setup.engine, "_config", setup.engine._config.model_copy(update={"in_flight": in_flight}))
    setup.engine.take(0)
    wanted = requests(128, 200, temperature=0.9)  # more than are sampled at once: some are under way at any moment
    for request in wanted:
        setup.engine.submit(request)
    finished: dict[object, Finished] = {}
    while not any(setup.engine.progress().values()):
        finished |= {result.key: result for result in setup.engine.step()}
    setup.engine.take(2)
    while setup.engine.num_in_flight:
        finished |= {result.key: result for result in setup.engine.step()}
    assert len(finished) == len(wanted)
    mixed = [result for result in finished.values() if {0, 2} <= set(result.versions.tolist())]
    assert mixed
    for result in finished.values():
        assert (np.diff(result.versions) >= 0).all()
        assert set(result.digests) == set(result.versions.tolist())
    for result in [*mixed[:8], *list(finished.values())[:8], *list(finished.values())[-8:]]:
        of_old = result.versions == 0
        np.testing.assert_allclose(result.logprobs[of_old], trainer_logprobs(setup, 0, result, 0.9)[of_old], atol=2e-4)
        # Under the new weights what is kept of the old ones' keys and values plays in; computed again it does not.
        if in_flight == "recompute" or not of_old.any():
            np.testing.assert_allclose(
                result.logprobs[~of_old], trainer_logprobs(setup, 2, result, 0.9)[~of_old], atol=2e-4
            )


@pytest.mark.parametrize("process", ["launcher", "server", "worker"])
def test_whichever_process_of_the_server_is_killed_all_samples_arrive_from_the_committed_weights(setup, process):
    setup.engine.take(3)
    server = setup.engine.server
    assert server is not None
    family = sorted(server.family(), key=psutil.Process.create_time)
    victim = {"launcher": family[0], "server": family[1], "worker": family[-1]}[process]
    for request in requests(16, 28):
        setup.engine.submit(request)
    finished = {result.key: result for result in setup.engine.step()}
    victim.send_signal(signal.SIGKILL)
    while setup.engine.num_in_flight or setup.engine.num_queued:
        finished |= {result.key: result for result in setup.engine.step()}
    assert len(finished) == 16
    assert all(result.digests == {3: setup.digests[3]} for result in finished.values())
    for result in finished.values():
        np.testing.assert_allclose(result.logprobs, trainer_logprobs(setup, 3, result, 1.0), atol=2e-4)
    # All may have arrived before the next look at the launcher: it is looked at also while nothing is in flight.
    until = time.monotonic() + 300
    while any(map(is_at_work, family)):
        assert time.monotonic() < until
        assert not setup.engine.step()


def is_at_work(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_trains_through_vllm_and_bears_the_loss_of_its_server(make_run, processes, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    engine = {**ENGINE, "max_length": 16, "folder": str(tmp_path), "in_flight": "recompute"}
    changes = {"model": MODEL, "rollout": {"engine": engine}, "staleness": {"max_staleness": 1, "lease_s": 60.0}}
    run = make_run(**changes, steps=20, train={"full_weights_every": 3})
    commits = Log(run.store, "log/commit", Commit)
    roles = processes.start_all(run, ROLLFLOW_HOME=str(tmp_path / "home"))
    until = time.monotonic() + 900
    while commits.tail() < 3:
        assert time.monotonic() < until
        assert all(role.exitcode in (None, 0) for role in roles)
        time.sleep(0.1)
    with held(roles[ROLES.index("train")]):  # or the run might be over before the kill
        ours = [
            p
            for p in psutil.process_iter()
            if f"{tmp_path}" in " ".join(_command(p)) and "api_server" in " ".join(_command(p))
        ]
        assert ours
        for found in ours:
            os.kill(found.pid, signal.SIGKILL)
    processes.join(roles, limit_s=900)
    assert [commit.status for commit in commits.read_from(1)] == ["trained"] * 20
    known = [
        commit.metrics["policy/mismatch_k3"]
        for commit in commits.read_from(1)
        if commit.metrics["policy/mismatch_tokens"]
    ]
    assert known
    assert max(known) < 1e-5


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []

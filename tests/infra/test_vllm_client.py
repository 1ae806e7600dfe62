"""The client against a small real HTTP server (little_vllm.py)."""

import pytest

from data_contracts.errors import ConfigError, EngineError, ServiceError
from infra.vllm_client import STREAM_TOKENS, Sampling, VllmClient, read_piece, request_body
from tests.infra.little_vllm import MAX_LENGTH, LittleVllm


@pytest.fixture
def little():
    server = LittleVllm()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(little):
    client = VllmClient(little.url, 4)
    yield client
    client.close()


def test_a_request_asks_for_tokens_and_the_probabilities_they_were_drawn_with():
    sampling = Sampling(seed=7, max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, stop_ids=(2,))
    body = request_body([4, 5], 8, sampling, "salt")
    assert body["token_ids"] == [4, 5]
    assert body["cache_salt"] == "salt"
    assert body["sampling_params"] == {
        "n": 8, "seed": 7, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "logprobs": 0,
        "ignore_eos": True, "stop_token_ids": [2], "stop": [], "detokenize": False, "stream_interval": STREAM_TOKENS,
    }  # fmt: skip


def test_texts_that_end_a_response_need_the_server_to_decode():
    assert request_body([4], 1, Sampling(seed=0, max_tokens=1, stop_texts=("\n",)), "")["sampling_params"]["detokenize"]


def test_samples_arrive_piece_by_piece_with_their_tokens_probabilities_and_weights(client):
    client.set_label("me-3")
    pieces = list(client.generate([1, 2], 2, Sampling(seed=10, max_tokens=3), "salt"))
    of_second = [piece for piece in pieces if piece.index == 1]
    assert [token for piece in of_second for token in piece.token_ids] == [11, 12, 13]
    assert [value for piece in of_second for value in piece.logprobs] == [-1, -1 / 2, -1 / 3]
    assert [piece.finish_reason for piece in of_second] == ["", "", "length"]
    assert of_second[-1].spans == [("me-3", 0, 3)]


def test_log_probabilities_of_other_tokens_are_refused():
    choice = {"index": 0, "token_ids": [5], "finish_reason": None, "weight_versions": None}
    with pytest.raises(EngineError, match="1 tokens and 1 log-probabilities that are not theirs"):
        read_piece(choice | {"logprobs": {"content": [{"token_id": 6, "logprob": -1.0}]}})
    with pytest.raises(EngineError, match="1 tokens and 0 log-probabilities"):
        read_piece(choice | {"logprobs": None})


def test_a_refused_request_is_told_from_a_server_that_failed(client, little):
    little.answer = (400, "prompt is too long")
    with pytest.raises(EngineError, match="refused a request with 400: .*prompt is too long"):
        list(client.generate([1], 1, Sampling(seed=0, max_tokens=1), ""))
    little.answer = (500, "engine is dead")
    with pytest.raises(ServiceError, match="failed at a request with 500: .*engine is dead"):
        list(client.generate([1], 1, Sampling(seed=0, max_tokens=1), ""))


def test_a_server_that_dies_in_the_middle_of_a_response_is_noticed(client, little):
    little.die_after_tokens = 2
    with pytest.raises(ServiceError, match=f"vLLM server {little.url} broke off"):
        list(client.generate([1], 1, Sampling(seed=0, max_tokens=5), ""))
    with pytest.raises(ServiceError, match=f"vLLM server {little.url} does not answer"):
        client.pause()


def test_a_server_without_the_extension_is_said_with_what_it_lacks(client, little):
    little.answer = (404, "Not Found")
    with pytest.raises(ConfigError, match="does not take weights from Rollflow: start it as README says"):
        client.call_worker("rollflow_take", files=[])


def test_the_length_is_the_servers_and_what_is_no_vllm_server_is_said(client, little):
    assert client.max_length() == MAX_LENGTH
    other = VllmClient(f"{little.url}/elsewhere", 1)
    with pytest.raises(ConfigError, match="elsewhere: what answers there is no vLLM server"):
        other.max_length()
    other.close()

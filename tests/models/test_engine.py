"""The engine samples what the model says, whatever else it is doing at the time."""

import copy
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from data_contracts.errors import ConfigError, ContractError, EngineError
from models.digest import weights_digest
from models.engine import Engine, Request, stop_texts
from models.policy import copy_weights, named_weights

VOCAB = 37
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Olmo2": {},
    "Phi3": {},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(architecture="Llama", seed=0, **changes):
    torch.manual_seed(seed)
    config = getattr(transformers, architecture.split(",")[0] + "Config")(
        **SIZES | ARCHITECTURES[architecture] | changes
    )
    # The library's own definition of attention: its fused one drops the soft cap of Gemma 2.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def make_engine(model, **options):
    return Engine(copy.deepcopy(model), **{"version": 0, "slots": 4} | options)


def make_requests(num, seed=0, longest_prompt=20, longest_response=12, **options):
    random = np.random.default_rng(seed)
    return [
        Request(
            key=key,
            prompt_ids=random.integers(3, VOCAB, random.integers(1, longest_prompt + 1)).tolist(),
            seed=1000 + key,
            max_new_tokens=int(random.integers(1, longest_response + 1)),
            **options,
        )
        for key in range(num)
    ]


def drain(engine):
    finished = []
    while engine.num_in_flight or engine.num_queued:
        finished += engine.step()
    return finished


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    return {result.key: result for result in drain(engine)}


@torch.no_grad()
def full_forward(model, result, temperature=1.0):
    """Log-probabilities [T, V] of every next token by one plain forward pass, float64 softmax."""
    prompt = list(result.request.prompt_ids)
    ids = torch.tensor([prompt + result.response_ids.tolist()])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).numpy()


def bits(result):
    return result.response_ids.tobytes(), result.logprobs.tobytes(), result.finish_reason


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probabilities_are_those_of_a_plain_forward_pass(architecture, deterministic):
    model = make_model(architecture)
    results = run(make_engine(model, deterministic=deterministic), make_requests(12))
    assert len(results) == 12
    for result in results.values():
        expected = full_forward(model, result)[np.arange(len(result.response_ids)), result.response_ids]
        assert result.logprobs.dtype == np.float32
        assert np.abs(result.logprobs - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.6, 1.0, 0), (1.4, 0.7, 0), (1.0, 1.0, 3), (1.3, 0.8, 9), (1.0, 1e-6, 0)]
)
def test_log_probabilities_are_of_the_distribution_sampled_from(temperature, top_p, top_k):
    model = make_model()
    requests = make_requests(12, temperature=temperature, top_p=top_p, top_k=top_k)
    for result in run(make_engine(model), requests).values():
        for token, logprob, row in zip(
            result.response_ids, result.logprobs, full_forward(model, result, temperature), strict=True
        ):
            order = np.argsort(-row)[: top_k or VOCAB]
            p = np.exp(row[order]) / np.exp(row[order]).sum()
            kept = order[: int(np.searchsorted(p.cumsum(), top_p)) + 1] if top_p < 1 else order
            assert token in kept
            assert logprob == pytest.approx(row[token] - np.log(np.exp(row[kept]).sum()), abs=1e-5)


def test_temperature_zero_follows_the_most_likely_tokens():
    model = make_model()
    for result in run(make_engine(model), make_requests(8, temperature=0.0)).values():
        assert (full_forward(model, result).argmax(1) == result.response_ids).all()
        assert (result.logprobs == 0).all()


def test_requests_of_different_sampling_share_a_batch():
    model = make_model()
    kinds = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 2.0}, {}]
    requests = [make_requests(20, **kinds[key % 5])[key] for key in range(20)]
    together = run(make_engine(model, slots=20), requests)
    for request in requests:
        alone = run(make_engine(model, slots=20), [request])[request.key]
        assert (alone.response_ids == together[request.key].response_ids).all()
        assert np.abs(alone.logprobs - together[request.key].logprobs).max() < 1e-5


def test_more_requests_than_slots_are_all_answered_in_full():
    engine = make_engine(make_model(), slots=3)
    requests = make_requests(25)
    results = run(engine, requests)
    assert {r.key: len(results[r.key].response_ids) for r in requests} == {r.key: r.max_new_tokens for r in requests}
    assert all(result.finish_reason == "length" for result in results.values())
    assert engine.num_tokens == sum(r.max_new_tokens for r in requests)


def test_a_free_slot_is_filled_at_the_next_step():
    engine = make_engine(make_model(), slots=2)
    lengths = [1, 5, 3, 2]
    for key, length in enumerate(lengths):
        engine.submit(Request(key=key, prompt_ids=[5, 6], seed=key, max_new_tokens=length))
    ended = {}
    for step in itertools.count():
        for result in engine.step():
            ended[result.key] = step
        if not engine.num_in_flight and not engine.num_queued:
            break
        assert engine.num_in_flight + engine.num_free <= 2
    # 0 takes step 0; 1 takes 0 to 4; 2 follows 0 in steps 1 to 3; 3 follows in 4 and 5.
    assert ended == {0: 0, 1: 4, 2: 3, 3: 5}


def test_counts_say_what_is_where():
    engine = make_engine(make_model(), slots=4)
    assert (engine.num_free, engine.num_queued, engine.num_in_flight) == (4, 0, 0)
    assert engine.step() == []
    for key in range(6):
        engine.submit(Request(key=key, prompt_ids=[5, 6], seed=key, max_new_tokens=3))
    assert (engine.num_free, engine.num_queued, engine.num_in_flight) == (0, 6, 0)
    engine.step()
    assert (engine.num_free, engine.num_queued, engine.num_in_flight) == (0, 2, 4)
    assert engine.progress() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert engine.num_tokens == 4


class Counting(torch.nn.Module):
    """Counts the tokens that pass an embedding."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.widths = inner, inner.weight, []

    def forward(self, ids):
        self.widths.append(ids.shape[1])
        return self.inner(ids)


def test_samples_of_one_prompt_pass_it_once_even_over_several_steps():
    model = make_model()
    counting = Counting(model.model.embed_tokens)
    model.model.embed_tokens = counting
    engine = Engine(model, version=0, slots=3)
    prompt = list(range(3, 35))  # 32 tokens: wider than any decoding step
    for key in range(8):
        engine.submit(Request(key=key, prompt_ids=prompt, seed=key, max_new_tokens=2))
    results = {result.key: result for result in drain(engine)}
    assert sum(width == 32 for width in counting.widths) == 1
    assert len({bits(result) for result in results.values()}) > 1


def test_new_weights_make_waiting_samples_pass_their_prompt_again():
    old, new = make_model(), make_model(seed=1)
    engine = make_engine(old, slots=2)
    for key in range(4):
        engine.submit(Request(key=key, prompt_ids=[5, 9, 11], seed=key, max_new_tokens=1))
    first = engine.step()
    engine.load_weights(named_weights(new), 1)
    second = engine.step()
    for model, results, version in ((old, first, 0), (new, second, 1)):
        assert len(results) == 2
        for result in results:
            assert result.versions.tolist() == [version]
            assert result.logprobs[0] == pytest.approx(full_forward(model, result)[0, result.response_ids[0]], abs=1e-5)


def test_weights_change_between_two_tokens_of_sequences_in_flight():
    models = {0: make_model(), 3: make_model(seed=1), 4: make_model(seed=2)}
    digests = {version: weights_digest(named_weights(model)) for version, model in models.items()}
    engine = make_engine(models[0], slots=2)
    assert engine.digest == digests[0]
    engine.submit(Request(key="long", prompt_ids=[4, 5, 6], seed=1, max_new_tokens=9))
    engine.submit(Request(key="short", prompt_ids=[7], seed=2, max_new_tokens=2))
    finished = engine.step() + engine.step()
    assert engine.load_weights(copy_weights(models[3]), 3) == engine.digest == digests[3]
    finished += engine.step()
    engine.load_weights(copy_weights(models[4]), 4)
    finished += drain(engine)
    results = {result.key: result for result in finished}
    assert results["short"].digests == {0: digests[0]}
    long = results["long"]
    assert long.versions.tolist() == [0, 0, 3, 4, 4, 4, 4, 4, 4]
    assert long.digests == digests
    assert engine.version == 4
    first = full_forward(models[0], long)[:2]
    assert np.abs(long.logprobs[:2] - first[np.arange(2), long.response_ids[:2]]).max() < 1e-5


def test_tokens_after_a_change_come_from_new_weights_over_old_keys_and_values():
    old, new = make_model(), make_model(seed=1)
    engine = make_engine(old, slots=1)
    engine.submit(Request(key=0, prompt_ids=[4, 5, 6, 7], seed=1, max_new_tokens=3))
    engine.step()
    engine.load_weights(copy_weights(new), 1)
    result = drain(engine)[0]
    with torch.no_grad():  # the library's own cache, filled by the old weights, read by the new ones
        cache = old(torch.tensor([[4, 5, 6, 7]]), use_cache=True).past_key_values
        for at in range(2):
            logits = new(torch.tensor([[int(result.response_ids[at])]]), past_key_values=cache).logits[0, -1]
            expected = torch.log_softmax(logits, -1)[int(result.response_ids[at + 1])]
            assert result.logprobs[at + 1] == pytest.approx(expected.item(), abs=1e-5)


def test_equal_weights_under_a_new_version_change_no_bit():
    model = make_model()
    undisturbed = run(make_engine(model), make_requests(8))
    engine = make_engine(model)
    for request in make_requests(8):
        engine.submit(request)
    finished = []
    for version in itertools.count(1):
        finished += engine.step()
        if not engine.num_in_flight and not engine.num_queued:
            break
        engine.load_weights(copy_weights(model), version)
    assert {r.key: bits(r) for r in finished} == {key: bits(r) for key, r in undisturbed.items()}


def test_weights_that_do_not_fit_leave_the_engine_as_it_was():
    engine = make_engine(make_model())
    digest = engine.digest
    with pytest.raises(ContractError, match="weights do not fit"):
        engine.load_weights({"x": torch.zeros(1)}, 1)
    assert (engine.version, engine.digest) == (0, digest)


def test_the_end_token_stops_a_response_and_is_kept():
    model = make_model()
    results = run(make_engine(model, eos_ids=(4, 8, 15)), make_requests(40, longest_response=30))
    stopped = [result for result in results.values() if result.finish_reason == "stop"]
    assert len(stopped) > 10
    for result in results.values():
        ends = np.isin(result.response_ids, [4, 8, 15])
        assert not ends[:-1].any()
        assert ends[-1] == (result.finish_reason == "stop")


def test_own_stop_tokens_stop_one_request_only():
    model = make_model()
    request = make_requests(1, longest_response=40)[0]
    free = Request(key="free", prompt_ids=[3, 4], seed=5, max_new_tokens=30)
    whole = run(make_engine(model), [free])["free"].response_ids
    wanted = int(whole[6])
    stopping = Request(key="own", prompt_ids=[3, 4], seed=5, max_new_tokens=30, stop_ids=frozenset({wanted}))
    results = run(make_engine(model), [request, free, stopping])
    first = int(np.flatnonzero(whole == wanted)[0])
    assert results["own"].response_ids.tolist() == whole[: first + 1].tolist()
    assert results["own"].finish_reason == "stop"
    assert (results["free"].response_ids == whole).all()


def test_stop_texts_stop_when_the_text_is_complete():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    model = make_model()
    whole = run(make_engine(model), [Request(key=0, prompt_ids=[3], seed=5, max_new_tokens=30)])[0].response_ids
    text = tokenizer.decode(whole[9:11].tolist())  # reaches over two tokens
    stops = stop_texts(tokenizer, ("never there", text))
    request = Request(key=0, prompt_ids=[3], seed=5, max_new_tokens=30, stops=stops)
    result = run(make_engine(model), [request])[0]
    decoded = [text in tokenizer.decode(whole[: num + 1].tolist()) for num in range(30)]
    assert result.finish_reason == "stop"
    assert result.response_ids.tolist() == whole[: decoded.index(True) + 1].tolist()
    for wrong in ((), ("a", "")):
        with pytest.raises(ConfigError, match="stop texts"):
            stop_texts(tokenizer, wrong)


def test_the_engines_length_limits_prompt_and_response_together():
    engine = make_engine(make_model(), max_length=10)
    result = run(engine, [Request(key=0, prompt_ids=[3] * 6, seed=0, max_new_tokens=50)])[0]
    assert len(result.response_ids) == 4
    assert result.finish_reason == "length"
    full = run(engine, [Request(key=0, prompt_ids=[3] * 9, seed=0, max_new_tokens=50)])[0]
    assert len(full.response_ids) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_aborted_requests_give_back_what_they_have(deterministic):
    model = make_model()
    whole = run(make_engine(model, deterministic=deterministic), make_requests(10, longest_response=1))
    requests = [
        Request(key=r.key, prompt_ids=r.prompt_ids, seed=r.seed, max_new_tokens=9)
        for r in make_requests(10, longest_response=1)
    ]
    undisturbed = run(make_engine(model, deterministic=deterministic), requests)
    engine = make_engine(model, deterministic=deterministic)
    for request in requests:
        engine.submit(request)
    engine.step()
    aborted = {result.key: result for result in engine.abort([0, 2, 7, "unknown"])}
    assert aborted.keys() == {0, 2, 7}
    assert all(result.finish_reason == "aborted" for result in aborted.values())
    assert aborted[0].response_ids.tolist() == whole[0].response_ids.tolist()
    assert len(aborted[7].response_ids) == 0
    assert aborted[7].digests == {}
    rest = {result.key: result for result in drain(engine)}
    assert rest.keys() == set(range(10)) - {0, 2, 7}
    assert all((rest[key].response_ids == undisturbed[key].response_ids).all() for key in rest)


def interleavings(model, num_rounds, make):
    """Results of random subsets in random order, submitted at random moments, some aborted half-way."""
    random = np.random.default_rng(0)
    requests = make_requests(24)
    engine = make()
    for _ in range(num_rounds):
        chosen = [requests[i] for i in random.permutation(24)[: random.integers(1, 25)]]
        version = engine.version
        while chosen or engine.num_in_flight or engine.num_queued:
            for _ in range(random.integers(0, 4)):
                if chosen:
                    engine.submit(chosen.pop())
            yield from engine.step()
            if random.random() < 0.1 and engine.num_in_flight:
                engine.abort([random.choice(list(engine.progress()))])
            if random.random() < 0.1:
                version += 1
                engine.load_weights(copy_weights(model), version)


@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX", "Gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_results_are_the_same_bits_in_any_company(architecture, dtype):
    model = make_model(architecture).to(dtype)
    alone = {}
    engine = make_engine(model, slots=5, max_length=40, deterministic=True)
    for request in make_requests(24):
        alone |= run(engine, [request])
    seen = 0
    for result in interleavings(model, 4, lambda: make_engine(model, slots=5, max_length=40, deterministic=True)):
        assert bits(result) == bits(alone[result.key])
        seen += 1
    assert seen > 40


def test_tokens_do_not_depend_on_company_without_determinism_either():
    # Log-probabilities may differ in the last bits; a token differs only if its random number falls between them.
    model = make_model()
    alone = {}
    for request in make_requests(24):
        alone |= run(make_engine(model, slots=5), [request])
    for result in interleavings(model, 4, lambda: make_engine(model, slots=5)):
        assert (result.response_ids == alone[result.key].response_ids).all()
        assert np.abs(result.logprobs - alone[result.key].logprobs).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(128, 384), (384, 128), (128, 19), (100, 48), (576, 1536)])
def test_matrix_kernels_treat_all_rows_of_one_shape_alike(dtype, inner, outer):
    # What the deterministic engine rests on; a machine where this fails cannot keep its promise.
    torch.manual_seed(0)
    weight, row = torch.randn(outer, inner).to(dtype), torch.randn(inner).to(dtype)
    for num_rows in (32, 64, 256, 512):
        others = torch.randn(num_rows, inner).to(dtype)
        expected = torch.nn.functional.linear(row.expand(num_rows, inner).contiguous(), weight)
        assert (expected == expected[0]).all()
        for at in (0, 1, num_rows // 2 + 1, num_rows - 1):
            mixed = others.clone()
            mixed[at] = row
            assert torch.equal(torch.nn.functional.linear(mixed, weight)[at], expected[0])


def deterministic_bits():
    """One text that any process must reproduce."""
    torch.set_num_threads(1)
    engine = make_engine(make_model(), slots=5, deterministic=True)
    results = run(engine, make_requests(24))
    return repr([bits(results[key]) for key in range(24)])


def test_deterministic_results_survive_a_restart():
    here = deterministic_bits()
    root = Path(__file__).parents[2]
    program = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('t', sys.argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.deterministic_bits())"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, __file__],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here


def test_seeds_and_run_seed_decide_the_tokens():
    model = make_model()

    def tokens(seed, run_seed):
        request = Request(key=0, prompt_ids=[3, 4], seed=seed, max_new_tokens=20)
        return tuple(run(make_engine(model, run_seed=run_seed), [request])[0].response_ids.tolist())

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tokens(1, 0), tokens(2, 0), tokens(1, 1)}) == 3


def test_first_tokens_are_drawn_with_the_models_probabilities():
    model = make_model()
    engine = make_engine(model, slots=500)
    num = 4000
    results = run(engine, [Request(key=k, prompt_ids=[3, 4, 5], seed=k, max_new_tokens=1) for k in range(num)])
    expected = np.exp(full_forward(model, results[0])[0]) * num
    counts = np.bincount([int(r.response_ids[0]) for r in results.values()], minlength=VOCAB)
    likely = expected >= 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum()
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_memory_grows_with_the_sequences_and_keeps_them():
    model = make_model()
    short = Request(key="short", prompt_ids=[3, 4], seed=1, max_new_tokens=50)
    long = Request(key="long", prompt_ids=list(range(3, 35)) + [4] * 16, seed=2, max_new_tokens=12)
    engine = make_engine(model)
    engine.submit(short)
    for _ in range(5):
        engine.step()
    engine.submit(long)
    results = {result.key: result for result in drain(engine)}
    for result in results.values():
        expected = full_forward(model, result)[np.arange(len(result.response_ids)), result.response_ids]
        assert np.abs(result.logprobs - expected).max() < 1e-5
    again = run(engine, [short])["short"]  # after the memory shrank
    assert (again.response_ids == results["short"].response_ids).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt has 0 tokens"),
        ({"prompt_ids": [3] * 64}, "prompt has 64 tokens, expected 1 to 63"),
        ({"prompt_ids": [3, VOCAB]}, "prompt ids reach from 3 to 37, expected 0 to 36"),
        ({"prompt_ids": [3, -1]}, "prompt ids reach from -1 to 3"),
        ({"max_new_tokens": 0}, "expected max_new_tokens >= 1"),
        ({"temperature": -1.0}, "temperature >= 0"),
        ({"top_p": 0.0}, "0 < top_p"),
        ({"top_k": -1}, "top_k >= 0"),
    ],
)
def test_requests_that_cannot_be_run_are_refused(change, message):
    engine = make_engine(make_model())
    with pytest.raises(EngineError, match=message):
        engine.submit(Request(**{"key": "k", "prompt_ids": [3], "seed": 0, "max_new_tokens": 1} | change))
    assert engine.num_queued == 0


def test_engines_that_cannot_be_made_are_refused():
    model = make_model()
    for options, message in (
        ({"slots": 0}, "at least one slot"),
        ({"max_length": 65}, "max_length 65: expected 2 to 64"),
        ({"max_length": 1}, "max_length 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_engine(model, **options)
    torch.set_num_threads(2)
    with pytest.raises(ConfigError, match="needs one thread, got 2"):
        make_engine(model, deterministic=True)


def test_models_that_the_attention_cannot_serve_are_refused():
    torch.manual_seed(0)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="BloomForCausalLM does not use"):
        Engine(bloom, version=0, slots=1, max_length=8)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="rotary positions of type dynamic"):
        make_engine(make_model(rope_parameters=rope))


def test_an_engines_model_does_not_run_by_itself():
    model = make_model()
    Engine(model, version=0, slots=1)
    with pytest.raises(EngineError, match="belongs to an engine"):
        model(torch.tensor([[3, 4]]))


def test_weights_that_are_not_finite_are_reported_and_requests_survive():
    model = make_model()
    broken = copy_weights(model)
    broken["model.norm.weight"][0] = math.nan
    engine = make_engine(model, slots=2)
    requests = make_requests(5)
    undisturbed = run(make_engine(model, slots=2), requests)
    for request in requests:
        engine.submit(request)
    engine.load_weights(broken, 1)
    for _ in range(2):
        with pytest.raises(EngineError, match="not finite"):
            engine.step()
    engine.load_weights(copy_weights(model), 2)
    results = {result.key: result for result in drain(engine)}
    assert results.keys() == undisturbed.keys()
    for key, result in results.items():
        assert (result.response_ids == undisturbed[key].response_ids).all()
        assert set(result.versions.tolist()) == {2}


def test_times_frame_the_generation():
    results = run(make_engine(make_model(), slots=1), make_requests(3))
    for result in results.values():
        assert 0 < result.started_at <= result.finished_at

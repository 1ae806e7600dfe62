import math

import pytest
import torch

from data_contracts.config import TinyModel
from data_contracts.errors import ConfigError
from models.tiny import build_model
from models.warm_start import IGNORED, WarmStart, greedy_accuracy, pad_examples, warm_start

EOS, EQUALS, FIRST_DIGIT = 2, 15, 3
SMALL = TinyModel(
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    max_positions=8,
    warm_start_batch=16,
    warm_start_lr=1e-2,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def copy(number):
    """Say the digit again; an odd digit twice."""
    digit = number * 7 % 10
    return [FIRST_DIGIT + digit, EQUALS], [FIRST_DIGIT + digit] * (1 + digit % 2) + [EOS]


HELD_OUT = [copy(n) for n in range(10)]


def run(config, seed=0):
    model, checks = build_model(config, seed=seed), []
    result = warm_start(model, copy, HELD_OUT, config, on_check=checks.append)
    return model, result, checks


def test_it_stops_at_the_first_check_that_is_right_often_enough():
    model, result, checks = run(SMALL.model_copy(update={"warm_start_accuracy": 0.4}))
    assert result == checks[-1]
    assert [c.steps for c in checks] == list(range(0, result.steps + 1, 10))
    assert all(c.accuracy < 0.4 for c in checks[:-1])
    assert result.accuracy >= 0.4
    assert greedy_accuracy(model, HELD_OUT) == result.accuracy
    assert not model.training
    assert len(checks) > 1
    assert result.loss < math.log(19)  # less than knowing nothing


def test_it_learns_all_when_asked_to():
    assert run(SMALL.model_copy(update={"warm_start_accuracy": 1.0}))[1].accuracy == 1.0


def test_it_stops_at_the_last_step_whatever_it_knows():
    _, result, checks = run(SMALL.model_copy(update={"warm_start_accuracy": 1.0, "warm_start_max_steps": 13}))
    assert [c.steps for c in checks] == [0, 10, 13]
    assert result.accuracy < 1.0


@pytest.mark.parametrize("change", [{"warm_start_accuracy": 0.0}, {"warm_start_max_steps": 0}])
def test_no_step_is_taken_when_none_is_wanted(change):
    config = SMALL.model_copy(update=change)
    model, result, _ = run(config)
    fresh = build_model(config, seed=0).state_dict()
    assert (result.steps, math.isnan(result.loss)) == (0, True)
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.state_dict().items())


def test_the_same_seed_gives_the_same_weights_bit_for_bit():
    config = SMALL.model_copy(update={"warm_start_max_steps": 20})
    one, same, other = (run(config, seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_accuracy_is_that_of_answers_generated_token_by_token():
    model, result, _ = run(SMALL.model_copy(update={"warm_start_accuracy": 0.4}))
    right = 0
    for prompt, answer in HELD_OUT:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(answer), do_sample=False, pad_token_id=0
        )
        right += made[0, len(prompt) :].tolist() == answer
    assert 0 < right < 10
    assert result.accuracy == pytest.approx(right / 10)


def test_only_answers_are_in_the_loss():
    ids, is_answer = pad_examples([([5, 6], [7, 2]), ([8], [9, 9, 2])])
    assert ids.tolist() == [[5, 6, 7, 2], [8, 9, 9, 2]]
    assert is_answer.tolist() == [[False, False, True, True], [False, True, True, True]]
    ids, is_answer = pad_examples([([5], [2]), ([5, 5, 5], [2])])
    assert ids.tolist() == [[5, 2, 0, 0], [5, 5, 5, 2]]
    assert is_answer.sum() == 2


def test_padding_changes_no_loss():
    def long_and_short(number):
        return copy(number) if number % 16 else ([FIRST_DIGIT] * 5, [FIRST_DIGIT, EOS])

    config = SMALL.model_copy(update={"warm_start_max_steps": 1})
    model = build_model(config, seed=0)
    expected = torch.tensor(0.0)
    examples = [long_and_short(n) for n in range(16)]
    num_tokens = sum(len(answer) for _, answer in examples)
    for prompt, answer in examples:
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[IGNORED] * len(prompt) + answer])
        expected = expected + model(input_ids=ids, labels=labels).loss * len(answer) / num_tokens
    result = warm_start(model, long_and_short, HELD_OUT, config)
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)


def test_examples_must_fit_the_model():
    with pytest.raises(ConfigError, match="expected 1 to 8 tokens of prompt and answer, got 7 and 2"):
        warm_start(build_model(SMALL, seed=0), lambda n: ([3] * 7, [3, EOS]), HELD_OUT, SMALL)
    with pytest.raises(ConfigError, match="expected 1 to 8 tokens of prompt and answer, got 0 and 1"):
        warm_start(build_model(SMALL, seed=0), copy, [([], [EOS])], SMALL)
    with pytest.raises(ConfigError, match="expected held-out examples, got none"):
        warm_start(build_model(SMALL, seed=0), copy, [], SMALL)


@pytest.mark.slow
def test_two_digit_sums_start_where_there_is_something_to_learn():
    from data_contracts.config import AdditionEnv
    from models.tiny import build_tokenizer
    from tasks.envs.registry import build_envs
    from tasks.prompts import plain_examples

    config = TinyModel()
    example, held_out = plain_examples(
        build_envs([AdditionEnv()], seed=0), build_tokenizer(config.characters), num_held_out=256, limit=60
    )
    result = warm_start(build_model(config, seed=0), example, held_out, config)
    assert isinstance(result, WarmStart)
    assert 0.35 <= result.accuracy < 0.6
    assert result.steps < config.warm_start_max_steps

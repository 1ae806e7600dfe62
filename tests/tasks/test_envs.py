import hashlib
import subprocess
import sys
from collections import Counter

import pytest

from data_contracts.config import AdditionEnv, CustomEnv, ReasoningGymEnv
from data_contracts.errors import ConfigError, ContractError
from tasks.envs.order import permute, uniform
from tasks.envs.protocol import Env, Prompt, Score
from tasks.envs.reasoning_gym import UNSTABLE, extract
from tasks.envs.registry import ENVS, build_envs

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

CUSTOM_MODULE = """
from tasks.envs.protocol import Env, Prompt, Score


class Echo(Env):
    name, verifier, num_prompts, num_eval_prompts = "echo", "echo@1", 5, 2

    def __init__(self, gold_reward=1.0, overlap=False):
        self.gold_reward, self.overlap = gold_reward, overlap

    def prompt(self, index):
        return Prompt(self.prompt_id(index), f"say {index}", str(index))

    def eval_prompt(self, index):
        number = index if self.overlap else 100 + index
        return Prompt(self.eval_prompt_id(index), f"say {number}", str(number))

    def score(self, prompt, response_text, response_ids):
        return Score(self.gold_reward if response_text == prompt.answer else 0.0)


def not_an_env():
    return "echo"
"""


@pytest.fixture
def custom_module(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(CUSTOM_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_envs"
    sys.modules.pop("my_envs", None)


def chain_sum(**fields):
    return ReasoningGymEnv(dataset="chain_sum", parameters=ONE_DIGIT, **fields)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000])
def test_an_order_visits_every_number_once(size):
    assert sorted(permute(i, size, "k") for i in range(size)) == list(range(size))


def test_another_key_gives_another_order():
    orders = {tuple(permute(i, 50, f"key {k}") for i in range(50)) for k in range(20)}
    assert len(orders) == 20


def test_an_order_has_no_number_beyond_its_size():
    with pytest.raises(IndexError, match="index 10 is outside 0 to 9"):
        permute(10, 10, "k")


def test_uniform_numbers_fill_the_unit_interval():
    tenths = Counter(int(uniform(i, "k") * 10) for i in range(10_000))
    assert set(tenths) == set(range(10))
    assert min(tenths.values()) > 850


def test_every_configurable_env_can_be_made():
    from typing import get_args

    from data_contracts.config import EnvConfig

    assert set(get_args(get_args(EnvConfig)[0])) == set(ENVS)


@pytest.mark.parametrize(
    "config",
    [
        AdditionEnv(),
        AdditionEnv(max_operand=1),
        AdditionEnv(max_operand=9999),
        chain_sum(),
        chain_sum(extract="last_number", exact=True, instruction="Answer with a number.", few_shot=3),
        chain_sum(extract="answer_tag"),
        ReasoningGymEnv(dataset="gcd", size=50),
        ReasoningGymEnv(dataset="word_sorting", size=50, extract="answer_tag"),
        ReasoningGymEnv(dataset="acre", size=60),
        ReasoningGymEnv(dataset="gsm_symbolic", size=40),
    ],
    ids=lambda c: f"{c.type}-{getattr(c, 'dataset', c.weight)}",
)
def test_every_env_proves_its_own_reward(config):
    build_envs([config], seed=0).validate()


def test_addition_covers_all_sums_once_over_both_splits():
    env = build_envs([AdditionEnv()], seed=0).by_name["addition"]
    trained = {env.prompt(i).content for i in range(env.num_prompts)}
    held_out = {env.eval_prompt(i).content for i in range(env.num_eval_prompts)}
    assert (len(trained), len(held_out)) == (10_000 - 512, 512)
    assert trained | held_out == {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}


def test_addition_answers_are_right_and_have_three_digits():
    env = build_envs([AdditionEnv()], seed=0).by_name["addition"]
    for i in range(200):
        prompt = env.prompt(i)
        left, right = str(prompt.content).rstrip("=").split("+")
        assert prompt.answer == f"{int(left) + int(right):03d}"


def test_the_held_out_sums_do_not_depend_on_the_seed_of_a_run():
    one, other = (build_envs([AdditionEnv()], seed).eval_prompts(512) for seed in (0, 1))
    assert one == other


@pytest.mark.parametrize(
    ("response", "reward"), [("042", 1.0), (" 0 4 2 ", 1.0), ("42", 0.0), ("0420", 0.0), ("", 0.0), ("043", 0.0)]
)
def test_addition_is_matched_exactly_but_for_spaces(response, reward):
    env = build_envs([AdditionEnv()], seed=0).by_name["addition"]
    assert env.score(Prompt("addition/0", "17+25=", "042"), response, []) == Score(reward, {"correct": reward})


def test_a_run_walks_through_every_prompt_before_any_comes_again():
    envs = build_envs([AdditionEnv(max_operand=9)], seed=3)
    size = envs.by_name["addition"].num_prompts
    first, second = ([envs.prompt_for(n).id for n in range(k * size, (k + 1) * size)] for k in (0, 1))
    assert len(set(first)) == len(set(second)) == size
    assert first != second


def test_number_and_seed_decide_the_prompt_in_any_process():
    code = (
        "from data_contracts.config import AdditionEnv; from tasks.envs.registry import build_envs\n"
        "envs = build_envs([AdditionEnv(), AdditionEnv(max_operand=9, name='small')], 7)\n"
        "print(*(envs.prompt_for(n).id for n in range(40)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    envs = build_envs([AdditionEnv(), AdditionEnv(max_operand=9, name="small")], seed=7)
    assert said == {(" ".join(envs.prompt_for(n).id for n in range(40)) + "\n").encode()}
    other = build_envs([AdditionEnv(), AdditionEnv(max_operand=9, name="small")], seed=8)
    assert [other.prompt_for(n).id for n in range(40)] != [envs.prompt_for(n).id for n in range(40)]


def test_envs_are_mixed_by_weight():
    envs = build_envs([AdditionEnv(weight=3), AdditionEnv(name="other", weight=1)], seed=0)
    names = Counter(envs.prompt_for(n).id.split("/")[0] for n in range(4000))
    assert 0.72 < names["addition"] / 4000 < 0.78


def test_a_prompt_is_found_by_its_id_alone():
    envs = build_envs([AdditionEnv(), chain_sum(few_shot=2)], seed=0)
    prompts = [envs.prompt_for(n) for n in range(20)] + envs.eval_prompts(5)
    assert [envs.find(p.id) for p in prompts] == prompts


@pytest.mark.parametrize(
    "prompt_id",
    ["addition/9488", "addition/-1", "addition/01", "addition/eval/512", "addition/x", "addition", "addition/²"],
)
def test_an_id_of_no_prompt_is_refused(prompt_id):
    with pytest.raises(ContractError, match="env addition has no prompt"):
        build_envs([AdditionEnv()], seed=0).find(prompt_id)


def test_an_id_of_no_env_is_refused():
    with pytest.raises(ContractError, match="'sums/1' is of no env of this run, which has addition"):
        build_envs([AdditionEnv()], seed=0).find("sums/1")


def test_two_envs_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two envs of the run are called 'addition'"):
        build_envs([AdditionEnv(), AdditionEnv(max_operand=9)], seed=0)


def test_held_out_questions_are_never_trained_on_even_where_there_are_few():
    env = build_envs([chain_sum(size=2000)], seed=0).by_name["chain_sum"]
    trained = {env.prompt(i).metadata["question"] for i in range(env.num_prompts)}
    held_out = {env.eval_prompt(i).metadata["question"] for i in range(env.num_eval_prompts)}
    assert not trained & held_out
    assert len(trained) > 120 > len(held_out) > 10  # 200 different questions in all


def test_a_data_set_without_choice_is_refused():
    same = ReasoningGymEnv(dataset="chain_sum", parameters={**ONE_DIGIT, "max_terms": 1, "min_terms": 1}, size=1)
    with pytest.raises(ConfigError, match="widen its parameters"):
        build_envs([same], seed=0).validate()


def test_solved_examples_are_earlier_turns_and_never_the_question_itself():
    env = build_envs([chain_sum(few_shot=2, instruction="Be short.", extract="answer_tag")], seed=0).by_name[
        "chain_sum"
    ]
    for i in range(30):
        prompt = env.prompt(i)
        assert [turn["role"] for turn in prompt.content] == ["user", "assistant"] * 2 + ["user"]
        questions = [turn["content"] for turn in prompt.content if turn["role"] == "user"]
        assert len(set(questions)) == 3
        assert all(question.startswith("Be short.\nState the final answer") for question in questions)
        assert prompt.content[1]["content"].startswith("<answer>")


@pytest.mark.parametrize(
    ("part", "response", "answer"),
    [
        ("whole", "  7 \n", "7"),
        ("whole", "  ", None),
        ("last_number", "first 12, then 1,300 pears.", "1300"),
        ("last_number", "10-7=3", "3"),
        ("last_number", "it is 10-7", "7"),
        ("last_number", "so x = -5.", "-5"),
        ("last_number", "about 2.50 euros", "2.50"),
        ("last_number", "1, 2, 3", "3"),
        ("last_number", "1,2,3", "3"),
        ("last_number", "none", None),
        ("answer_tag", "<answer>1</answer> no <answer> 2\n</answer>", "2"),
        ("answer_tag", "<answer>1", None),
    ],
)
def test_the_answer_is_extracted(part, response, answer):
    assert extract(response, part) == answer


def test_partial_scores_count_unless_exact():
    loose, strict = (build_envs([chain_sum(exact=e)], seed=0).by_name["chain_sum"] for e in (False, True))
    prompt = loose.prompt(0)
    chatty = f"The answer is {prompt.answer}"
    partial = loose.score(prompt, chatty, [])
    assert 0 < partial.reward < 1
    assert partial.components == {"score": partial.reward, "answered": 1.0}
    assert strict.score(prompt, chatty, []).reward == 0.0
    assert strict.score(prompt, prompt.answer, []).reward == 1.0


def test_no_answer_is_a_reward_of_zero():
    env = build_envs([chain_sum(extract="answer_tag")], seed=0).by_name["chain_sum"]
    assert env.score(env.prompt(0), "12", []) == Score(0.0, {"score": 0.0, "answered": 0.0})


@pytest.mark.parametrize(
    ("dataset", "answer"), [("coin_flip", "1e999999"), ("game_of_life", '{"a": 1}'), ("prime_factorization", "x=1/0")]
)
def test_an_answer_that_breaks_the_scorer_is_a_reward_of_zero(dataset, answer):
    env = build_envs([ReasoningGymEnv(dataset=dataset, size=20)], seed=0).by_name[dataset]
    assert env.score(env.prompt(0), answer, []).reward == 0.0


def test_the_verifier_is_named_with_its_version():
    env = build_envs([chain_sum()], seed=0).by_name["chain_sum"]
    assert env.verifier.startswith("reasoning_gym.chain_sum@0.1.")


@pytest.mark.parametrize(
    ("dataset", "parameters", "message"),
    [
        ("chain_sums", {}, "no data set 'chain_sums': did you mean chain_sum"),
        ("chain_sum", {"min_term": 2}, "chain_sum has no parameter 'min_term': did you mean min_terms"),
        ("chain_sum", {"qqq": 2}, "has no parameter 'qqq': choose one of .*min_terms"),
        ("chain_sum", {"size": 2}, "has no parameter 'size'"),
        ("chain_sum", {"min_terms": -1}, "chain_sum refuses its parameters: min_terms must be positive"),
        ("chain_sum", {"min_terms": "x"}, "chain_sum refuses its parameters"),
    ],
)
def test_a_data_set_that_cannot_be_made_says_why(dataset, parameters, message):
    with pytest.raises(ConfigError, match=message):
        build_envs([ReasoningGymEnv(dataset=dataset, parameters=parameters, size=10)], seed=0)


def test_the_gold_answer_must_be_found_by_the_extraction():
    words = ReasoningGymEnv(dataset="word_sorting", size=20, extract="last_number")
    with pytest.raises(ConfigError, match=r"prompt word_sorting/0: expected gold answer .* to score 1, got 0"):
        build_envs([words], seed=0).validate()


@pytest.mark.parametrize("dataset", ["rush_hour", "graph_color"])
def test_a_data_set_without_a_gold_answer_is_refused(dataset):
    with pytest.raises(ConfigError, match="gives no gold answer as text"):
        build_envs([ReasoningGymEnv(dataset=dataset, size=20)], seed=0).validate()


@pytest.mark.parametrize("dataset", sorted(UNSTABLE - {"knight_swap"}))
def test_a_data_set_that_every_process_makes_anew_is_refused(dataset):
    with pytest.raises(ConfigError, match="does not make the same questions in every process"):
        build_envs([ReasoningGymEnv(dataset=dataset, size=20)], seed=0).validate()


@pytest.mark.slow
def test_exactly_the_data_sets_known_as_unstable_differ_between_processes():
    code = (
        "import sys, hashlib\nfrom reasoning_gym.factory import DATASETS, create_dataset\n"
        "def digest(name):\n"
        "    data = create_dataset(name, seed=0, size=100)\n"
        "    order = [0, 3, 7, 1] if sys.argv[1] == 'a' else [7, 3, 1, 0]\n"
        "    made = {i: (data[i]['question'], str(data[i]['answer'])) for i in order}\n"
        "    return hashlib.sha256(repr(sorted(made.items())).encode()).hexdigest()\n"
        "for name in sorted(DATASETS.keys() - {'composite'}):\n    print('\\n@', name, digest(name))"
    )
    said = [
        subprocess.run([sys.executable, "-c", code, a], env={"PYTHONHASHSEED": a_seed}, capture_output=True, check=True)
        for a, a_seed in (("a", "1"), ("b", "2"))
    ]
    first, second = (
        dict(line.split()[1:] for line in s.stdout.decode().splitlines() if line.startswith("@")) for s in said
    )
    assert len(first) == 105
    assert {name for name in first if first[name] != second[name]} == UNSTABLE


def test_a_custom_env_is_imported(custom_module):
    envs = build_envs([CustomEnv(path=f"{custom_module}:Echo", parameters={"gold_reward": 1.0})], seed=0)
    envs.validate()
    assert envs.find("echo/3").answer == "3"
    assert isinstance(envs.by_name["echo"], Env)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"gold_reward": 0.5}, "expected gold answer '0' to score 1, got 0.5"),
        ({"overlap": True}, "holds out a prompt that it also trains on: 'say 0'"),
    ],
)
def test_a_custom_env_that_cannot_prove_its_reward_is_refused(custom_module, parameters, message):
    with pytest.raises(ConfigError, match=message):
        build_envs([CustomEnv(path=f"{custom_module}:Echo", parameters=parameters)], seed=0).validate()


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        ("my_envs", {}, "expected module:function"),
        ("no_such_module_here:make", {}, "cannot be imported: No module named"),
        ("my_envs:missing", {}, "cannot be imported: .*missing"),
        ("my_envs:Echo", {"colour": "red"}, "cannot be made from parameters .*colour"),
        ("my_envs:not_an_env", {}, "expected an Env .* got str"),
    ],
)
def test_a_custom_env_that_cannot_be_made_says_why(custom_module, path, parameters, message):
    with pytest.raises(ConfigError, match=message):
        build_envs([CustomEnv(path=path, parameters=parameters)], seed=0)


def test_addition_needs_neither_torch_nor_reasoning_gym():
    code = (
        "import sys; from data_contracts.config import AdditionEnv; from tasks.envs.registry import build_envs\n"
        "build_envs([AdditionEnv()], 0).validate()\n"
        "heavy = {'torch', 'transformers', 'reasoning_gym', 'prefect'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_name_the_same_prompts_for_ever():
    prompts = [build_envs([AdditionEnv()], seed=0).by_name["addition"].prompt(i) for i in range(1000)]
    digest = hashlib.sha256(repr([(p.id, p.content, p.answer) for p in prompts]).encode()).hexdigest()
    assert digest.startswith("97fd1d75bcf33d20")

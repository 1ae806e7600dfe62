import math
import os
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.config import AdditionEnv, CustomEnv, OverlongPenalty, ReasoningGymEnv, RewardConfig, TinyModel
from data_contracts.errors import ServiceError
from data_contracts.metrics import check_names
from data_contracts.trajectory import SCHEMAS, check, make_table
from models.tiny import build_tokenizer
from tasks.envs.protocol import Score
from tasks.envs.registry import build_envs
from tasks.prompts import encode_prompt, make_decoder
from tasks.scoring import checked, count_errors, judge_all, make_pool, score, shaped
from tasks.verify import Job, VerifierPool

CUSTOM_MODULE = '''
import os, re, sys, time
from pathlib import Path
import numpy as np
from tasks.envs.protocol import Env, Prompt, Score


class Trial(Env):
    """The answer says what the verifier does."""

    name, verifier, num_prompts, num_eval_prompts = "trial", "trial@2", 100, 4

    def __init__(self, folder, in_process=False):
        self.folder, self.needs_timeout = Path(folder), not in_process

    def prompt(self, index):
        return Prompt(self.prompt_id(index), "1+1=", "2")

    def eval_prompt(self, index):
        return Prompt(self.eval_prompt_id(index), "1+2=", "3")

    def score(self, prompt, response_text, response_ids):
        what = response_text[:1]
        if what == "0":
            raise ValueError("no sandbox")
        if what == "1":
            return Score(float("nan"), {"x": 1.0})
        if what == "3":  # fails twice, then works; each prompt on its own
            seen = self.folder / prompt.id.replace("/", "-")
            count = int(seen.read_text()) + 1 if seen.exists() else 1
            seen.write_text(str(count))
            if count <= 2:
                raise OSError("try again")
            return Score(0.5, {"tries": count})
        if what == "4":
            while True:
                time.sleep(0.01)
        if what == "5":  # a C function that never returns
            (self.folder / "begun").touch()
            re.match("(a+)+$", "a" * 60 + "b")
        if what == "6":
            os._exit(7)
        if what == "7":
            print("a verifier that talks")
            return Score(np.float32(0.25), {"length": np.int64(len(response_ids))})
        if what == "8":
            return Score(0.0, {"pid": os.getpid()})
        if what == "+":
            with (self.folder / "judged").open("a") as file:
                file.write("x")
            return Score(1.0, {"parsed": 1.0})
        if what == "-":
            return Score(0.0, {"parsed": 0.0})
        return Score(float(response_text == prompt.answer), {"correct": float(response_text == prompt.answer)})

    def second_opinion(self, prompt, response_text, response_ids):
        return 0.0 if response_text[:1] == "+" else None
'''

TOKENIZER = build_tokenizer(TinyModel().characters)
DECODE = make_decoder(TOKENIZER)
FAST = RewardConfig(timeout_s=1, max_retries=1)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Return a function that makes the envs of a run: the env above, in process or in the pool, and addition."""
    (tmp_path / "trial_env.py").write_text(CUSTOM_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**parameters):
        config = CustomEnv(path="trial_env:Trial", parameters={"folder": str(tmp_path), **parameters})
        return build_envs([config, AdditionEnv()], seed=0)

    yield make
    sys.modules.pop("trial_env", None)


def raw(rows):
    """Build a raw table from (prompt id, response text, error)."""
    made = []
    for number, (prompt_id, text, error) in enumerate(rows):
        ids = [] if error else [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        made.append(
            dict(
                ticket=number, attempt=0, sample=0, prompt_id=prompt_id, env=prompt_id.split("/")[0], seed=1,
                prompt_ids=[3, 4], response_ids=ids, action_mask=[True] * len(ids),
                behavior_logprobs=[-0.5] * len(ids), policy_versions=[0] * len(ids),
                used_versions=[0] if ids else [], used_digests=["d"] if ids else [],
                finish_reason="error" if error else "stop", error=error, temperature=1.0, top_p=1.0, top_k=0,
                max_new_tokens=4, engine="torch", dtype="float32", queued_at=0.0, started_at=0.0, finished_at=1.0,
            )
        )  # fmt: skip
    return make_table(made, "raw")


def column(scored, name):
    return scored.table.column(name).to_pylist()


def test_rewards_stand_beside_an_unchanged_raw_table():
    envs = build_envs([AdditionEnv()], seed=0)
    prompts = [envs.prompt_for(n) for n in range(6)]
    table = raw([(p.id, p.answer if n % 2 else "999", "") for n, p in enumerate(prompts)])
    scored = score(table, envs, DECODE, RewardConfig())
    check(scored.table, "scored", vocab_size=len(TOKENIZER))
    assert scored.table.select(SCHEMAS["raw"].names).replace_schema_metadata().equals(table.replace_schema_metadata())
    assert column(scored, "reward") == [0.0, 1.0] * 3
    assert column(scored, "reward_names") == [["correct"]] * 6
    assert column(scored, "reward_values") == [[0.0], [1.0]] * 3
    assert column(scored, "verifier") == ["addition@1"] * 6
    assert column(scored, "reward_error") == [""] * 6
    assert column(scored, "response_text") == [p.answer if n % 2 else "999" for n, p in enumerate(prompts)]
    assert scored.metrics == {
        "verify/rows": 6, "verify/errors": 0, "verify/failed_samples": 0,
        "verify/retries": 0, "verify/timeouts": 0, "verify/restarts": 0,
    }  # fmt: skip


def test_a_failed_sample_has_no_reward_and_says_why():
    envs = build_envs([AdditionEnv()], seed=0)
    prompt = envs.prompt_for(0)
    scored = score(raw([(prompt.id, "", "engine died"), (prompt.id, prompt.answer, "")]), envs, DECODE, RewardConfig())
    check(scored.table, "scored")
    rewards = column(scored, "reward")
    assert math.isnan(rewards[0]) and rewards[1] == 1.0
    assert column(scored, "reward_error") == ["no response: engine died", ""]
    assert column(scored, "reward_names") == [[], ["correct"]]
    assert (scored.metrics["verify/errors"], scored.metrics["verify/failed_samples"]) == (1, 1)


@pytest.mark.parametrize(
    ("prompt_id", "message"),
    [("sums/1", "of no env of this run"), ("addition/99999", "has no prompt 'addition/99999'")],
)
def test_a_prompt_that_cannot_be_found_is_no_reward_of_zero(prompt_id, message):
    scored = score(raw([(prompt_id, "1", "")]), build_envs([AdditionEnv()], seed=0), DECODE, RewardConfig())
    check(scored.table, "scored")
    assert message in column(scored, "reward_error")[0]


def test_an_env_that_gives_another_prompt_here_is_noticed():
    envs = build_envs([AdditionEnv()], seed=0)
    prompt = envs.prompt_for(0)

    def encode(prompt):
        return encode_prompt(prompt, TOKENIZER, 60)

    table = raw([(prompt.id, prompt.answer, "")])
    told = score(table, envs, DECODE, RewardConfig(), encode=encode)
    assert "gives another prompt for" in column(told, "reward_error")[0]
    at = table.schema.get_field_index("prompt_ids")
    honest = table.set_column(at, table.schema.field(at), pa.array([encode(prompt)], pa.list_(pa.int32())))
    assert column(score(honest, envs, DECODE, RewardConfig(), encode=encode), "reward") == [1.0]


@pytest.mark.parametrize("in_process", [True, False])
def test_a_verifier_that_fails_is_tried_again_on_a_budget_of_its_own(trial, in_process):
    envs = trial(in_process=in_process)
    table = raw([("trial/0", "3", ""), ("trial/1", "2", ""), ("trial/2", "0", ""), ("trial/3", "1", "")])
    scored = score(table, envs, DECODE, RewardConfig(timeout_s=20, max_retries=2))
    check(scored.table, "scored")
    assert column(scored, "reward_error") == [
        "", "", "ValueError: no sandbox", "verifier gave reward nan, expected a finite number"
    ]  # fmt: skip
    assert np.allclose(column(scored, "reward"), [0.5, 1.0, math.nan, math.nan], equal_nan=True)
    assert column(scored, "reward_values") == [[3.0], [1.0], [], []]
    assert column(scored, "verifier") == ["trial@2"] * 4
    assert scored.metrics["verify/retries"] == 4
    assert scored.metrics["verify/errors"] == 2


@pytest.mark.parametrize("kind", ["4", "5"])
def test_a_verifier_that_hangs_is_killed_and_the_others_are_judged(trial, kind):
    envs = trial()
    rows = [(f"trial/{n}", kind if n == 3 else "2", "") for n in range(40)]
    with make_pool(envs, FAST) as pool:
        scored = score(raw(rows), envs, DECODE, FAST, pool=pool)
    check(scored.table, "scored")
    errors = column(scored, "reward_error")
    assert errors[3] == "verification took longer than 1 s"
    assert math.isnan(column(scored, "reward")[3])
    assert [r for n, r in enumerate(column(scored, "reward")) if n != 3] == [1.0] * 39
    assert [e for n, e in enumerate(errors) if n != 3] == [""] * 39
    assert (scored.metrics["verify/timeouts"], scored.metrics["verify/restarts"]) == (2, 2)


def test_a_verifier_that_kills_its_process_costs_only_its_own_row(trial):
    envs = trial()
    scored = score(raw([("trial/0", "2", ""), ("trial/1", "6", ""), ("trial/2", "2", "")]), envs, DECODE, FAST)
    assert column(scored, "reward_error") == ["", "verifier process died with 7", ""]
    assert scored.metrics["verify/restarts"] == 2
    assert scored.metrics["verify/timeouts"] == 0


def test_what_a_verifier_prints_and_returns_stays_apart(trial):
    scored = score(raw([("trial/0", "7", "")]), trial(), DECODE, FAST)
    assert column(scored, "reward") == [0.25]
    assert (column(scored, "reward_names"), column(scored, "reward_values")) == ([["length"]], [[2.0]])


def test_processes_are_started_once_and_only_for_envs_that_need_them(trial):
    envs = trial()
    with make_pool(envs, FAST) as pool:
        prompt = envs.by_name["addition"].prompt(0)
        score(raw([(prompt.id, prompt.answer, "")]), envs, DECODE, FAST, pool=pool)
        assert pool.pids == []
        pids = {
            column(score(raw([("trial/0", "8", "")]), envs, DECODE, FAST, pool=pool), "reward_values")[0][0]
            for _ in range(3)
        }
        assert pids == set(pool.pids)
        [pid] = pool.pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_many_responses_keep_their_order_over_several_processes(trial):
    envs = trial()
    jobs = [Job(f"trial/{n % 100}", "2" if n % 3 else "9", [n]) for n in range(300)]
    with VerifierPool(envs, timeout_s=20, max_retries=0, num_processes=2) as pool:
        outcomes, counts = pool.verify(jobs)
        assert len(pool.pids) == 2
    assert outcomes == [Score(float(n % 3 > 0), {"correct": float(n % 3 > 0)}) for n in range(300)]
    assert (counts.retries, counts.restarts) == (0, 0)


def test_envs_that_cannot_be_made_again_elsewhere_are_an_error(trial, tmp_path):
    envs = trial()
    (tmp_path / "trial_env.py").unlink()
    with make_pool(envs, FAST) as pool, pytest.raises(ServiceError, match="cannot make the run's envs: .*trial_env"):
        pool.verify([Job("trial/0", "2", [])])
    assert pool.pids == []


def test_a_verifier_whose_parent_died_ends_by_itself(trial, tmp_path):
    trial()
    code = (
        "import sys, time; from data_contracts.config import CustomEnv; from tasks.envs.registry import build_envs\n"
        "from tasks.verify import Job, VerifierPool\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"envs = build_envs([CustomEnv(path='trial_env:Trial', parameters={{'folder': {str(tmp_path)!r}}})], 0)\n"
        "pool = VerifierPool(envs, timeout_s=2, max_retries=0)\n"
        "pool.verify([Job('trial/0', '2', [])])\n"
        "print(*pool.pids, flush=True); pool.verify([Job('trial/0', '5', [])])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    _wait_until((tmp_path / "begun").exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_until(lambda: not _lives(pid))


def _wait_until(is_true):
    """Give up after a minute: only a broken build takes that long."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_responses_in_no_batch_are_judged_with_the_same_care(trial):
    envs = trial()
    sums = envs.by_name["addition"].eval_prompt(0)
    jobs = [
        Job(sums.id, sums.answer, []),
        Job("trial/eval/0", "3", []),
        Job("trial/eval/0", "4", []),
        Job("trial/eval/1", "0", []),
        Job("other/0", "1", []),
    ]
    outcomes, counts = judge_all(jobs, envs, RewardConfig(timeout_s=2, max_retries=0))
    assert outcomes[0] == Score(1.0, {"correct": 1.0})
    assert outcomes[1:4] == ["OSError: try again", "verification took longer than 2 s", "ValueError: no sandbox"]
    assert "'other/0' is of no env of this run" in str(outcomes[4])
    assert (counts.timeouts, counts.retries) == (1, 0)


def test_reasoning_gym_is_judged_in_the_pool_as_in_this_process():
    envs = build_envs([ReasoningGymEnv(dataset="chain_sum", size=50)], seed=0)
    env = envs.by_name["chain_sum"]
    prompts = [env.prompt(n) for n in range(8)]
    texts = [p.answer if n % 2 else f"{p.answer} 0" for n, p in enumerate(prompts)]
    scored = score(raw([(p.id, t, "") for p, t in zip(prompts, texts, strict=True)]), envs, DECODE, RewardConfig())
    here = [env.score(p, t, []) for p, t in zip(prompts, texts, strict=True)]
    assert np.allclose(column(scored, "reward"), [s.reward for s in here])
    assert 0 < column(scored, "reward")[0] < 1 == column(scored, "reward")[1]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Score(math.inf), "verifier gave reward inf"),
        (Score(1e300), "verifier gave reward 1e+300"),
        (Score(1.0, {"style": math.nan}), "verifier gave style nan"),
        ("", "verification failed without a word"),
        ("timeout", "timeout"),
    ],
)
def test_numbers_that_are_not_finite_are_no_reward(outcome, reason):
    assert str(checked(outcome)).startswith(reason)


def test_an_empty_batch_stays_empty():
    scored = score(raw([]), build_envs([AdditionEnv()], seed=0), DECODE, RewardConfig())
    check(scored.table, "scored")
    assert scored.table.num_rows == 0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_the_penalty_on_long_responses_is_that_of_the_formula(num_tokens: int, penalty: float) -> None:
    config = OverlongPenalty(buffer_tokens=20)
    outcome = shaped(Score(1.0, {"correct": 1.0}), num_tokens, config, 100)
    assert outcome == Score(1.0 + penalty, {"correct": 1.0, "overlong": penalty})
    assert shaped("no reward", num_tokens, config, 100) == "no reward"


def test_the_penalty_is_a_component_of_the_scored_table() -> None:
    envs = build_envs([AdditionEnv()], seed=0)
    prompt = envs.prompt_for(0)
    config = RewardConfig(overlong=OverlongPenalty(max_tokens=3, buffer_tokens=2, factor=0.5))
    table = raw([(prompt.id, prompt.answer, ""), (prompt.id, "1", "")])  # 4 and 2 tokens with the end
    scored = score(table, envs, DECODE, config).table
    assert scored.column("reward").to_pylist() == [0.5, -0.25]
    assert scored.column("reward_names").to_pylist() == [["correct", "overlong"]] * 2
    assert scored.column("reward_values").to_pylist() == [[1.0, -0.5], [0.0, -0.25]]


def test_missing_rewards_are_counted_by_kind():
    outcomes = [
        Score(1.0), "no response: out of memory", "verification took longer than 1 s", "verifier process died with 7",
        checked(Score(math.nan)), "ValueError: no sandbox", "OSError: try again",
    ]  # fmt: skip
    kinds = {"sample": 1, "timeout": 1, "died": 1, "not_finite": 1, "exception": 2}
    assert count_errors(outcomes) == {f"verify/failed/{kind}": count for kind, count in kinds.items()}
    check_names(count_errors(outcomes))


@pytest.mark.parametrize("in_process", [True, False])
def test_verifiers_that_disagree_give_no_reward_and_are_not_asked_again(trial, tmp_path, in_process):
    envs = trial(in_process=in_process)
    scored = score(raw([("trial/0", "+", ""), ("trial/1", "-", ""), ("trial/2", "2", "")]), envs, DECODE, FAST)
    assert column(scored, "reward_error") == ["verifiers disagree: trial@2 gave 1, the second one 0", "", ""]
    assert math.isnan(column(scored, "reward")[0])
    assert scored.metrics["verify/failed/disagree"] == 1.0
    assert scored.metrics["verify/unparsed"] == 1.0
    assert scored.metrics["verify/retries"] == 0.0
    assert (tmp_path / "judged").read_text() == "x"
    check_names(scored.metrics)

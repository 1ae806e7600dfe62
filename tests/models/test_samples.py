from dataclasses import replace

import numpy as np
import pyarrow as pa

from data_contracts.trajectory import SCHEMAS, check, make_table
from models.samples import Sample, groups_from_bytes, groups_to_bytes, samples_from_table

PLAIN = {
    pa.int64(): 0,
    pa.int32(): 0,
    pa.float32(): 0.0,
    pa.float64(): 0.0,
    pa.string(): "",
}


def row(sample: int, **changes) -> dict:
    values = {f.name: PLAIN.get(f.type, []) for f in SCHEMAS["scored"]}
    return (
        values
        | {
            "ticket": 7,
            "sample": sample,
            "prompt_ids": [4, 5],
            "response_ids": [6, 7, 8],
            "action_mask": [True, False, True],
            "behavior_logprobs": [-0.5, float("nan"), -0.25],
            "policy_versions": [3, -1, 4],
            "used_versions": [3, 4],
            "used_digests": ["a", "b"],
            "finish_reason": "stop",
            "branch_of": -1,
            "temperature": 0.5,
            "reward": 1.0,
            "reward_names": ["exact"],
            "reward_values": [1.0],
        }
        | changes
    )


def test_rows_become_samples():
    [sample] = samples_from_table(check(make_table([row(2)], "scored"), "scored"))
    assert (sample.ticket, sample.sample, sample.reward, sample.temperature) == (7, 2, 1.0, 0.5)
    assert sample.prompt_ids.tolist() == [4, 5]
    assert sample.response_ids.tolist() == [6, 7, 8]
    assert sample.action_mask.tolist() == [True, False, True]
    np.testing.assert_array_equal(sample.behavior_logprobs, np.array([-0.5, np.nan, -0.25], np.float32))
    assert sample.policy_versions.tolist() == [3, -1, 4]
    assert sample.components == {"exact": 1.0}
    assert sample.name == "ticket 7, sample 2"
    assert (sample.is_guided, sample.branch_of, sample.branch_at) == (False, -1, 0)


def test_guidance_and_branches_reach_the_trainer():
    guided = row(0, guided_prompt_ids=[9, 4, 5])
    rest = {"action_mask": [False, False, True], "behavior_logprobs": [float("nan")] * 2 + [-0.25]}
    rest |= {"policy_versions": [-1, -1, 4], "used_versions": [4], "used_digests": ["b"]}
    first, second = samples_from_table(
        check(make_table([guided, row(1, branch_of=0, branch_at=2, **rest)], "scored"), "scored")
    )
    assert (first.is_guided, first.prompt_ids.tolist()) == (True, [4, 5])
    assert (second.is_guided, second.branch_of, second.branch_at) == (False, 0, 2)


def test_error_rows_are_left_out_and_slices_keep_their_rows():
    failed = row(
        1, finish_reason="error", error="engine died", response_ids=[], action_mask=[], behavior_logprobs=[],
        policy_versions=[], used_versions=[], used_digests=[], reward=float("nan"), reward_error="no response",
        reward_names=[], reward_values=[],
    )  # fmt: skip
    unscored = row(2, reward=float("nan"), reward_error="verifier died", reward_names=[], reward_values=[])
    table = make_table([row(0, prompt_ids=[9]), failed, unscored, row(3, prompt_ids=[8, 8, 8])], "scored")
    assert [s.sample for s in samples_from_table(table)] == [0, 3]
    assert [s.prompt_ids.tolist() for s in samples_from_table(table.slice(2, 2))] == [[8, 8, 8]]


def test_groups_are_the_same_in_another_process(make_groups):
    groups = make_groups(3, 4)
    groups[1] = [
        replace(s, components={"b": 0.1, "a": float("nan")}, temperature=0.7, max_age=3) for s in groups[1][:2]
    ]
    groups.append([])
    again = groups_from_bytes(groups_to_bytes(groups))
    assert [len(group) for group in again] == [4, 2, 4, 0]
    for group, other in zip(groups, again, strict=True):
        for sample, copy in zip(group, other, strict=True):
            for name in Sample.__dataclass_fields__:
                was, now = getattr(sample, name), getattr(copy, name)
                if isinstance(was, np.ndarray):
                    assert was.dtype == now.dtype
                    np.testing.assert_array_equal(was, now)
                else:
                    assert repr(was) == repr(now)

import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import AlgorithmConfig, Grpo, Tree, TurnReturns, Turns
from models.samples import Sample
from models.step import step_data


def sample(index, acted, reward, ticket=0, branch_of=-1, branch_at=0, components=None):
    acted = np.array(acted, bool)
    return Sample(
        prompt_ids=np.array([1]),
        response_ids=np.arange(len(acted)),
        action_mask=acted,
        behavior_logprobs=np.where(acted, -1.0, np.nan).astype(np.float32),
        policy_versions=np.where(acted, 0, -1),
        reward=reward,
        ticket=ticket,
        sample=index,
        components=components or {},
        branch_of=branch_of,
        branch_at=branch_at,
    )


def branch(index, length, reward, of=-1, at=0, ticket=0):
    return sample(index, [place >= at for place in range(length)], reward, ticket, of, at)


def advantages(groups, cfg):
    data = step_data(groups, AlgorithmConfig(advantage=cfg), version=0, max_staleness=0)
    return [data.advantages[data.sequence == i].tolist() for i in range(len(data.samples))]


# --- turns ---


def test_a_turn_ends_where_the_env_speaks():
    group = [sample(0, [1, 1, 0, 0, 1, 0, 1], 1.0), sample(1, [0, 1], 0.0)]
    data = step_data([group], AlgorithmConfig(), version=0, max_staleness=0)
    assert data.structure is not None
    assert data.structure.turns(data.sequence).tolist() == [0, 0, 1, 2, 0]


def test_an_episodes_advantage_is_divided_by_a_constant_or_by_its_turns():
    group = [sample(0, [1, 1, 0, 1], 1.0), sample(1, [1], 0.0)]
    assert advantages([group], Turns(eps=0)) == [pytest.approx([0.1] * 3), pytest.approx([-0.1])]
    assert advantages([group], Turns(eps=0, divide_by=None)) == [pytest.approx([0.5] * 3), pytest.approx([-1.0])]


def test_the_example_of_the_constant_normalizer():
    long = [[1, 0] * 12, [1]]
    rewards = [0.0, 1.0]  # r_hat = -1 and 1
    group = [sample(i, acted, reward) for i, (acted, reward) in enumerate(zip(long, rewards, strict=True))]
    assert advantages([group], Turns(eps=0, divide_by=None))[0] == pytest.approx([-1 / 12] * 12)
    assert advantages([group], Turns(eps=0))[0] == pytest.approx([-0.1] * 12)


def test_returns_of_a_turn_are_compared_with_the_same_turn_of_the_others():
    def episode(index, acted, reward, *turns):
        return sample(index, acted, reward, components={f"turn/{k}": value for k, value in enumerate(turns)})

    two, three = [1, 0, 1], [1, 0, 1, 0, 1]
    group = [episode(0, two, 1.0, 0.5, 0.5), episode(1, three, 0.25, 0.0, 0.25, 0.0), episode(2, three, 3.0, 1.0)]
    got = advantages([group], TurnReturns(normalize=False, discount=0.5))
    # returns: 0.5 + 0.25, 0.5; 0.125, 0.25, 0; 1 + 0 + 2/4, 0 + 2/2, 2
    first, second = mean([0.75, 0.125, 1.5]), mean([0.5, 0.25, 1.0])
    assert got[0] == pytest.approx([0.75 - first, 0.5 - second])
    assert got[1] == pytest.approx([0.125 - first, 0.25 - second, -1.0])
    assert got[2] == pytest.approx([1.5 - first, 1.0 - second, 1.0])
    scaled = advantages([group], TurnReturns(discount=0.5, eps=0))
    assert scaled[1][2] == pytest.approx(-1 / math.sqrt(2))
    assert scaled[0][0] == pytest.approx((0.75 - first) / stdev([0.75, 0.125, 1.5]))


def test_without_turns_and_their_rewards_returns_are_those_of_grpo():
    group = [sample(i, [1] * (i + 1), reward) for i, reward in enumerate([1.0, 0.0, 0.5])]
    assert advantages([group], TurnReturns()) == [pytest.approx(a, abs=1e-6) for a in advantages([group], Grpo())]


# --- trees ---


def test_a_group_without_branches_is_grpo():
    group = [branch(i, 2, reward) for i, reward in enumerate([1.0, 0.0, 0.5])]
    want = advantages([group], Grpo(eps=1e-8))
    assert advantages([group], Tree()) == [pytest.approx(a, abs=1e-6) for a in want]


def test_branches_are_compared_by_depth_or_with_their_siblings():
    # two trunks; two samples go on from the first one's second token, so its values are the mean of three
    group = [branch(0, 4, 1.0), branch(1, 3, 0.0), branch(2, 4, 0.0, of=0, at=2), branch(3, 5, 0.5, of=0, at=2)]
    got = advantages([group], Tree(eps=0))
    first, leaves = [mean([1.0, 0.0, 0.5]), 0.0], [1.0, 0.0, 0.5]
    one = 1 / math.sqrt(2)
    assert stdev(first) > 0
    assert got[0] == pytest.approx([one, one, 1.0, 1.0])
    assert got[1] == pytest.approx([-one] * 3)
    assert got[2] == pytest.approx([(0.0 - mean(leaves)) / stdev(leaves)] * 2)
    assert got[3] == pytest.approx([0.0] * 3)
    deeper = [*group, branch(4, 4, 1.0, of=1, at=1)]
    by_depth, by_place = advantages([deeper], Tree(eps=0)), advantages([deeper], Tree(eps=0, among="siblings"))
    assert by_depth[4] == pytest.approx([(1.0 - 0.5) / stdev([1.0, 0.0, 0.5, 0.0, 1.0])] * 3)
    assert by_place[4] == pytest.approx([one] * 3)
    assert by_place[1] == pytest.approx([(0.5 - mean([0.5, 0.5])) * 0, -one, -one])


def likely(sample, *logp):
    own = iter(logp)
    values = [next(own) if acted else math.nan for acted in sample.action_mask]
    return replace(sample, behavior_logprobs=np.array(values, np.float32))


def test_values_can_be_weighed_by_how_likely_the_continuations_are():
    # one trunk of four tokens, split after two: its own continuation (mean log-probability -1), and two others
    group = [
        likely(branch(0, 4, 1.0), -0.1, -0.1, -0.5, -1.5),
        likely(branch(1, 3, 0.0, of=0, at=2), -2.0),
        likely(branch(2, 4, 0.5, of=0, at=2), -3.0, -3.0),
        likely(branch(3, 2, 0.0), -1.0, -1.0),
    ]
    weights = [math.exp(-1.0), math.exp(-2.0), math.exp(-3.0)]
    mixed = (1.0 * weights[0] + 0.5 * weights[2]) / sum(weights)
    got = advantages([group], Tree(eps=0, fusion="likelihood"))
    spread = stdev([mixed, 0.0])
    assert got[0][:2] == pytest.approx([mixed / 2 / spread] * 2)
    assert got[3] == pytest.approx([-mixed / 2 / spread] * 2)
    leaves = [1.0, 0.0, 0.5]  # a leaf is worth its own reward
    assert got[1] == pytest.approx([(0.0 - mean(leaves)) / stdev(leaves)])


def test_a_value_by_likelihood_passes_through_every_split():
    # 0 is split after one token (by 1) and again after two (by 2): what goes on from the first split is worth a mix
    group = [
        likely(branch(0, 3, 1.0), -1.0, -2.0, -3.0),
        likely(branch(1, 2, 0.0, of=0, at=1), -4.0),
        likely(branch(2, 3, 0.5, of=0, at=2), -5.0),
        likely(branch(3, 1, 0.25), -1.0),
    ]
    inner = (1.0 * math.exp(-3) + 0.5 * math.exp(-5)) / (math.exp(-3) + math.exp(-5))
    first = (inner * math.exp(-2) + 0.0 * math.exp(-4)) / (math.exp(-2) + math.exp(-4))
    got = advantages([group], Tree(eps=0, fusion="likelihood"))
    assert got[0][0] == pytest.approx((first - mean([first, 0.25])) / stdev([first, 0.25]))
    assert got[0][1] == pytest.approx((inner - mean([inner, 0.0])) / stdev([inner, 0.0]))


@pytest.mark.parametrize(
    ("cfg", "kept"),
    [
        (Tree(keep_share=0.5), {1, 3}),
        (Tree(keep_share=0.5, keep="best_and_worst"), {0, 3}),
        (Tree(keep_share=0.1), {3}),
        (Tree(keep_share=0.8, keep="best_and_worst"), {0, 1, 3}),
    ],
)
def test_of_the_last_branches_only_some_count(cfg, kept):
    rewards = [0.0, 0.75, 0.25, 1.0]  # all go on from sample 0's first token, itself among them
    group = [branch(0, 3, rewards[0]), *(branch(i, 3, rewards[i], of=0, at=1) for i in (1, 2, 3))]
    whole, got = advantages([group], Tree()), advantages([group], cfg)
    for i in range(4):
        assert got[i][-1] == (whole[i][-1] if i in kept else 0.0)
    assert got[0][0] == whole[0][0]


def test_a_branch_of_a_branch_before_its_own_beginning_is_a_branch_of_the_first():
    group = [branch(0, 5, 1.0), branch(1, 5, 0.0, of=0, at=3), branch(2, 5, 0.5, of=1, at=2)]
    same = [*group[:2], branch(2, 5, 0.5, of=0, at=2)]
    assert advantages([group], Tree()) == advantages([same], Tree())


def test_a_branch_whose_trunk_is_missing_begins_at_the_prompt():
    group = [branch(1, 5, 0.0, of=0, at=3), branch(2, 5, 0.5, of=1, at=4), branch(3, 2, 1.0)]
    got = advantages([group], Tree(eps=0))
    assert len(got[0]) == 2
    assert all(value < 0 for value in got[0])
    assert got[2][0] > 0


def test_equal_names_in_two_groups_are_different_trees():
    trees = [[branch(0, 3, 1.0, ticket=t), branch(1, 3, 0.0, of=0, at=1, ticket=t)] for t in (4, 4)]
    assert advantages(trees, Tree()) == 2 * advantages(trees[:1], Tree())


def by_hand(group, cfg):
    """Follow every sample's path token by token; a branch is a stretch that the same samples share."""
    paths = []
    for s in group:
        shared = [] if s.branch_of < 0 else paths[s.branch_of][: s.branch_at]
        paths.append(shared + [(s.sample, place) for place in range(len(shared), len(s.response_ids))])
    sharers = {token: frozenset(i for i, p in enumerate(paths) if token in p) for path in paths for token in path}
    branches = {}  # (owner, sharers) to depth and the branch before
    for path in paths:
        before, depth = None, 0
        for token in path:
            name = (token[0], sharers[token])
            if before is None or name != before:
                depth += 1
                branches[name] = (depth, before)
                before = name
    found = []
    for i, path in enumerate(paths):
        found.append([])
        for token in path:
            if token[0] != i:
                continue
            name = (token[0], sharers[token])
            key = 0 if cfg.among == "depth" else 1
            alike = [n for n, standing in branches.items() if standing[key] == branches[name][key]]
            values = {n: mean(group[j].reward for j in sorted(n[1])) for n in alike}
            spread = stdev(values.values()) if len(values) > 1 else 0.0
            scaled = (values[name] - mean(values.values())) / (spread + cfg.eps) if spread >= 1e-6 else 0.0
            found[-1].append(min(max(scaled, -cfg.largest), cfg.largest))
    return found


@pytest.mark.parametrize("among", ["depth", "siblings"])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_tree_advantages_are_those_of_a_walk_token_by_token(among, data):
    group = []
    for index in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 6))
        parent = data.draw(st.integers(-1, index - 1))
        longest = min(length, len(group[parent].response_ids)) - 1 if parent >= 0 else 0
        reward = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
        at = data.draw(st.integers(1, longest)) if longest >= 1 else 0
        group.append(branch(index, length, reward, of=parent if at else -1, at=at))
    cfg = Tree(among=among)
    got = advantages([group], cfg)
    for own, want in zip(got, by_hand(group, cfg), strict=True):
        assert own == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("cfg", [Turns(), Turns(divide_by=None), TurnReturns(), Tree()], ids=lambda c: c.type)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_finite_rewards_give_finite_advantages_and_equal_ones_nothing(cfg, data):
    masks = data.draw(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=5))
    rewards = data.draw(st.lists(st.floats(-1e6, 1e6, width=32), min_size=len(masks), max_size=len(masks)))
    group = [sample(i, m, r) for i, (m, r) in enumerate(zip(masks, rewards, strict=True))]
    got = [value for own in advantages([group], cfg) for value in own]
    assert np.isfinite(got).all()
    even = [sample(i, m, rewards[0]) for i, m in enumerate(masks)]
    assert all(value == 0 for own in advantages([even], cfg) for value in own)

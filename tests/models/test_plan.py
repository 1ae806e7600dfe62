import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.algorithm import AlgorithmConfig
from models.packing import even_microbatches, microbatches, pack
from models.plan import plan_updates
from models.samples import Sample
from models.step import step_data


def sample(prompt, length, acted=True):
    zeros = np.zeros(length, np.float32)
    return Sample(
        prompt_ids=np.arange(1, prompt + 1, dtype=np.int32),
        response_ids=np.ones(length, np.int32),
        action_mask=np.full(length, acted),
        behavior_logprobs=zeros,
        policy_versions=np.zeros(length, np.int32),
    )


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 30)), min_size=1, max_size=24)


@settings(deadline=None)
@given(shapes=shapes, tokens=st.integers(1, 80), ranks=st.integers(1, 4))
def test_even_microbatches_hold_every_sample_once_within_the_limit(shapes, tokens, ranks):
    samples = [sample(*shape) for shape in shapes]
    batches = even_microbatches(samples, tokens, ranks)
    assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    for batch in batches:
        assert len(batch) == 1 or pack([samples[i] for i in batch]).num_rows <= tokens
    one_rank = microbatches(samples, tokens)
    if ranks == 1:
        assert batches == one_rank
    assert -(-len(batches) // ranks) == -(-len(one_rank) // ranks)  # no rank does more forward passes than without


def test_one_large_batch_is_shared_by_all_ranks():
    samples = [sample(1 + i % 4, 10) for i in range(16)]
    sizes = [pack([samples[i] for i in batch]).num_rows for batch in even_microbatches(samples, 9999, 2)]
    assert len(sizes) == 2
    assert max(sizes) <= 1.2 * min(sizes)


@settings(deadline=None, max_examples=40)
@given(shapes=shapes, tokens=st.integers(1, 80), ranks=st.integers(1, 3), updates=st.integers(1, 2))
def test_ranks_do_as_many_microbatches_and_each_token_counts_once(shapes, tokens, ranks, updates):
    groups = [[sample(*shape), sample(*shape, acted=i % 3 > 0)] for i, shape in enumerate(shapes)]
    data = step_data(groups, AlgorithmConfig(), version=0, max_staleness=0)
    plans = [
        plan_updates(data, inner_updates=updates, tokens_per_microbatch=tokens, rank=rank, num_ranks=ranks)
        for rank in range(ranks)
    ]
    for several in zip(*plans, strict=True):
        assert len({len(update.parts) for update in several}) == 1
        assert len({tuple(update.members) for update in several}) == 1
        assert len({update.is_one_part for update in several}) == 1
        counted = [i for update in several for part in update.parts if part.counts for i in part.members]
        assert sorted(counted) == sorted(several[0].members)
        assert sorted(several[0].at.tolist()) == sorted(data.tokens_of(sorted(several[0].members)).tolist())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_a_token_has_no_update(ranks):
    data = step_data([[sample(2, 3, acted=False)]], AlgorithmConfig(), version=0, max_staleness=0)
    assert plan_updates(data, inner_updates=1, tokens_per_microbatch=9, rank=ranks - 1, num_ranks=ranks) == []

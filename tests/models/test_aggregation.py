import pytest
import torch

from data_contracts.algorithm import ConstantNorm, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from models.aggregation import AGGREGATIONS, totals_of
from models.tokens import TokenBatch

ALL = [
    TokenMean(),
    SequenceMeanTokenMean(),
    SequenceMeanTokenMean(count_empty=True),
    SequenceMeanTokenSum(),
    SequenceMeanTokenSum(count_empty=True),
    ConstantNorm(length=8),
]


def aggregate(batch: TokenBatch, loss, cfg, totals=None) -> torch.Tensor:
    totals = totals or totals_of(batch.mask, batch.sequence, batch.num_sequences)
    return AGGREGATIONS[type(cfg)](loss, batch, cfg, totals)


@pytest.mark.parametrize(
    ("cfg", "key"),
    [
        (TokenMean(), "token-mean"),
        (SequenceMeanTokenSum(), "seq-mean-token-sum"),
        (SequenceMeanTokenMean(), "seq-mean-token-mean"),
        (SequenceMeanTokenMean(count_empty=True), "trl grpo (all rows)"),
        (ConstantNorm(length=8), "trl dr_grpo (L=8)"),
    ],
)
def test_modes_match_the_reference(reference, token_batch, cfg, key):
    case = reference("agg.modes")
    batch = token_batch(case["inputs"]["token_loss"], case["inputs"]["mask"])
    assert aggregate(batch, batch.logp, cfg).item() == pytest.approx(case["expected"][key])


@pytest.mark.parametrize("cfg", ALL, ids=lambda c: f"{c.type}-{getattr(c, 'count_empty', '')}")
def test_microbatches_add_up(reference, token_batch, cfg):
    case = reference("agg.modes")
    rows, mask = case["inputs"]["token_loss"], case["inputs"]["mask"]
    whole = token_batch(rows, mask)
    totals = totals_of(whole.mask, whole.sequence, whole.num_sequences)
    parts = [token_batch(rows[a:b], mask[a:b]) for a, b in ((0, 1), (1, 4))]
    added = sum(aggregate(part, part.logp, cfg, totals).item() for part in parts)
    assert added == pytest.approx(aggregate(whole, whole.logp, cfg).item())


@pytest.mark.parametrize("cfg", ALL, ids=lambda c: f"{c.type}-{getattr(c, 'count_empty', '')}")
def test_nothing_in_the_loss_is_zero(token_batch, cfg):
    batch = token_batch([[float("nan"), 1.0]], [[0, 0]])
    loss = aggregate(batch, batch.logp, cfg)
    loss.backward()
    assert loss.item() == 0.0
    assert batch.logp.grad.tolist() == [0.0, 0.0]

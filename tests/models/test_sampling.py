"""Random numbers are uniform functions of their three arguments; tokens follow the probabilities asked for."""

import numpy as np
import pytest
import torch

from data_contracts.errors import EngineError
from models.sampling import sample, uniforms

# 0.999 quantiles of the chi-square distribution by degrees of freedom, from tables.
CHI_SQUARE_999 = {7: 24.3, 15: 37.7, 99: 148.2, 255: 330.5}


def chi_square(observed, expected):
    return float(((observed - expected) ** 2 / expected).sum())


def probabilities(logits, temperature, top_p, top_k):
    """The distribution by its definition, one row and one token at a time, in float64."""
    scores = np.asarray(logits, np.float64) / temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
        p /= p.sum()
    if top_p < 1:
        reached, lowest = 0.0, 1.0
        for value in np.sort(p)[::-1]:
            if reached >= top_p:
                break
            reached, lowest = reached + value, value
        p = np.where(p >= lowest, p, 0)
        p /= p.sum()
    return p


def draw(logits, uniform, temperature=1.0, top_p=1.0, top_k=0):
    num = logits.shape[0]
    return sample(
        logits,
        np.broadcast_to(uniform, num).astype(np.float64),
        np.full(num, temperature),
        np.full(num, top_p),
        np.full(num, top_k),
    )


@pytest.mark.parametrize("varied", ["run", "sample", "token"])
def test_numbers_are_uniform_along_each_argument(varied):
    num = 20_000
    steps, zero = np.arange(num), np.zeros(num, np.int64)
    if varied == "run":
        numbers = np.concatenate([uniforms(run, zero[:1], zero[:1]) for run in range(num // 4)])
    else:
        numbers = uniforms(7, steps if varied == "sample" else zero + 5, steps if varied == "token" else zero + 5)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert chi_square(counts, len(numbers) / 100) < CHI_SQUARE_999[99]
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(len(numbers))


def test_neighbours_in_both_arguments_are_independent():
    seeds, tokens = np.meshgrid(np.arange(200), np.arange(200), indexing="ij")
    numbers = uniforms(0, seeds.ravel(), tokens.ravel()).reshape(200, 200)
    right, below = numbers[:, 1:].ravel(), numbers[1:].ravel()
    for a, b in ((numbers[:, :-1].ravel(), right), (numbers[:-1].ravel(), below)):
        cells = np.histogram2d(a, b, bins=16, range=((0, 1), (0, 1)))[0]
        assert chi_square(cells, len(a) / 256) < CHI_SQUARE_999[255]
    assert len(np.unique(numbers)) == numbers.size


def test_numbers_depend_on_their_arguments_alone_and_stay_inside():
    seeds, tokens = np.array([3, -1, 2**62, 0]), np.array([0, 5, 9, 0])
    together = uniforms(11, seeds, tokens)
    for row in range(4):
        assert uniforms(11, seeds[row : row + 1], tokens[row : row + 1])[0] == together[row]
    assert ((together > 0) & (together < 1)).all()
    assert uniforms(-3, seeds, tokens)[0] == uniforms(-3 + 2**64, seeds, tokens)[0]


def splitmix64(state):
    """One output of the published generator, in Python's integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_numbers_are_three_rounds_of_splitmix64():
    # The generator's published first outputs for seed 0; a resumed run must draw the same tokens for ever.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    for run, seed, token in ((0, 0, 0), (5, 2**62 + 1, 123), (2**63, -7, 1)):
        state = splitmix64(splitmix64(splitmix64(run) ^ seed % (1 << 64)) ^ token)
        assert uniforms(run, np.array([seed]), np.array([token]))[0] == ((state >> 16) + 0.5) / 2**48


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1, 1, 0), (0.7, 1, 0), (1.6, 0.8, 0), (1, 1, 5), (0.9, 0.6, 9), (1, 1e-9, 0)]
)
def test_log_probabilities_are_those_of_the_definition(temperature, top_p, top_k):
    torch.manual_seed(3)
    logits = torch.randn(400, 37) * 2
    tokens, logprobs = draw(logits, uniforms(1, np.arange(400), np.arange(400)), temperature, top_p, top_k)
    for row in range(400):
        expected = probabilities(logits[row].numpy(), temperature, top_p, top_k)
        assert expected[tokens[row]] > 0
        assert logprobs[row] == pytest.approx(np.log(expected[tokens[row]]), abs=2e-6)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1, 1, 0), (0.5, 1, 0), (1.3, 0.85, 0), (1, 1, 4)])
def test_frequencies_follow_the_probabilities(temperature, top_p, top_k):
    torch.manual_seed(0)
    logits = torch.randn(8).repeat(40_000, 1)
    tokens, _ = draw(logits, uniforms(5, np.arange(40_000), np.zeros(40_000, np.int64)), temperature, top_p, top_k)
    expected = probabilities(logits[0].numpy(), temperature, top_p, top_k) * 40_000
    counts = np.bincount(tokens, minlength=8)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    assert chi_square(counts[kept], expected[kept]) < CHI_SQUARE_999[7]


def test_inversion_walks_through_the_tokens_in_order():
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).repeat(6, 1)
    tokens, _ = draw(logits, np.array([1e-9, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-49]))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_no_impossible_token_is_drawn_at_the_ends(vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(64, vocab)
    logits[:, -(vocab // 2) :][torch.rand(64, vocab // 2 or vocab) < 0.9] = -torch.inf
    logits[:, 0] = 0
    for uniform in (2.0**-49, 1 - 2.0**-49):
        tokens, logprobs = draw(logits, uniform)
        assert torch.isfinite(logits[torch.arange(64), tokens]).all()
        assert np.isfinite(logprobs).all()


def test_a_large_vocabulary_is_inverted_exactly_enough():
    torch.manual_seed(0)
    logits = torch.randn(32, 49_152) * 3
    uniform = uniforms(2, np.arange(32), np.zeros(32, np.int64))
    tokens, logprobs = draw(logits, uniform)
    upto = torch.softmax(logits.double(), 1).cumsum(1)
    rows = torch.arange(32)
    above, below = upto[rows, tokens].numpy(), (upto[rows, tokens] - torch.exp(torch.from_numpy(logprobs))).numpy()
    assert (below - 1e-6 <= uniform).all()
    assert (uniform <= above + 1e-6).all()
    expected = torch.log_softmax(logits.double(), 1)[rows, tokens].numpy()
    assert np.abs(logprobs - expected).max() < 2e-6


def test_ties_are_kept_together():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]).repeat(300, 1)
    uniform = uniforms(0, np.arange(300), np.zeros(300, np.int64))
    for narrowing in ({"top_k": 2}, {"top_p": 0.2}):
        tokens, logprobs = draw(logits, uniform, **narrowing)
        assert set(tokens.tolist()) == {1, 2, 3}
        assert np.allclose(logprobs, -np.log(3))


def test_temperature_zero_takes_the_first_most_likely_token():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 5.0]])
    tokens, logprobs = draw(logits, 0.99, temperature=0)
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0, 0]


@pytest.mark.parametrize("vocab", [19, 64, 1001])
def test_a_row_gives_the_same_bits_in_any_company(vocab):
    torch.manual_seed(1)
    logits = torch.randn(96, vocab) * 4
    uniform = uniforms(9, np.arange(96), np.arange(96))
    temperature = np.where(np.arange(96) % 5 == 0, 0.0, np.where(np.arange(96) % 2, 0.8, 1.0))
    top_p = np.where(np.arange(96) % 3 == 0, 0.7, 1.0)
    top_k = np.where(np.arange(96) % 4 == 0, 6, 0)
    tokens, logprobs = sample(logits, uniform, temperature, top_p, top_k)
    random = np.random.default_rng(0)
    for _ in range(20):
        rows = random.permutation(96)[: random.integers(1, 97)]
        again = sample(logits[rows], uniform[rows], temperature[rows], top_p[rows], top_k[rows])
        assert (again[0] == tokens[rows]).all()
        assert (again[1].view(np.int32) == logprobs[rows].view(np.int32)).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(broken):
    logits = torch.zeros(4, 5)
    logits[2, 3] = broken
    with pytest.raises(EngineError, match="logits of 1 of 4 sequences are not finite"):
        draw(logits, 0.5)

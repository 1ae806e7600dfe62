"""Drawing one token per row, and the random numbers for it.

Legend: N rows (one sequence each), V vocabulary, K blocks of 64 tokens.

The random number of a token is a hash of (run seed, sample seed, token index), not a generator's state: it does
not depend on the slot, on the batch or on what was drawn before, so a restart draws the same tokens.

A row's distribution: divide the logits by the temperature; keep the `top_k` most likely tokens; of these keep
the fewest most likely whose renormalized probabilities reach `top_p`; renormalize. Tokens that tie with the last
one kept are kept too, so nothing depends on an order of equals. Temperature 0 puts all probability on the most
likely token (the first of equals): its log-probability is 0.
"""

import math

import numpy as np
import torch
from torch import Tensor

from data_contracts.errors import EngineError

_BLOCK = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(run_seed: int, sample_seeds: np.ndarray, token_indices: np.ndarray) -> np.ndarray:
    """Return one number in (0, 1) for each row, a pure function of the three arguments.

    Three rounds of splitmix64 (Steele, Lea, Flood 2014: the constants are its finalizer's), one for each argument.

    Args:
        run_seed: any integer; taken modulo 2**64.
        sample_seeds: int64 [N].
        token_indices: int64 [N], index of the token in its response, from 0.

    Returns:
        float64 [N]; multiples of 2**-48 shifted by half a step, so neither 0 nor 1 occurs.
    """
    state = _mix(np.full(1, run_seed % (1 << 64), np.uint64))
    state = _mix(state ^ sample_seeds.astype(np.int64).view(np.uint64))
    state = _mix(state ^ token_indices.astype(np.int64).view(np.uint64))
    return ((state >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def sample(
    logits: Tensor, uniform: np.ndarray, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row by inverting the cumulative distribution.

    A row's result depends on that row's arguments alone, bit for bit, at whatever position the row stands. Only
    rows that ask for top-k or top-p pay for finding it.

    Args:
        logits: float32 [N, V].
        uniform: float64 [N] in (0, 1).
        temperature: float64 [N], 0 or more.
        top_p: float64 [N] in (0, 1]; 1 keeps all.
        top_k: int64 [N]; 0 keeps all.

    Returns:
        Tokens int64 [N] and their log-probabilities float32 [N] under the distribution drawn from.

    Raises:
        EngineError: a row has no finite maximum (the model's output is not finite).
    """
    # Whole blocks: element-wise kernels then never fall into their scalar tail, whose exp differs in the last bit.
    scores = torch.nn.functional.pad(logits, (0, -logits.shape[1] % _BLOCK), value=-math.inf)
    greedy = temperature == 0
    if (temperature != 1).any():
        divisor = np.where(greedy, 1.0, temperature).astype(np.float32)
        scores = scores / torch.from_numpy(divisor).to(scores.device)[:, None]
    narrowed = np.flatnonzero(((top_k > 0) | (top_p < 1)) & ~greedy)
    if narrowed.size:
        rows = torch.from_numpy(narrowed).to(scores.device)
        kept = _narrow(scores[rows], top_p[narrowed], top_k[narrowed])
        scores = scores.index_copy(0, rows, kept)
    tokens, logprobs = _invert(scores, torch.from_numpy(uniform).to(scores.device))
    if greedy.any():
        best = logits.argmax(dim=1).cpu().numpy()
        tokens, logprobs = np.where(greedy, best, tokens), np.where(greedy, np.float32(0), logprobs)
    return tokens, logprobs


def _mix(state: np.ndarray) -> np.ndarray:
    """Return splitmix64's output for each 64-bit state."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _invert(scores: Tensor, uniform: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the token where each row's cumulative probability first exceeds `uniform`, and its log-probability.

    Two levels: block sums first, then the 64 tokens of one block, so no running sum over V is written.
    """
    num_rows = scores.shape[0]
    top = scores.amax(dim=1, keepdim=True)  # [N, 1]
    if not bool(torch.isfinite(top).all()):
        bad = int((~torch.isfinite(top)).sum())
        raise EngineError(
            f"logits of {bad} of {num_rows} sequences are not finite: the weights in the engine are broken"
        )
    mass = torch.exp(scores - top).view(num_rows, -1, _BLOCK)  # [N, K, 64]
    upto = mass.sum(dim=2).double().cumsum(dim=1)  # [N, K]
    total = upto[:, -1:]
    target = uniform[:, None] * total
    block = torch.searchsorted(upto, target, right=True)  # [N, 1]
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = mass.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]  # [N, 64]
    within = torch.searchsorted(inside.double().cumsum(dim=1), target - before, right=True)
    # The block's sum was rounded to float32: a target past its last token belongs to the last one that has mass.
    last = _BLOCK - 1 - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    token = block * _BLOCK + torch.minimum(within, last)  # [N, 1]
    # One row at a time on purpose: the logarithm of a vector kernel's tail may differ in the last bit.
    log_total = np.array([math.log(value) for value in total[:, 0].tolist()])
    above = (scores.gather(1, token) - top)[:, 0].double().cpu().numpy()
    return token[:, 0].cpu().numpy(), (above - log_total).astype(np.float32)


def _narrow(scores: Tensor, top_p: np.ndarray, top_k: np.ndarray) -> Tensor:
    """Return scores [N, V] with -inf where top-k, then top-p drops a token."""
    ranked = scores.sort(dim=1, descending=True).values
    limit = np.where(top_k > 0, np.minimum(top_k, scores.shape[1]), scores.shape[1])
    at_limit = torch.from_numpy(limit - 1).to(scores.device)[:, None]
    floor = ranked.gather(1, at_limit)  # [N, 1] lowest score that top-k keeps
    ranked = ranked.masked_fill(ranked < floor, -math.inf)
    mass = torch.exp(ranked - ranked[:, :1]).double()
    before = mass.cumsum(dim=1)
    share = torch.from_numpy(np.where(top_p < 1, top_p, math.inf)).to(scores.device)[:, None]
    wanted = share * before[:, -1:]
    # A token stays if those ahead of it do not reach top-p yet; the first one always stays.
    stays = (before - mass < wanted) & (mass > 0)
    lowest = ranked.masked_fill(~stays, math.inf).amin(dim=1, keepdim=True)
    return scores.masked_fill(scores < lowest, -math.inf)

"""How much each sample's or token's own gradient scatters: what optimal baselines weigh rewards by.

Legend: S samples, N tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from models.logprobs import collisions, head_of
from models.packing import hidden_logprobs, pack, packed_hidden, packed_logprobs
from models.plan import Microbatch
from models.step import StepData
from models.tokens import MAX_LOG_RATIO, log_ratio, select


def score_weights(model: PreTrainedModel, data: StepData) -> Tensor:
    """Return |g|^2 w^2 of each sample [S] float64; 0 for a sample without a token in the loss.

    g is the gradient of the sample's summed log-probability under the model's present weights, w the product of its
    ratios to the behavior policy, unclipped. Costs a forward and a backward pass for every sample.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.zeros(len(data.samples), dtype=torch.float64)
    for i, sample in enumerate(data.samples):
        at = data.tokens_of([i])
        mask = data.mask[at]
        if not mask.any():
            continue
        logp, _ = packed_logprobs(model, pack([sample]))
        gradients = torch.autograd.grad(select(mask.to(logp.device), logp).sum(), parameters, allow_unused=True)
        norm = sum((g.double().pow(2).sum().item() for g in gradients if g is not None), 0.0)
        log = log_ratio(logp.detach().cpu(), data.behavior[at], mask).double().sum()
        weights[i] = norm * (2 * log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()
    return weights


@torch.no_grad()
def token_scores(model: PreTrainedModel, parts: Sequence[Microbatch], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and scores [N] under the model's present weights; NaN for tokens that are in no part.

    The score of a token is 1 - 2 p + sum over the vocabulary of squared probabilities: the squared norm of the
    gradient of its log-probability by the logits.
    """
    logp, scores = (torch.full((num_tokens,), torch.nan) for _ in range(2))
    for part in parts:
        packed = part.packed.to(model.device)
        hidden = packed_hidden(model, packed)
        own = hidden_logprobs(model, hidden, packed)[0]
        logp[part.at] = own.cpu()
        scores[part.at] = (1 - 2 * own.exp() + collisions(hidden, head_of(model), packed.temperature)).cpu()
    return logp, scores

"""How much each sample's own gradient scatters: what an optimal off-policy baseline weighs rewards by.

Legend: S samples.
"""

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from models.packing import pack, packed_logprobs
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

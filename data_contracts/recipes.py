"""Published recipes by name: each is data, the fields of an AlgorithmConfig that differ from its defaults.

Formulas and numbers are those of the named source. A recipe whose source left something open says so in its line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RECOMPUTED = {"type": "recomputed"}
BY_SEQUENCE = {"type": "seq_mean_token_mean"}
REINFORCE = {"type": "reinforce"}
CLIP = {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}


@dataclass(frozen=True)
class Preset:
    """A recipe."""

    about: str
    """What it does, in one line."""
    source: str
    """Where the formula comes from."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of AlgorithmConfig."""
    basis: Literal["code", "notes", "interpretation"] = "code"
    """Whether the formula was read in public code, in notes on a paper, or is our reading of an abstract."""


PRESETS: dict[str, Preset] = {
    # plain policy gradients and their baselines
    "grpo": Preset(
        "group-normalized rewards, ratio to the behavior policy clipped at 0.2, mean by sequence",
        "GRPO; trl, verl",
        {"loss": CLIP, "aggregation": BY_SEQUENCE},
    ),
    "dr_grpo": Preset(
        "GRPO without the deviation, sums over a constant length",
        "Dr. GRPO; verl",
        {
            "advantage": {"type": "grpo", "std": "none"},
            "loss": CLIP,
            "aggregation": {"type": "constant_norm", "length": 1024},
        },
    ),
    "dapo": Preset(
        "clip-higher (0.2, 0.28), dual clip 10, mean by token, no divergence; add curate.drop_zero_variance",
        "DAPO; verl",
        {"loss": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}},
    ),
    "rloo": Preset(
        "reward minus the mean of the group's others, likelihood gradient clipped as in PPO",
        "RLOO; trl, verl",
        {"advantage": {"type": "rloo"}, "loss": CLIP, "aggregation": {"type": "seq_mean_token_sum"}},
    ),
    "reinforce_pp": Preset(
        "rewards whitened over the step, clipped; the divergence from version 0 in the reward",
        "REINFORCE++; verl",
        {"advantage": {"type": "reinforce_pp"}, "loss": CLIP, "reward_kl": {"coefficient": 0.001}},
    ),
    "reinforce_pp_baseline": Preset(
        "rewards minus the group's mean, whitened over the step, clipped",
        "REINFORCE++-baseline; verl",
        {"advantage": {"type": "reinforce_pp", "group_baseline": True}, "loss": CLIP},
    ),
    "opo": Preset(
        "length-weighted baseline, likelihood gradient without a trust region",
        "OPO; verl",
        {"advantage": {"type": "opo"}, "loss": REINFORCE},
    ),
    "maxrl": Preset(
        "rewards relative to the group's mean, divided by it",
        "MaxRL; prime-rl",
        {"advantage": {"type": "maxrl"}, "loss": CLIP},
    ),
    "gpg": Preset(
        "centered rewards scaled by how many are not zero, no trust region",
        "GPG; verl",
        {"advantage": {"type": "gpg"}, "loss": REINFORCE},
    ),
    "asymre": Preset(
        "baseline shifted by -0.1, likelihood gradient without a ratio",
        "AsymRE; Trinity-RFT",
        {"advantage": {"type": "asymre", "shift": -0.1}, "loss": REINFORCE},
    ),
    "kimi": Preset(
        "centered rewards, likelihood gradient and half a squared log-ratio to the behavior policy",
        "Kimi k1.5; ROLL",
        {
            "advantage": {"type": "grpo", "std": "none"},
            "loss": REINFORCE,
            "regularizers": [{"type": "kl", "towards": "behavior", "estimator": "k2", "coefficient": 0.1}],
        },
    ),
    "mc_grpo": Preset(
        "median and median deviation instead of mean and deviation; wants an odd samples_per_group",
        "MC-GRPO; lotusroot-kim/MC-GRPO",
        {"advantage": {"type": "mc_grpo"}, "loss": CLIP},
    ),
    "gdpo": Preset(
        "each reward component normalized in its group, then their sum over the step",
        "GDPO; NVlabs/GDPO",
        {"advantage": {"type": "gdpo"}, "loss": CLIP},
    ),
    "gd2po": Preset(
        "components normalized in their group; samples whose components nearly cancel are dropped",
        "GD2PO; Qwen-Applications/GD2PO",
        {"advantage": {"type": "gd2po"}, "loss": CLIP},
    ),
    "ddca": Preset(
        "accuracy and, among right answers, length as separate advantages",
        "DDCA; alphadl/DDCA",
        {"advantage": {"type": "ddca"}, "loss": CLIP},
    ),
    "pass_at_k": Preset(
        "only the best sample of a group counts, by how far it is above the second",
        "GRPO for pass@k; verl",
        {"advantage": {"type": "pass_at_k"}, "loss": CLIP},
    ),
    "remax": Preset(
        "reward minus that of the greedy response, likelihood gradient; wants rollout.greedy_sample",
        "ReMax; verl",
        {"advantage": {"type": "remax"}, "loss": REINFORCE},
    ),
    "otb": Preset(
        "reward minus the group's optimal baseline at each place, clipped; costs a forward pass",
        "optimal token baseline; verl",
        {"advantage": {"type": "otb"}, "loss": CLIP},
    ),
    "a_star_po": Preset(
        "regression of the log-ratio to version 0 on the reward above a smooth maximum of the group's",
        "A*-PO; trl (whose values come from samples of version 0)",
        {"loss": {"type": "a_star_po"}},
    ),
    "drpo": Preset(
        "likelihood of short right answers against the likeliest wrong ones; set loss.max_length",
        "DRPO; Optimization-AI/DRPO",
        {"loss": {"type": "drpo"}},
    ),
    # guidance, turns and trees
    "oc_grpo": Preset(
        "guided rollouts trained without the guidance, weighed by what it did; wants rollout.guided_samples",
        "OC-GRPO; AgPriyank/OC-GRPO",
        {"proximal": RECOMPUTED, "importance": {"type": "off_context"}, "loss": CLIP},
    ),
    "async_web": Preset(
        "decoupled PPO on whole episodes, an episode's advantage divided by 10 for each token of its turns",
        "AsyncWebRL; microsoft/webgym",
        {
            "advantage": {"type": "turns", "divide_by": 10},
            "proximal": RECOMPUTED,
            "importance": {"type": "masked", "low": 0.0, "high": 5.0},
            "loss": {**CLIP, "dual_clip": 3.0},
        },
    ),
    "turn_grpo": Preset(
        "rewards from a turn on, relative to the same turn of the group's others, clipped at 0.2",
        "turn-level advantages; our definition",
        {"advantage": {"type": "turn_returns"}, "loss": CLIP},
        basis="interpretation",
    ),
    "branch_grpo": Preset(
        "values of branches relative to their depth, clipped at 0.2 (0.001 in the source, for images); "
        "wants rollout.branching",
        "BranchGRPO; Fredreic1849/BranchGRPO",
        {"advantage": {"type": "tree"}, "loss": CLIP},
    ),
    "branch_grpo_likelihood": Preset(
        "the same, the value of a branch weighed by how likely its continuations are, half of the last branches kept",
        "BranchGRPO; Fredreic1849/BranchGRPO",
        {
            "advantage": {"type": "tree", "fusion": "likelihood", "keep_share": 0.5, "keep": "best_and_worst"},
            "loss": CLIP,
        },
    ),
    "trace": Preset(
        "values of branches relative to those that begin at the same place; wants rollout.branching",
        "TRACE's update (its allocation of rollouts is not here); notes",
        {"advantage": {"type": "tree", "among": "siblings"}, "loss": CLIP},
        basis="notes",
    ),
    # value models
    "ppo_gae": Preset(
        "PPO: value head on the policy's hidden state, generalized advantages, clipped at 0.2; works with one sample",
        "PPO with GAE; verl (whose critic is a model of its own: advantage.value.trunk own)",
        {"advantage": {"type": "gae", "discount": 1.0, "trace": 0.95}, "loss": CLIP},
    ),
    "dvpo": Preset(
        "values of actions fitted on version 0 for 40 steps and then frozen, as advantages; clipped at 0.2",
        "DVPO; arXiv 2502.16944",
        {"advantage": {"type": "frozen_value"}, "loss": CLIP},
        basis="notes",
    ),
    "sao_value": Preset(
        "SAO with its value model: lambda by length, full returns, 10 steps for values alone; works with one sample",
        "SAO; arXiv 2607.07508",
        {
            "advantage": {
                "type": "gae",
                "trace_by_length": 1.5,
                "return_trace": 1.0,
                "value": {"updates": 2, "warmup_steps": 10},
            },
            "loss": {"type": "sao"},
        },
        basis="notes",
    ),
    # trust regions
    "gspo": Preset(
        "one ratio for a sequence, the geometric mean, clipped at 3e-4 and 4e-4",
        "GSPO; verl, trl",
        {"loss": {"type": "gspo"}, "aggregation": BY_SEQUENCE},
    ),
    "luspo": Preset(
        "GSPO, each sequence weighed by its length",
        "LUSPO; trl",
        {"loss": {"type": "gspo"}, "aggregation": {"type": "seq_mean_token_sum"}},
    ),
    "gmpo": Preset(
        "geometric mean of ratios clipped in log space",
        "GMPO; verl",
        {"loss": {"type": "gmpo"}, "aggregation": BY_SEQUENCE},
    ),
    "cispo": Preset(
        "bounded ratio as a constant weight: no token loses its gradient", "CISPO; verl", {"loss": {"type": "cispo"}}
    ),
    "cispo_scale": Preset(
        "CISPO with the weight bounded above alone, at 5",
        "ScaleRL; trl",
        {"loss": {"type": "cispo", "clip_low": 1.0, "clip_high": 4.0}},
    ),
    "sapo": Preset(
        "a smooth gate instead of a clip", "SAPO; verl", {"loss": {"type": "sapo"}, "aggregation": BY_SEQUENCE}
    ),
    "m2po": Preset(
        "clips only where the second moment of the log-ratios exceeds 0.04",
        "M2PO; Infini-AI-Lab/M2PO",
        {"loss": {"type": "m2po"}},
    ),
    "m2po_mask": Preset(
        "drops the tokens with the largest staleness until the second moment of the rest is below 0.04",
        "M2PO; AReaL (which counts tokens after dropping)",
        {"proximal": RECOMPUTED, "importance": {"type": "moment_masked"}, "loss": CLIP},
    ),
    "topr": Preset(
        "good samples by likelihood, others by a ratio cut off at 1",
        "TOPR (token form); ROLL",
        {"loss": {"type": "topr"}, "advantage": {"type": "grpo", "std": "none"}},
    ),
    "vespo": Preset("likelihood weighted by a bump of the sequence's ratio", "VESPO; trl", {"loss": {"type": "vespo"}}),
    "dppo_tv": Preset(
        "no token whose probability moved by more than 0.2", "DPPO binary-TV; prime-rl", {"loss": {"type": "dppo_tv"}}
    ),
    "ipo": Preset(
        "no token whose probability moved by more than 0.1 in any direction",
        "IPO; prime-rl",
        {"loss": {"type": "dppo_tv", "limit": 0.1, "sides": "both"}},
    ),
    "sao": Preset(
        "ratio to the behavior policy as a weight, 0 outside (0.7, 6); group advantages (sao_value: its value model)",
        "SAO; SkyRL",
        {"loss": {"type": "sao"}},
    ),
    "mhpo": Preset(
        "a saturating log-ratio with damping",
        "MHPO; arXiv 2603.16929",
        {"loss": {"type": "mhpo"}, "aggregation": BY_SEQUENCE},
        basis="notes",
    ),
    "tbpo": Preset(
        "mean ratio of a sequence in an asymmetric region, times its mean staleness weight (bound for bad ones ours)",
        "TBPO; arXiv 2604.07853",
        {
            "proximal": RECOMPUTED,
            "importance": {"type": "truncated", "level": "geometric", "cap": 1e9},
            "loss": {"type": "tbpo"},
            "aggregation": BY_SEQUENCE,
        },
        basis="notes",
    ),
    "minpro": Preset(
        "the token's ratio times the smallest ratio before it",
        "MinPRO; arXiv 2601.22718",
        {"loss": {"type": "minpro"}},
        basis="interpretation",
    ),
    "mu_grpo": Preset(
        "wide clip and a veto on what follows a token of a failure that became too likely; for many updates a batch",
        "Mu-GRPO; arXiv 2605.17570",
        {
            "loss": {"type": "ppo_clip", "clip_low": 0.99, "clip_high": 1.0},
            "filters": [{"type": "failure_veto"}],
        },
        basis="interpretation",
    ),
    "opsm": Preset(
        "clipped, without failures that the current policy would hardly write",
        "off-policy sequence mask; trl, slime",
        {"loss": CLIP, "filters": [{"type": "off_policy_sequence", "delta": 0.5}]},
    ),
    "sfpo": Preset(
        "three fast steps on a batch, half of the way back, one more (numbers ours)",
        "SFPO; notes",
        {"loss": CLIP, "update": {"type": "slow_fast"}},
        basis="notes",
    ),
    # corrections from the behavior to a proximal policy
    "areal": Preset(
        "decoupled PPO: clipped around the recomputed policy, tokens with a weight above 5 dropped",
        "AReaL",
        {
            "advantage": {"type": "grpo", "std": "biased", "eps": 1e-5},
            "proximal": RECOMPUTED,
            "importance": {"type": "masked", "low": 0.0, "high": 5.0},
            "loss": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        },
    ),
    "a3po": Preset(
        "decoupled PPO whose proximal policy is interpolated by a token's age, without a forward pass",
        "A-3PO; AReaL",
        {
            "proximal": {"type": "interpolated"},
            "importance": {"type": "masked", "low": 0.0, "high": 5.0},
            "loss": CLIP,
        },
    ),
    "ppo_ewma": Preset(
        "clipped around averaged weights, over the behavior policy (advantages normalized by group)",
        "PPO-EWMA; openai/ppo-ewma",
        {"proximal": {"type": "ewma", "decay": 0.9}, "loss": {"type": "ppo_ewma"}},
    ),
    "revised_ppo_ewma": Preset(
        "averaged weights in both factors: truncated weight to them, clipped ratio from them",
        "arXiv 2605.12070",
        {"proximal": {"type": "ewma", "decay": 0.9}, "importance": {"type": "truncated", "cap": 2.0}, "loss": CLIP},
        basis="interpretation",
    ),
    "tis": Preset(
        "clipped around the recomputed policy, times the ratio to the behavior policy cut off at 2",
        "TIS; verl",
        {"proximal": RECOMPUTED, "importance": {"type": "truncated", "cap": 2.0}, "loss": CLIP},
    ),
    "mis": Preset(
        "the same, but sequences with a ratio above 3 are dropped",
        "MIS; trl",
        {"proximal": RECOMPUTED, "importance": {"type": "masked", "level": "sequence", "high": 3.0}, "loss": CLIP},
    ),
    "icepop": Preset(
        "the same, but tokens with a ratio outside [0.5, 5] are dropped",
        "IcePop; slime",
        {"proximal": RECOMPUTED, "importance": {"type": "masked", "low": 0.5, "high": 5.0}, "loss": CLIP},
    ),
    "geo_rs": Preset(
        "the same, but sequences whose mean ratio is outside [0.999, 1.001] are dropped, the others unweighted",
        "geometric rejection sampling; verl (whose denominators shrink with the sequences dropped)",
        {
            "proximal": RECOMPUTED,
            "importance": {"type": "masked", "level": "geometric", "low": 0.999, "high": 1.001, "weight": "one"},
            "loss": CLIP,
        },
    ),
    "kl_rs": Preset(
        "the same, but sequences of a mean divergence (k3) above 0.01 are dropped, the others unweighted (limit ours)",
        "rejection by a divergence; verl (whose denominators shrink with the sequences dropped), AReaL",
        {"proximal": RECOMPUTED, "importance": {"type": "kl_masked"}, "loss": CLIP},
    ),
    "ais": Preset(
        "weights between none and the ratio, by how bad the mismatch is and how good the weights are",
        "AIS; abstract",
        {"proximal": RECOMPUTED, "importance": {"type": "adaptive"}, "loss": CLIP},
        basis="interpretation",
    ),
    "vcpo": Preset(
        "likelihood gradient with the sequence's ratio cut off at 8, learning rate by effective sample size "
        "(vcpo_opob adds its gradient-norm baseline)",
        "VCPO; mit-han-lab/vcpo",
        {
            "advantage": {"type": "grpo", "std": "biased", "eps": 1e-8},
            "proximal": RECOMPUTED,
            "importance": {"type": "truncated", "level": "sequence", "cap": 8.0},
            "loss": REINFORCE,
            "step_size": {"type": "ess", "rule": "sqrt", "full_at": 1.0},
        },
    ),
    "vcpo_opob": Preset(
        "the same with the gradient-norm baseline, which costs a backward pass for every sample",
        "VCPO; mit-han-lab/vcpo",
        {
            "advantage": {"type": "opob"},
            "proximal": RECOMPUTED,
            "importance": {"type": "truncated", "level": "sequence", "cap": 8.0},
            "loss": REINFORCE,
            "step_size": {"type": "ess", "rule": "sqrt", "full_at": 1.0},
        },
    ),
}

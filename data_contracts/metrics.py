"""Every metric by name, with unit and meaning. What is not declared here cannot be logged or drawn.

A name ending in `/*` declares a family: one metric for each value of the last part, for example a reward
component or an env.
"""

from collections.abc import Iterable, Mapping

from data_contracts.errors import ContractError

METRICS: dict[str, tuple[str, str]] = {
    "warm_start/steps": ("steps", "supervised steps before version 0"),
    "warm_start/accuracy": ("fraction", "held-out prompts that version 0 answers exactly"),
    "warm_start/seconds": ("s", "wall-clock time of the warm start"),
    "loss/total": ("loss", "what the optimizer minimized: surrogate and regularizers, mean over inner updates"),
    "loss/policy": ("loss", "the surrogate alone"),
    "loss/regularizers": ("loss", "the regularizers alone"),
    "loss/clip_fraction_low": ("fraction", "tokens of the loss whose gradient is cut because the ratio fell too low"),
    "loss/clip_fraction_high": ("fraction", "tokens of the loss whose gradient is cut because the ratio rose too high"),
    "loss/weight_mean": (
        "ratio",
        "mean importance weight from the behavior to the proximal policy, 0 for dropped tokens",
    ),
    "loss/dropped_fraction": ("fraction", "tokens that importance weights or filters removed from the loss"),
    "loss/dropped_sequences": ("fraction", "sequences of which importance weights or filters left no token"),
    "policy/ratio_mean": ("ratio", "mean of current over behavior probability, by token of the loss"),
    "policy/ratio_max": ("ratio", "largest current over behavior probability"),
    "policy/ratio_min": ("ratio", "smallest current over behavior probability"),
    "policy/ratio_p05": ("ratio", "5 % quantile of current over behavior probability"),
    "policy/ratio_p50": ("ratio", "median of current over behavior probability"),
    "policy/ratio_p95": ("ratio", "95 % quantile of current over behavior probability"),
    "policy/ess_token": ("fraction", "effective sample size over tokens, (sum w)^2 / (n sum w^2) of the ratios"),
    "policy/ess_sequence": ("fraction", "the same over sequences, with the product of a sequence's ratios"),
    "policy/mismatch_k1": ("nats", "KL of behavior from trainer at equal version, mean of log behavior - log trainer"),
    "policy/mismatch_k3": ("nats", "the same by the estimator rho - 1 - log rho, rho = trainer over behavior"),
    "policy/mismatch_ratio": (
        "ratio",
        "largest ratio of the two probabilities of a token at equal version, at least 1",
    ),
    "policy/mismatch_tokens": ("tokens", "tokens at equal version that the mismatch was measured on"),
    "policy/kl_behavior": ("nats", "KL of behavior from current policy, estimator k3, all tokens of the loss"),
    "policy/kl_proximal": ("nats", "KL of proximal from current policy, estimator k3"),
    "policy/second_moment": ("nats^2", "mean squared log-ratio of current to behavior policy"),
    "policy/chi2_token": ("ratio", "mean squared ratio of current to behavior probability, less 1"),
    "policy/chi2_sequence": ("ratio", "the same with the product of a sequence's ratios"),
    "policy/ratio_above": ("fraction", "tokens of the loss more than twice as likely as under the behavior policy"),
    "policy/ratio_below": ("fraction", "tokens of the loss less than half as likely as under the behavior policy"),
    "policy/log_ppl_gap": ("nats", "mean over sequences of mean log behavior - mean log current"),
    "policy/ppl_ratio": ("ratio", "mean over sequences of the exponential of that gap"),
    "policy/entropy": ("nats", "mean entropy of the next-token distribution at the sampling temperature"),
    "optimizer/grad_norm": ("norm", "global norm of the gradient before clipping, mean over inner updates"),
    "optimizer/learning_rate": ("rate", "learning rate of this step"),
    "optimizer/rate_factor": ("fraction", "what staleness multiplied the learning rate by, mean over inner updates"),
    "optimizer/entropy_coefficient": ("loss/nat", "coefficient of an adaptive entropy bonus after this step"),
    "optimizer/updates": ("count", "optimizer updates of this step"),
    "critic/loss": ("reward^2", "what the value model minimized, mean over its updates"),
    "critic/explained_variance": (
        "fraction",
        "share of the variance of what values should have been that they explain, before this step",
    ),
    "critic/value_mean": ("reward", "mean value of the tokens of the loss, before this step"),
    "critic/target_mean": ("reward", "mean of what those values should have been"),
    "staleness/mean": (
        "versions",
        "mean age of the tokens offered to the loss: trainer version - version that sampled",
    ),
    "staleness/max": ("versions", "largest age of a token offered to the loss"),
    "staleness/p95": ("versions", "95 % quantile of that age"),
    "staleness/limit": ("versions", "how far rollouts might run ahead when the step was chosen, where that adapts"),
    "staleness/excluded_tokens": ("tokens", "sampled tokens that were too old and stayed as context only"),
    "reuse/tokens": ("tokens", "tokens of the loss with an age bound of their own; staleness/* does not count them"),
    "reuse/age_max": ("versions", "largest age of these"),
    "reuse/groups": ("groups", "groups of the step that are copies of earlier ones"),
    "reuse/joined_samples": ("samples", "samples of earlier tickets that were trained as part of a later group"),
    "curriculum/known_prompts": ("prompts", "prompts of which something is believed"),
    "curriculum/pass_rate": ("fraction", "mean over these prompts of the expected pass rate"),
    "curriculum/kept_groups": ("groups", "earlier groups that may be used again"),
    "curriculum/successes": ("prompts", "hard prompts with a success that may be used again"),
    "curriculum/parts": ("prompts", "prompts with samples that wait for the rest of their group"),
    "lag/tokens/*": ("tokens", "tokens of the loss by age in versions: 0, 1, 2-3, 4-7, ..."),
    "lag/ratio_mean/*": ("ratio", "mean of current over behavior probability by age of the token"),
    "lag/ratio_max/*": ("ratio", "largest current over behavior probability by age of the token"),
    "lag/kl/*": ("nats", "KL of behavior from current policy (k3) by age of the token"),
    "lag/clip_fraction/*": ("fraction", "tokens whose gradient the trust region cut, by age of the token"),
    "lag/reward/*": ("reward", "mean reward of samples by age of their oldest token"),
    "reward/kl": (
        "nats",
        "mean over samples of the divergence from version 0 that reward_kl took off, before its weight",
    ),
    "reward/mean": ("reward", "mean reward of the samples of the step"),
    "reward/std": ("reward", "standard deviation of the rewards over the step (n)"),
    "reward/zero_variance_groups": ("fraction", "groups whose rewards are all equal"),
    "reward/component/*": ("reward", "mean of one named reward component"),
    "length/mean": ("tokens", "mean response length"),
    "length/max": ("tokens", "longest response"),
    "length/better": ("tokens", "mean response length of samples above their group's mean reward"),
    "length/worse": ("tokens", "mean response length of samples below their group's mean reward"),
    "length/truncated": ("fraction", "samples cut off by the length limit"),
    "train/tokens": ("tokens", "response tokens in the loss"),
    "train/packed_tokens": ("tokens", "tokens that went through the linear layers"),
    "train/padded_tokens": ("tokens", "tokens that a padded batch of the same samples would have taken"),
    "train/samples": ("samples", "samples of the step"),
    "train/groups": ("groups", "groups of the step"),
    "train/step_s": ("s", "wall-clock time of the step's computation"),
    "train/tokens_per_s": ("tokens/s", "response tokens in the loss by wall-clock time of the step's computation"),
    "weights/bytes": ("bytes", "weights of the version as they were published: in full, or as a difference"),
    "weights/full_bytes": ("bytes", "weights of the version in full"),
    "weights/changed": ("fraction", "weights whose bits differ from the version before, where a difference was made"),
    "eval/unjudged": ("prompts", "held-out prompts whose answer no verifier could judge"),
    "eval/accuracy": ("fraction", "held-out prompts that the version answers right, without sampling"),
    "eval/reward": ("reward", "mean reward of the version's answers to held-out prompts, without sampling"),
    "eval/reward/*": ("reward", "the same over the prompts of one env"),
    "eval/length": ("tokens", "mean length of the version's answers to held-out prompts"),
    "eval/truncated": ("fraction", "answers to held-out prompts cut off by the length limit"),
    "verify/rows": ("samples", "samples that went through the reward stage"),
    "verify/errors": ("samples", "of these, samples without a reward: the sample or its verification had failed"),
    "verify/failed/*": (
        "samples",
        "samples without a reward by kind: sample, timeout, died, not_finite, disagree, exception",
    ),
    "verify/unparsed": ("samples", "samples with a reward in which no answer could be read; that is a wrong answer"),
    "verify/failed_samples": ("samples", "of these, samples that came from rollout as failures"),
    "verify/retries": ("count", "verifications tried again after an error or a timeout"),
    "verify/timeouts": ("count", "verifications that took longer than reward.timeout_s"),
    "verify/restarts": ("count", "verifier processes killed or found dead, and replaced"),
    "eval/seconds": ("s", "wall-clock time of the evaluation"),
    "time/step_s": ("s", "wall-clock time of the step with reading, computing and publishing"),
    "time/wait_s": ("s", "time that the trainer waited for groups before the step"),
    "rollout/tokens": ("tokens", "tokens sampled for the records of this version"),
    "rollout/prompt_tokens": ("tokens", "prompt tokens of those records, once for every sample"),
    "rollout/rows": ("samples", "samples in those records"),
    "rollout/tokens_per_s": ("tokens/s", "tokens sampled by second in which a rollout process worked"),
    "rollout/aborted_groups": (
        "groups",
        "groups that a rollout process stopped sampling: no longer its own, or settled",
    ),
    "rollout/aborted_tokens": ("tokens", "tokens of those groups, which nobody will train on"),
    "rollout/busy_s": ("s", "time the rollout processes worked, all of them together"),
    "rollout/waiting_s": ("s", "time the rollout processes waited, all of them together"),
    "rollout/idle": ("fraction", "share of their time that the rollout processes waited"),
    "verify/busy_s": ("s", "time the reward process worked"),
    "verify/waiting_s": ("s", "time the reward process waited"),
    "verify/idle": ("fraction", "share of its time that the reward process waited"),
    "curate/busy_s": ("s", "time the curation process worked"),
    "curate/waiting_s": ("s", "time the curation process waited"),
    "curate/idle": ("fraction", "share of its time that the curation process waited"),
    "curate/refused/*": ("groups", "groups refused by curation for one reason"),
    "curate/left_out/*": ("samples", "samples left out of accepted groups by one rule of curation"),
    "audit/raw/*": (
        "of the window",
        "what the audit found in a window of raw rows: rows, torn, violations, statistics",
    ),
    "audit/scored/*": ("of the window", "the same of scored rows"),
    "audit/curated/*": ("of the window", "the same of rows that were trained on"),
    "export/audit": ("record", "newest record of log/audit that the exporter has written, by record number"),
    "export/commit": ("version", "newest commit that the exporter has written to the tracking server"),
    "export/evaluation": ("record", "newest record of log/eval that the exporter has written, by record number"),
}

HISTOGRAMS: dict[str, tuple[str, str]] = {
    "staleness/tokens": (
        "versions",
        "sampled tokens by age, at consumption, excluded ones too; not those with an age bound of their own",
    ),
    "staleness/samples": ("versions", "samples by age of their oldest token; not those with a bound of their own"),
    "length/tokens": ("tokens", "samples by response length, buckets of powers of two, named by their upper end"),
}


def declared(name: str, names: Mapping[str, tuple[str, str]] = METRICS) -> tuple[str, str] | None:
    """Return (unit, meaning) of a metric, through its family if need be; None if nobody declared it."""
    if name in names:
        return names[name]
    folder, _, last = name.rpartition("/")
    return names.get(f"{folder}/*") if last else None


def check_names(metrics: Iterable[str], histograms: Iterable[str] = ()) -> None:
    """Refuse undeclared names.

    Raises:
        ContractError: names those that are missing and where to declare them.
    """
    missing = [name for name in metrics if declared(name) is None]
    missing += [name for name in histograms if declared(name, HISTOGRAMS) is None]
    if missing:
        raise ContractError(
            f"metrics {missing} are not declared: add name, unit and meaning to data_contracts/metrics.py"
        )

"""How large is one update of a real model at learning rates of reinforcement learning? Bytes published, beside full.

Samples groups of real prompts under a bfloat16 model, trains it on them with GRPO, one group a step, once for each
learning rate from the same weights, and writes the difference between successive versions as a run would.

    python -m tests.benchmarks.bench_delta models_local/smollm2
"""

import argparse

import numpy as np
import torch

from data_contracts.algorithm import AlgorithmConfig
from data_contracts.config import ReasoningGymEnv, TrainConfig
from models.delta import apply_delta, delta_from_bytes, delta_to_bytes, make_delta
from models.digest import weights_digest
from models.engine import Engine
from models.policy import Policy, copy_weights, end_ids, load_policy, load_weights
from models.requests import Finished, Request
from models.samples import Sample
from models.trainer import Trainer
from tasks.envs.registry import build_envs
from tasks.prompts import encode_prompt, make_decoder

RATES = (1e-6, 1e-5, 3e-5)
PROMPTS_AT_ONCE = 2


def sample_groups(policy: Policy, num_groups: int, num_samples: int) -> list[list[Sample]]:
    """Return groups whose rewards differ: others have no gradient."""
    sums = ReasoningGymEnv(
        dataset="chain_sum",
        parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        extract="last_number",
        exact=True,
    )
    envs = build_envs((sums,), 0)
    engine = Engine(policy.model, version=0, slots=64, max_length=320, eos_ids=end_ids(policy))
    decode = make_decoder(policy.tokenizer)
    groups: list[list[Sample]] = []
    number = 0
    while len(groups) < num_groups:
        prompts = [envs.prompt_for(number + i) for i in range(PROMPTS_AT_ONCE)]
        for i, prompt in enumerate(prompts):
            ids = encode_prompt(prompt, policy.tokenizer, 300)
            for sample in range(num_samples):
                seed = (number + i) * num_samples + sample
                engine.submit(Request((i, sample), ids, seed=seed, max_new_tokens=16))
        finished: dict[tuple[int, int], Finished] = {}
        while engine.num_in_flight or engine.num_queued:
            finished |= {result.key: result for result in engine.step()}  # pyright: ignore[reportAssignmentType]
        for i, prompt in enumerate(prompts):
            results = [finished[(i, sample)] for sample in range(num_samples)]
            texts = decode([result.response_ids.tolist() for result in results])
            env = envs.env_of(prompt.id)
            rewards = [env.score(prompt, text, []).reward for text in texts]
            if len(set(rewards)) > 1:
                groups.append([_sample(*pair) for pair in zip(results, rewards, strict=True)])
        number += PROMPTS_AT_ONCE
    return groups[:num_groups]


def _sample(result: Finished, reward: float) -> Sample:
    mask = np.ones(len(result.response_ids), bool)
    ids = np.array(result.request.prompt_ids)
    return Sample(ids, result.response_ids, mask, result.logprobs, result.versions, reward=reward)


def main() -> None:
    """Print a line for every learning rate and step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    arguments = parser.parse_args()
    # Two of them: an engine keeps the model it was given.
    groups = sample_groups(load_policy(arguments.model, "bfloat16"), arguments.steps, arguments.samples)
    policy = load_policy(arguments.model, "bfloat16")
    start = copy_weights(policy.model)
    full_bytes = sum(tensor.nbytes for tensor in start.values())
    for rate in RATES:
        load_weights(policy.model, start)
        train = TrainConfig(learning_rate=rate)
        trainer = Trainer(policy.model, AlgorithmConfig(), train, total_steps=arguments.steps)
        before, digest = start, weights_digest(start)
        for step, group in enumerate(groups):
            result = trainer.step([group], version=step, max_staleness=None)
            after = copy_weights(policy.model)
            delta = make_delta(before, after, base_digest=digest)
            body = delta_to_bytes(delta)
            is_exact = weights_digest(apply_delta(before, delta_from_bytes(body), base_digest=digest)) == delta.digest
            share = delta.num_changed / sum(tensor.numel() for tensor in start.values())
            print(
                f"learning rate {rate:g}, step {step + 1} ({result.status}): {100 * share:.3f} % of weights changed, "
                f"{len(body):,} bytes, {full_bytes:,} in full: 1/{full_bytes / len(body):.0f}, "
                f"{8 * len(body) / max(delta.num_changed, 1):.1f} bits a change, exact: {is_exact}",
                flush=True,
            )
            before, digest = after, delta.digest


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()

"""The evaluate role: greedy answers to held-out prompts, by versions at fixed intervals and by the last one.

It writes log/eval and nothing else; training never waits for it. A version that is overtaken while another is
being evaluated is not skipped: every due version is evaluated, in order.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from data_contracts.config import RunConfig
from data_contracts.errors import DigestMismatch
from data_contracts.records import Commit, Evaluation
from infra.log import Log
from models.policy import build_policy
from models.requests import Finished, Request, stop_texts
from tasks.engine import make_engine
from tasks.envs.protocol import Prompt
from tasks.envs.registry import Envs, build_envs
from tasks.full_weights import WeightsFinder
from tasks.model_files import read_model_files
from tasks.prompts import encode_prompt, make_decoder
from tasks.role import Role
from tasks.scoring import judge_all, make_pool
from tasks.verify import Job

SHOWN_EXAMPLES = 8


def run(role: Role) -> None:
    """Evaluate every due version until the last step's has been evaluated, or the run ends before it."""
    torch.set_num_threads(role.config.evaluate.threads)
    log = Log(role.store, "log/eval", Evaluation)
    commits = Log(role.store, "log/commit", Commit)
    evaluator: Evaluator | None = None
    last = log.last()
    done = last.version if last is not None else -1
    try:
        while done < role.config.steps:
            newest = commits.tail() - 1
            due = next_due(role.config, done, newest)
            if due is None:
                role.wait("a version to evaluate", on=("train",) if newest >= 0 else ("start",))
                continue
            role.progressed(f"evaluating version {due}")
            evaluator = evaluator or Evaluator(role)
            try:
                log.append(log.tail(), evaluator.evaluate(due))
            except DigestMismatch as cause:  # its weights are torn for good, which is no reason to end the run
                role.tell("amend", version=due, error=f"version {due} is not evaluated: {cause}")
            done = due
    finally:
        if evaluator is not None:
            evaluator.close()


def next_due(config: RunConfig, done: int, newest: int) -> int | None:
    """Return the next version to evaluate after `done`, of those up to `newest`; None when there is none yet."""
    every = config.evaluate.every
    candidate = 0 if done < 0 else min((done // every + 1) * every, config.steps)
    return candidate if candidate <= newest else None


class Evaluator:
    """Holds an engine and the held-out prompts."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._weights = WeightsFinder(role)
        config = role.config
        files = read_model_files(role.store)
        _, weights = self._weights.wait_for(lambda: 0)
        policy = build_policy(files, next(iter(weights.values())).dtype, weights)
        self._envs: Envs = build_envs(config.envs, config.seed)
        self._limit = config.evaluate.max_new_tokens or config.rollout.sampling.max_new_tokens
        self._tokenizer = policy.tokenizer
        self._decode = make_decoder(policy.tokenizer)
        self._stops = (
            stop_texts(policy.tokenizer, config.rollout.sampling.stop) if config.rollout.sampling.stop else None
        )
        self._engine = make_engine(config, policy)
        self._prompts = self._envs.eval_prompts(config.evaluate.num_prompts)
        self._pool = make_pool(self._envs, config.reward)

    def close(self) -> None:
        """End the verifier processes."""
        self._pool.close()

    def evaluate(self, version: int) -> Evaluation:
        """Return the evaluation of a version.

        Raises:
            DigestMismatch: its weights are torn, and the trainer no longer has them.
        """
        started = time.monotonic()
        _, weights = self._weights.wait_for(lambda: version)
        digest = self._engine.load_weights(weights, version)
        for index, prompt in enumerate(self._prompts):
            ids = encode_prompt(prompt, self._tokenizer, self._engine.max_length - self._limit)
            self._engine.submit(
                Request(index, ids, seed=index, max_new_tokens=self._limit, temperature=0.0, stops=self._stops)
            )
        finished: dict[int, Finished] = {}
        while self._engine.num_in_flight or self._engine.num_queued:
            finished |= {int(str(result.key)): result for result in self._engine.step()}
            self._role.check()
        results = [finished[index] for index in range(len(self._prompts))]
        metrics, examples = self._score(results)
        metrics["eval/seconds"] = time.monotonic() - started
        return Evaluation(
            writer=self._role.writer, version=version, digest=digest, metrics=metrics, examples=tuple(examples)
        )

    def _score(self, results: Sequence[Finished]) -> tuple[dict[str, float], list[dict[str, str]]]:
        texts = self._decode([result.response_ids.tolist() for result in results])
        jobs = [
            Job(prompt.id, text, result.response_ids.tolist())
            for prompt, text, result in zip(self._prompts, texts, results, strict=True)
        ]
        outcomes, _ = judge_all(jobs, self._envs, self._role.config.reward, pool=self._pool)
        rewards: dict[str, list[float]] = defaultdict(list)
        examples = []
        for prompt, text, outcome in zip(self._prompts, texts, outcomes, strict=True):
            name = self._envs.env_of(prompt.id).name
            if isinstance(outcome, str):  # nobody could judge it: neither right nor wrong
                continue
            rewards[name].append(outcome.reward)
            if len(rewards[name]) <= SHOWN_EXAMPLES:
                examples.append(_example(prompt, text, outcome.reward))
        everything = [reward for of_env in rewards.values() for reward in of_env]
        metrics = {
            "eval/reward": _mean(everything),
            "eval/accuracy": _mean([float(reward == 1.0) for reward in everything]),
        }
        metrics |= {f"eval/reward/{name}": _mean(of_env) for name, of_env in rewards.items()}
        metrics["eval/unjudged"] = float(len(outcomes) - len(everything))
        metrics["eval/length"] = _mean([len(result.response_ids) for result in results])
        metrics["eval/truncated"] = _mean([float(result.finish_reason == "length") for result in results])
        return metrics, examples


def _example(prompt: Prompt, response: str, reward: float) -> dict[str, str]:
    content = prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["content"]
    return {"prompt": content, "response": response, "expected": prompt.answer, "reward": f"{reward:g}"}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Envs from their configuration, and which prompt a number stands for.

A prompt number comes from the curriculum, one for each ticket. Number and the run's seed alone decide the env, by
weight, and the prompt in it: every env is walked in a seeded order, each prompt once before any comes again.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from data_contracts.config import AdditionEnv, CodeEnv, CustomEnv, EnvConfig, MathEnv, ReasoningGymEnv
from data_contracts.errors import ConfigError, ContractError
from infra.installed import load_function
from tasks.envs.addition import Addition
from tasks.envs.code import Code
from tasks.envs.order import permute, uniform
from tasks.envs.protocol import Env, Prompt


def _reasoning_gym(config: ReasoningGymEnv) -> Env:
    from tasks.envs.reasoning_gym import ReasoningGym  # its package takes over a second to import

    return ReasoningGym(config)


def _math(config: MathEnv) -> Env:
    from tasks.envs.mathematics import Mathematics  # sympy takes a second to import

    return Mathematics(config)


def _custom(config: CustomEnv) -> Env:
    function = load_function(config.path, "env")
    try:
        env = function(**config.parameters)
    except TypeError as cause:
        raise ConfigError(f"env {config.path} cannot be made from parameters {config.parameters}: {cause}") from cause
    if not isinstance(env, Env):
        raise ConfigError(f"env {config.path}: expected an Env (tasks/envs/protocol.py), got {type(env).__name__}")
    return env


ENVS: dict[type, Callable[[Any], Env]] = {
    AdditionEnv: Addition,
    ReasoningGymEnv: _reasoning_gym,
    MathEnv: _math,
    CodeEnv: Code,
    CustomEnv: _custom,
}


class Envs:
    """The envs of a run.

    Attributes:
        configs: what they were made from; another process makes the same envs from it.
        seed: the run's seed.
        by_name: every env, in the order of the configuration.
    """

    def __init__(self, envs: Sequence[Env], configs: Sequence[EnvConfig], seed: int) -> None:
        self.configs = tuple(configs)
        self.seed = seed
        self.by_name: dict[str, Env] = {}
        for env in envs:
            if env.name in self.by_name:
                raise ConfigError(f"two envs of the run are called {env.name!r}: give one of them another `name`")
            self.by_name[env.name] = env
        self._envs = tuple(envs)
        self._shares = tuple(accumulate(config.weight for config in configs))

    def prompt_for(self, number: int) -> Prompt:
        """Return the training prompt that a prompt number (from 0) stands for."""
        env = self._choose(number)
        epoch, place = divmod(number, env.num_prompts)
        return env.prompt(permute(place, env.num_prompts, f"{self.seed}/{env.name}/{epoch}"))

    def find(self, prompt_id: str) -> Prompt:
        """Return the prompt with this id, of any env and either split.

        Raises:
            ContractError: no env of the run has it.
        """
        return self.env_of(prompt_id).find(prompt_id)

    def env_of(self, prompt_id: str) -> Env:
        """Return the env that a prompt id names.

        Raises:
            ContractError: the run has no such env.
        """
        name = prompt_id.partition("/")[0]
        if name not in self.by_name:
            raise ContractError(f"prompt {prompt_id!r} is of no env of this run, which has {', '.join(self.by_name)}")
        return self.by_name[name]

    def eval_prompts(self, limit: int) -> list[Prompt]:
        """Return the first `limit` held-out prompts of each env, or all where there are fewer."""
        return [env.eval_prompt(index) for env in self._envs for index in range(min(limit, env.num_eval_prompts))]

    def validate(self) -> None:
        """Prove every env's reward.

        Raises:
            ConfigError: an env gives its gold answer less than 1, or fails another of the proofs of `Env.validate`.
        """
        for env in self._envs:
            env.validate()

    def _choose(self, number: int) -> Env:
        if len(self._envs) == 1:
            return self._envs[0]
        point = uniform(number, f"{self.seed}/env") * self._shares[-1]
        return self._envs[min(bisect_right(self._shares, point), len(self._envs) - 1)]


def build_envs(configs: Sequence[EnvConfig], seed: int) -> Envs:
    """Make the envs of a run.

    Args:
        configs: `RunConfig.envs`.
        seed: the run's seed.

    Raises:
        ConfigError: an env cannot be made, or two have one name.
    """
    return Envs([ENVS[type(config)](config) for config in configs], configs, seed)

"""Sums such as 17+25=, answered 042: the task that a tiny policy learns on a CPU in minutes.

All problems are permuted once, by a key that no run's seed touches: the held-out sums are the same in every run, so
evaluations compare, and neither the warm start nor training ever sees them.
"""

from data_contracts.config import AdditionEnv
from tasks.envs.order import permute
from tasks.envs.protocol import Env, Prompt, Score

MAX_HELD_OUT = 512
_KEY = "addition/1"


class Addition(Env):
    """Sums of two numbers of equal width; the answer is the sum with leading zeros, matched exactly."""

    verifier = "addition@1"
    needs_timeout = False

    def __init__(self, config: AdditionEnv) -> None:
        """Count the problems: (max_operand + 1)^2, of which 512 (at most a quarter) are held out."""
        self.name = config.name or config.type
        self._base = config.max_operand + 1
        self._width = len(str(config.max_operand))
        self._answer_width = len(str(2 * config.max_operand))
        num_problems = self._base**2
        self.num_eval_prompts = min(MAX_HELD_OUT, num_problems // 4)
        self.num_prompts = num_problems - self.num_eval_prompts

    def prompt(self, index: int) -> Prompt:
        """Return training prompt `index`."""
        if not 0 <= index < self.num_prompts:
            raise IndexError(f"env {self.name} has prompts 0 to {self.num_prompts - 1}, not {index}")
        return self._problem(self.num_eval_prompts + index, self.prompt_id(index))

    def eval_prompt(self, index: int) -> Prompt:
        """Return held-out prompt `index`."""
        if not 0 <= index < self.num_eval_prompts:
            raise IndexError(f"env {self.name} has held-out prompts 0 to {self.num_eval_prompts - 1}, not {index}")
        return self._problem(index, self.eval_prompt_id(index))

    def score(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> Score:
        """Score 1 for exactly the answer, spaces aside, else 0."""
        correct = float(response_text.replace(" ", "") == prompt.answer)
        return Score(correct, {"correct": correct})

    def wrong_response(self, prompt: Prompt) -> str:
        """Return the sum plus one."""
        return f"{int(prompt.answer) + 1:0{self._answer_width}d}"

    def _problem(self, place: int, prompt_id: str) -> Prompt:
        left, right = divmod(permute(place, self._base**2, _KEY), self._base)
        text = f"{left:0{self._width}d}+{right:0{self._width}d}="
        answer = f"{left + right:0{self._answer_width}d}"
        return Prompt(prompt_id, text, answer, guided=f"{answer} {text}")

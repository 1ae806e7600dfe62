"""A whole run in one process: the roles take turns, through the same functions and records as in seven processes.

Nothing runs at the same time, so nothing depends on timing: roll out whatever the newest version admits, judge it,
settle it, train one step, and so on. For small models that is also the fastest way: no process starts and no wait.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import torch

from data_contracts.errors import ProtocolError, TrainingDiverged
from data_contracts.records import Evaluation
from infra.log import Log
from infra.runs import Run
from infra.settings import keep_freed_memory
from tasks.curate import Curator
from tasks.evaluate import Evaluator, next_due
from tasks.ledger import Ledger
from tasks.reward import Judge
from tasks.role import Role
from tasks.rollout import Worker
from tasks.start import run as start
from tasks.supervise import Supervisor
from tasks.train import Learner

MAX_TURNS = 10_000
"""A group that takes more turns of sampling than this does not come to an end."""

MAX_WAITS = 200
"""Training has everything before it begins: if it waits this often, something is missing that nobody will bring."""


def run_in_lockstep(run: Run) -> Iterator[int]:
    """Play all roles of a run that nobody has worked on, and yield each version when it is committed and due evaluated.

    Raises:
        TrainingDiverged: two steps in a row were not finite; the last version has been evaluated.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    Supervisor(run.store).open()
    with ExitStack() as stack:
        roles = {
            name: stack.enter_context(Role(name, run.store, run.config))
            for name in ("start", "rollout", "reward", "curate", "train", "evaluate")
        }
        start(roles["start"])
        yield from _Lockstep(run, roles, stack).versions()
        roles["train"].tell("end")


class _Lockstep:
    def __init__(self, run: Run, roles: dict[str, Role], stack: ExitStack) -> None:
        self._run, self._roles = run, roles
        ledgers = {name: Ledger(run.store, run.config) for name in ("rollout", "reward", "curate", "train")}
        self._sampled, self._judged = ledgers["rollout"], ledgers["reward"]
        self._settled, self._trained = ledgers["curate"], ledgers["train"]
        self._worker = Worker(roles["rollout"], ledgers["rollout"])
        self._judge = stack.enter_context(Judge(roles["reward"], self._judged))
        self._curator = Curator(roles["curate"], self._settled)
        self._learner = Learner(roles["train"], self._trained)
        stack.callback(self._learner.close)
        self._evaluator = Evaluator(roles["evaluate"])
        stack.callback(self._evaluator.close)
        self._evaluations = Log(run.store, "log/eval", Evaluation)
        self._evaluated = -1

    def versions(self) -> Iterator[int]:
        self._learner.take_over()
        self._evaluate_due(0)
        while self._trained.state.version < self._run.config.steps:
            self._roll_out()
            self._judged.sync()
            self._judge.turn()
            self._settled.sync()
            self._curator.read()
            self._curator.settle()
            try:
                self._train_once()
            except TrainingDiverged:
                self._evaluate(self._trained.state.version)
                raise
            self._evaluate_due(self._trained.state.version)
            yield self._trained.state.version

    def _roll_out(self) -> None:
        """Sample all that the newest version admits."""
        for _ in range(MAX_TURNS * self._run.config.groups_per_step):
            was_idle, claims = self._worker.is_idle, self._sampled.state.next["claim"]
            self._worker.turn()
            # What does not fit into the slots at once is claimed later: done is who was idle and claims nothing.
            if was_idle and self._worker.is_idle and self._sampled.state.next["claim"] == claims:
                return
        raise ProtocolError("rollout does not come to an end")

    def _train_once(self) -> None:
        before = self._trained.state.version
        for _ in range(MAX_WAITS):
            self._learner.turn()
            if self._trained.state.version > before:
                return
            if self._trained.state.num_in_flight == 0:  # groups were refused: others must be rolled out first
                return
        raise ProtocolError(f"version {before + 1} is not trained although its groups are there")

    def _evaluate_due(self, newest: int) -> None:
        due = next_due(self._run.config, self._evaluated, newest)
        if due is not None and due > self._evaluated:
            self._evaluate(due)

    def _evaluate(self, version: int) -> None:
        self._evaluations.append(self._evaluations.tail(), self._evaluator.evaluate(version))
        self._evaluated = version

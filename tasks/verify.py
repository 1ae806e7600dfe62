"""Verifications that may hang, in processes that can be killed.

    parent                                child: python -m tasks.verify
    configs, seed, limit  ── one line ─►  builds the envs, answers `ready`
    up to CHUNK jobs      ── one line ─►  answers each job with one line, in order

The parent waits at most `timeout_s` for each answer. A child that is late or dies is killed and replaced; the job it
was at is tried again on a budget of its own, the jobs behind it as if nothing had happened. Children start with the
first job. A child whose parent has died ends by itself: at the end of its input, or by its own alarm clock.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

from data_contracts.config import EnvConfig
from data_contracts.errors import ContractError, RollflowError, ServiceError
from tasks.envs.protocol import Env, Prompt, Score
from tasks.envs.registry import Envs, build_envs

CHUNK = 32
START_LIMIT_S = 120.0
_ORPHAN_GRACE_S = 1.0
_CONFIGS = TypeAdapter(tuple[EnvConfig, ...])
T = TypeVar("T")


class Job(NamedTuple):
    """One response to judge."""

    prompt_id: str
    response_text: str
    response_ids: list[int]


Outcome = Score | str
"""A score, or why there is none."""

DISAGREE = "verifiers disagree"
"""How the reason begins where two verifiers differ: they would again, so it is not tried again."""


@dataclass(slots=True)
class Counts:
    """What happened beside scoring."""

    retries: int = 0
    timeouts: int = 0
    restarts: int = 0
    """Children killed or found dead, and replaced."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    is_ready: bool = False
    jobs: deque[int] = field(default_factory=deque)
    """Numbers of the jobs it was given and has not answered."""
    deadline: float = 0.0
    unread: bytes = b""


class VerifierPool:
    """Processes that judge responses. One caller at a time. Use as a context manager, or call `close`."""

    def __init__(self, envs: Envs, *, timeout_s: float, max_retries: int, num_processes: int = 2) -> None:
        """Start nothing yet.

        Args:
            envs: what the children build again for themselves.
            timeout_s: limit on one verification.
            max_retries: how often a verification that failed or took too long is tried again.
            num_processes: children at most.
        """
        self._setup = {
            "configs": [config.model_dump(mode="json") for config in envs.configs],
            "seed": envs.seed,
            "limit_s": timeout_s + _ORPHAN_GRACE_S,
        }
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._num_processes = num_processes
        self._children: list[_Child] = []

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are there."""
        return [child.process.pid for child in self._children]

    def close(self) -> None:
        """Kill the children; a later `verify` starts new ones."""
        for child in self._children:
            _kill(child)
        self._children.clear()

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Outcome], Counts]:
        """Judge every job; a job that fails or hangs more than `max_retries` times comes back as the reason.

        Takes at most about (failed attempts + 1) * timeout_s after the children are there.

        Raises:
            ServiceError: a child cannot be started.
        """
        outcomes: list[Outcome | None] = [None] * len(jobs)
        attempts = [0] * len(jobs)
        counts = Counts()
        waiting = deque(range(len(jobs)))

        def settle(number: int, answer: Score | str) -> None:
            attempts[number] += 1
            if isinstance(answer, str) and attempts[number] <= self._max_retries and not answer.startswith(DISAGREE):
                counts.retries += 1
                waiting.append(number)
            else:
                outcomes[number] = answer

        try:
            while waiting or any(child.jobs for child in self._children):
                self._hand_out(jobs, waiting)
                for child in self._wait():
                    self._hear(child, settle)
                self._replace_late(settle, waiting, counts)
        except BaseException:
            self.close()  # whatever stopped the caller, no child goes on with jobs nobody waits for
            raise
        return [outcome for outcome in outcomes if outcome is not None], counts

    def _hand_out(self, jobs: Sequence[Job], waiting: deque[int]) -> None:
        idle = [child for child in self._children if child.is_ready and not child.jobs]
        wanted = min(self._num_processes, -(-len(waiting) // CHUNK))
        while len(self._children) < wanted:
            self._children.append(self._start())
        for child in idle:
            if not waiting:
                return
            # Late in a batch the rest is shared out, so that one slow chunk does not keep the others idle.
            share = max(1, min(CHUNK, -(-len(waiting) // self._num_processes)))
            numbers = [waiting.popleft() for _ in range(min(share, len(waiting)))]
            child.jobs.extend(numbers)
            child.deadline = time.monotonic() + self._timeout_s
            try:
                _write_line(child, [jobs[number] for number in numbers])
            except BrokenPipeError:
                child.deadline = 0.0  # it died while idle; `_replace_late` takes it from here

    def _start(self) -> _Child:
        path = os.pathsep.join(p for p in (os.getcwd(), *sys.path) if p)
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.verify"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        child = _Child(process, deadline=time.monotonic() + START_LIMIT_S)
        try:
            _write_line(child, self._setup)
        except BrokenPipeError as cause:
            _kill(child)
            raise ServiceError(
                f"verifier process ended with {process.returncode} before it was asked anything"
            ) from cause
        return child

    def _wait(self) -> list[_Child]:
        """Return the children with something to read, as soon as there are any or a deadline is over."""
        with selectors.DefaultSelector() as selector:
            busy = [child for child in self._children if child.jobs or not child.is_ready]
            for child in busy:
                selector.register(_stdout(child), selectors.EVENT_READ, child)
            timeout = min((child.deadline for child in busy), default=0.0) - time.monotonic()
            return [key.data for key, _ in selector.select(max(timeout, 0.0))]

    def _hear(self, child: _Child, settle: Any) -> None:
        body = os.read(_stdout(child).fileno(), 1 << 16)
        if not body:
            child.deadline = 0.0
            return
        *lines, child.unread = (child.unread + body).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if not child.is_ready:
                if "error" in answer:
                    raise ServiceError(f"verifier process cannot make the run's envs: {answer['error']}")
                child.is_ready = True
                continue
            child.deadline = time.monotonic() + self._timeout_s
            settle(child.jobs.popleft(), answer["error"] if "error" in answer else Score(**answer))

    def _replace_late(self, settle: Any, waiting: deque[int], counts: Counts) -> None:
        now = time.monotonic()
        for child in [c for c in self._children if c.deadline <= now and (c.jobs or not c.is_ready)]:
            has_died = not child.deadline
            self._children.remove(child)
            _kill(child, wait_s=1.0 if has_died else 0.0)
            if not child.is_ready:
                code = child.process.returncode
                state = f"ended with {code}" if has_died else f"was not ready after {START_LIMIT_S:.0f} s"
                raise ServiceError(f"verifier process {state}: see its output above")
            counts.restarts += 1
            head = child.jobs.popleft()
            waiting.extendleft(reversed(child.jobs))
            if has_died and child.process.returncode != -signal.SIGALRM:  # its alarm clock may be first
                settle(head, f"verifier process died with {child.process.returncode}")
            else:
                counts.timeouts += 1
                settle(head, f"verification took longer than {self._timeout_s:g} s")


def _stdout(child: _Child) -> IO[bytes]:
    assert child.process.stdout is not None  # noqa: S101 opened as a pipe
    return child.process.stdout


def _write_line(child: _Child, value: Any) -> None:
    assert child.process.stdin is not None  # noqa: S101 opened as a pipe
    child.process.stdin.write(json.dumps(value).encode() + b"\n")
    child.process.stdin.flush()


def _kill(child: _Child, *, wait_s: float = 0.0) -> None:
    """End a child; one that is about to end by itself gets `wait_s` seconds to leave its own exit code."""
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout=wait_s)
    child.process.kill()
    child.process.wait()
    for stream in (child.process.stdin, child.process.stdout):
        with suppress(BrokenPipeError):  # unwritten input of a process that is gone
            if stream is not None:
                stream.close()


def attempt(function: Callable[[], T]) -> T | str:
    """Return what an env's code returns, or what it raised, in words."""
    try:
        return function()
    except RollflowError as cause:
        return str(cause)
    except Exception as cause:  # noqa: BLE001 an env is the user's code: anything may come out of it
        return f"{type(cause).__name__}: {cause}"


def judge(env: Env, prompt: Prompt, job: Job) -> Score:
    """Judge one response in this process, with plain floats as numbers.

    Raises:
        ContractError: the env's two verifiers disagree.
    """
    given = env.score(prompt, job.response_text, job.response_ids)
    second = env.second_opinion(prompt, job.response_text, job.response_ids)
    if second is not None and not abs(second - given.reward) <= env.tolerance:
        raise ContractError(f"{DISAGREE}: {env.verifier} gave {given.reward:g}, the second one {second:g}")
    return Score(float(given.reward), {str(name): float(value) for name, value in given.components.items()})


def _find_and_judge(envs: Envs, job: Job) -> Score:
    return judge(envs.env_of(job.prompt_id), envs.find(job.prompt_id), job)


def _serve() -> None:
    """Answer the parent's lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a verifier prints goes to the log, not between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it kills this process when it stops

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    try:
        envs = build_envs(_CONFIGS.validate_python(setup["configs"]), setup["seed"])
    except RollflowError as cause:
        answer({"error": str(cause)})
        return
    answer({"ready": True})
    for line in sys.stdin:
        for fields in json.loads(line):
            # The default action of this signal ends the process even inside a C function that never returns.
            signal.setitimer(signal.ITIMER_REAL, setup["limit_s"])
            outcome = attempt(partial(_find_and_judge, envs, Job(*fields)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if isinstance(outcome, str):
                answer({"error": outcome})
            else:
                answer({"reward": outcome.reward, "components": outcome.components})


if __name__ == "__main__":
    _serve()

"""Writes a realistic run into a store, record by record, with the real log: what the roles would have written.

Two rollout workers run ahead of training by up to two versions; one dies and its tickets are claimed again;
curation refuses groups, the trainer drops some, one step is skipped; every tenth version is evaluated.
"""

import json
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pyarrow as pa

from data_contracts import trajectory
from data_contracts.config import RunConfig
from data_contracts.records import (
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Control,
    Curated,
    Evaluation,
    GroupRef,
    Heartbeat,
    ObjectRef,
    PolicyRef,
    Raw,
    Record,
    Refused,
    Scored,
    Verdict,
    encode_record,
)
from infra.log import Log
from infra.objects import put_batch
from infra.store import Store

START = 1_700_000_000.0
GROUPS = 4
SAMPLES = 4
WORKERS = ("a0a0a0a0a0a0", "b1b1b1b1b1b1")
DEATH = 14
"""Version at which the second worker dies."""


def encode_text(text: str) -> list[int]:
    """A tokenizer for tests: one token per character."""
    return [ord(c) for c in text]


def decode_text(ids: list[int]) -> str:
    """The way back."""
    return "".join(map(chr, ids))


@dataclass
class _Group:
    ticket: int
    version: int
    attempt: int = 0
    batch: BatchRef | None = None
    ref: GroupRef | None = None
    reward: float = 0.0


@dataclass
class RunBuilder:
    """The roles of a run, one call each. `rng` and `clock` are its only state besides what the records need."""

    store: Store
    steps: int = 40
    seed: int = 0
    clock: float = START
    next_ticket: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    unscored: deque[tuple[str, Raw, pa.Table]] = field(default_factory=deque)
    uncurated: deque[tuple[str, Scored, pa.Table]] = field(default_factory=deque)
    accepted: deque[_Group] = field(default_factory=deque)
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("accepted", "refused", "dropped", "trained", "tokens"), 0)
    )
    dead: bool = False
    died_at: float = 0.0
    held: list[_Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def append(self, path: str, record: Record) -> None:
        number = self.numbers.get(path, 0)
        assert Log(self.store, path, type(record)).append(number, record) is None
        self.numbers[path] = number + 1

    def control(self, kind: str, **fields: object) -> Control:
        return Control.model_validate({"writer": "super", "kind": kind, "at": self.tick(0.1), **fields})

    def tick(self, seconds: float) -> float:
        self.clock += seconds * self.rng.uniform(0.7, 1.3)
        return self.clock

    def begin(self) -> None:
        config = RunConfig(
            name="tiny",
            steps=self.steps,
            groups_per_step=GROUPS,
            samples_per_group=SAMPLES,
            staleness={"max_staleness": 2},
        )
        body = {
            "id": self.store.url.rsplit("/", 1)[-1],
            "config": config.model_dump(mode="json"),
            "contracts": {"trajectory/raw": "1"},
            "packages": {"rollflow": "0.1.0", "torch": "2.13.0"},
            "created_at": START,
        }
        self.store.put_new("run.json", json.dumps(body).encode())
        self.append("log/control", Control(writer="super", kind="start", at=self.tick(1)))
        self.commit(0, [], "initial")
        self.evaluate(0)

    def claim(self, worker: str, version: int, num: int) -> list[_Group]:
        tickets = tuple(range(self.next_ticket, self.next_ticket + num))
        self.next_ticket += num
        self.append(
            "log/claim",
            Claim(
                writer=worker,
                kind="claim",
                tickets=tickets,
                attempt=0,
                version=version,
                curriculum=version,
                deadline=version + 2,
                next_ticket=self.next_ticket,
                at=self.tick(0.02),
            ),
        )
        return [_Group(t, version) for t in tickets]

    def reclaim(self, worker: str, version: int, groups: list[_Group]) -> list[_Group]:
        tickets = tuple(g.ticket for g in groups)
        self.append(
            "log/claim",
            Claim(
                writer=worker,
                kind="reclaim",
                tickets=tickets,
                attempt=1,
                version=version,
                curriculum=version,
                deadline=version + 2,
                next_ticket=self.next_ticket,
                at=self.tick(0.02),
            ),
        )
        return [_Group(t, version, attempt=1) for t in tickets]

    def rollout(self, worker: str, groups: list[_Group]) -> None:
        rows, refs = [], []
        for group in groups:
            refs.append(
                GroupRef(
                    ticket=group.ticket,
                    attempt=group.attempt,
                    first_row=len(rows),
                    num_rows=SAMPLES,
                    oldest_version=group.version,
                )
            )
            rows += [self.make_row(group, sample) for sample in range(SAMPLES)]
        table = trajectory.make_table(rows, "raw")
        busy = 0.11 * len(groups) * self.rng.uniform(0.8, 1.2)
        tokens = sum(len(row["response_ids"]) for row in rows)
        record = Raw(
            writer=worker,
            at=self.tick(busy / 2),
            batch=put_batch(self.store, table),
            groups=tuple(refs),
            metrics={
                "tokens": tokens,
                "busy_s": busy,
                "waiting_s": busy * self.rng.uniform(0, 0.4),
                "prefill_tokens": 6.0 * len(rows),
            },
        )
        self.append(f"log/raw/{worker}", record)
        self.unscored.append((worker, record, table))

    def make_row(self, group: _Group, sample: int) -> dict[str, object]:
        left, right = 10 + group.ticket % 80, 11 + sample
        text = f"{left}+{right}="
        answer = f"{left + right}$" if self.rng.random() < skill(group.version) else f"{self.rng.randrange(10, 190)}$"
        ids = encode_text(answer)
        return {
            "ticket": group.ticket,
            "attempt": group.attempt,
            "sample": sample,
            "prompt_id": f"addition/{group.ticket}",
            "env": "addition",
            "seed": group.ticket * 1000 + sample,
            "prompt_ids": encode_text(text),
            "response_ids": ids,
            "action_mask": [True] * len(ids),
            "behavior_logprobs": [-self.rng.random() for _ in ids],
            "policy_versions": [group.version] * len(ids),
            "used_versions": [group.version],
            "used_digests": [digest(group.version)],
            "finish_reason": "stop",
            "error": "",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_new_tokens": 4,
            "engine": "torch",
            "dtype": "float32",
            "queued_at": self.clock,
            "started_at": self.clock,
            "finished_at": self.clock + 1,
        }

    def reward(self) -> None:
        worker, raw, table = self.unscored.popleft()
        texts = [decode_text(ids) for ids in table.column("response_ids").to_pylist()]
        prompts = [decode_text(ids) for ids in table.column("prompt_ids").to_pylist()]
        rewards = [float(str(eval_sum(p)) == t.rstrip("$")) for p, t in zip(prompts, texts, strict=True)]
        scored_table = trajectory.add_columns(
            table,
            {
                "response_text": texts,
                "reward": rewards,
                "reward_names": [["correct"]] * len(texts),
                "reward_values": [[r] for r in rewards],
                "verifier": ["addition@1"] * len(texts),
                "reward_error": [""] * len(texts),
            },
        )
        refused = {str(raw.groups[-1].ticket): "verifier timed out: 10.0 s"} if self.rng.random() < 0.03 else {}
        record = Scored(
            writer="reward1",
            at=self.tick(0.03),
            rollout=worker,
            batch=put_batch(self.store, scored_table),
            groups=raw.groups[:-1] if refused else raw.groups,
            refused=refused,
            metrics={"busy_s": 0.05, "waiting_s": 0.4, "rows": len(texts)},
        )
        self.append(f"log/scored/{worker}", record)
        self.uncurated.append((worker, record, scored_table))

    def curate(self) -> None:
        worker, scored, table = self.uncurated.popleft()
        rewards = table.column("reward").to_pylist()
        verdicts = []
        for group in scored.groups:
            mine = rewards[group.first_row : group.first_row + group.num_rows]
            chance = self.rng.random()
            reason = (
                ""
                if chance > 0.07
                else "all rewards are equal: 4 rows of 0.0"
                if chance > 0.02
                else f"row {group.first_row}: contract: too short"
            )
            mean = sum(mine) / len(mine)
            verdicts.append(
                Verdict(
                    ticket=group.ticket,
                    accepted=not reason,
                    reason=reason,
                    attempt=group.attempt,
                    batch=scored.batch,
                    group=group,
                    reward_mean=mean,
                )
            )
            if not reason:
                self.accepted.append(
                    _Group(group.ticket, group.oldest_version, group.attempt, scored.batch, group, mean)
                )
        verdicts += [
            Verdict(ticket=int(t), accepted=False, reason=f"no reward: {why}") for t, why in scored.refused.items()
        ]
        self.totals["accepted"] += sum(v.accepted for v in verdicts)
        self.totals["refused"] += sum(not v.accepted for v in verdicts)
        self.append(
            "log/curated",
            Curated(
                writer="curate1",
                at=self.tick(0.02),
                verdicts=tuple(verdicts),
                covers={worker: 1},
                num_accepted=self.totals["accepted"],
                num_refused=self.totals["refused"],
                metrics={"busy_s": 0.04, "waiting_s": 0.5},
            ),
        )

    def drop(self, version: int, reason: str, groups: list[_Group]) -> None:
        self.totals["dropped"] += len(groups)
        tickets = tuple(g.ticket for g in groups)
        self.append(
            "log/refused",
            Refused(
                writer="train1",
                at=self.tick(0.01),
                tickets=tickets,
                reason=reason,
                detail="deadline in sight",
                commit=version,
                num_refused=self.totals["dropped"],
            ),
        )

    def commit(self, version: int, groups: list[_Group], status: str = "trained") -> None:
        tokens = sum(3 + g.ticket % 3 for g in groups) * SAMPLES
        self.totals["trained"] += len(groups)
        self.totals["tokens"] += tokens
        lags: dict[str, float] = {}
        for group in groups:
            lag = str(version - 1 - group.version)
            lags[lag] = lags.get(lag, 0) + 4.0 * SAMPLES
        step_s = 0.5 * self.rng.uniform(0.9, 1.2)
        self.append(
            "log/commit",
            Commit(
                writer="train1",
                at=self.tick(0.4),
                version=version,
                status=status,
                consumed=tuple(
                    Consumed(ticket=g.ticket, attempt=g.attempt, batch=g.batch, group=g.ref, deadline=g.version + 2)
                    for g in groups
                ),
                weights=PolicyRef(
                    kind="full" if version % 10 == 0 else "delta",
                    base=None if version % 10 == 0 else version - 1,
                    objects=(
                        ObjectRef(
                            key=f"policy/{version}-train1/model.safetensors",
                            num_bytes=2_400_000 if version % 10 == 0 else 180_000,
                            sha256="0" * 64,
                        ),
                    ),
                    digest=digest(version),
                    dtype="float32",
                    num_parameters=600_000,
                ),
                checkpoint=(
                    ObjectRef(
                        key=f"checkpoint/{version}-train1/optimizer.safetensors", num_bytes=4_800_000, sha256="1" * 64
                    ),
                )
                if version % 20 == 0
                else None,
                checkpoint_version=version // 20 * 20,
                num_trained=self.totals["trained"],
                num_tokens=self.totals["tokens"],
                metrics=self.train_metrics(version, groups, lags, step_s, tokens) if groups else {},
                histograms={"staleness/tokens": lags} if groups else {},
                evidence="" if status != "skipped" else "gradient norm is nan in microbatch 2",
            ),
        )

    def train_metrics(
        self, version: int, groups: list[_Group], lags: dict[str, float], step_s: float, tokens: int
    ) -> dict[str, float]:
        mean = sum(g.reward for g in groups) / len(groups)
        total = sum(lags.values())
        age = sum(int(lag) * n for lag, n in lags.items()) / total

        def around(value: float, spread: float = 0.1) -> float:
            return value * math.exp(self.rng.gauss(0, spread))

        metrics = {
            "loss/total": self.rng.gauss(0, 0.02),
            "loss/clip_fraction_low": around(0.01 + 0.01 * age),
            "loss/clip_fraction_high": around(0.02 + 0.02 * age),
            "loss/weight_mean": around(1.0, 0.01),
            "policy/ratio_mean": around(1.0, 0.01),
            "policy/ratio_max": around(2.4, 0.2),
            "policy/ratio_min": around(0.4),
            "policy/ratio_p05": around(0.86, 0.03),
            "policy/ratio_p50": around(1.0, 0.005),
            "policy/ratio_p95": around(1.16, 0.03),
            "policy/ess_token": min(around(0.93, 0.02), 1),
            "policy/ess_sequence": min(around(0.82, 0.04), 1),
            "policy/mismatch_k3": around(1.2e-6, 0.3),
            "policy/kl_behavior": around(0.004 + 0.006 * age),
            "policy/kl_proximal": around(0.003),
            "policy/entropy": around(0.9 * math.exp(-version / 25) + 0.12, 0.04),
            "optimizer/grad_norm": around(1.6 * math.exp(-version / 30) + 0.3, 0.15),
            "optimizer/learning_rate": 3e-4,
            "staleness/mean": age,
            "staleness/max": float(max(int(lag) for lag in lags)),
            "reward/mean": mean,
            "reward/std": math.sqrt(mean * (1 - mean)),
            "reward/zero_variance_groups": min(around(0.2 + version / 90), 1),
            "reward/component/correct": mean,
            "length/mean": around(3.9, 0.02),
            "length/better": around(3.8, 0.02),
            "length/worse": around(4.0, 0.02),
            "length/truncated": around(0.02, 0.4),
            "train/tokens": float(tokens),
            "train/step_s": step_s,
            "train/tokens_per_s": tokens / step_s,
            "time/step_s": step_s,
            "time/wait_s": self.rng.uniform(0, 0.4),
        }
        if version == 23:
            metrics["optimizer/grad_norm"] = math.nan
        return metrics

    def evaluate(self, version: int) -> None:
        accuracy = round(skill(version) + self.rng.gauss(0, 0.01), 4)
        examples = tuple(
            {
                "prompt": f"{a}+{b}=",
                "response": str(a + b if ok else a + b + 10),
                "reward": f"{float(ok):g}",
                "expected": str(a + b),
            }
            for a, b, ok in [
                (17, 25, True),
                (80, 19, True),
                (46, 38, False),
                (9, 90, True),
                (55, 66, True),
                (1, 2, False),
            ]
        )
        self.append(
            "log/eval",
            Evaluation(
                writer="eval1",
                at=self.tick(0.05),
                version=version,
                digest=digest(version),
                metrics={"eval/accuracy": accuracy},
                examples=examples,
            ),
        )

    def beat(self) -> None:
        for role, writer, state, done in [
            ("rollout", WORKERS[0], "waiting for room", False),
            ("rollout", WORKERS[1], "generating", False),
            ("reward", "reward1", "waiting for raw groups", False),
            ("curate", "curate1", "waiting for scored groups", False),
            ("train", "train1", "training", False),
            ("evaluate", "eval1", "waiting for version 50", True),
        ]:
            at = self.died_at if self.dead and writer == WORKERS[1] else self.clock
            beat = Heartbeat(
                role=role,
                writer=writer,
                host="node",
                pid=7,
                process_started=START,
                beat=9,
                state=state,
                busy_s=9.0,
                waiting_s=31.0,
                at=at,
                done=done,
            )
            self.store.put(f"role/{role}-{writer}.json", encode_record(beat))

    def step(self, version: int) -> None:
        """Everything that leads to commit `version`."""
        newest = version - 1
        while len(self.accepted) < GROUPS:
            for worker in WORKERS:
                if worker == WORKERS[1] and self.dead:
                    continue
                groups = self.claim(worker, newest, GROUPS)
                if worker == WORKERS[1] and newest >= DEATH:
                    self.dead, self.died_at, self.held = True, self.clock, groups
                    continue
                self.rollout(worker, groups)
            if self.held and newest > DEATH:
                self.append(
                    "log/control",
                    Control(writer="super", kind="dead", role="supervisor", target=WORKERS[1], at=self.tick(0.01)),
                )
                self.rollout(WORKERS[0], self.reclaim(WORKERS[0], newest, self.held))
                self.held = []
            while self.unscored:
                self.reward()
            while self.uncurated:
                self.curate()
        too_old = [g for g in self.accepted if newest - g.version > 2]
        if too_old:
            self.accepted = deque(g for g in self.accepted if g not in too_old)
            self.drop(newest, "dropped", too_old)
            return self.step(version)
        if version == 30:
            extra = self.claim(WORKERS[0], newest, 1)
            self.drop(newest, "timeout", extra)
        self.commit(
            version, [self.accepted.popleft() for _ in range(GROUPS)], "skipped" if version == 23 else "trained"
        )
        if version % 10 == 0:
            self.evaluate(version)
        return None


def build_run(store: Store, steps: int = 40, until: int | None = None, end: str = "end", seed: int = 0) -> RunBuilder:
    """Write a run of `steps` commits into `store` (a view below the run's prefix), up to commit `until`.

    Args:
        end: control record at the end: end, fail, stop, or "" for a run that is still going on.
    """
    builder = RunBuilder(store, steps=steps, seed=seed)
    builder.begin()
    for version in range(1, (steps if until is None else until) + 1):
        builder.step(version)
    error = "TrainingDiverged: loss is nan in versions 39 and 40, batch 0123abcd" if end == "fail" else ""
    if end:
        builder.append(
            "log/control",
            Control(writer="super", kind=end, role="train" if error else "", error=error, at=builder.tick(0.1)),
        )
    builder.beat()
    return builder


def skill(version: int) -> float:
    """How often the policy of a version is right, 0 to 1."""
    return 0.35 + 0.6 * (1 - math.exp(-version / 14))


def digest(version: int) -> str:
    """Stands for the digest of a version's weights."""
    return f"{version:04x}".rjust(8, "d") * 8


def eval_sum(prompt: str) -> int:
    """The answer to `17+25=`."""
    left, right = prompt.rstrip("=").split("+")
    return int(left) + int(right)

"""Whole runs of the protocol in miniature, under every kind of bad luck that a store and processes allow.

Every actor has a view of its own that lags as it likes, and acts in steps between which anything may happen:
it looks, decides, and puts what it had decided. Actors die at any point, are slow, are taken for dead and
come back; new ones start from the beginning or from anybody's snapshot. The world watches what is put.
"""

import json
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from data_contracts.curriculum import Curriculum, Place, place_of, returned_since_commit
from data_contracts.curriculum_config import AeroSampler, CurriculumConfig, FromPool, PilotCommitSampler
from data_contracts.drawing import commits_named, first_state, next_state
from data_contracts.errors import ProtocolError
from data_contracts.protocol import (
    LOGS,
    RETURNED,
    Account,
    Finished,
    Judged,
    Lease,
    Recover,
    Refuse,
    Replaced,
    Rules,
    RunState,
    Ticket,
    Train,
    choose_groups,
    decide_claim,
    decide_rebase,
    decide_reclaim,
    decide_refuse,
    decide_start,
    decide_verdicts,
    followed,
    owned,
)
from data_contracts.protocol_limit import Adaptive
from data_contracts.records import (
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Curated,
    GroupRef,
    Joined,
    Outcome,
    PolicyRef,
    Raw,
    Record,
    Refused,
    Reused,
    Scored,
    Verdict,
    decode_record,
    encode_record,
)
from data_contracts.reuse import Drawing
from data_contracts.uses import Uses

SCALE = int(os.environ.get("ROLLFLOW_FUZZ", "1"))
"""Multiplies the number of simulated runs."""

WEIGHTS = PolicyRef(kind="full", objects=(), digest="", dtype="float32", num_parameters=0)


class Broken(AssertionError):
    """The world saw what must never happen."""


@dataclass
class Luck:
    """How bad a run's luck is; all are probabilities."""

    refused: float = 0.1
    refused_first_step: float = 0
    unscorable: float = 0.02
    trainer_refuses: float = 0
    lost_lease: float = 0
    lost_reply: float = 0.1
    death: float = 0.001
    sleep: float = 0
    takeover: float = 0
    haste: float = 0.4
    stragglers: float = 0
    trainer_speed: float = 1


@dataclass
class Hooks:
    """The decisions under test; a broken one must be noticed."""

    claim: Callable[..., Claim | None] = decide_claim
    choose: Callable[..., object] = choose_groups
    verdicts: Callable[..., Curated | None] = decide_verdicts
    uses: Callable[[Uses, Curated], Curated] = Uses.check
    drawing: type[Drawing] = Drawing
    state: type[RunState] = RunState


@dataclass
class World:
    """The store, what really happened, and the rules that are never broken."""

    rules: Rules
    luck: Luck = field(default_factory=Luck)
    hooks: Hooks = field(default_factory=Hooks)
    seed: int = 0
    logs: dict[str, list[Record]] = field(default_factory=dict)
    batches: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    actors: list["Actor"] = field(default_factory=list)
    num_writers: int = 0
    trained: dict[int, int] = field(default_factory=dict)
    num_refusals_left: int = 6
    curricula: dict[str, Curriculum | None] = field(default_factory=dict)
    """State by the nonce of the commit that names it."""
    limits: list[int] = field(default_factory=list)
    """How far rollouts might run ahead after each commit."""
    curriculum_config: CurriculumConfig = field(default_factory=CurriculumConfig)
    uses: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """How and of which ticket samples were trained under later tickets, to these."""

    def __post_init__(self) -> None:
        self.truth = self.hooks.state(self.rules)
        """The fold over everything, in the order in which it was put."""
        first = make_commit("warm-start", 0, status="initial")
        self.curricula[first.nonce] = first_state(self.drawing)
        self.append("commit", 0, first)
        for kind in (Worker, Worker, Reward, Curator, Trainer):
            self.spawn(kind, random.Random(self.seed))

    @property
    def drawing(self) -> Drawing:
        eta, size = self.rules.max_staleness, self.rules.groups_per_step
        return self.hooks.drawing(self.curriculum_config, self.seed, size, 4, eta, 3 * size)

    # --- the store ---

    def log(self, name: str) -> list[Record]:
        return self.logs.setdefault(name, [])

    def append(self, name: str, number: int, record: Record, lost_reply: bool = False) -> Record | None:
        """Create-only put of the next number; a writer whose reply was lost puts again and finds its nonce."""
        log = self.log(name)
        if number > len(log):
            raise Broken(f"{name}: {number} would leave a gap after {len(log)}")
        if number == len(log):
            log.append(decode_record(type(record), encode_record(record)))
            if name in LOGS:
                self.truth.apply(name, number, log[number])
            self.watch(name, record)
            if not lost_reply:
                return None
        winner = log[number]
        return None if winner.nonce == record.nonce else winner

    def spawn(self, kind: type["Actor"], rnd: random.Random) -> "Actor":
        self.num_writers += 1
        state = self.hooks.state(self.rules)
        if self.snapshots and rnd.random() < 0.7:
            state = self.hooks.state.from_snapshot(self.rules, json.loads(rnd.choice(self.snapshots)))
        actor = kind(self, f"{kind.__name__.lower()}{self.num_writers}", state)
        actor.catch_up()
        self.actors.append(actor)
        return actor

    def alive(self, kind: type["Actor"]) -> list["Actor"]:
        return [actor for actor in self.actors if isinstance(actor, kind)]

    # --- the rules that are never broken ---

    def watch(self, name: str, record: Record) -> None:
        if isinstance(record, Commit):
            self.watch_commit(record)
        if isinstance(record, Curated) and self.rules.deterministic:
            settled = [v.ticket for v in record.verdicts]
            waiting = [t.number for t in self.truth.in_flight() if t.is_pending]
            if settled != sorted(settled) or any(n < max(settled) for n in waiting if settled):
                raise Broken(f"verdicts on {settled} while {waiting} wait, not in ticket order")
        if isinstance(record, Refused) and record.reason == "contract":
            raise Broken(f"tickets {record.tickets} had older tokens than their claims promised")
        rules, in_flight = self.rules, self.truth.num_in_flight
        if isinstance(record, Claim) and rules.max_staleness is not None:
            most = (rules.max_staleness + 1) * rules.groups_per_step + self.truth.num_both
            if in_flight > most:
                raise Broken(f"{in_flight} tickets in flight, at most {most} may be")
            self.watch_limit(record)
        if isinstance(record, Claim) and in_flight > (rules.max_unsettled or in_flight) + self.truth.num_both:
            raise Broken(f"{in_flight} tickets in flight, at most {rules.max_unsettled} may be")
        kept = len(self.truth.tickets) - in_flight
        if kept > 2 * rules.groups_per_step + self.num_refused_since(self.truth):
            raise Broken(f"{kept} settled tickets are kept")

    def watch_limit(self, record: Claim) -> None:
        """A claim keeps to a limit that was in force at a commit its writer may have seen last, never to more."""
        rules, truth = self.rules, self.truth
        if rules.adaptive is None or rules.max_staleness is None or record.kind != "claim":
            return
        seen = [limit for commit, limit in enumerate(self.limits) if commit >= record.version]
        if not all(rules.adaptive.lowest <= limit <= rules.max_staleness for limit in self.limits):
            raise Broken(f"limits {self.limits} leave {rules.adaptive.lowest} to {rules.max_staleness}")
        most = (record.version + max(seen) + 1) * rules.groups_per_step + truth.num_refused + truth.num_both
        if record.next_ticket > most:
            raise Broken(f"{record.next_ticket} tickets claimed, the limit allows {most}")

    def watch_commit(self, record: Commit) -> None:
        self.limits.append(self.truth.limit.versions)
        eta, t = self.rules.max_staleness, record.version - 1
        for group in record.consumed:
            if group.ticket in self.trained:
                raise Broken(f"ticket {group.ticket} trained twice")
            versions = self.batches[group.batch.key][group.ticket]
            self.watch_uses(t, group)
            if group.group.reused is not None:
                continue
            if eta is not None and self.rules.stragglers != "interrupt" and t - min(versions) > eta:
                raise Broken(f"commit {t + 1}: ticket {group.ticket} has tokens of {min(versions)}, older than {eta}")
            if group.deadline is not None and group.deadline < t:
                raise Broken(f"commit {t + 1}: ticket {group.ticket} was due at {group.deadline}")
            if eta == 0 and set(versions) != {t}:
                raise Broken(f"commit {t + 1}: synchronous training used versions {versions}")
        first = min((group.ticket for group in record.consumed), default=0)
        if eta == 0 and record.consumed and first <= max(self.trained, default=-1):
            raise Broken(f"commit {t + 1} is out of order")
        self.trained.update((group.ticket, record.version) for group in record.consumed)

    def watch_uses(self, t: int, group: Consumed) -> None:
        """What is used again is within its own bound, unless there is none on staleness, and says whose it was."""
        for source in [*group.group.joined, *([group.group.reused] if group.group.reused is not None else [])]:
            if self.rules.max_staleness is not None and t - source.oldest_version > source.max_age:
                raise Broken(f"commit {t + 1}: ticket {group.ticket} uses {source}, too old")
            if isinstance(source, Joined) and source.lent:
                continue
            kind = "joined" if isinstance(source, Joined) else "copied"
            self.uses.setdefault((kind, source.ticket), []).append(group.ticket)
        if group.ticket in {joined.ticket for joined in group.group.joined}:
            raise Broken(f"ticket {group.ticket} joins itself")

    def num_refused_since(self, state: RunState) -> int:
        """Count the refusals that no commit's trainer had seen."""
        curated = self.log("curated")[state.seen["curated"] :]
        refused = self.log("refused")[state.seen["refused"] :]
        return sum(not v.accepted for r in curated for v in r.verdicts) + sum(len(r.tickets) for r in refused)

    def fold(self, positions: dict) -> RunState:
        state = self.hooks.state(self.rules)
        for log in LOGS:
            for number in range(positions[log]):
                state.apply(log, number, self.log(log)[number])
        return state

    def count(self, positions: dict) -> Account:
        """Account for the tickets by brute force, from the first records of each log."""
        seen = {log: self.log(log)[: positions[log]] for log in LOGS}
        issued = {n for r in seen["claim"] if isinstance(r, Claim) and r.kind == "claim" for n in r.tickets}
        trained = {g.ticket for r in seen["commit"] if isinstance(r, Commit) for g in r.consumed} & issued
        verdicts: dict[int, bool] = {}
        for r in seen["curated"]:
            for verdict in r.verdicts if isinstance(r, Curated) else ():
                verdicts.setdefault(verdict.ticket, verdict.accepted)
        refused = {n for n, accepted in verdicts.items() if not accepted}
        refused |= {n for r in seen["refused"] if isinstance(r, Refused) for n in r.tickets}
        refused = (refused & issued) - trained
        return Account(len(issued), len(trained), len(refused), len(issued) - len(trained) - len(refused))

    def check_curricula(self) -> None:
        """The state that a commit names follows from the records that its trainer had applied, whoever folds them."""
        commits = [record for record in self.log("commit") if isinstance(record, Commit)]
        for commit in commits[1:]:
            state = self.fold(commit.positions)
            states = {version: self.curriculum(version) for version in commits_named(state)}
            named = self.curriculum(commit.version)
            again = next_state(state, states, self.drawing)
            if again != named or (named and Curriculum.model_validate_json(named.model_dump_json()) != named):
                raise Broken(f"commit {commit.version}: its curriculum depends on more than the records")

    def check_views(self) -> None:
        for actor in self.actors:
            if actor.state.account() != self.count(actor.state.next):
                raise Broken(f"{actor.name} counts {actor.state.account()}, there are {self.count(actor.state.next)}")
            if actor.state != self.fold(actor.state.next):
                raise Broken(f"{actor.name}: its state depends on how the logs were interleaved")

    # --- running ---

    def step(self, rnd: random.Random) -> None:
        """Something one actor does, or one stroke of bad luck."""
        luck, fate = self.luck, rnd.random()
        missing = [kind for kind in (Worker, Reward, Curator, Trainer) if not self.alive(kind)]
        if fate < luck.death and len(self.actors) > 4:
            self.actors.remove(rnd.choice(self.actors))
        elif fate < 2 * luck.death and len(self.actors) < 9:
            self.spawn(rnd.choice([Worker, Curator, Trainer, Trainer]), rnd)
        elif missing and rnd.random() < 0.3:
            self.spawn(rnd.choice(missing), rnd)
        elif fate < 2 * luck.death + 0.02:
            self.snapshots.append(json.dumps(rnd.choice(self.actors).state.snapshot()))
        else:
            actor = rnd.choices(self.actors, [actor.speed for actor in self.actors])[0]
            if rnd.random() < luck.haste:
                actor.turn(rnd)
            else:
                for _ in range(rnd.choice([1, 2, 5])):
                    if actor in self.actors:
                        actor.step(rnd)
            if rnd.random() < luck.sleep:
                actor.speed = rnd.choice([0.01, 0.1, 1])
            if actor.pending is not None and rnd.random() < luck.takeover:
                self.take_over(actor, rnd)

    def take_over(self, actor: "Actor", rnd: random.Random) -> None:
        """An actor goes silent with a decision in its hand; another takes its place; then the first wakes up."""
        if len(self.actors) >= 9:
            return
        successor = self.spawn(type(actor), rnd)
        for _ in range(rnd.randrange(20)):
            if successor in self.actors:
                successor.step(rnd)
            other = rnd.choice(self.actors)
            if other is not actor:
                other.turn(rnd)
        if actor.pending is not None:
            actor.put(rnd)

    def finish(self, rnd: random.Random) -> int:
        """Let everybody run fairly until the run is over; return the rounds it took."""
        for kind in (Worker, Reward, Curator, Trainer):
            if not self.alive(kind):
                self.spawn(kind, rnd)
        limit = 200 + 20 * self.rules.steps
        for number in range(limit):
            for actor in list(self.actors):
                actor.turn(rnd)
            if not self.alive(Trainer):
                self.spawn(Trainer, rnd)
            if any(isinstance(t, Trainer) and t.is_done for t in self.actors):
                self.check_end()
                return number
        raise Broken(f"hangs: {self.truth.account()} at version {self.truth.version} after {limit} fair rounds")

    def curriculum(self, version: int) -> Curriculum | None:
        return self.curricula.get(self.log("commit")[version].nonce)

    def check_prompts(self) -> None:
        """Every prompt that was ever reached is in some ticket that kept it, or waits to be handed out again.

        Claims under an older curriculum state can hand a prompt out twice, which is harmless; a synchronous run
        has none, unless a place was given away while a replaced trainer's commit was on its way.
        """
        claims = [r for r in self.log("claim") if isinstance(r, Claim) and r.kind == "claim"]
        places = {n: place_of(n, self.curriculum(r.curriculum)) for r in claims for n in r.tickets}
        sampler = self.curriculum_config.sampler
        if isinstance(sampler, FromPool):
            if any(place.prompt >= sampler.pool for place in places.values()):
                raise Broken(f"prompts outside of the pool: {places}")
            return
        prompts = {n: place.prompt for n, place in places.items() if not place.is_copy}
        dropped = {n for r in self.log("refused") if isinstance(r, Refused) and r.reason in RETURNED for n in r.tickets}
        verdicts: dict[int, bool] = {}
        for r in self.log("curated"):
            for verdict in r.verdicts if isinstance(r, Curated) else ():
                verdicts.setdefault(verdict.ticket, verdict.accepted)
        kept = [n for n in prompts if n not in dropped or n in self.trained or not verdicts.get(n, True)]
        last = self.curriculum(self.truth.version) or Curriculum()
        new = [prompts[h.ticket] for h in returned_since_commit(self.truth) if h.ticket in prompts]
        held = {prompts[n] for n in kept} | set(last.returned) | set(new)
        if lost := set(range(max(prompts.values(), default=-1) + 1)) - held:
            raise Broken(f"prompts {lost} are lost")
        trained = [prompts[n] for n in self.trained if n in prompts]
        is_plain = self.rules.max_staleness == 0 and self.truth.num_both == 0
        if is_plain and len(set(trained)) < len(trained):
            raise Broken(f"prompts trained twice in a synchronous run: {sorted(trained)}")

    def check_end(self) -> None:
        truth = self.truth
        wanted = self.rules.steps * self.rules.groups_per_step
        # After a late commit a worker whose view lags may claim a place that is gone when the trainer has ended.
        if len(self.trained) != wanted or truth.num_in_flight > truth.num_both:
            raise Broken(f"ended with {truth.account()}, expected {wanted} trained and none in flight")
        if truth.account() != self.count(truth.next):
            raise Broken(f"{truth.account()} is not {self.count(truth.next)}")
        self.check_prompts()
        if not self.curriculum_config.is_plain:
            self.check_curricula()
        many = {source: tickets for source, tickets in self.uses.items() if len(tickets) > 1}
        if many:
            raise Broken(f"samples used more than once again: {many}")


def make_commit(writer: str, version: int, **fields) -> Commit:
    fields = {"consumed": (), "status": "trained", "num_trained": 0, **fields}
    return Commit(writer=writer, version=version, weights=WEIGHTS, checkpoint_version=0, num_tokens=0, **fields)


@dataclass(eq=False)
class Actor:
    world: World
    name: str
    state: RunState
    pending: tuple[str, int, Record] | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        """Roles keep more."""

    def read(self, log: str, limit: int | None = None) -> None:
        end = len(self.world.log(log))
        if limit is not None:
            end = min(end, self.state.next[log] + limit)
        while self.state.next[log] < end:
            number = self.state.next[log]
            self.state.apply(log, number, self.world.log(log)[number])

    def catch_up(self) -> None:
        while self.state.behind():
            for log in self.state.behind():
                self.read(log, max(1, self.state.needs[log] - self.state.next[log]))

    def look(self, rnd: random.Random) -> None:
        """Read some of each log: a view may lag in any of them, but not behind what it knows that others knew."""
        logs = list(LOGS)
        rnd.shuffle(logs)
        for log in logs:
            self.read(log, rnd.choice([0, 0, 1, 2, 5]))
        self.catch_up()

    def look_fully(self) -> None:
        for log in LOGS:
            self.read(log)
        self.catch_up()

    def put(self, rnd: random.Random) -> bool:
        """Put what was decided, whatever has happened since; learn who won."""
        assert self.pending is not None
        (log, number, record), self.pending = self.pending, None
        winner = self.world.append(log, number, record, rnd.random() < self.world.luck.lost_reply)
        self.state.apply(log, number, winner or record)
        self.catch_up()
        if winner is None:
            self.won(record)
        return winner is None

    def won(self, record: Record) -> None:
        """What was decided stands."""

    def step(self, rnd: random.Random) -> None:
        raise NotImplementedError

    def turn(self, rnd: random.Random) -> None:
        raise NotImplementedError


class Worker(Actor):
    def __post_init__(self) -> None:
        self.version = 0
        self.groups: dict[int, tuple[int, list[int]]] = {}
        self.finished: dict[int, tuple[int, list[int]]] = {}
        self.delivered: set[tuple[int, int]] = set()

    def step(self, rnd: random.Random) -> None:
        action = rnd.randrange(6)
        if action == 0:
            self.generate(rnd)
        elif action == 1:
            self.deliver(rnd)
        elif self.pending is not None:
            self.put(rnd)
        elif action in (2, 3):
            self.look(rnd)
            self.version = rnd.randint(self.version, max(self.version, self.state.version))
        else:
            self.decide(rnd, self.guess_lost(rnd), rnd.choice([None, 1, 2]))

    def guess_lost(self, rnd: random.Random) -> list[Lease]:
        """Anybody may be taken for dead, and often is not."""
        pending = [t for t in self.state.in_flight() if t.is_pending]
        return [Lease(t.number, t.attempt) for t in pending if rnd.random() < self.world.luck.lost_lease]

    def decide(self, rnd: random.Random, lost: Iterable[Lease], limit: int | None) -> None:
        if self.state.version < self.version:
            return
        unfinished = set(self.groups) - set(self.finished)
        record = (
            decide_reclaim(self.state, self.name, lost, version=self.version, limit=limit)
            or decide_rebase(self.state, self.name, unfinished, version=self.version)
            or self.world.hooks.claim(
                self.state, self.name, version=self.version, curriculum=self.state.version, limit=limit
            )
        )
        if record is not None:
            self.pending = ("claim", self.state.next["claim"], record)

    def generate(self, rnd: random.Random, finish: float = 0.4) -> None:
        for ticket in owned(self.state, self.name):
            key = (ticket.number, ticket.attempt)
            if key in self.delivered or (self.finished.get(ticket.number, (None,))[0] == ticket.attempt):
                continue
            source = self.given(ticket).source if self.given(ticket).is_copy else None
            if source is not None:
                self.finished[ticket.number] = (ticket.attempt, self.world.batches[source.batch.key][source.ticket])
                continue
            if self.groups.get(ticket.number, (None,))[0] != ticket.attempt:
                self.groups[ticket.number] = (ticket.attempt, [])
            if rnd.random() < 0.7:
                self.groups[ticket.number][1].append(self.version)
                if rnd.random() < finish * self.slowness(ticket.number):
                    self.finished[ticket.number] = self.groups.pop(ticket.number)

    def given(self, ticket: Ticket) -> Place:
        return place_of(ticket.number, self.world.curriculum(ticket.curriculum))

    def reference(self, row: int, number: int, attempt: int, versions: list[int]) -> GroupRef:
        place, reuse = self.given(self.state.tickets[number]), self.world.curriculum_config.reuse
        fields = {"ticket": number, "attempt": attempt, "first_row": row, "num_rows": 1}
        if place.is_copy and place.source is not None and reuse is not None:
            source = place.source
            copied = Reused(ticket=source.ticket, oldest_version=source.oldest_version, max_age=reuse.max_age)
            return GroupRef(**fields, reused=copied)
        return GroupRef(**fields, oldest_version=min(versions))

    def slowness(self, ticket: int) -> float:
        chance = random.Random(f"{self.world.seed} {ticket} straggler").random()
        return 0.1 if chance < self.world.luck.stragglers else 1.0

    def deliver(self, rnd: random.Random, share: float = 0.6) -> None:
        self.finished = {n: group for n, group in self.finished.items() if n in self.state.tickets}
        ready = {n: group for n, group in self.finished.items() if rnd.random() < share}
        if not ready:
            return
        name = f"raw/{self.name}"
        number = len(self.world.log(name))
        batch = BatchRef(key=f"{name}/{number}", num_bytes=1, sha256="", num_rows=len(ready))
        self.world.batches[batch.key] = {n: versions for n, (_, versions) in ready.items()}
        groups = tuple(
            self.reference(i, n, attempt, versions) for i, (n, (attempt, versions)) in enumerate(ready.items())
        )
        self.world.append(name, number, Raw(writer=self.name, batch=batch, groups=groups))
        for n, (attempt, _) in ready.items():
            del self.finished[n]
            self.delivered.add((n, attempt))

    def turn(self, rnd: random.Random) -> None:
        if self.pending is not None:
            self.put(rnd)
        self.look_fully()
        self.version = max(self.version, self.state.version)
        living = {actor.name for actor in self.world.actors}
        lost = [Lease(t.number, t.attempt) for t in self.state.in_flight() if t.is_pending and t.owner not in living]
        self.decide(rnd, lost, None)
        if self.pending is not None:
            self.put(rnd)
        self.generate(rnd, finish=0.8)
        self.deliver(rnd, share=1.0)


class Reward(Actor):
    def step(self, rnd: random.Random, everything: bool = False) -> None:
        if rnd.random() < 0.5:
            self.look(rnd)
        for writer in followed(self.state):
            raw, scored = self.world.log(f"raw/{writer}"), self.world.log(f"scored/{writer}")
            while len(scored) < len(raw) and (everything or rnd.random() < 0.6):
                self.score(writer, len(scored), raw[len(scored)])

    def score(self, writer: str, number: int, raw: Record) -> None:
        assert isinstance(raw, Raw)
        chance = random.Random(f"{self.world.seed} {writer} {number}")
        bad = {g.ticket for g in raw.groups if chance.random() < self.world.luck.unscorable}
        record = Scored(
            writer=self.name,
            rollout=writer,
            batch=raw.batch,
            groups=tuple(g for g in raw.groups if g.ticket not in bad),
            refused={str(n): "unscorable" for n in bad},
        )
        self.world.append(f"scored/{writer}", number, record)

    def turn(self, rnd: random.Random) -> None:
        self.look_fully()
        self.step(rnd, everything=True)


class Curator(Actor):
    def __post_init__(self) -> None:
        self.judged: list[Judged] = []

    def step(self, rnd: random.Random) -> None:
        action = rnd.randrange(3)
        if self.pending is not None:
            if action:
                self.put(rnd)
        elif action == 0:
            self.look(rnd)
            self.read_scored(lambda: rnd.random() < 0.6)
        else:
            self.decide()

    def read_scored(self, wanted: Callable[[], bool]) -> None:
        self.judged = [j for j in self.judged if j.number >= self.state.covers.get(j.rollout, 0)]
        for writer, first in followed(self.state).items():
            number = max([first, *(j.number + 1 for j in self.judged if j.rollout == writer)])
            scored = self.world.log(f"scored/{writer}")
            while number < len(scored) and wanted():
                if any(group.ticket >= self.state.next_ticket for group in scored[number].groups):
                    self.read("claim")
                    self.catch_up()
                self.judged.append(self.judge(writer, number, scored[number]))
                number += 1

    def judge(self, writer: str, number: int, scored: Record) -> Judged:
        assert isinstance(scored, Scored)
        luck, rules = self.world.luck, self.world.rules
        verdicts = [Verdict(ticket=int(n), accepted=False, reason=why) for n, why in scored.refused.items()]
        for group in scored.groups:
            chance = random.Random(f"{self.world.seed} {group.ticket}").random()
            good = chance >= luck.refused and not (luck.refused_first_step and group.ticket < rules.groups_per_step)
            verdicts.append(self.verdict(group, scored.batch, good))
        return Judged(writer, number, tuple(verdicts))

    def verdict(self, group: GroupRef, batch: BatchRef | None, good: bool) -> Verdict:
        fields = {"ticket": group.ticket, "attempt": group.attempt, "batch": batch}
        known = self.state.tickets.get(group.ticket)
        if known is None or group.reused is not None or self.world.curriculum_config.is_plain:
            return Verdict(**fields, accepted=good, reason="" if good else "taste", group=group)
        state = self.world.curriculum(known.curriculum)
        place, config = place_of(group.ticket, state), self.world.curriculum_config
        rate = random.Random(f"{self.world.seed} {place.prompt} rate").random()
        chance, count = random.Random(f"{self.world.seed} {group.ticket} passes"), place.samples or 4
        outcome = Outcome(num_samples=count, num_passed=sum(chance.random() < rate for _ in range(count)), spread=rate)
        group, passed, total = self.join(group, place, state, outcome)
        is_pilot = isinstance(config.sampler, PilotCommitSampler) and place.samples and place.source is None
        is_part = is_pilot or (isinstance(config.sampler, AeroSampler) and not passed and total < config.sampler.limit)
        good = good and not is_part
        fields["batch"] = batch if good or is_part else None
        return Verdict(**fields, accepted=good, reason="" if good else "taste", group=group, outcome=outcome)

    def join(
        self, group: GroupRef, place: Place, state: Curriculum | None, outcome: Outcome
    ) -> tuple[GroupRef, int, int]:
        """Return the group with what it was given, the samples in it that passed, and all of them."""
        config, joined = self.world.curriculum_config, []
        given = [(place.source, getattr(config.sampler, "max_age", 0), 0.0)] if place.source is not None else []
        passed = outcome.num_passed
        if config.successes is not None and state is not None and not passed and place.prompt in state.successes:
            given.append((state.successes[place.prompt], config.successes.max_age, 1.0))
        for source, age, reward in given:
            if any(version < source.group.oldest_version for version in self.versions(source)):
                raise Broken(f"{source} does not know its oldest token")
            joined += source.group.joined
            joined.append(
                Joined(
                    ticket=source.ticket, batch=source.batch, rows=(0, 1), rewards=(reward, 0.0),
                    oldest_version=source.group.oldest_version, max_age=age, lent=bool(reward),
                )
            )  # fmt: skip
        rewards = [reward for one in joined for reward in one.rewards]
        ref = group.model_copy(update={"joined": tuple(joined)})
        return ref, passed + sum(map(int, rewards)), outcome.num_samples + len(rewards)

    def versions(self, source) -> list[int]:
        return self.world.batches[source.batch.key][source.ticket]

    def decide(self) -> None:
        record = self.world.hooks.verdicts(self.state, self.name, self.judged)
        if record is not None:
            uses = Uses(max_copies=1)
            for before in self.world.log("curated")[: self.state.next["curated"]]:
                uses.add(before)
            record = self.world.hooks.uses(uses, record)
            self.pending = ("curated", self.state.next["curated"], record)

    def turn(self, rnd: random.Random) -> None:
        if self.pending is not None:
            self.put(rnd)
        self.look_fully()
        self.read_scored(lambda: True)
        self.decide()
        if self.pending is not None:
            self.put(rnd)


class Trainer(Actor):
    def __post_init__(self) -> None:
        self.stage = "refused"
        self.is_done = False
        self.speed = self.world.luck.trainer_speed
        self.weights = self.state.version
        """Version it would train from; grows with its own commits, otherwise it has to load what others committed."""
        self.has_taken_over = self.state.trainer != ""

    def step(self, rnd: random.Random) -> None:
        if self.pending is not None:
            if rnd.random() < 0.3:
                self.put(rnd)
        elif self.stage == "refused":
            self.read("claim", rnd.randrange(4))
            self.read("curated", rnd.randrange(4))
            self.read("refused")
            self.stage = "commit"
        elif self.stage == "commit":
            self.read("commit")
            self.catch_up()
            self.stage = "decide"
        else:
            self.stage = "refused"
            self.decide(rnd)

    def decide(self, rnd: random.Random) -> None:
        if not self.has_started():
            return
        if self.refuse_some(rnd):
            return
        choice = self.world.hooks.choose(self.state, self.name, version=self.weights)
        if isinstance(choice, Recover):
            self.weights = choice.version
        elif isinstance(choice, Train):
            if choice.version != self.weights + 1:
                raise Broken(f"{self.name} trains version {choice.version} from weights of {self.weights}")
            commit = make_commit(self.name, **choice._asdict(), metrics=self.metrics(rnd))
            self.world.curricula[commit.nonce] = self.next_curriculum()
            self.pending = ("commit", choice.version, commit)
        elif isinstance(choice, Refuse):
            self.refuse(choice.tickets, choice.reason)
        elif isinstance(choice, Replaced):
            self.world.actors.remove(self)
        elif isinstance(choice, Finished):
            self.is_done = True

    def metrics(self, rnd: random.Random) -> dict[str, float]:
        """An effective sample size that moves the limit, or none."""
        rule = self.state.rules.adaptive
        return {rule.metric: rnd.random()} if rule is not None and rnd.random() < 0.9 else {}

    def put(self, rnd: random.Random) -> bool:
        self.stage = "refused"  # whatever it puts, it looks for its successor before it decides again
        return super().put(rnd)

    def won(self, record: Record) -> None:
        if isinstance(record, Commit):
            self.weights = record.version

    def next_curriculum(self) -> Curriculum:
        states = {version: self.world.curriculum(version) for version in commits_named(self.state)}
        return next_state(self.state, states, self.world.drawing)

    def has_started(self) -> bool:
        if getattr(self, "started", False):
            return True
        start = decide_start(self.state, self.name)
        if start is None:
            self.started = True
            return True
        self.pending = ("refused", self.state.next["refused"], start)
        return False

    def refuse_some(self, rnd: random.Random) -> bool:
        """A batch turns out unreadable, or a ticket takes too long."""
        if self.state.trainer != self.name or not self.world.num_refusals_left:
            return False
        has_taken_over, self.has_taken_over = self.has_taken_over, False
        if rnd.random() >= (0.5 if has_taken_over else self.world.luck.trainer_refuses):
            return False
        self.world.num_refusals_left -= 1
        accepted = has_taken_over or rnd.random() < 0.6
        victims = [t.number for t in self.state.in_flight() if t.is_accepted == accepted]
        victims = victims[:2] if has_taken_over else rnd.sample(victims, min(len(victims), 1))
        return self.refuse(victims, "unreadable" if accepted else "timeout")

    def refuse(self, tickets: Iterable[int], reason: str) -> bool:
        record = decide_refuse(self.state, self.name, tickets, reason)
        if record is not None:
            self.pending = ("refused", self.state.next["refused"], record)
        return record is not None

    def turn(self, rnd: random.Random) -> None:
        if self.pending is not None:
            self.put(rnd)
        self.look_fully()
        self.decide(rnd)


def random_rules(rnd: random.Random, **fixed) -> Rules:
    given = {
        "groups_per_step": rnd.choice([1, 2, 2, 3]),
        "steps": rnd.randint(1, 8),
        "max_staleness": rnd.choice([0, 1, 1, 2, 4, None]),
        "max_attempts": rnd.choice([1, 2, 3]),
        "claim_block": rnd.choice([1, 2, 5]),
        "deterministic": rnd.random() < 0.1,
        "stragglers": rnd.choice(["wait", "interrupt", "drop"]),
        **fixed,
    }
    needs_limit = given["max_staleness"] is None or rnd.random() < 0.1
    limit = rnd.randint(given["groups_per_step"], 3 * given["groups_per_step"]) if needs_limit else None
    return Rules(**{"max_unsettled": limit, **given})


TROUBLES: list[dict[str, float]] = [
    {"refused": 0.6, "refused_first_step": 1},
    {"unscorable": 0.2, "trainer_refuses": 0.3},
    {"lost_lease": 0.1},
    {"lost_lease": 0.02, "stragglers": 0.3},
    {"death": 0.03, "sleep": 0.02},
    {"sleep": 0.05, "stragglers": 0.2},
    {"takeover": 0.05, "trainer_refuses": 0.05},
    {"takeover": 0.2, "trainer_refuses": 0.02},
    {"stragglers": 0.4, "trainer_speed": 0.3},
    {"stragglers": 0.1, "trainer_speed": 0.1},
    {"haste": 0.1, "trainer_speed": 0.1},
    {"haste": 0.8, "trainer_speed": 0.3},
]


def random_luck(rnd: random.Random) -> Luck:
    """Two kinds of trouble do more harm than all of them at once, under which nothing moves."""
    return Luck(**{name: value for trouble in rnd.sample(TROUBLES, 2) for name, value in trouble.items()})


def random_curriculum(rnd: random.Random, eta: int | None) -> CurriculumConfig:
    """Any sampler, with and without reuse and successes."""
    age = 2 * (eta or 0) + rnd.choice([1, 2, 4])
    kind = rnd.choice(["order", "uniform", "thompson", "window", "pilot_commit", "aero"])
    sampler: dict[str, object] = {"type": kind} if kind == "order" else {"type": kind, "pool": rnd.choice([3, 20])}
    if kind in ("pilot_commit", "aero"):
        sampler["max_age"] = age
    if kind == "pilot_commit":
        sampler |= {"pilots": rnd.choice([1, 2]), "pilot_samples": 2, "rest": rnd.choice([0, 3])}
    if kind == "aero":
        sampler |= {"explore": 3, "more": 1, "limit": 7}
    reuse = {"share": rnd.choice([0.2, 0.5]), "max_age": age, "size": 4} if rnd.random() < 0.6 else None
    successes = {"max_age": age, "below": 0.9} if rnd.random() < 0.5 else None
    return CurriculumConfig.model_validate({"sampler": sampler, "reuse": reuse, "successes": successes})


def play(
    seed: int,
    hooks: Hooks | None = None,
    luck: Luck | None = None,
    num_steps: int = 1000,
    curriculum: CurriculumConfig | None = None,
    **fixed,
) -> World:
    """One run: up to `num_steps` of chaos, then fair turns to its end."""
    rnd = random.Random(seed)
    rules = random_rules(rnd, **fixed)
    world = World(rules, luck or random_luck(rnd), hooks or Hooks(), seed)
    if curriculum is not None:
        world = World(rules, world.luck, world.hooks, seed, curriculum_config=curriculum)
    for _ in range(rnd.randrange(num_steps)):
        world.step(rnd)
        if world.truth.is_finished and rnd.random() < 0.1:
            break
    world.check_views()
    world.finish(rnd)
    world.check_views()
    return world


ZOMBIES = Luck(takeover=0.3, trainer_refuses=0.02)
"""Trainers are replaced while they work, and wake up again."""

SLOW_GROUPS = Luck(stragglers=0.3, trainer_speed=0.3)
"""Many groups are ready while a few take very long."""


# --- the protocol holds ---


@pytest.mark.parametrize("seed", range(0, 200 * SCALE, 20))
def test_every_run_ends_within_its_bound_and_trains_each_ticket_once(seed):
    for s in range(seed, seed + 20):
        play(s)


@pytest.mark.parametrize("eta", [0, 1, 2, 4, None])
@pytest.mark.parametrize("stragglers", ["wait", "interrupt", "drop"])
def test_slow_groups_neither_break_the_bound_nor_stop_the_run(eta, stragglers):
    for seed in range(4 * SCALE):
        play(seed, luck=SLOW_GROUPS, max_staleness=eta, stragglers=stragglers, groups_per_step=2, steps=8)


ADAPTIVE = Adaptive("policy/ess_token", low=0.4, high=0.6, lowest=0)


@pytest.mark.parametrize("stragglers", ["wait", "interrupt", "drop"])
def test_a_limit_that_moves_keeps_the_bound_and_stops_nothing(stragglers):
    moved = set()
    for seed in range(12 * SCALE):
        rules = {"max_staleness": (1, 2, 4, 8)[seed % 4], "steps": 12, "adaptive": ADAPTIVE, "stragglers": stragglers}
        luck = (SLOW_GROUPS, ZOMBIES, None)[seed % 3]
        moved |= set(play(seed, luck=luck, **rules).limits)
    assert {0, 1, 2, 4, 8} <= moved, "the case must occur to be tested"


@pytest.mark.parametrize("eta", [0, 1, 4, None])
def test_whatever_the_curriculum_every_run_ends_and_what_is_used_again_is_within_its_own_bound(eta):
    worlds = []
    for seed in range(12 * SCALE):
        curriculum = random_curriculum(random.Random(seed), eta)
        worlds.append(play(seed, num_steps=500, curriculum=curriculum, max_staleness=eta, steps=6 + (eta or 0)))
    consumed = [group.group for world in worlds for record in world.log("commit")[1:] for group in record.consumed]
    assert sum(group.reused is not None for group in consumed) >= 5, "the case must occur to be tested"
    assert sum(bool(group.joined) for group in consumed) >= 1, "the case must occur to be tested"


class Careless(Drawing):
    """Offers sources that somebody may be holding by an older state."""

    def may_offer(self, source, state, version):
        return True


MUCH_REUSE = {
    "curriculum": CurriculumConfig.model_validate({"reuse": {"share": 0.6, "max_age": 9, "size": 2}}),
    "max_staleness": 4,
    "steps": 12,
}


def test_a_source_is_used_once_even_if_it_is_offered_to_many():
    """Views lag, the trainer's too: what somebody has claimed is offered once more, and refused."""
    worlds = [play(seed, Hooks(drawing=Careless), num_steps=400, **MUCH_REUSE) for seed in range(10 * SCALE)]
    verdicts = [verdict for world in worlds for record in world.log("curated") for verdict in record.verdicts]
    assert sum(verdict.reason.startswith("used_before") for verdict in verdicts) >= 1, "the case must occur"
    assert sum(len(world.uses) for world in worlds) >= 5, "the case must occur to be tested"


def test_a_replaced_trainer_whose_last_commit_wins_does_no_harm():
    worlds = [play(seed, luck=ZOMBIES, groups_per_step=2, steps=6) for seed in range(60 * SCALE)]
    assert sum(world.truth.num_both > 0 for world in worlds) >= 3, "the case must occur to be tested"
    assert sum(world.truth.num_overbooked > 0 for world in worlds) >= 1, "the case must occur to be tested"


def test_a_step_whose_groups_are_all_refused_is_refilled():
    for seed in range(5):
        world = play(seed, luck=Luck(refused_first_step=1, refused=0), num_steps=1, max_staleness=0)
        assert world.truth.num_refused >= world.rules.groups_per_step


def test_the_state_does_not_depend_on_the_interleaving_and_a_snapshot_can_be_taken_anywhere():
    for seed in range(20 * SCALE):
        world = play(seed, luck=ZOMBIES if seed % 2 else None)
        rnd = random.Random(seed)
        state = RunState(world.rules)
        while ready := [log for log in LOGS if state.next[log] < len(world.log(log))]:
            log = rnd.choice(ready)
            for _ in range(min(rnd.choice([1, 1, 9]), len(world.log(log)) - state.next[log])):
                state.apply(log, state.next[log], world.log(log)[state.next[log]])
            if rnd.random() < 0.3:
                state = RunState.from_snapshot(world.rules, json.loads(json.dumps(state.snapshot())))
            if rnd.random() < 0.1:
                assert state == world.fold(state.next)
                assert state.account() == world.count(state.next)
        assert state == world.truth


def test_what_a_restart_reads_does_not_grow_with_the_run():
    def mean_size(steps: int) -> float:
        rules = Rules(groups_per_step=3, steps=steps, max_staleness=1, claim_block=4)
        world, rnd, sizes = World(rules, Luck(refused=0.3, death=0)), random.Random(0), []
        while not world.truth.is_finished:
            for actor in list(world.actors):
                actor.turn(rnd)
            sizes.append(len(json.dumps(world.truth.snapshot())))
        return sum(sizes) / len(sizes)

    assert mean_size(120) < 1.2 * mean_size(20)


class Machine(RuleBasedStateMachine):
    """The same world, led astray by Hypothesis."""

    @initialize(
        seed=st.integers(0, 999),
        eta=st.sampled_from([0, 1, 2, 4, None]),
        adaptive=st.sampled_from([None, ADAPTIVE, replace(ADAPTIVE, lowest=1)]),
    )
    def begin(self, seed, eta, adaptive):
        rnd = random.Random(seed)
        curriculum = random_curriculum(rnd, eta) if seed % 2 else CurriculumConfig()
        rules = random_rules(rnd, max_staleness=eta, adaptive=adaptive if (eta or 0) > 1 else None)
        self.world = World(rules, random_luck(rnd), Hooks(), seed, curriculum_config=curriculum)
        self.fate = random.Random(seed)

    @rule(index=st.integers(0, 8), times=st.integers(1, 4))
    def step(self, index, times):
        for _ in range(times):
            if self.world.actors:
                self.world.actors[index % len(self.world.actors)].step(self.fate)

    @rule(index=st.integers(0, 8))
    def turn(self, index):
        if self.world.actors:
            self.world.actors[index % len(self.world.actors)].turn(self.fate)

    @rule(rounds=st.integers(1, 4))
    def everybody(self, rounds):
        for _ in range(rounds):
            for actor in list(self.world.actors):
                actor.turn(self.fate)

    @rule(index=st.integers(0, 8))
    def die(self, index):
        if self.world.actors:
            self.world.actors.pop(index % len(self.world.actors))

    @rule(kind=st.sampled_from([Worker, Reward, Curator, Trainer]))
    def spawn(self, kind):
        if len(self.world.actors) < 9:
            self.world.spawn(kind, self.fate)

    @rule(index=st.integers(0, 8))
    def take_over(self, index):
        waiting = [actor for actor in self.world.actors if actor.pending is not None]
        if waiting:
            self.world.take_over(waiting[index % len(waiting)], self.fate)

    @rule(index=st.integers(0, 8))
    def snapshot(self, index):
        if self.world.actors:
            actor = self.world.actors[index % len(self.world.actors)]
            self.world.snapshots.append(json.dumps(actor.state.snapshot()))

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "world"):
            assert self.world.truth.account() == self.world.count(self.world.truth.next)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.check_views()
            self.world.finish(self.fate)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40 * SCALE,
    stateful_step_count=40,
    deadline=None,
    derandomize=SCALE == 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- the simulation notices a protocol that does not hold ---


def first_come(state: RunState, writer: str, **arguments) -> object:
    """Train whatever was accepted first."""
    choice = choose_groups(state, writer, **arguments)
    ready = sorted((t for t in state.in_flight() if t.is_accepted), key=lambda t: (t.verdict_at, t.number))
    if isinstance(choice, Replaced | Recover | Finished) or len(ready) < state.rules.groups_per_step:
        return choice
    taken = [t.verdict for t in ready[: state.rules.groups_per_step]]
    consumed = tuple(
        Consumed(ticket=v.ticket, attempt=v.attempt, batch=v.batch, group=v.group) for v in taken if v is not None
    )
    version = state.version + 1
    return Train(version, consumed, {**state.next}, version * state.rules.groups_per_step)


def one_too_many(state: RunState, writer: str, **arguments) -> Claim | None:
    """Claim one ticket more than there is room for."""
    claim = decide_claim(state, writer, **arguments)
    if claim is None:
        return None
    end = claim.next_ticket + 1
    return claim.model_copy(update={"tickets": (*claim.tickets, end - 1), "next_ticket": end})


def room_of_the_newest(state: RunState, writer: str, *, version: int, **arguments) -> Claim | None:
    """Claim what the newest version admits with the deadline of older weights."""
    claim = decide_claim(state, writer, version=state.version, **arguments)
    if claim is None:
        return None
    return claim.model_copy(update={"version": version, "deadline": state.rules.deadline(version)})


def ignore_the_limit(state: RunState, writer: str, *, version: int, **arguments) -> Claim | None:
    """Claim what the bound allows, whatever the limit is."""
    plain = RunState.from_snapshot(state.rules, state.snapshot())
    plain.limit = plain.limit._replace(versions=state.rules.max_staleness or 0)
    return decide_claim(plain, writer, version=version, **arguments)


def last_word(state: RunState, writer: str, **arguments) -> object:
    """Go on although another trainer has started."""
    return choose_groups(state, state.trainer, **arguments)


def old_weights(state: RunState, writer: str, *, version: int) -> object:
    """Train from whatever weights one has."""
    return choose_groups(state, writer)


def forget_covers(state: RunState, writer: str, judged: Iterable[Judged]) -> Curated | None:
    """Take every record for dealt with."""
    judged = list(judged)
    record = decide_verdicts(state, writer, judged)
    if record is None:
        return None
    return record.model_copy(update={"covers": {j.rollout: j.number + 1 for j in judged}})


class ForgetsAtOnce(RunState):
    """Forgets what became of a ticket as soon as it is settled."""

    def _is_final(self, ticket: Ticket) -> bool:
        return ticket.is_trained or ticket.is_refused


class CountsEvents(RunState):
    """Counts a ticket that was refused twice as two."""

    def _apply_refused(self, number: int, record: Refused) -> None:
        super()._apply_refused(number, record)
        known = [self.tickets[n] for n in record.tickets if n in self.tickets]
        self.num_refused += sum(t.verdict is not None and not t.verdict.accepted for t in known)


@pytest.mark.parametrize(
    ("hooks", "circumstances"),
    [
        (Hooks(choose=first_come), {"luck": SLOW_GROUPS, "max_staleness": 1, "stragglers": "wait", "steps": 8}),
        (Hooks(claim=one_too_many), {"max_staleness": 1, "max_unsettled": None}),
        (Hooks(claim=room_of_the_newest), {"luck": replace(SLOW_GROUPS, sleep=0.1), "max_staleness": 1, "steps": 8}),
        (Hooks(claim=ignore_the_limit), {"max_staleness": 4, "adaptive": ADAPTIVE, "steps": 12}),
        (Hooks(choose=last_word), {"luck": ZOMBIES}),
        (Hooks(choose=old_weights), {"luck": ZOMBIES}),
        (Hooks(verdicts=forget_covers), {}),
        (Hooks(uses=lambda uses, record: record, drawing=Careless), MUCH_REUSE),
        (Hooks(state=ForgetsAtOnce), {"luck": ZOMBIES}),
        (Hooks(state=CountsEvents), {"luck": Luck(refused=0.5, trainer_refuses=0.5, sleep=0.05)}),
    ],
    ids=[
        "first_come",
        "one_too_many",
        "room_of_the_newest",
        "ignore_the_limit",
        "last_word",
        "old_weights",
        "forget_covers",
        "use_again",
        "forgets",
        "counts_events",
    ],
)
def test_a_broken_rule_is_noticed(hooks, circumstances):
    with pytest.raises((Broken, ProtocolError)):
        for seed in range(150):
            play(seed, hooks, **circumstances)

"""The rollout role: claims tickets, samples their groups, writes finished groups as raw batches.

One thread: it steps the engine, and between two steps reads the records, takes new weights, claims what there
is room for, and publishes what is finished.

rollout waits for: room to claim.   unblocked by: a commit, a refusal, a lost lease of another worker.
"""

import time
from collections import deque
from collections.abc import Iterator

import pyarrow as pa
import torch

from data_contracts import trajectory
from data_contracts.curriculum import Curriculum, Place, Source, place_of
from data_contracts.errors import ConfigError, ContractError, ObjectMissing
from data_contracts.protocol import Leases, RunState, decide_claim, decide_rebase, decide_reclaim, owned, room
from data_contracts.protocol_state import LogName
from data_contracts.records import DELIVERED, Claim, GroupRef, Raw
from infra.crash import point
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.objects import put_batch
from models.requests import Finished, Request, stop_texts
from tasks.branching import FROM_PROMPT, starts_from, trunk_of
from tasks.curriculum import CurriculumReader
from tasks.engine import RolloutEngine, make_rollout_engine
from tasks.envs.registry import Envs, build_envs
from tasks.full_weights import WeightsFinder
from tasks.ledger import Ledger
from tasks.prompts import encode_prompt, with_guidance
from tasks.raw_rows import Group, make_raw_table, sample_seed, temperature_of
from tasks.reuse import copy_group
from tasks.role import Role

PUBLISH_AFTER_S = 0.5

Key = tuple[int, int, int]
"""(ticket, attempt, sample)."""


def run(role: Role) -> None:
    """Roll out until every step of the run is committed."""
    torch.set_num_threads(role.config.rollout.threads)
    while True:
        ledger = Ledger(role.store, role.config)
        if ledger.newest is not None:
            break
        role.wait("the first version", on=("start",))
    worker = Worker(role, ledger)
    try:
        while not worker.is_over():
            worker.turn()
        worker.publish()
    finally:
        worker.close()


class Worker:
    """One rollout process: an engine, the tickets it holds, and its raw log."""

    def __init__(self, role: Role, ledger: Ledger) -> None:
        self._role = role
        self._config = role.config
        self._ledger = ledger
        self._weights = WeightsFinder(role, lambda: ledger.newest)
        self._raw = Log(role.store, f"log/raw/{role.writer}", Raw)
        self._next_raw = 0
        self._envs: Envs = build_envs(role.config.envs, role.config.seed)
        if role.config.rollout.guided_samples:
            for env in self._envs.by_name.values():
                with_guidance(env.prompt(0))  # an env without guidance ends the run here, not in every group
        self._engine, self._tokenizer = self._load_engine()
        stop = role.config.rollout.sampling.stop
        self._stops = stop_texts(self._tokenizer, stop) if stop else None
        self._curricula = CurriculumReader(ledger)
        self._open: dict[tuple[int, int], Group] = {}
        self._finished: deque[Group] = deque()
        self._oldest_finished = 0.0
        self._leases = Leases(role.config.staleness.lease_s)
        self._looked_at = float("-inf")
        self._synced_at = float("-inf")
        self._counted = 0
        self._checked: dict[LogName, int] = {}
        self._aborted = {"aborted_groups": 0.0, "aborted_tokens": 0.0}

    def _load_engine(self) -> tuple[RolloutEngine, object]:
        def wanted() -> int:
            self._ledger.sync()
            state = self._ledger.state
            return first_open_version(state) if self._config.staleness.exact else state.version

        return make_rollout_engine(self._role, self._weights, wanted)

    def close(self) -> None:
        """Let the engine go."""
        self._engine.close()

    def is_over(self) -> bool:
        """Whether nothing is left to do in this run, or for a process that was asked to leave it."""
        is_done = self._ledger.state.is_finished or self._role.is_over
        return is_done or (self._role.is_finishing and not self._open)

    def turn(self) -> None:
        """Read, load, claim, step, publish: whatever of these there is to do."""
        self._role.check()
        self._sync()
        self._drop_lost()
        self._take_weights()
        self._rebase()
        if not self._role.is_finishing:
            self._take_over()
            self._claim()
        if self._engine.num_in_flight or self._engine.num_queued:
            self._role.progressed(
                f"sampling {self._engine.num_in_flight} sequences under version {self._engine.version}"
            )
            for result in self._engine.step():
                self._collect(result)
            self._role.tokens = self._engine.num_tokens
        if self._finished and self._is_due():
            self.publish()
        elif not self._open and not self.is_over():
            self._role.wait("room to claim", on=("train", "curate", "reward"))
            self._synced_at = float("-inf")
        self._show_held()

    def _sync(self) -> None:
        # A look costs four requests: on a folder nothing, on object storage more than a decoding step.
        now = time.monotonic()
        if now - self._synced_at >= self._role.store.pacing[0]:
            self._ledger.sync()
            self._synced_at = now

    def _take_weights(self) -> None:
        newest = self._ledger.state.version
        if newest == self._engine.version or (self._open and not self._config.rollout.swap_in_flight):
            return
        if self._config.staleness.exact:
            if self._open or room(self._ledger.state, self._engine.version) > 0:
                return
            newest = self._engine.version + 1
        if self._engine.take(newest):
            self._role.progressed(f"loaded version {newest}")

    def _drop_lost(self) -> None:
        """Stop sampling groups that are another worker's by now, or settled: nobody waits for them here."""
        if self._checked == self._ledger.state.next:
            return
        self._checked = dict(self._ledger.state.next)
        mine = {(ticket.number, ticket.attempt) for ticket in owned(self._ledger.state, self._role.writer)}
        for key in [key for key in self._open if key not in mine]:
            self._role.progressed(f"ticket {key[0]} is no longer its own")
            group = self._open.pop(key)
            results = self._engine.abort((*key, sample) for sample in range(group.num_samples))
            self._aborted["aborted_groups"] += 1
            self._aborted["aborted_tokens"] += sum(len(r.response_ids) for r in (*results, *group.results.values()))

    @property
    def num_open(self) -> int:
        """Groups that are being sampled."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being sampled, and nothing that is sampled waits to be written."""
        return not (self._open or self._finished)

    def _rebase(self) -> None:
        """Put groups that hold training up on the weights in the engine, when stragglers are to be interrupted."""
        while record := decide_rebase(
            self._ledger.state, self._role.writer, self._unfinished(), version=self._engine.version
        ):
            point("rollout.rebase")
            self._ledger.append(record)

    def _unfinished(self) -> list[int]:
        return [group.ticket for group in self._open.values()]

    def _claim(self) -> None:
        limit = self._num_groups_wanted()
        while limit > 0:
            state = self._ledger.state
            record = decide_claim(
                state, self._role.writer, version=self._engine.version, curriculum=state.version, limit=limit
            )
            if record is None:
                return
            point("rollout.before_claim")
            if self._ledger.append(record):
                point("rollout.claimed")
                self._begin(record)
                limit = self._num_groups_wanted()

    def _num_groups_wanted(self) -> int:
        """Return how many more groups keep the slots busy: at least one when nothing is in flight."""
        free = self._engine.num_free // self._config.samples_per_group
        return free if self._open else max(free, 1)

    def _take_over(self) -> None:
        """Claim again what workers that are gone have left."""
        now = time.monotonic()
        if now - self._looked_at < self._config.orchestration.heartbeat_s:
            return
        self._looked_at = now
        beats = {beat.writer: beat for beat in read_heartbeats(self._role.store, "rollout")}
        lost = self._leases.observe(now, self._ledger.state, beats, self._role.dead_writers)
        lost = [lease for lease in lost if self._ledger.state.tickets[lease.ticket].owner != self._role.writer]
        while lost:
            record = decide_reclaim(
                self._ledger.state, self._role.writer, lost, version=self._engine.version, limit=None
            )
            if record is None:
                return
            point("rollout.before_reclaim")
            if self._ledger.append(record) and record.kind == "reclaim":
                self._begin(record)

    def _begin(self, record: Claim) -> None:
        """Submit the groups of a claim that stands; deliver at once those that are copies of earlier ones."""
        curriculum = self._curricula.at(record.curriculum)
        copies: list[tuple[int, Source]] = []
        for ticket in record.tickets:
            place = place_of(ticket, curriculum)
            if place.is_copy and place.source is not None:
                copies.append((ticket, place.source))
            else:
                self._submit(self._make_group(ticket, record, place))
        self._deliver_copies(copies, record, curriculum)
        self._role.progressed(f"claimed tickets {record.tickets[0]} to {record.tickets[-1]}")

    def _submit(self, group: Group) -> None:
        self._open[(group.ticket, group.attempt)] = group
        if group.error:
            self._close(group)
            return
        for sample in range(group.num_samples):
            if trunk_of(sample, self._config.rollout.branching) < 0:
                self._engine.submit(self._request(group, sample))

    def _make_group(self, ticket: int, record: Claim, place: Place, *, error: str = "") -> Group:
        prompt = self._envs.prompt_for(place.prompt)
        limit = self._engine.max_length - self._config.rollout.sampling.max_new_tokens
        env = self._envs.env_of(prompt.id).name
        ids: list[int] = []
        guided: list[int] = []
        try:
            ids = encode_prompt(prompt, self._tokenizer, limit)
            if self._config.rollout.guided_samples:
                guided = encode_prompt(with_guidance(prompt), self._tokenizer, limit)
        except ConfigError as cause:  # one prompt that does not fit is an error row, not the end of the run
            error = error or str(cause)
        num_samples = place.samples or self._config.samples_per_group
        return Group(ticket, record.attempt, prompt.id, env, ids, record.at, num_samples, error, guided)

    def _deliver_copies(self, copies: list[tuple[int, Source]], record: Claim, curriculum: Curriculum) -> None:
        """Write copies of earlier groups, each under its own ticket, as one batch and one raw record."""
        reuse = self._config.curriculum.reuse
        if not copies or reuse is None:
            return
        tables: list[pa.Table] = []
        references: list[GroupRef] = []
        for ticket, source in copies:
            first = sum(table.num_rows for table in tables)
            try:
                table, reference = copy_group(self._role.store, source, ticket, record.attempt, first, reuse.max_age)
            except (ContractError, ObjectMissing) as cause:  # torn since: the ticket gets no samples, and says why
                self._submit(self._make_group(ticket, record, place_of(ticket, curriculum), error=str(cause)))
                continue
            tables.append(table)
            references.append(reference)
        if tables:
            self._append_raw(pa.concat_tables(tables), references)

    def _request(self, group: Group, sample: int) -> Request:
        sampling = self._config.rollout.sampling
        is_guided = sample < self._config.rollout.guided_samples
        shared = group.starts.get(sample, FROM_PROMPT).prefix.tolist()
        return Request(
            key=(group.ticket, group.attempt, sample),
            prompt_ids=[*(group.guided_ids if is_guided else group.prompt_ids), *shared],
            seed=sample_seed(group.ticket, sample),
            max_new_tokens=sampling.max_new_tokens - len(shared),
            temperature=temperature_of(sample, group.num_samples, self._config),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stops=self._stops,
        )

    def _collect(self, result: Finished) -> None:
        ticket, attempt, sample = result.key  # pyright: ignore[reportGeneralTypeIssues]
        group = self._open[(ticket, attempt)]
        group.results[sample] = result
        self._branch(group, sample, result)
        if len(group.results) == group.num_samples:
            self._close(group)

    def _branch(self, group: Group, sample: int, result: Finished) -> None:
        """Submit the samples that go on from the middle of a finished one."""
        branching = self._config.rollout.branching
        if branching is None or trunk_of(sample, branching) >= 0:
            return
        starts = starts_from(sample, result.response_ids, result.logprobs, branching, group.num_samples)
        group.starts |= starts
        for branch in starts:
            self._engine.submit(self._request(group, branch))

    def _close(self, group: Group) -> None:
        del self._open[(group.ticket, group.attempt)]
        if not self._finished:
            self._oldest_finished = time.monotonic()
        self._finished.append(group)

    def _is_due(self) -> bool:
        """Whether to write: a batch is full, nothing else is coming, or the oldest result has waited long enough."""
        return (
            not self._open
            or len(self._finished) >= self._config.rollout.groups_per_batch
            or time.monotonic() - self._oldest_finished > PUBLISH_AFTER_S
        )

    def publish(self) -> None:
        """Write the finished groups as batches, and a raw record for each."""
        while self._finished:
            groups = [
                self._finished.popleft() for _ in range(min(len(self._finished), self._config.rollout.groups_per_batch))
            ]
            self._append_raw(*make_raw_table(groups, self._config))

    def _append_raw(self, table: pa.Table, references: list[GroupRef]) -> None:
        point("rollout.before_batch")
        batch = put_batch(self._role.store, trajectory.check(table, "raw"))
        point("rollout.before_raw")
        record = Raw(writer=self._role.writer, batch=batch, groups=tuple(references), metrics=self._count(table))
        self._raw.append(self._next_raw, record)
        self._next_raw += 1
        point("rollout.raw")
        self._role.held |= {str(group.ticket): DELIVERED for group in references}

    def _count(self, table: pa.Table) -> dict[str, float]:
        """Return what this process did since its last record."""
        tokens, self._counted = self._counted, self._engine.num_tokens
        aborted, self._aborted = self._aborted, dict.fromkeys(self._aborted, 0.0)
        prompts = sum(len(ids) for ids in table.column("prompt_ids").to_pylist())
        return (
            {
                "tokens": float(self._engine.num_tokens - tokens),
                "prompt_tokens": float(prompts),
                "rows": float(table.num_rows),
            }
            | {name: value for name, value in aborted.items() if value}
            | self._role.take_times()
        )

    def _show_held(self) -> None:
        """Keep the heartbeat's counters: they move with progress, and only with it."""
        counters = {str(group.ticket): len(group.results) for group in self._open.values()}
        for (ticket, _, _), tokens in self._progress():
            counters[str(ticket)] = counters.get(str(ticket), 0) + tokens
        counters |= {str(group.ticket): 1 << 30 for group in self._finished}
        pending = self._ledger.state.tickets
        delivered = {
            ticket: DELIVERED
            for ticket, counter in self._role.held.items()
            if counter == DELIVERED and int(ticket) in pending and pending[int(ticket)].is_pending
        }
        self._role.held = delivered | counters

    def _progress(self) -> Iterator[tuple[Key, int]]:
        for key, tokens in self._engine.progress().items():
            yield key, tokens + 1  # pyright: ignore[reportReturnType]


def first_open_version(state: RunState) -> int:
    """Return the oldest version that admits a ticket which nobody has claimed; the newest one when none does."""
    return next((version for version in range(state.version) if room(state, version) > 0), state.version)

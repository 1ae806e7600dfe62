"""The protocol: who may do what next. Views of the logs in, decisions out; no clock and no store.

    rollout --raw--> reward --scored--> curate --curated--> train --commit--> rollout

Every role runs one loop: read the logs further and `apply` them, decide, append the decided record at
`state.next[log]`. If another record was there first, apply that one and decide again. Decisions return
complete records (their nonce and time for people are stamped on by the record itself) or small commands.

rollout   waits for: room, or a lost lease.            unblocked by: a commit, a refusal
reward    waits for: raw records of followed writers.  unblocked by: rollout
curate    waits for: scored records, given-up tickets. unblocked by: reward, rollout
train     waits for: enough accepted groups, such that those left behind can still make it.
                                                       unblocked by: curate, a rebase, its own refusals
Nobody waits for a person.

Why the bound holds. When `n` more tickets are claimed with version w, all tickets in flight, these included,
number at most (w + eta + 1 - v) * B for every commit v up to now: exactly the places of the steps up to the
new tickets' deadline w + eta. Each commit takes B of them away and one step. So whatever the trainer
consumes, the tickets in flight up to a deadline always fit their places in number; the trainer's rule
(`choose_groups`) sees to it that they also fit in order. A view that lags sees less room, never more: only
claims take room away, and an append to `claim` proves that the view of `claim` was complete.

An eta that adapts (`protocol_limit`) lies between its lowest value and the bound, so it only takes room away; deadlines
stay those of the bound. It is a fold over commits: views that have applied the same commits agree on it. One that lags
may still see a larger one, which the bound allows too. Nothing stands still: with v the newest commit, eta = 0 still
leaves room for the B groups of the next step.

The one exception is a trainer that was replaced while it worked and whose last commit still won: it may
have trained tickets that its successor had refused and whose places were given away again. There are at
most as many surplus groups as such tickets (`RunState.num_both`); the trainer refuses them as overbooked. One
that is claimed in a lagging view after the last commit stays in flight when the run is over.
"""

from data_contracts.protocol_curate import Judged, decide_verdicts, followed
from data_contracts.protocol_leases import Lease, Leases, Timeouts
from data_contracts.protocol_rollout import decide_claim, decide_rebase, decide_reclaim, owned, room
from data_contracts.protocol_state import LOGS, RETURNED, LogName, RunState
from data_contracts.protocol_ticket import Account, Rules, Ticket
from data_contracts.protocol_train import (
    Finished,
    Recover,
    Refuse,
    Replaced,
    Train,
    Wait,
    choose_groups,
    decide_refuse,
    decide_start,
    ready_groups,
)

__all__ = [
    "LOGS",
    "RETURNED",
    "Account",
    "Finished",
    "Judged",
    "Lease",
    "Leases",
    "LogName",
    "Recover",
    "Refuse",
    "Replaced",
    "Rules",
    "RunState",
    "Ticket",
    "Timeouts",
    "Train",
    "Wait",
    "choose_groups",
    "decide_claim",
    "decide_rebase",
    "decide_reclaim",
    "decide_refuse",
    "decide_start",
    "decide_verdicts",
    "followed",
    "owned",
    "ready_groups",
    "room",
]

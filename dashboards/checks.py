"""The books of a run: statements that hold in a sound run, checked against what was counted record by record."""

from dataclasses import dataclass

from dashboards.fold import Fold


@dataclass(frozen=True)
class Check:
    """A statement that holds in a sound run."""

    name: str
    is_ok: bool
    detail: str


def balance(fold: Fold, max_staleness: int | None, groups_per_step: int | None) -> list[Check]:
    """Compare what was counted ticket by ticket with the running totals that the records carry."""
    settled = fold.trained + fold.refused_curation + fold.refused_trainer
    parts = (
        f"{fold.trained} trained + {fold.refused_curation + fold.refused_trainer} refused + {len(fold.open)} in flight"
    )
    checks = [
        Check(
            "every ticket is accounted for", fold.issued == settled + len(fold.open), f"{fold.issued} issued = {parts}"
        )
    ]
    twice = "; ".join(fold.contradictions[:3]) or f"{fold.trained} tickets in {max(len(fold.versions) - 1, 0)} commits"
    checks.append(Check("no ticket was trained twice", not fold.contradictions, twice))
    totals = []
    if fold.last_commit:
        totals.append(("trained", fold.trained, fold.last_commit.num_trained))
    if fold.last_curated:
        totals.append(("accepted", fold.verdicts[True], fold.last_curated.num_accepted))
        totals.append(("refused by curation", fold.verdicts[False], fold.last_curated.num_refused))
    if fold.last_refused:
        totals.append(("refused by the trainer", fold.refused_trainer, fold.last_refused.num_refused))
    for name, counted, told in totals:
        checks.append(
            Check(f"{name}: records and their totals agree", counted == told, f"{counted} counted, {told} told")
        )
    ages = [v.max_staleness for v in fold.versions if v.max_staleness is not None]
    if ages:
        bound = "no bound" if max_staleness is None else f"bound {max_staleness}"
        is_ok = max_staleness is None or max(ages) <= max_staleness
        checks.append(Check("staleness stays within its bound", is_ok, f"at most {max(ages):g} versions, {bound}"))
    if groups_per_step:
        odd = [v.version for v in fold.versions if v.status != "initial" and v.num_groups != groups_per_step]
        detail = f"{groups_per_step} groups each" if not odd else f"not so in versions {odd[:5]}"
        checks.append(Check("every commit consumed a full step", not odd, detail))
    return checks

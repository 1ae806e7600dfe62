"""How the costs of asking a run for its books and its quarantine grow: `python -m tests.benchmarks.bench_books`.

Processor time of `reconcile`, and of listing the quarantine with every ticket's fate, on runs of n and 4 n steps: 4
times as much is linear.
"""

import time
from collections.abc import Callable

from dashboards.reconcile import reconcile
from infra.store import Store, open_store
from tasks.quarantine import fates, quarantine, read_quarantine
from tests.dashboards.build_run import build_run

STEPS = (40, 160)
LIMIT = 6.0
"""Most that four times the records may cost: linear, with room for noise."""


def make_run(steps: int) -> tuple[Store, int]:
    """Return a run in memory, and the number of refusals in its quarantine."""
    store = open_store(f"memory://books{steps}").at("run")
    build_run(store, steps=steps)
    refused = [ticket for ticket, fate in fates(store).items() if fate.startswith("refused")]
    for ticket in refused:
        quarantine(store, "curate", [ticket], "zero_variance", {"ticket": ticket}, None)
    return store, len(refused)


def measure(function: Callable[[], object], repeats: int = 3) -> float:
    """Return the smallest of some measurements, in processor seconds."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    """Print the times and their ratios."""
    told: dict[str, list[float]] = {"reconcile": [], "quarantine": []}
    for steps in STEPS:
        store, num_refused = make_run(steps)
        told["reconcile"].append(measure(lambda store=store: reconcile(store)))
        told["quarantine"].append(measure(lambda store=store: (read_quarantine(store), fates(store))))
        print(f"{steps} steps, {num_refused} refusals: " + ", ".join(f"{n} {t[-1]:.3f} s" for n, t in told.items()))
    for name, (few, many) in told.items():
        print(f"{name}: {many / few:.2f} times for {STEPS[1] / STEPS[0]:.0f} times the records, limit {LIMIT}")
        if many > LIMIT * few:
            raise SystemExit(f"{name} grows faster than its records")


if __name__ == "__main__":
    main()

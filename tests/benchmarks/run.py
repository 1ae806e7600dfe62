"""Prints every benchmark: `make bench`. Ratios measured side by side in one run are what counts."""

import argparse
import subprocess
import sys

BENCHMARKS = (
    "bench_log",
    "bench_engine",
    "bench_trainer",
    "bench_loss",
    "bench_contracts",
    "bench_books",
    "bench_run",
    "bench_vllm",
)


def main() -> int:
    """Run the benchmarks one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=BENCHMARKS)
    failed = 0
    for name in parser.parse_args().names:
        print(f"== {name}", flush=True)
        failed |= subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())

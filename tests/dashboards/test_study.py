import math

import pytest

from dashboards.study import Outcome, Results, estimate, render_body, render_markdown, sentences
from data_contracts.study import Cell, StudyConfig

STUDY = StudyConfig(name="s", presets=("grpo", "gspo", "cispo"), staleness=(0, 8), seeds=(0, 1, 2))
FINAL = {
    ("grpo", 0): (0.8, 0.82, 0.81),
    ("grpo", 8): (0.4, 0.6, 0.5),
    ("gspo", 0): (0.79, 0.83, 0.81),
    ("gspo", 8): (0.61, 0.8, 0.705),
    ("cispo", 0): (0.6, 0.62, 0.6),
    ("cispo", 8): (0.45, 0.55, 0.55),
}


@pytest.fixture
def results() -> Results:
    outcomes = {
        Cell(preset, staleness, seed): Outcome({0: 0.3, 10: score}, {"policy/entropy": 0.1 * seed})
        for (preset, staleness), scores in FINAL.items()
        for seed, score in enumerate(scores)
    }
    return Results(STUDY, outcomes)


def test_an_interval_is_that_of_student() -> None:
    found = estimate([0.4, 0.6, 0.5])
    assert (found.mean, found.half) == (pytest.approx(0.5), pytest.approx(4.303 * 0.1 / math.sqrt(3)))
    assert math.isnan(estimate([0.4]).half)
    assert str(estimate([0.4])) == "0.400"


def test_differences_are_paired_by_seed(results: Results) -> None:
    """The seeds scatter by 0.1, the differences hardly at all."""
    gain = results.gain("gspo", 8)
    assert gain.mean == pytest.approx(0.205)
    assert gain.half < 0.05
    assert results.final("gspo", 8).half > 0.2


def test_a_verdict_needs_an_interval_without_zero(results: Results) -> None:
    verdicts = {cell: results.verdict(*cell) for cell in FINAL if cell[0] != "grpo"}
    assert verdicts == {("gspo", 0): "the same", ("gspo", 8): "better", ("cispo", 0): "worse", ("cispo", 8): "the same"}


def test_the_sentences_name_who_is_better(results: Results) -> None:
    fresh, stale = sentences(results)
    assert "the same: gspo" in fresh
    assert "worse: cispo" in fresh
    assert "better: gspo; the same: cispo" in stale
    assert "(at 0: 0.810" in stale


def test_a_run_that_diverged_is_counted(results: Results) -> None:
    failed = Results(STUDY, {**results.outcomes, Cell("gspo", 8, 1): Outcome({0: 0.3, 4: 0.1}, {}, "TrainingDiverged")})
    assert ", 1 diverged" in render_markdown(failed)


def test_a_study_without_a_run_can_be_shown() -> None:
    empty = Results(STUDY, {})
    assert "0 of 18 runs done" in render_markdown(empty)
    assert "0 of 18 runs done" in render_body(empty)

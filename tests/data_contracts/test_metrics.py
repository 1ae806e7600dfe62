import re

import pytest

from data_contracts.errors import ContractError
from data_contracts.metrics import HISTOGRAMS, METRICS, check_names, declared


@pytest.mark.parametrize("names", [METRICS, HISTOGRAMS])
def test_every_metric_has_a_path_a_unit_and_a_meaning(names):
    for name, (unit, meaning) in names.items():
        assert re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)*(/\*)?", name), name
        assert unit and len(meaning) > 10, name


def test_an_undeclared_name_is_refused_and_named():
    with pytest.raises(ContractError, match="loss/typo"):
        check_names({"loss/total": 0.1, "loss/typo": 0.2})
    with pytest.raises(ContractError, match="loss/total"):
        check_names([], ["loss/total"])


def test_declared_names_pass():
    check_names(["loss/total", "reward/component/exact"], ["staleness/tokens"])


def test_a_family_declares_its_members_only():
    assert declared("reward/component/style") == METRICS["reward/component/*"]
    assert declared("reward/component/") is None
    assert declared("reward/other/style") is None

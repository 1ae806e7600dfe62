"""Reads the curriculum state that a commit names."""

from data_contracts.curriculum import Curriculum
from infra.objects import get_object
from tasks.ledger import Ledger


class CurriculumReader:
    """Keeps the state last asked for: claims of one worker mostly name the newest commit."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._version = -1
        self._state = Curriculum()

    def at(self, version: int) -> Curriculum:
        """Return the state of a commit; empty when the commit names none."""
        if version != self._version:
            reference = self._ledger.commit(version).curriculum
            self._state = Curriculum()
            if reference is not None:
                self._state = Curriculum.model_validate_json(get_object(self._ledger.store, reference))
            self._version = version
        return self._state

"""Reads the curriculum state that a commit names."""

from collections import OrderedDict

from data_contracts.curriculum import Curriculum, Place, place_of
from infra.objects import get_object
from tasks.ledger import Ledger

KEPT = 8


class CurriculumReader:
    """Keeps the states last asked for: claims of one worker mostly name the newest commit."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._states: OrderedDict[int, Curriculum] = OrderedDict()

    def at(self, version: int) -> Curriculum:
        """Return the state of a commit; empty when the commit names none."""
        if version not in self._states:
            reference = self._ledger.commit(version).curriculum
            state = Curriculum()
            if reference is not None:
                state = Curriculum.model_validate_json(get_object(self._ledger.store, reference))
            self._states[version] = state
        self._states.move_to_end(version)
        while len(self._states) > KEPT:
            self._states.popitem(last=False)
        return self._states[version]

    def given(self, ticket: int) -> tuple[Place, Curriculum] | None:
        """Return what a ticket was given, and the state that says so; None for one that is settled or not claimed."""
        known = self._ledger.state.tickets.get(ticket)
        if known is None or not known.is_claimed:
            return None
        state = self.at(known.curriculum)
        return place_of(ticket, state), state

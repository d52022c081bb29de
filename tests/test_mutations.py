"""The list of mutations (mutations.txt) fits the tree; that each is noticed takes minutes: `python -m tests.mutations`."""

from tests.mutations import MUTATIONS, stale


def test_each_mutation_is_of_one_line_and_has_its_test():
    assert not list(stale(MUTATIONS))
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)

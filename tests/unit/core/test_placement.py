"""Which nodes an attempt gets."""

import pytest

from orchestrator.core.placement import count_usable, place, usable
from tests.unit.core.story import Story


def test_too_few_nodes_are_no_placement() -> None:
    assert place(Story(nodes=2).joins("n1").state) is None


def test_a_first_attempt_takes_the_first_names() -> None:
    assert place(Story(nodes=2).joins("n3", "n1", "n2").state) == ("n1", "n2")


def test_a_node_keeps_its_place_when_a_lower_name_joins() -> None:
    story = Story(nodes=2, checkpoints=False).launched().joins("n2", "n3")
    story.starts()
    assert place(story.joins("n1").state) == ("n2", "n3")


@pytest.mark.parametrize(
    ("lost", "expected"),
    [("n1", ("n4", "n2", "n3")), ("n2", ("n1", "n4", "n3")), ("n4", ("n1", "n2", "n3"))],
)
def test_a_spare_takes_exactly_the_place_of_the_lost_node(
    lost: str, expected: tuple[str, ...]
) -> None:
    assert place(Story(nodes=3).running().loses(lost).state) == expected


def test_nodes_to_avoid_get_no_place() -> None:
    story = Story(nodes=2).running()
    assert place(story.state, frozenset({"n1"})) == ("n3", "n2")
    assert place(story.state, frozenset({"n1", "n2"})) is None


def test_excluded_and_lost_nodes_are_not_usable() -> None:
    story = Story(nodes=2, spares=2).running(step=5).fails("gpu", "node", node="n1", rank=0)
    story.decides()
    story.loses("n4")
    assert usable(story.state) == ("n2", "n3")
    assert count_usable(story.state) == 2


def test_names_without_numbers_have_an_order_too() -> None:
    story = Story(nodes=4).joins("b", "a10", "a9", "a")
    assert place(story.state) == ("a", "a9", "a10", "b")


def test_an_unfit_node_gets_no_ranks_until_its_agent_finds_nothing_wrong() -> None:
    story = Story(nodes=2).joins("n1").joins("n2", unfit="no GPU answers").joins("n3")
    assert place(story.state) == ("n1", "n3")
    assert place(story.joins("n2").state) == ("n1", "n2")

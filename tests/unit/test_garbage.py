"""What is garbage, and since when; which producers are missing."""

from __future__ import annotations

import pytest

from tasks.core.completeness import BILLED, GAP, SILENT, Completeness, completeness, spans
from tasks.core.garbage import DAY_NS, StepFacts, find, objects_in

NOW = 1_795_849_200_000_000_000


def step(age_days: float, *objects: str) -> StepFacts:
    return StepFacts(NOW - int(age_days * DAY_NS), frozenset(f"objects/{name}" for name in objects))


def test_every_name_of_an_object_in_a_text_is_found() -> None:
    text = b'{"a":[{"path":"objects/t/1.parquet"}],"prices":{"parts":[{"path":"objects/p/2.parquet"}]},"x":"not objects/y"}'
    assert objects_in(text) == {"objects/t/1.parquet", "objects/p/2.parquet"}
    assert objects_in(text[:40]) == {"objects/t/1.parquet"}


def test_old_steps_go_unless_a_commit_names_one_of_their_objects() -> None:
    steps = {
        "steps/young": step(29, "a"),
        "steps/on the day": step(30, "a"),
        "steps/old": step(31, "a"),
        "steps/old without objects": step(31),
        "steps/old and committed": step(400, "b", "c"),
    }
    found = find(NOW, steps, {"objects/c"}, [f"objects/{n}" for n in "abc"], {})
    assert found.steps == ["steps/old", "steps/old without objects"]
    assert (found.objects, found.unnamed) == ([], {}), "young steps name a; b goes with a step that stays"


def test_objects_go_when_nothing_has_named_them_for_seven_days() -> None:
    objects = [f"objects/{n}" for n in "abcde"]
    noted = {
        "objects/a": NOW - 7 * DAY_NS,
        "objects/b": NOW - 7 * DAY_NS + 1,
        "objects/c": NOW - 90 * DAY_NS,
        "objects/gone": NOW - 90 * DAY_NS,
    }
    found = find(NOW, {"steps/x": step(1, "c")}, {"objects/d"}, objects, noted)
    assert found.objects == ["objects/a"]
    assert found.unnamed == {"objects/b": NOW - 7 * DAY_NS + 1, "objects/e": NOW}


def test_what_goes_out_of_use_now_waits_seven_days_whatever_was_noted_before() -> None:
    found = find(NOW, {"steps/old": step(31, "a")}, set(), ["objects/a"], {"objects/a": NOW - 60 * DAY_NS})
    assert (found.steps, found.objects, found.unnamed) == (["steps/old"], [], {"objects/a": NOW})
    later = NOW + 7 * DAY_NS
    assert find(later, {}, set(), ["objects/a"], found.unnamed).objects == ["objects/a"]


def test_a_note_from_the_future_does_not_keep_an_object_for_ever() -> None:
    found = find(NOW, {}, set(), ["objects/a"], {"objects/a": NOW + 900 * DAY_NS})
    assert found.unnamed == {"objects/a": NOW}


# --- completeness ---------------------------------------------------------------------------------------------------


def every(hours: range, *names: str) -> dict[int, set[str]]:
    return {hour: set(names) for hour in hours}


def told(found: Completeness) -> list[tuple[str, str, str]]:
    return [(m.name, spans(m.hours), m.reason) for m in found.missing]


def test_nothing_is_missing_where_all_hours_are_there() -> None:
    found = completeness(every(range(24), "n-1", "n-2"), every(range(24), "i-1"), every(range(24), "i-1"))
    assert (told(found), set(found.expected), set(found.seen)) == ([], {2}, {2})


def test_hours_between_two_sightings_are_missing() -> None:
    seen = every(range(-24, 48), "n-1")
    for hour in (-3, 5, 6, 9, 30):
        seen[hour] = set()
    found = completeness(seen, {}, {})
    assert told(found) == [("n-1", "5-6, 9", GAP)]
    assert (found.expected[5], found.seen[5], found.expected[7], found.seen[7]) == (1, 0, 1, 1)


@pytest.mark.parametrize("hours", [range(3, 20), range(24), range(1), range(-24, -2)])
def test_a_host_that_came_or_went_is_not_missing(hours: range) -> None:
    assert (
        told(completeness(every(hours, "n-1") | {-1: {"n-2"}, 0: {"n-2"} | ({"n-1"} if 0 in hours else set())}, {}, {}))
        == []
    )


def test_a_host_that_was_there_until_midnight_and_not_since_is_missing() -> None:
    assert told(completeness(every(range(-24, 0), "n-1"), {}, {})) == [("n-1", "0-23", SILENT)]
    seen = every(range(-24, 0), "n-1", "n-2") | every(range(48), "n-2")
    assert told(completeness(seen, {}, {})) == [("n-1", "0-23", SILENT)]
    late = every(range(-24, 0), "n-1") | {47: {"n-1"}}
    assert told(completeness(late, {}, {})) == [("n-1", "0-23", GAP)]


def test_machines_that_are_billed_and_dark_are_missing() -> None:
    billed, observed = every(range(8, 12), "i-1", "i-2"), every(range(8, 10), "i-1")
    found = completeness({}, billed, observed)
    assert told(found) == [("i-1", "10-11", BILLED), ("i-2", "8-11", BILLED)]
    assert set(found.expected) == {0}, "a machine is no producer; it is told, and not counted with them"


def test_hours_are_written_as_people_do() -> None:
    assert spans([5]) == "5" and spans([7, 1, 2, 3, 9, 10]) == "1-3, 7, 9-10" and spans([]) == ""

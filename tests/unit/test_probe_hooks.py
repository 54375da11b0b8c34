"""Hooks: their order, what failures do, removal, and what an empty point costs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from seedance.probe.hooks import POINTS, HookError, HookManager


class Failure(Exception):
    pass


def failing(_: Any) -> None:
    raise Failure("no more")


def test_the_seven_points() -> None:
    assert POINTS == (
        "pre_batch",
        "post_batch",
        "pre_forward",
        "post_forward",
        "post_backward",
        "pre_step",
        "post_step",
    )


def test_smaller_priority_goes_first_and_ties_as_added() -> None:
    hooks, seen = HookManager(), list[str]()
    for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
        hooks.add("pre_step", lambda _, name=name: seen.append(name), priority=priority)
    hooks.fire("pre_step")
    assert seen == ["a", "b", "c", "d"]


def test_the_context_is_passed_on_and_points_are_apart() -> None:
    hooks, seen = HookManager(), list[tuple[str, int]]()
    for point in POINTS:
        hooks.add(point, lambda context, point=point: seen.append((point, context)))
    for number, point in enumerate(POINTS):
        hooks.fire(point, number)
    assert seen == [(point, number) for number, point in enumerate(POINTS)]


def test_a_failing_hook_is_counted_told_once_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    hooks, seen = HookManager(), list[int]()
    hooks.add("post_step", failing, priority=-1, name="mine")
    hooks.add("post_step", seen.append)
    with caplog.at_level(logging.WARNING, "seedance.probe"):
        for number in range(3):
            hooks.fire("post_step", number)
    assert seen == [0, 1, 2]
    assert hooks.failures == {"mine": 1}
    (record,) = caplog.records
    assert record.name == "seedance.probe"
    assert record.getMessage() == (
        "hook mine on post_step failed with Failure: no more. It was removed; training goes on without it. Mend it and add "
        "it again."
    )
    hooks.add("pre_step", failing, name="mine")
    hooks.fire("pre_step")
    assert hooks.failures == {"mine": 2}
    assert len(caplog.records) == 1


def test_failures_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        HookManager().failures["x"] = 1  # type: ignore[index]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_not_held_up(error: type[BaseException]) -> None:
    hooks = HookManager()

    def leave(_: Any) -> None:
        raise error

    hooks.add("pre_batch", leave)
    with pytest.raises(error):
        hooks.fire("pre_batch")
    assert hooks.wanted("pre_batch")
    assert hooks.failures == {}


def test_wanted_says_whether_anyone_listens() -> None:
    hooks = HookManager()
    assert not any(hooks.wanted(point) for point in (*POINTS, "pre_lunch"))
    handle = hooks.add("pre_forward", print)
    assert [point for point in POINTS if hooks.wanted(point)] == ["pre_forward"]
    handle.remove()
    handle.remove()
    assert not hooks.wanted("pre_forward")
    hooks.add("pre_forward", failing)
    hooks.fire("pre_forward")
    assert not hooks.wanted("pre_forward")


def test_one_function_added_twice_is_two_hooks() -> None:
    hooks, seen = HookManager(), list[int]()
    first = hooks.add("pre_step", seen.append)
    hooks.add("pre_step", seen.append)
    hooks.fire("pre_step", 1)
    first.remove()
    hooks.fire("pre_step", 2)
    assert seen == [1, 1, 2]


def test_hooks_may_add_and_remove_hooks() -> None:
    hooks, seen = HookManager(), list[str]()

    def first(_: Any) -> None:
        seen.append("first")
        own.remove()
        other.remove()
        hooks.add("pre_step", lambda _: seen.append("new"))

    own = hooks.add("pre_step", first)
    other = hooks.add("pre_step", lambda _: seen.append("other"))
    hooks.fire("pre_step")
    assert seen == ["first"]
    hooks.fire("pre_step")
    assert seen == ["first", "new"]


def test_clear_removes_everything() -> None:
    hooks, seen = HookManager(), list[int]()
    handles = [hooks.add(point, seen.append) for point in POINTS]
    hooks.clear()
    for point in POINTS:
        hooks.fire(point, 1)
    assert seen == []
    assert not any(handle.is_active for handle in handles)
    assert repr(handles[0]).endswith(".append on pre_batch, priority 0, removed>")


def test_a_point_that_is_none() -> None:
    with pytest.raises(HookError, match=r"found 'pre_stp'\. Did you mean pre_step\?") as caught:
        HookManager().add("pre_stp", print)
    assert (caught.value.point, caught.value.name) == ("pre_stp", "builtins.print")
    with pytest.raises(HookError, match=r"found 7\.$"):
        HookManager().add(7, print)  # type: ignore[arg-type]


async def _wait(_: Any) -> None: ...


def _count(_: Any) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("fn", "found"), [(_wait, "a coroutine function"), (_count, "a generator function"), (7, "int"), (None, "NoneType")]
)
def test_what_is_no_plain_function(fn: Any, found: str) -> None:
    hooks = HookManager()
    with pytest.raises(HookError, match=f"expected a function of one argument, found {found}"):
        hooks.add("pre_step", fn)
    assert not hooks.wanted("pre_step")


def test_an_object_that_can_be_called_is_a_hook() -> None:
    class Hook:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, context: int) -> None:
            self.seen += context

    hooks, hook = HookManager(), Hook()
    assert hooks.add("pre_step", hook).name.endswith("Hook")
    hooks.fire("pre_step", 3)
    assert hook.seen == 3


def test_threads_add_and_remove_at_once() -> None:
    hooks, seen = HookManager(), list[int]()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(200):
            handle = hooks.add("post_batch", lambda _: None)
            hooks.fire("post_batch")
            handle.remove()
        hooks.add("post_step", seen.append)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hooks.fire("post_step", 1)
    assert seen == [1] * 4
    assert not hooks.wanted("post_batch")

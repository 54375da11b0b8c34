"""Attaching, detaching, and what of a probe is in models and in the process meanwhile and afterwards: nothing that stays."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import seedance
from seedance.probe.probe import AttachError, Moment, active, attach
from seedance.probe.sampling import is_sampled
from seedance.probe.session import NO_BUDGET
from seedance.probe.settings import SettingsError
from tests.probe_runs import Net, check_clean, dicts, probing, rows, step, surroundings, totals

X = torch.linspace(-1, 1, 32).reshape(4, 8)


# --- nothing left -----------------------------------------------------------------------------------------------------


def test_detaching_leaves_modules_and_functions_as_they_were(tmp_path: Path) -> None:
    model = Net()
    held, around = dicts(model), surroundings()
    probe = attach(model, spool=tmp_path, max_sample_ppm=1_000_000)
    assert surroundings() != around
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, X)
    model(X)  # a unit is open, its counter or its marks are at work
    probe.detach()
    assert probe.failures == 0
    assert dicts(model) == held
    assert surroundings() == around
    assert not probe.is_on
    probe.detach()  # again is fine


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_unit_that_is_not_sampled_has_no_hook_at_all(tmp_path: Path, has_closure: bool) -> None:
    model = Net()
    seen: list[int] = []
    model.head.register_forward_pre_hook(
        lambda *_: seen.append(len(module_hooks._global_forward_hooks) + torch._C._len_torch_dispatch_stack())
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with attach(model, spool=tmp_path, max_sample_ppm=0):
        for _ in range(8):
            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    assert seen[0] > 0  # the first one is counted
    assert seen[4:] == [0, 0, 0, 0]


@pytest.mark.parametrize(("job", "attempt"), [("job-1", 0), ("job-1", 3), ("job-2", 0)])
def test_units_are_sampled_by_job_attempt_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, attempt: int
) -> None:
    """As the pipeline and the other ranks work it out, whatever a sample costs here."""
    monkeypatch.setattr("seedance.probe.session.BUDGET_PPM", NO_BUDGET)
    model = Net()
    seen: list[bool] = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(bool(module_hooks._global_forward_hooks)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, spool=tmp_path, job_id=job, attempt=attempt, max_sample_ppm=300_000):
        for _ in range(150):
            step(model, optimizer, X)
    assert seen[4:] == [is_sampled(job, attempt, unit, 300_000) for unit in range(4, 150)]  # those before are counted


def test_copies_and_pickles_in_the_middle_of_a_sampled_unit_are_clean(tmp_path: Path) -> None:
    model = Net()
    made: list[nn.Module] = []

    def copies(*_: Any) -> None:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        made.extend((copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))))
        made.append(torch.load(buffer, weights_only=False))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path):
        step(model, optimizer, X)
        handle = model.blocks[0].down.register_forward_hook(lambda *_: None)
        handle.remove()
        model.blocks[0].down.forward = _between(model.blocks[0].down.forward, copies)  # type: ignore[method-assign]
        step(model, optimizer, X)
        del model.blocks[0].down.forward
        copies()
    assert len(made) == 8
    for one in made:
        check_clean(one)
        assert "_compiled_call_impl" not in one.__dict__
    fresh = made[-1]
    before = totals(tmp_path)["units"]
    fresh(X)
    assert totals(tmp_path)["units"] == before


def _between(forward: Any, call: Any) -> Any:
    def forward_between(x: torch.Tensor) -> torch.Tensor:
        call()
        return forward(x)  # type: ignore[no-any-return]

    forward_between.__reduce__ = None  # type: ignore[attr-defined]
    return _Picklable(forward_between)


class _Picklable:
    """A function that pickles as nothing."""

    def __init__(self, function: Any = None) -> None:
        self.function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Picklable, ()


def test_a_model_that_goes_away_is_not_held_by_its_probe(tmp_path: Path) -> None:
    model = Net()
    probe = attach(model, spool=tmp_path, max_sample_ppm=1_000_000)
    for _ in range(2):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
    with torch.no_grad():
        model(X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    probe.detach()
    assert probe.failures == 0


def test_data_parallel_replicas_run_their_own_module(tmp_path: Path) -> None:
    model = Net()
    with probing(model, tmp_path):
        replica = model._replicate_for_data_parallel()
        replica.head = nn.Linear(8, 3)
        replica._modules["blocks"] = model.blocks
        assert replica(X).shape == (4, 3)
        assert "_compiled_call_impl" not in replica.__dict__


def test_functions_that_others_wrap_meanwhile_still_work(tmp_path: Path) -> None:
    model, save = Net(), torch.save
    probe = attach(model, spool=tmp_path)
    ours = torch.save
    torch.save = functools.partial(ours)
    try:
        probe.detach()
        buffer = io.BytesIO()
        torch.save(X, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), X)
    finally:
        torch.save = save


# --- attaching --------------------------------------------------------------------------------------------------------


def test_attaching_again_gives_the_same_probe(tmp_path: Path) -> None:
    model = Net()
    first = attach(model, spool=tmp_path)
    second = attach(model)
    assert first.settings is second.settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, X)
    first.detach()
    assert not second.is_on
    assert active() is None
    assert totals(tmp_path)["units"] == 3


def test_detach_by_model_and_of_everything(tmp_path: Path) -> None:
    one, two = Net(), Net()
    first, second = attach(one, spool=tmp_path), attach(two, spool=tmp_path)
    seedance.detach(one)
    assert not first.is_on
    assert second.is_on
    check_clean(one)
    seedance.detach()
    assert not second.is_on
    assert active() is None


def test_a_second_attachment_repeats_no_key(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with attach(model, spool=tmp_path, job_id="job", max_sample_ppm=1_000_000):
            for _ in range(3):
                step(model, optimizer, X)
    assert totals(tmp_path)["units"] == 9
    assert [row["statement"] for row in rows(tmp_path, "jobs")] == ["started", "ended"] * 3


def test_what_cannot_be_attached_says_why(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"expected a torch\.nn\.Module, found method"):
        attach(Net().forward)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no setting 'spol'"):
        attach(Net(), spol=tmp_path)
    settings = attach(Net(), spool=tmp_path).settings
    seedance.detach()
    with pytest.raises(AttachError, match="found both"):
        attach(Net(), settings=settings, spool=tmp_path)
    assert active() is None


def test_switched_off_it_does_nothing(tmp_path: Path) -> None:
    model, around = Net(), surroundings()
    probe = attach(model, spool=tmp_path, enabled=False)
    assert surroundings() == around
    assert not probe.is_on
    probe.hooks.add("pre_batch", lambda _: None)
    probe.batch(samples=3)
    probe.detach()
    assert not list(tmp_path.iterdir())


def test_hooks_are_called_at_their_points_in_order(tmp_path: Path) -> None:
    model = Net()
    seen: list[tuple[str, int, str]] = []
    with attach(model, spool=tmp_path) as probe:
        for point in (
            "post_step",
            "pre_step",
            "post_backward",
            "post_forward",
            "pre_forward",
            "post_batch",
            "pre_batch",
        ):

            def note(moment: Moment) -> None:
                seen.append((moment.point, moment.unit, moment.phase))

            probe.hooks.add(point, note)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, X)
        with torch.no_grad():
            model(X)
    points = ["pre_batch", "pre_forward", "post_forward", "post_backward", "pre_step", "post_step", "post_batch"]
    assert seen == [
        *((point, 0, "train") for point in points),
        *((point, 1, "eval") for point in ("pre_batch", "pre_forward", "post_forward", "post_batch")),
    ]


def test_counts_that_are_told_win_over_those_that_are_found(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with attach(model, spool=tmp_path) as probe:
        step(model, optimizer, ids)
        model(ids).sum().backward()
        probe.batch(tokens=7, samples=1, tokens_out=2, requests=1)
        optimizer.step()
        with pytest.raises(AttachError, match="whole number"):
            probe.batch(tokens=1.5)  # type: ignore[arg-type]
    sums = totals(tmp_path)
    assert (sums["samples"], sums["tokens_in"], sums["tokens_out"], sums["requests"]) == (2 + 1, 10 + 7, 2, 1)


def test_results_and_statements_of_a_job(tmp_path: Path) -> None:
    model = Net()
    with attach(model, spool=tmp_path, job_id="job", team="t", labels={"a": "b"}):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
        seedance.result(accuracy=0.913, loss=torch.tensor(0.5))
        with pytest.raises(seedance.errors.SeedanceError, match="finite number"):
            seedance.result(accuracy=float("nan"))
    seedance.result(accuracy=1)  # without a probe it is nobody's
    said = rows(tmp_path, "jobs")
    assert [row["statement"] for row in said] == ["started", "result", "result", "ended"]
    assert [(row["quality_metric"], row["quality"]) for row in said[1:3]] == [
        ("accuracy", "0.913000000"),
        ("loss", "0.500000000"),
    ]
    assert said[-1]["exit_reason"] == "finished"
    assert {row["model"] for row in said} == {"Net"}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (ZeroDivisionError(), "error: ZeroDivisionError"),
        (SystemExit(3), "error: SystemExit"),
        (SystemExit("no data"), "error: SystemExit"),
        (SystemExit(0), "finished"),
        (SystemExit(), "finished"),
    ],
    ids=repr,
)
def test_a_context_that_fails_says_so_in_the_last_statement(tmp_path: Path, end: BaseException, reason: str) -> None:
    with pytest.raises(type(end)), attach(Net(), spool=tmp_path):
        raise end
    assert rows(tmp_path, "jobs")[-1]["exit_reason"] == reason

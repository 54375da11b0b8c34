"""Keys: what changes them, and that one key computes once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seedance.errors import SchemaError
from seedance.schema import Table, number
from tasks import step as step_module
from tasks.errors import DeterminismError
from tasks.io.lake import Lake, Step
from tasks.plan import STAGES
from tasks.step import data_key, run_step, stage_key

SPEC = Table("core_test__things", "one thing", ("n",), (number("n", 64, "count", "number"),))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that is on the path and never imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "stage_code_of_test.py"
    file.write_text("raise RuntimeError('a key needs the bytes, not the import')\n")
    return file


def keys(**changed: Any) -> tuple[str, str]:
    facts: dict[str, Any] = {"schemas": [SPEC], "settings": {"look_back_days": 35}, "inputs": ["a" * 64, "b" * 64]}
    facts |= changed
    modules = facts.pop("modules", ["stage_code_of_test", "tasks.step"])
    stage = facts.pop("stage", "reduce")
    return stage_key(stage, modules=modules, **facts), data_key(stage, **facts)


def test_keys_are_the_same_for_the_same(module: Path) -> None:
    assert keys() == keys()
    assert keys(inputs=["b" * 64, "a" * 64], modules=["tasks.step", "stage_code_of_test", "tasks.step"]) == keys()
    assert len(keys()[0]) == len(keys()[1]) == 64
    assert keys()[0] != keys()[1]
    assert module.stem not in sys.modules


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": "bill"}, {"schemas": [replace(SPEC, version=2)]}, {"schemas": []},
        {"settings": {"look_back_days": 36}}, {"inputs": ["a" * 64]}, {"inputs": ["a" * 64, "b" * 64, "b" * 64]},
    ],
)  # fmt: skip
def test_data_changes_both_keys(module: Path, changed: dict[str, Any]) -> None:
    assert module.is_file()
    assert all(new != old for new, old in zip(keys(**changed), keys(), strict=True))


def test_code_changes_the_stage_key_alone(module: Path) -> None:
    before = keys()
    module.write_text("a = 1\n")
    after = keys()
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert keys(modules=["tasks.step"])[0] != after[0]


def test_the_environment_changes_the_stage_key_alone(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.is_file()
    seen = []
    for text in (None, "pyarrow==26.0.1\n", "pyarrow==26.0.2\n"):
        file = tmp_path / "run.txt"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(step_module, "REQUIREMENTS", file)
        seen.append(keys())
    assert len({stage for stage, _ in seen}) == 3
    assert len({data for _, data in seen}) == 1


def test_requirements_are_those_of_the_checkout() -> None:
    assert Path(__file__).resolve().parents[2] / "requirements" / "run.txt" == step_module.REQUIREMENTS


def test_what_cannot_be_keyed_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError):
        stage_key("reduce", modules=["tasks.core.no_such_module"], schemas=[], settings={}, inputs=[])
    with pytest.raises(ModuleNotFoundError, match="it has no file"):
        stage_key("reduce", modules=["sys"], schemas=[], settings={}, inputs=[])
    with pytest.raises(SchemaError, match=r"\$\.settings\.ratio"):
        data_key("reduce", schemas=[], settings={"ratio": 0.1}, inputs=[])


def test_one_key_computes_once(tmp_path: Path) -> None:
    lake, calls = Lake.open(str(tmp_path)), []

    def compute() -> Step:
        calls.append(1)
        return Step({}, {"rows": 1})

    assert run_step(lake, "reduce", "k", compute) == (Step({}, {"rows": 1}), False)
    assert run_step(lake, "reduce", "k", compute) == (Step({}, {"rows": 1}), True)
    assert run_step(lake, "bill", "k", compute)[1] is False
    assert len(calls) == 2


def test_two_runs_of_one_key_at_once_must_agree(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))

    def overtaken(rows: int) -> Step:
        lake.create_step("reduce", f"k{rows}", Step({}, {"rows": 1}))
        return Step({}, {"rows": rows})

    assert run_step(lake, "reduce", "k1", lambda: overtaken(1)) == (Step({}, {"rows": 1}), False)
    with pytest.raises(DeterminismError, match="fact rows: stored 1, computed 2"):
        run_step(lake, "reduce", "k2", lambda: overtaken(2))


def test_a_stage_that_fails_leaves_no_step(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))

    def fails() -> Step:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        run_step(lake, "reduce", "k", fails)
    assert lake.step("reduce", "k") is None


def test_a_change_deep_below_a_stage_changes_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a stage's pure code imports counts without being named, through any number of modules."""
    (tmp_path / "tasks" / "core").mkdir(parents=True)
    top, middle, deep = (tmp_path / "tasks" / name for name in ("top.py", "core/middle.py", "core/deep.py"))
    top.write_text("from tasks.core import middle\nfrom tasks import beside\n")
    middle.write_text("def f():\n    from tasks.core.deep import VALUE\n    return VALUE\n")
    deep.write_text("VALUE = 1\n")
    monkeypatch.setattr(step_module, "ROOT", tmp_path)
    assert step_module._with_imports({"tasks.top"}) == {"tasks.top", "tasks.core.middle", "tasks.core.deep"}


BESIDE_STAGES = {
    f"tasks.core.{name}"
    for name in (
        "completeness",
        "configurations",  # the Pareto front
        "contracts",  # gates
        "explain",
        "garbage",
        "levels",
        "named",
        "pareto",
        "pareto_export",
        "pools",
        "tier_policy",  # checkpoint tiers
        "tiering",
        "tree",  # the page
    )
}
"""Pure code of commands that make no bytes of a committed day."""


def test_the_stages_cover_all_pure_code_of_the_pipeline() -> None:
    core = {f"tasks.core.{p.stem}" for p in (step_module.ROOT / "tasks" / "core").glob("*.py") if p.stem != "__init__"}
    assert core - step_module._with_imports(set(STAGES)) - BESIDE_STAGES == set()

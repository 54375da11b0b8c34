"""Errors carry their facts, and keep them when a worker process sends them home."""

import pickle
import threading

import pyarrow as pa
import pytest

import seedance.errors
import tasks.errors
from seedance.errors import Exists, SchemaError, SeedanceError, StoreError, WithFacts
from tasks.errors import DeliveryError, PipelineError


def _kinds(module: object) -> list[type[WithFacts]]:
    return [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, WithFacts) and k is not WithFacts]


@pytest.mark.parametrize("kind", [*_kinds(seedance.errors), *_kinds(tasks.errors)])
def test_message_and_facts_survive_pickling(kind: type[WithFacts]) -> None:
    error = kind("lake/x: expected 3 rows, found 2.", expected=3, found=2, where="lake/x", type=pa.int64())
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "lake/x: expected 3 rows, found 2."
    assert (again.expected, again.found, again.where, again.type) == (3, 2, "lake/x", pa.int64())
    assert again.facts == error.facts


def test_a_fact_that_cannot_be_pickled_travels_as_text() -> None:
    lock = threading.Lock()
    again = pickle.loads(pickle.dumps(StoreError("refused", url="s3://b", client=lock)))
    assert again.url == "s3://b"
    assert again.client == str(lock)


def test_an_unknown_fact_is_named() -> None:
    with pytest.raises(AttributeError, match="SchemaError carries no fact 'column'; it has table"):
        _ = SchemaError("no", table="t").column


def test_two_roots() -> None:
    assert issubclass(Exists, StoreError)
    assert all(issubclass(k, SeedanceError) for k in _kinds(seedance.errors))
    assert all(issubclass(k, PipelineError) for k in _kinds(tasks.errors) if k is not WithFacts)
    assert not issubclass(DeliveryError, SeedanceError)


@pytest.mark.parametrize("module", [seedance.errors, tasks.errors])
def test_the_tree_in_the_docstring_is_the_tree(module: object) -> None:
    drawn = module.__doc__ or ""
    own = [k for k in _kinds(module) if k.__module__ == module.__name__]  # type: ignore[attr-defined]
    assert own
    for kind in own:
        assert kind.__name__ in drawn
        assert kind.__doc__

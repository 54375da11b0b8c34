"""Shards: one name and one text for equal rows, a footer that is judged without the rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seedance.errors import SchemaError, ShardError
from seedance.schema import INSTANT, JOBS, LABELS, Table, instant, text
from seedance.shard import content_sha16, parse_name, read_footer, read_shard, write_shard

HOUR = "2026-11-28T07"
START = 1_795_849_200_000_000_000
SPEC = Table(
    "raw_telemetry__things",
    "one thing",
    ("name", "at_utc"),
    (text("name", "name"), instant("at_utc", "when"), text("note", "note", null=True)),
)
FACTS: dict[str, Any] = {
    "producer": "node-0-1", "node": "node-0-1", "cloud": "aws", "instance_id": "i-1", "instance_type": "p5.48xlarge",
    "hour": HOUR, "seq": 3, "period_ns": 1_000_000_000,
}  # fmt: skip


def things(names: list[str], notes: list[str | None] | None = None) -> pa.Table:
    at = pa.array([START + 5 * i for i in range(len(names))], INSTANT)
    return pa.table({"name": pa.array(names, pa.string()), "at_utc": at, "note": pa.array(notes or names, pa.string())})


def test_name_and_footer_say_what_is_inside() -> None:
    path, data = write_shard(things(["b", "a"]), SPEC, **FACTS)
    name = parse_name("raw/" + path)
    assert (name.table, name.day, name.hour, name.producer, name.seq) == (
        "raw_telemetry__things", date(2026, 11, 28), 7, "node-0-1", 3,
    )  # fmt: skip
    assert name.sha16 == content_sha16(data)
    assert name.path == path
    footer, rows = read_shard(data, SPEC, where=path)
    assert footer == read_footer(data)
    assert (footer.rows, footer.first_ns, footer.last_ns) == (2, START, START + 5)
    assert (footer.cloud, footer.instance_id, footer.clock_offset_ns) == ("aws", "i-1", 0)
    assert rows.column("name").to_pylist() == ["a", "b"]


def test_the_order_of_rows_does_not_matter_even_under_one_key() -> None:
    rows = things(["b", "a", "a"], ["x", "z", None])
    rows = rows.set_column(1, "at_utc", pa.array([START] * 3, INSTANT))
    turned = pa.concat_tables([rows.slice(2), rows.slice(0, 1), rows.slice(1, 1)])
    assert write_shard(rows, SPEC, **FACTS) == write_shard(turned, SPEC, **FACTS)


def test_a_shard_without_rows_begins_and_ends_at_its_hour() -> None:
    _, data = write_shard(SPEC.empty(), SPEC, **{**FACTS, "cloud": None})
    footer, rows = read_shard(data, SPEC, where="x")
    assert (footer.rows, footer.first_ns, footer.last_ns, footer.cloud) == (0, START, START, None)
    assert rows.num_rows == 0


def test_labels_survive() -> None:
    row: dict[str, list[Any]] = {c.name: [None if c.null else "train"] for c in JOBS.columns}
    row |= {c.name: [1] for c in JOBS.columns if pa.types.is_integer(c.type)}
    row |= {"stated_at_utc": [START], "statement": ["started"], "labels": [[("b", "1"), ("a", "2")]]}
    table = pa.table({n: pa.array(v, JOBS[n].type) for n, v in row.items()})
    _, data = write_shard(table, JOBS, **FACTS)
    assert read_shard(data, JOBS, where="x")[1].column("labels").to_pylist() == [[("b", "1"), ("a", "2")]]
    assert JOBS["labels"].type == LABELS


def test_footers_are_read_from_files(tmp_path: Path) -> None:
    _, data = write_shard(things(["a"]), SPEC, **FACTS)
    (tmp_path / "x.parquet").write_bytes(data)
    assert read_footer(tmp_path / "x.parquet") == read_footer(str(tmp_path / "x.parquet")) == read_footer(data)


def test_a_nullable_column_that_the_shard_predates_is_null() -> None:
    old = Table(SPEC.name, SPEC.about, SPEC.key, SPEC.columns[:2])
    _, data = write_shard(things(["a"]).drop_columns("note"), old, **FACTS)
    assert read_shard(data, SPEC, where="x")[1].column("note").to_pylist() == [None]


@pytest.mark.parametrize(
    "path",
    [
        "x.parquet",
        "t/date=2026-11-28/hour=24/n-1-0123456789abcdef.parquet",
        "t/date=2026-13-28/hour=01/n-1-0123456789abcdef.parquet",
        "t/date=2026-11-28/hour=01/n-1-0123.parquet",
        "t/date=2026-11-28/hour=01/n-1-0123456789abcdef.parquet.tmp",
    ],
)
def test_other_names_are_refused(path: str) -> None:
    with pytest.raises(ShardError, match="not the name of a shard") as caught:
        parse_name(path)
    assert caught.value.path == path


def test_damage_is_found() -> None:
    notes = [f"{i * 7919 % 10007}-{i}" for i in range(2_000)]
    _, data = write_shard(things(notes), SPEC, **FACTS)
    torn, flipped = data[: len(data) // 2], bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    for bad in (b"", b"PAR1", torn):
        with pytest.raises(ShardError, match="not a Parquet file"):
            read_footer(bad)
    assert read_footer(bytes(flipped)).rows == 2_000
    with pytest.raises(ShardError, match="rows cannot be read") as caught:
        read_shard(bytes(flipped), SPEC, where="here")
    assert caught.value.path == "here"


def test_footers_that_do_not_fit_are_refused() -> None:
    def with_footer(footer: bytes | None) -> bytes:
        sink = pa.BufferOutputStream()
        pq.write_table(things(["a"]).replace_schema_metadata({} if footer is None else {"seedance": footer}), sink)
        return bytes(sink.getvalue())

    for footer, reason in (
        (None, "no footer"), (b"{", "not JSON"), (b"[]", "not a JSON object"), (b"{}", "lacks schema_version, table"),
    ):  # fmt: skip
        with pytest.raises(ShardError, match=reason):
            read_footer(with_footer(footer))
    good = write_shard(things(["a"]), SPEC, **FACTS)[1]
    raw = (pq.ParquetFile(pa.BufferReader(good)).schema_arrow.metadata or {})[b"seedance"]
    with pytest.raises(ShardError, match="footer field rows: '1' is not an integer"):
        read_footer(with_footer(raw.replace(b'"rows":1', b'"rows":"1"')))
    with pytest.raises(ShardError, match="expected 2 rows as the footer says, found 1"):
        read_shard(with_footer(raw.replace(b'"rows":1', b'"rows":2')), SPEC, where="x")
    assert read_footer(with_footer(raw.replace(b"{", b'{"new":1,', 1))).rows == 1


def test_another_table_or_version_is_refused() -> None:
    _, data = write_shard(things(["a"]), SPEC, **FACTS)
    with pytest.raises(ShardError, match="expected raw_telemetry__jobs version 1, found raw_telemetry__things"):
        read_shard(data, JOBS, where="x")
    with pytest.raises(ShardError, match="version 2, found"):
        read_shard(data, replace(SPEC, version=2), where="x")


def test_what_cannot_stand_in_a_name_is_refused() -> None:
    for wrong in ({"producer": "a/b"}, {"seq": -1}, {"hour": "2026-11-28 07"}):
        with pytest.raises(ShardError):
            write_shard(things(["a"]), SPEC, **{**FACTS, **wrong})
    with pytest.raises(SchemaError, match="missing column note"):
        write_shard(things(["a"]).drop_columns("note"), SPEC, **FACTS)

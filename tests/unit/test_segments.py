"""Segments of a spool to rows: what each table's declaration refuses, row by row, and that all else arrives."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance import upload as uploads
from seedance.probe.spool import HOUR_NS
from seedance.schema import DEVICE_SAMPLES, EVENTS, JOBS, PROCESS_SAMPLES, STEP_WINDOWS, TELEMETRY, Table
from seedance.segments import fit, read_segments
from seedance.shard import read_footer
from seedance.upload import Uploaded, upload
from tests.shard_tables import HOUR, NODE, ROWS, SECOND, START, jobs, row, steps
from tests.spools import FACTS, examined, left, refused, tables, write

NOW = START + HOUR_NS // 2
"""Within the hour of all rows here."""


def test_one_shard_a_table(tmp_path: Path) -> None:
    spool, drop = tmp_path / "spool", tmp_path / "drop"
    every = [(TELEMETRY[table], r) for table, rows in ROWS.items() for r in rows]
    # Three writers, their rows mixed.
    for first in range(3):
        write(spool, *every[first::3], period_ns=7, clock_offset_ns=-5)
    done = upload(spool, str(drop), final=True, now_ns=NOW)
    assert done == Uploaded(shards=6, rows=len(every))
    assert str(done) == f"uploaded {len(every)} rows in 6 shards."
    assert left(spool) == []
    found = tables(drop)
    assert found.keys() == ROWS.keys()
    for table, rows in ROWS.items():
        spec = TELEMETRY[table]
        assert sorted(map(str, found[table])) == sorted(str({c: r[c] for c in spec.names}) for r in rows)
    for path in drop.rglob("*.parquet"):
        footer = read_footer(path)
        assert (footer.producer, footer.node, footer.hour) == (NODE, NODE, HOUR)
        assert (footer.cloud, footer.instance_id, footer.instance_type) == ("aws", "i-0a", "p4d.24xlarge")
        assert (footer.period_ns, footer.clock_offset_ns) == (7, -5)


def test_the_edge_of_an_hour(tmp_path: Path) -> None:
    end = START + HOUR_NS
    # A reading that ends with the hour is of it; a statement at that instant is of the next.
    reading = row(DEVICE_SAMPLES, sampled_at_utc=end, covered_ns=SECOND)
    write(tmp_path, (DEVICE_SAMPLES, reading), *((JOBS, row(JOBS, stated_at_utc=at)) for at in (end - 1, end)))
    upload(tmp_path, str(tmp_path / "drop"), final=True, now_ns=NOW)
    found = {(s.name.table, s.name.hour): s.rows for s in examined(tmp_path / "drop")}
    assert found == {(DEVICE_SAMPLES.name, 3): 1, (JOBS.name, 3): 1, (JOBS.name, 4): 1}


def test_nodes_apart(tmp_path: Path) -> None:
    write(tmp_path, (JOBS, jobs()[0]), node="node-a")
    write(tmp_path, (JOBS, jobs()[0] | {"rank": 1}), node="node-b", instance_id="i-0b")
    assert upload(tmp_path, str(tmp_path / "drop"), final=True).shards == 2
    footers = [read_footer(s) for s in sorted((tmp_path / "drop").rglob("*.parquet"))]
    assert [(f.node, f.instance_id) for f in footers] == [("node-a", "i-0a"), ("node-b", "i-0b")]


def test_the_header_that_knows_most(tmp_path: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(FACTS)
    for rank, facts in enumerate([nothing, FACTS | {"period_ns": 3}, nothing]):
        write(tmp_path, (JOBS, row(JOBS, rank=rank)), **facts)
    assert upload(tmp_path, str(tmp_path / "drop"), final=True).rows == 3
    (shard,) = (tmp_path / "drop").rglob("*.parquet")
    footer = read_footer(shard)
    assert (footer.instance_id, footer.period_ns, footer.rows) == ("i-0a", 3, 3)


WRONG: dict[str, tuple[Table, Any, str]] = {
    "missing": (STEP_WINDOWS, {"units": None}, "units: expected a value, found none"),
    "unknown": (STEP_WINDOWS, {"speed": 1}, "unknown column 'speed': expected those of raw_telemetry__step_windows"),
    "float": (STEP_WINDOWS, {"wall_ns": 1.0}, "wall_ns: expected an integer, found Decimal"),
    "bool": (STEP_WINDOWS, {"wall_ns": True}, "wall_ns: expected an integer, found bool True"),
    "text": (STEP_WINDOWS, {"wall_ns": "1"}, "wall_ns: expected an integer, found str '1'"),
    "negative": (STEP_WINDOWS, {"wall_ns": -1}, "wall_ns: expected 0 to 9,223,372,036,854,775,807 ns, found int -1"),
    "wide": (STEP_WINDOWS, {"wall_ns": 2**63}, "wall_ns: expected 0 to"),
    "short": (STEP_WINDOWS, {"attempt": 2**15}, "attempt: expected 0 to 32,767 count, found int 32768"),
    "closed set": (STEP_WINDOWS, {"phase": "nap"}, "phase: expected one of train, prefill, decode, mixed, eval"),
    "no text": (STEP_WINDOWS, {"job_id": 7}, "job_id: expected text, found int 7"),
    "list": (STEP_WINDOWS, {"job_id": ["a"]}, "job_id: expected text, found list ['a']"),
    "not a number": (STEP_WINDOWS, {"wall_ns": float("nan")}, "wall_ns: expected an integer, found Decimal"),
    "no instant": (STEP_WINDOWS, {"window_start_utc": "now"}, "window_start_utc: expected an integer, found str 'now'"),
    "labels": (JOBS, {"labels": {"a": 1}}, "labels: expected labels of text to text"),
    "labels, flat": (JOBS, {"labels": "a"}, "labels: expected labels, found str 'a'"),
    "quality": (JOBS, {"quality": "good"}, "quality: expected decimal128(18, 9), found str 'good'"),
    "infinite": (JOBS, {"quality": float("inf")}, "quality: expected decimal128(18, 9)"),
    "large": (JOBS, {"quality": 10**9}, "quality: expected decimal128(18, 9)"),
    "huge": (JOBS, {"quality": "1e999999999"}, "quality: expected decimal128(18, 9)"),
    "world": (JOBS, {"world_size": 0}, "world_size: expected 1 to 2,147,483,647 count, found int 0"),
    "node": (DEVICE_SAMPLES, {"node": "node-b"}, "node: expected node-a, found str 'node-b'"),
    "process's node": (PROCESS_SAMPLES, {"node": "node-b"}, "node: expected node-a, found str 'node-b'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused_and_the_others_go(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec, change, reason = WRONG[case]
    good = ROWS[spec.name]
    write(tmp_path, (spec, good[0]), (spec, good[1] | change), *((spec, r) for r in good[2:]))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows) == (len(good) - 1, 1)
    (told,) = refused(tmp_path)
    assert told["reason"].startswith(reason)
    assert json.loads(told["text"])[0] == spec.name
    # A row whose instant is none lies in the segment of the present hour.
    assert told["line"] == (2 if case == "no instant" else 3)
    assert "1 row(s) are refused" in caplog.text and told["reason"][:30] in caplog.text
    assert sum(map(len, tables(tmp_path / "drop").values())) == len(good) - 1
    assert str(done).endswith(", 1 rows refused.")


def test_other_things_than_rows(tmp_path: Path) -> None:
    write(tmp_path, (JOBS, row(JOBS)))
    (segment,) = (tmp_path / "closed").glob("*.jsonl")
    header, good = segment.read_bytes().splitlines()
    odd = [b"[1]", b"7", b'["nothing",{}]', b'["raw_telemetry__jobs",[]]', b"\xff\xfe", b"\0\0", b'{"lost_rows":"x"}']
    deep = b"[" * 100_000
    segment.write_bytes(b"\n".join([header, *odd, b"", deep, b'{"lost_rows":3}', good, b""]))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows, done.torn_lines, done.lost_rows) == (1, 8, 3, 3)
    assert [r["line"] for r in refused(tmp_path)] == [2, 3, 4, 5, 6, 7, 8, 10]
    assert refused(tmp_path)[4]["text"] == "\\xff\\xfe"
    assert str(done) == (
        "uploaded 1 rows in 1 shards, 8 rows refused, 3 lines torn, 3 rows lost before they were written."
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seedance_spool": 2},
        {"node": "a b"},
        {"node": None},
        {"period_ns": -1},
        {"period_ns": HOUR_NS + 1},
        {"clock_offset_ns": 2**63},
        {"cloud": 7},
    ],
)
def test_a_wrong_header(change: dict[str, Any], tmp_path: Path) -> None:
    """Whose rows they are is not known."""
    write(tmp_path, (JOBS, row(JOBS)))
    (segment,) = (tmp_path / "closed").glob("*.jsonl")
    header, *rest = segment.read_bytes().splitlines()
    segment.write_bytes(b"\n".join([json.dumps(json.loads(header) | change).encode(), *rest, b""]))
    write(tmp_path, (JOBS, row(JOBS, rank=1)))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows) == (1, 2)
    assert [r["reason"].split(":")[0].split(",")[0] for r in refused(tmp_path)][1] == "the segment has no header"


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    one, two, three = steps(3)
    write(tmp_path, (STEP_WINDOWS, one), (STEP_WINDOWS, two), (STEP_WINDOWS, one | {"units": 11}))
    write(tmp_path, (STEP_WINDOWS, three), (STEP_WINDOWS, two))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows) == (3, 2)
    assert [r["window_start_utc"] for r in tables(tmp_path / "drop")[STEP_WINDOWS.name]] == [
        r["window_start_utc"] for r in (one, two, three)
    ]
    told = refused(tmp_path)
    assert all(r["reason"].startswith("repeats the key (job_id, attempt, rank, device_uuid, phase,") for r in told)
    assert {json.loads(r["text"])[1]["window_start_utc"] for r in told} == {
        one["window_start_utc"],
        two["window_start_utc"],
    }


def test_null_in_a_key_is_a_value(tmp_path: Path) -> None:
    write(tmp_path, *((JOBS, row(JOBS, rank=rank)) for rank in (None, 0, None)))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows) == (2, 1)


def test_what_a_job_says(tmp_path: Path) -> None:
    said = {"labels": {"b": "2", "a": "1\n"}, "quality": Decimal("0.1234567895"), "statement": "result"}
    write(tmp_path, (JOBS, row(JOBS, **said)), (JOBS, row(JOBS, rank=1, quality=0.25, labels=[["x", "y"]])))
    upload(tmp_path, str(tmp_path / "drop"), final=True)
    # Null ranks sort last.
    second, first = tables(tmp_path / "drop")[JOBS.name]
    assert (first["quality"], first["labels"]) == (Decimal("0.123456790"), [("a", "1\n"), ("b", "2")])
    assert (second["quality"], second["labels"]) == (Decimal("0.250000000"), [("x", "y")])


HOSTILE = ["a\nb\r\u2028", "nul\0nul", "\ud800 \udc80", "x" * 1_000_000, "", "'; --", "é🂡", "\\ud800"]


def test_hostile_text_arrives(tmp_path: Path) -> None:
    write(tmp_path, *((JOBS, row(JOBS, job_id=text, rank=i)) for i, text in enumerate(HOSTILE)), instance_id="\0\udc80")
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows) == (len(HOSTILE), 0)
    by_rank = {r["rank"]: r["job_id"] for r in tables(tmp_path / "drop")[JOBS.name]}
    assert [by_rank[i] for i in range(len(HOSTILE))] == [
        text if i != 2 else "\\ud800 \\udc80" for i, text in enumerate(HOSTILE)
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_fit_takes_no_offence(value: Any) -> None:
    for spec in TELEMETRY.values():
        good = ROWS[spec.name][0]
        fit(spec, json.loads(json.dumps(good)), HOUR)
        for bad in (value, {**good, spec.names[0]: value}, {**good, spec.names[-1]: value}):
            try:
                fitted = fit(spec, bad, HOUR)
            except ValueError as error:
                assert str(error)
            else:
                pa.Table.from_pylist([fitted], schema=spec.arrow)


def test_a_torn_last_line_at_every_byte(tmp_path: Path) -> None:
    write(tmp_path / "whole", *((EVENTS, r) for r in ROWS[EVENTS.name]))
    (segment,) = (tmp_path / "whole" / "closed").glob("*.jsonl")
    data = segment.read_bytes()
    cut = tmp_path / segment.name
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        read = read_segments([cut])
        rows = sum(group.table.num_rows for group in read.groups.values())
        assert rows == max(0, data[:size].count(b"\n") - 1)
        assert read.torn_lines == (size > 0 and not data[:size].endswith(b"\n"))
        assert read.refused == []


def test_a_rule_that_the_rows_check_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should it ever be stricter, the table's rows are refused, and the batch is not tried for ever."""
    real = uploads.write_shard

    def strict(table: pa.Table, spec: Table, **facts: Any) -> tuple[str, bytes]:
        if spec is JOBS:
            raise pa.ArrowInvalid("no such thing")
        return real(table, spec, **facts)

    monkeypatch.setattr(uploads, "write_shard", strict)
    write(tmp_path, *((JOBS, r) for r in jobs()), (EVENTS, ROWS[EVENTS.name][0]))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.shards, done.rows, done.refused_rows) == (1, 1, 2)
    assert [r["reason"] for r in refused(tmp_path)] == ["no such thing"] * 2
    assert json.loads(refused(tmp_path)[0]["text"])[1]["stated_at_utc"] == START

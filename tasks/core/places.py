"""Devices and volumes to the machines they are on, by readings and footers of the hour, else of any hour of the day.

Knows no time split.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import ATTACHED, DEVICES
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY
from seedance.schema import INSTANT
from seedance.shard import Footer
from tasks.core.arrays import grouped, match_groups, merge_rows, plain
from tasks.core.claims import HOUR_NS
from tasks.core.observe import DEVICE_KEY, footer_facts
from tasks.errors import LawError

FACTS = ("cloud", "instance_id", "instance_type", "gpu_model")


def resolve(devices: pa.Table, edges: pa.Table) -> pa.Table:
    """DEVICES with what an hour does not know taken from the first hour of the day that does.

    Args:
        devices: DEVICES of the day.
        edges: EDGES of the day; a device that an hour knows only by readings that reach back gets a row too.
    """
    back = grouped(edges, DEVICE_KEY)
    rows = pa.concat_tables([plain(devices), *([_bare(back)] if back.num_rows else [])])
    rows = merge_rows(rows, DEVICES)
    found: dict[str, list[str | None]] = {n: [] for n in FACTS}
    known: dict[tuple[str, str, str], str] = {}
    told = rows.select([*DEVICE_KEY[1:], *FACTS]).to_pylist()  # in the order of hours
    for row in told:
        for name in FACTS:
            # The machine is the host's; the model is the device's.
            for key in _keys(row, name):
                if row[name] is not None:
                    known.setdefault((name, *key), row[name])
    for row in told:
        for name in FACTS:
            fallback = next((known[name, *key] for key in _keys(row, name) if (name, *key) in known), None)
            found[name].append(row[name] if row[name] is not None else fallback)
    for name in FACTS:
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(found[name], pa.string()))
    return rows


def place(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """Rows by hour, node and device as `core_usage__device_hourly`."""
    of_device, of_row, keys = match_groups(devices, rows, DEVICE_KEY)
    where: list[int | None] = [None] * keys.num_rows
    for i, group in enumerate(of_device.tolist()):
        where[group] = i
    index = pa.array(where, pa.int64()).take(pa.array(of_row))
    columns = {n: devices.column(n).take(index) for n in FACTS} | {n: rows.column(n) for n in rows.column_names}
    made = pa.table([columns[n] for n in DEVICE_HOURLY.names], schema=DEVICE_HOURLY.arrow)
    # A host that changed its name within the hour is one machine; of two kinds of evidence the worse comes first by name.
    made = merge_rows(made, DEVICE_HOURLY)
    _assert_hour(made)
    return made


def _assert_hour(rows: pa.Table) -> None:
    where = ("hour_utc", "cloud", "instance_id", "device_uuid")
    for row in grouped(rows, where, {"ns": "sum"}).filter(pc.field("ns") > HOUR_NS).to_pylist():
        raise LawError(
            f"device {row['device_uuid']} of {row['instance_id']} in the hour {row['hour_utc']:%Y-%m-%dT%H}: expected at most "
            f"{HOUR_NS:,} ns, found {row['ns']:,} ns over several host names. Look for two agents that report one device.",
            law="time",
            where=f"{row['device_uuid']} {row['hour_utc']:%Y-%m-%dT%H}",
            expected=HOUR_NS,
            found=row["ns"],
        )


def attached(events: pa.Table, footers: Sequence[Footer], hour_ns: int) -> pa.Table:
    """ATTACHED: volumes that hosts of the bucket name as block devices of their own.

    Args:
        events: event rows.
        footers: of every shard of the bucket.
        hour_ns: start of the hour, ns UTC.
    """
    names = pc.and_(pc.equal(events.column("kind"), "block_device"), pc.equal(events.column("source"), "kernel"))
    at = events.column("at_utc").cast(pa.int64())
    in_hour = pc.and_(pc.greater_equal(at, hour_ns), pc.less(at, hour_ns + HOUR_NS))
    hosts = footer_facts(footers)
    own = pc.is_in(events.column("node"), value_set=pa.array(list(hosts), pa.string()))
    rows = events.filter(pc.and_(pc.and_(names, in_hour), own))
    nodes = rows.column("node").to_pylist()
    facts = [pa.array([hosts[n].get(f) for n in nodes], pa.string()) for f in ("cloud", "instance_id")]
    hour = pa.repeat(pa.scalar(hour_ns, pa.int64()).cast(INSTANT), rows.num_rows)
    return merge_rows(
        pa.table([hour, rows.column("object"), rows.column("node"), *facts], schema=ATTACHED.arrow), ATTACHED
    )


def attachments(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """`core_usage__attachments_hourly`: a host without a footer that names its machine takes that of its devices, or no row."""
    machines: dict[str, dict[str, str]] = {}
    for row in devices.select(["node", "cloud", "instance_id"]).to_pylist():
        if row["cloud"] and row["instance_id"]:
            machines.setdefault(row["node"], row)
    made = set()
    for row in rows.to_pylist():
        fallback = machines.get(row["node"], {})
        cloud, machine = (row[n] or fallback.get(n) for n in ("cloud", "instance_id"))
        key = (row["hour_utc"], row["object_id"], cloud, machine)
        if None not in key:
            made.add(key)
    columns = [list(c) for c in zip(*sorted(made), strict=True)] or [[], [], [], []]
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, ATTACHMENTS.arrow, strict=True)], schema=ATTACHMENTS.arrow
    )


def _keys(row: dict[str, str], name: str) -> list[tuple[str, str]]:
    own = (row["node"], row["device_uuid"])
    return [own] if name == "gpu_model" else [own, (row["node"], "")]


def _bare(keys: pa.Table) -> pa.Table:
    columns = {n: keys.column(n) for n in DEVICE_KEY}
    columns |= {n: pa.nulls(keys.num_rows, pa.string()) for n in FACTS}
    columns |= {
        n: pa.repeat(pa.scalar(HOUR_NS if n == "tail_ns" else 0), keys.num_rows).cast(DEVICES[n].type)
        for n in DEVICES.names
        if n not in columns
    }
    return plain(pa.table([columns[n] for n in DEVICES.names], schema=DEVICES.arrow))

"""Devices and volumes to the machines they are on, by readings and footers of the hour, else of any hour of the day.

Also what a MIG slice is of its GPU. Ids of Azure are compared without case, so they are lower case from here on. Knows no time
split. Source: infra/rules/telemetry.md 1 and 4.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import ATTACHED, DEVICES
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY
from seedance.schema import INSTANT
from seedance.shard import Footer
from tasks.core.arrays import flat, grouped, match_groups, merge_rows, number_groups, plain
from tasks.core.claims import HOUR_NS
from tasks.core.observe import DEVICE_KEY, PLACE, footer_facts
from tasks.errors import LawError

OF_DEVICE = ("gpu_model", "parent_uuid", "mig_profile")
"""Facts that belong to a device; the others are its host's."""
SLICES = re.compile(r"(?:(\d{1,4})c\.)?(\d{1,4})g\.")
"""Compute slices in a profile as NVML writes it: 3g.40gb has 3, and its compute instance 1c.3g.40gb has 1."""
MOST_BYTES = 2**63 - 1


def resolve(devices: pa.Table, edges: pa.Table) -> pa.Table:
    """DEVICES with what an hour does not know taken from the first hour of the day that does.

    Args:
        devices: DEVICES of the day.
        edges: EDGES of the day; a device that an hour knows only by readings that reach back gets a row too.
    """
    back = grouped(edges, DEVICE_KEY)
    rows = pa.concat_tables([plain(devices), *([_bare(back)] if back.num_rows else [])])
    rows = merge_rows(rows, DEVICES)
    known: dict[tuple[str, str, str], str] = {}
    names = [n for n in PLACE if rows.column(n).null_count < rows.num_rows]
    found: dict[str, list[str | None]] = {n: [] for n in names}
    told = rows.select([*DEVICE_KEY[1:], *names]).to_pylist()  # in the order of hours
    for row in told:
        for name in names:
            # The machine is the host's; the model is the device's.
            for key in _keys(row, name):
                if row[name] is not None:
                    known.setdefault((name, *key), row[name])
    for row in told:
        for name in names:
            fallback = next((known[name, *key] for key in _keys(row, name) if (name, *key) in known), None)
            found[name].append(row[name] if row[name] is not None else fallback)
    for name, values in found.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values, pa.string()))
    azure = pc.fill_null(pc.equal(rows.column("cloud"), "azure"), False)
    if pc.any(azure).as_py():
        lower = pc.if_else(azure, _of_each(rows.column("instance_id"), _lower, pa.string()), rows.column("instance_id"))
        rows = rows.set_column(rows.schema.get_field_index("instance_id"), "instance_id", lower)
    return rows


def slices(profile: str | None) -> int:
    """Compute slices of a MIG profile; 1 where it is unknown. Source: NVIDIA MIG User Guide, device names."""
    found = SLICES.search((profile or "").lower())
    return max(int(found[1] or found[2]), 1) if found else 1


def total_slices(gpu_model: str | None) -> int:
    """Compute slices of a whole GPU: 4 on the A30, 7 on every other. Source: NVIDIA MIG User Guide, supported profiles."""
    return 4 if "A30" in (gpu_model or "").upper() else 7


def place(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """Rows by hour, node and device as `core_usage__device_hourly`."""
    of_device, of_row, keys = match_groups(devices, rows, DEVICE_KEY)
    where: list[int | None] = [None] * keys.num_rows
    for i, group in enumerate(of_device.tolist()):
        where[group] = i
    index = pa.array(where, pa.int64()).take(pa.array(of_row))
    columns = {n: devices.column(n).take(index) for n in PLACE} | {n: rows.column(n) for n in rows.column_names}
    whole = pc.is_null(columns["parent_uuid"])
    for name, of, count in (("mig_slices", "mig_profile", slices), ("mig_total", "gpu_model", total_slices)):
        columns[name] = pc.if_else(whole, pa.scalar(None, pa.int16()), _of_each(columns[of], count, pa.int16()))
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
    sizes, types = zip(*(_told(p) for p in rows.column("payload").to_pylist()), strict=True) if nodes else ((), ())
    columns = {n: pa.array([hosts[h].get(n) for h in nodes], pa.string()) for n in ("cloud", "instance_id")}
    columns |= {n: rows.column(n) for n in ("node", "at_utc", "event_id")} | {"object_id": rows.column("object")}
    columns["hour_utc"] = pa.repeat(pa.scalar(hour_ns, pa.int64()).cast(INSTANT), rows.num_rows)
    columns |= {"bytes": pa.array(sizes, pa.int64()), "object_type": pa.array(types, pa.string())}
    made = merge_rows(pa.table([columns[n] for n in ATTACHED.names], schema=ATTACHED.arrow), ATTACHED)
    of_row, _ = number_groups(made.column(n) for n in ("hour_utc", "object_id", "node"))
    return made.filter(pa.array(np.diff(of_row, append=-1) != 0))  # in the order of the key: the last statement


def _told(payload: str) -> tuple[int | None, str | None]:
    """Size in bytes and type that a statement about a volume gives; what is no JSON, or not of its type, is unknown."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(said, dict):
        return None, None
    size, kind = said.get("bytes"), said.get("type")
    is_size = isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MOST_BYTES
    return size if is_size else None, kind if isinstance(kind, str) and kind and kind.isprintable() else None


def attachments(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """`core_usage__attachments_hourly`: a host without a footer that names its machine takes that of its devices, or no row."""
    machines: dict[str, dict[str, str]] = {}
    for row in devices.select(["node", "cloud", "instance_id"]).to_pylist():
        if row["cloud"] and row["instance_id"]:
            machines.setdefault(row["node"], row)
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    at = rows.column("at_utc").cast(pa.int64()).to_pylist()
    order = sorted(zip(at, rows.to_pylist(), strict=True), key=lambda r: (r[0], r[1]["event_id"], r[1]["node"]))
    for _, row in order:  # the last statement stands
        fallback = machines.get(row["node"], {})
        cloud, machine = (row[n] or fallback.get(n) for n in ("cloud", "instance_id"))
        if cloud is not None and machine is not None:
            names = (row["object_id"], machine)
            object_id, machine = map(_lower, names) if cloud == "azure" else names
            key = (row["hour_utc"], object_id, cloud, machine)
            made[key] = dict(zip(ATTACHMENTS.key, key, strict=True)) | {n: row[n] for n in ("bytes", "object_type")}
    return pa.Table.from_pylist([made[k] for k in sorted(made)], schema=ATTACHMENTS.arrow)


def _lower(name: str | None) -> str | None:
    """An id of Azure as it is compared: Azure states its own in any case."""
    return None if name is None else name.lower()


def _of_each(column: pa.ChunkedArray, value: Callable[[str | None], Any], type_: pa.DataType) -> pa.Array:
    """A value for each row, computed once for each text that occurs."""
    coded = flat(column).dictionary_encode(null_encoding="encode")
    return pa.array([value(t) for t in coded.dictionary.to_pylist()], type_).take(coded.indices)


def _keys(row: dict[str, str], name: str) -> list[tuple[str, str]]:
    own = (row["node"], row["device_uuid"])
    return [own] if name in OF_DEVICE else [own, (row["node"], "")]


def _bare(keys: pa.Table) -> pa.Table:
    columns = {n: keys.column(n) for n in DEVICE_KEY}
    columns |= {n: pa.nulls(keys.num_rows, pa.string()) for n in PLACE}
    columns |= {
        n: pa.repeat(pa.scalar(HOUR_NS if n == "tail_ns" else 0), keys.num_rows).cast(DEVICES[n].type)
        for n in DEVICES.names
        if n not in columns
    }
    return plain(pa.table([columns[n] for n in DEVICES.names], schema=DEVICES.arrow))

"""Summed op rows to `core_usage__layer_hourly`, and the check that its time is the devices' time.

Rows of layer (none) are time of devices, not of layers, and are left out. A row's bound is the sum of the bounds of its
strata over the pool (hour, job, attempt), weighted by their active time, rounded up. Knows no device hour.
Source: infra/rules/telemetry.md 4.2 and 4.3, infra/rules/ledger.md 4.11.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import GREATEST, LAYERS
from schemas.usage import EVIDENCE, LAYER_HOURLY
from tasks.core.arrays import Ints, ints, match_groups, merge_rows, nullable, number_groups, plain, sums, whole_numbers
from tasks.core.layers import CATEGORIES, MILLION, NO_LAYER, op_categories
from tasks.core.money import telescope
from tasks.core.observe import DEVICE_KEY
from tasks.errors import LawError

POOL = ("hour_utc", "job_id", "attempt")


def finish(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """`core_usage__layer_hourly` of rows of LAYERS.

    Args:
        rows: LAYERS of the day, any number a key.
        devices: DEVICES of the day, resolved.
    """
    rows = merge_rows(_typed(rows, devices), LAYERS, GREATEST)
    rows = rows.filter(pc.not_equal(rows.column("layer"), NO_LAYER))
    ns = ints(rows.column("ns"))
    facts = {
        "category": pa.array(CATEGORIES).take(pa.array(op_categories(rows))),
        "uncounted_ns": pa.array(_uncounted(rows, ns)),
        "bound_ppm": pa.array(_bound(rows, ns)).cast(pa.int32()),
        "evidence": pa.array(EVIDENCE).take(rows.column("evidence").combine_chunks()),
    }
    columns = {n: rows.column(n) for n in rows.column_names} | facts
    made = pa.table([columns[n] for n in LAYER_HOURLY.names], schema=LAYER_HOURLY.arrow)
    return made.take(pc.sort_indices(made, sort_keys=[(k, "ascending") for k in LAYER_HOURLY.key])).combine_chunks()


def assert_equal(layers: pa.Table, devices: pa.Table) -> None:
    """Work and communication of the layer table are those of the device table, per hour, job and attempt.

    Raises:
        LawError: they differ; carries law, where, expected, found.
    """
    for category in ("work", "communication"):
        one, two = (t.filter(pc.equal(t.column("category"), category)) for t in (devices, layers))
        of_one, of_two, keys = match_groups(one, two, POOL)
        expected = sums(of_one, keys.num_rows, ints(one.column("ns")))
        found = sums(of_two, keys.num_rows, ints(two.column("ns")))
        wrong = np.flatnonzero(expected != found)
        if len(wrong):
            row = keys.slice(int(wrong[0]), 1).to_pylist()[0]
            where = f"{row['hour_utc']:%Y-%m-%dT%H} {row['job_id']} attempt {row['attempt']}"
            raise LawError(
                f"{category} of {where}: expected the devices' {int(expected[wrong[0]]):,} ns in the layer table, found "
                f"{int(found[wrong[0]]):,} ns ({len(wrong):,} of {keys.num_rows:,} job hours differ). Nothing was written.",
                law="time",
                where=where,
                expected=int(expected[wrong[0]]),
                found=int(found[wrong[0]]),
            )


def _typed(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """The rows with instance type and model from the devices they name, and no longer naming any."""
    named = np.flatnonzero(np.asarray(pc.is_valid(rows.column("device_uuid")).to_numpy(zero_copy_only=False), bool))
    columns = {n: rows.column(n) for n in rows.column_names}
    if len(named):
        of_device, of_row, keys = match_groups(devices, rows.take(pa.array(named)), DEVICE_KEY)
        place = np.full(keys.num_rows, -1, np.int64)
        place[of_device] = np.arange(len(of_device))
        index = np.full(rows.num_rows, -1, np.int64)
        index[named] = place[of_row]
        source = nullable(index, pa.int64())
        for name in ("instance_type", "gpu_model"):
            columns[name] = pc.coalesce(rows.column(name), plain(devices).column(name).take(source))
    columns |= {n: pa.nulls(rows.num_rows, pa.string()) for n in ("node", "device_uuid")}
    return pa.table([columns[n] for n in LAYERS.names], schema=LAYERS.arrow)


def _uncounted(rows: pa.Table, ns: Ints) -> Ints:
    """Of each row's ns, the part of its calls without a FLOP formula, rounded down; all of it where no calls are counted."""
    calls, uncounted = (whole_numbers(rows.column(n)) for n in ("calls", "uncounted_calls"))
    uncounted = np.minimum(uncounted, np.maximum(calls, 1))
    return np.asarray(telescope(ns, uncounted, np.maximum(calls, 1)), np.int64)


def _bound(rows: pa.Table, ns: Ints) -> Ints:
    pool, first = number_groups(rows.column(k) for k in POOL)
    work = np.asarray(op_categories(rows) == 0)
    whole = sums(pool, len(first), np.where(work, ns, 0))[pool]
    bound = ints(rows.column("bound_ns"))
    safe = np.maximum(whole, 1)
    ppm = _ceil_ppm(np.minimum(bound, safe), safe)
    return np.where((bound > 0) & (whole == 0), MILLION, np.minimum(ppm, MILLION))


def _ceil_ppm(part: Ints, whole: Ints) -> Ints:
    down = telescope(np.full(len(part), MILLION), part, whole)
    # Exactly divisible parts need no step up; one more for the others rounds up.
    back = telescope(whole, down, np.full(len(part), MILLION))
    return down + (back < part)

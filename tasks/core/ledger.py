"""One day's ledger: from charges and observed time to addresses, layer money and billed spans, with the laws asserted.

The order of the rules is the order of the code: label, hours, spans, vectors, first rounding, estimates, second rounding.
Knows no disk, no clock. Source: infra/rules/ledger.md 2 to 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import SPANS
from seedance.schema import MONEY
from tasks.core import money
from tasks.core.address_rows import Teams, complete, coverage, hour_instants, of_vector, teams_of
from tasks.core.allocate import LEDGERS, Addressed, Index, day_part, first_rounding
from tasks.core.compare import Pair
from tasks.core.estimate import Estimate
from tasks.core.placed import DayInputs, place
from tasks.core.provisional import estimated_rows
from tasks.core.second import second_rounding
from tasks.core.spans import BILLING_GRAIN_NS, HOUR_NS, MachineHours, vectors, width
from tasks.errors import LawError


@dataclass(frozen=True, kw_only=True)
class Inputs(DayInputs):
    """What a day's ledger is a function of, beside what `DayInputs` names.

    Args:
        layer_hourly, jobs: usage tables of the day.
        gpu_counts: devices of an instance type.
        revision: number of the commit that will hold the result.
        cause: why the day is written again; None for the first time.
    """

    layer_hourly: pa.Table
    jobs: pa.Table
    gpu_counts: Mapping[str, int]
    revision: int = 1
    cause: str | None = None


@dataclass(frozen=True)
class Ledger:
    """A day's ledger: the tables, and the slots and estimates that the reconciliation reports on."""

    addresses: pa.Table
    layers: pa.Table
    spans: pa.Table
    hours: MachineHours
    estimated: list[Estimate]
    pairs: list[Pair]
    """Estimate beside bill, hour by hour."""
    lost_ns: int
    """Observed time on devices whose machine no reading and no footer names: it can have no address."""


def settle(inputs: Inputs) -> Ledger:
    """The ledger of one day.

    Raises:
        LawError: money or time of the day does not add up; names the first charge or machine-hour that breaks the law.
    """
    charges = inputs.charges
    placed = place(inputs)
    hours, found = placed.hours, placed.estimated
    open_slots = {e.slot: e for e in found if e.provisional}
    span = np.array(
        [open_slots[i].span_ns if i in open_slots else s.billed_ns or 0 for i, s in enumerate(hours.slots)], np.int64
    )
    vector = vectors(hours, inputs.gpu_counts, span)
    addressed = first_rounding(placed.parts, placed.slots, placed.labels, vector)
    teams = {
        (j, a): t for j, a, t in zip(*(inputs.jobs[c].to_pylist() for c in ("job_id", "attempt", "team")), strict=True)
    }
    addresses = pa.concat_tables(
        [
            _billed_rows(addressed, charges, vector, hours, inputs, teams),
            estimated_rows(vector, hours, found, placed.volumes, placed.terms, teams, inputs.revision, inputs.cause),
        ]
    )
    for slot in hours.slots:
        if slot.billed_ns is not None and slot.running_ns > slot.billed_ns + BILLING_GRAIN_NS:
            slot.findings.add("observed_exceeds_billed")
        if slot.billed_ns is not None and slot.instance_type not in inputs.gpu_counts:
            slot.findings.add("unknown_type")
    spans = _span_rows(_only(vector, span > 0), hours, span, open_slots, inputs.day_ns)
    assert_money(charges, addresses)
    assert_time(spans, hours, inputs.gpu_counts, span, inputs.day_ns)
    unplaced = pc.or_(pc.is_null(inputs.device_hourly["instance_id"]), pc.is_null(inputs.device_hourly["cloud"]))
    lost = pc.sum(inputs.device_hourly["ns"].filter(unplaced)).as_py() or 0
    return Ledger(addresses, second_rounding(addresses, inputs.layer_hourly), spans, hours, found, placed.pairs(), lost)


def _only(vector: pa.Table, which: npt.NDArray[np.bool_]) -> pa.Table:
    if not len(vector):
        return vector
    return vector.filter(pa.array(which[np.asarray(vector["slot"])]))


def _billed_rows(
    found: Addressed,
    charges: pa.Table,
    vector: pa.Table,
    hours: MachineHours,
    inputs: Inputs,
    teams: Teams,
) -> pa.Table:
    n = len(found.row)
    take = pa.array(found.row, pa.int64())
    place = pa.array(found.vector, pa.int64(), mask=found.vector < 0)
    rows = (
        vector.take(place)
        if len(vector)
        else pa.table([pa.nulls(n, f.type) for f in vector.schema], schema=vector.schema)
    )
    slots = rows["slot"].to_pylist()
    seen = coverage(vector, len(hours.slots))
    columns = {
        "x_ChargeKey": charges["x_ChargeKey"].take(take),
        "x_Occurrence": charges["x_Occurrence"].take(take),
        "x_HourUtc": hour_instants(found.hour, inputs.day_ns),
        "x_MachineId": pa.array(
            [None if s is None else hours.slots[s].machine.split("|", 1)[1] for s in slots], pa.string()
        ),
        "x_InstanceType": pa.array([None if s is None else hours.slots[s].instance_type for s in slots], pa.string()),
        "x_CoveragePpm": pa.array([None if s is None or seen[s] < 0 else int(seen[s]) for s in slots], pa.int32()),
        "x_Category": pa.array(found.category.tolist(), pa.string()),
        "x_Team": teams_of(rows, teams),
        "x_EstimatedCost": pa.nulls(n, MONEY),
        "x_State": pa.array(["billed"] * n, pa.string()),
    }
    columns |= of_vector(rows)
    for name in LEDGERS:
        _, valid = money.to_units(charges[name])
        columns[name] = money.from_units(found.amounts[name], valid[found.row])
    for name in (
        "x_Cloud",
        "BillingAccountId",
        "SubAccountId",
        "ResourceId",
        "BillingCurrency",
        "BillingPeriodStart",
        "InvoiceId",
        "ChargeCategory",
        "PricingCategory",
        "ServiceName",
        "x_TieRule",
    ):
        columns[name] = charges[name].take(take)
    return complete(columns, n, inputs.revision, inputs.cause)


def _span_rows(
    vector: pa.Table, hours: MachineHours, spans: Index, open_slots: Mapping[int, Estimate], day_ns: int
) -> pa.Table:
    n = len(vector)
    slot = np.asarray(vector["slot"])
    rows = [hours.slots[int(i)] for i in slot]
    columns = {
        "x_HourUtc": hour_instants(np.array([r.hour for r in rows], np.int64), day_ns),
        "x_Cloud": pa.array([r.machine.split("|", 1)[0] for r in rows], pa.string()),
        "x_MachineId": pa.array([r.machine.split("|", 1)[1] for r in rows], pa.string()),
        "x_InstanceType": pa.array([r.instance_type for r in rows], pa.string()),
        "x_Category": vector["category"],
        "x_Ns": vector["ns"],
        "x_EnergyMj": vector["energy_mj"],
        "x_BilledSpanNs": pa.array(spans[slot] if n else spans[:0], pa.int64()),
        "x_ObservedNs": pc.coalesce(vector["observed_ns"], 0),
        "x_State": pa.array(["provisional" if int(i) in open_slots else "billed" for i in slot], pa.string()),
        "x_ParentId": vector["parent"],
        **of_vector(vector),
    }
    return pa.table([columns[c.name] for c in SPANS.columns], names=list(SPANS.names)).combine_chunks()


def assert_money(charges: pa.Table, addresses: pa.Table) -> None:
    """Law 1: the addresses of each charge add up to its day part, in each ledger on its own.

    Raises:
        LawError: names the charge, the ledger, what was expected and found.
    """
    billed = addresses.filter(pc.equal(addresses["x_State"], "billed"))
    key = ["x_ChargeKey", "x_Occurrence"]
    found = billed.group_by(key, use_threads=False).aggregate([(name, "sum") for name in LEDGERS])
    wanted = charges.select([*key, *(day_part(name) for name in LEDGERS)])
    joined = wanted.join(found, key, join_type="full outer", use_threads=False)
    for name in LEDGERS:
        want, have = joined[day_part(name)], joined[name + "_sum"]
        wrong = pc.not_equal(
            pc.coalesce(want, pa.scalar(0, want.type)), pc.coalesce(have.cast(want.type), pa.scalar(0, want.type))
        )
        if pc.any(wrong).as_py():
            row = joined.filter(wrong).slice(0, 1).to_pylist()[0]
            raise LawError(
                f"law 1 (money): charge {row['x_ChargeKey']} occurrence {row['x_Occurrence']}: {name} expected "
                f"{row[day_part(name)]}, addresses add up to {row[name + '_sum']}. Nothing was published.",
                charge=row["x_ChargeKey"],
                ledger=name,
                expected=row[day_part(name)],
                found=row[name + "_sum"],
            )


def assert_time(spans: pa.Table, hours: MachineHours, gpu_counts: Mapping[str, int], span: Index, day_ns: int) -> None:
    """Law 2: every GPU of a machine-hour has the billed span over its slices and categories, and so have GPUs without a name.

    Raises:
        LawError: names machine, hour, GPU, ns expected and found.
    """
    key = ["x_Cloud", "x_MachineId", "x_HourUtc", "gpu"]
    named = spans.append_column("gpu", pc.coalesce(spans["x_ParentId"], spans["x_DeviceId"]))
    total: dict[int, dict[str | None, int]] = {}
    found = named.group_by(key, use_threads=False).aggregate([("x_Ns", "sum")])
    machines = pc.binary_join_element_wise(found["x_Cloud"], found["x_MachineId"], "|").to_pylist()
    hour = (np.asarray(found["x_HourUtc"].cast(pa.int64())) - day_ns) // HOUR_NS
    for machine, h, gpu, ns in zip(
        machines, hour.tolist(), found["gpu"].to_pylist(), found["x_Ns_sum"].to_pylist(), strict=True
    ):
        total.setdefault(hours.index[machine, h], {})[gpu] = ns
    for number in np.nonzero(span > 0)[0].tolist():
        slot, billed, by_gpu = hours.slots[number], int(span[number]), total.get(number, {})
        unnamed = width(slot, gpu_counts) - slot.devices
        wrong: dict[str | None, tuple[int, int]] = {}
        wrong |= {g: (billed, ns) for g, ns in by_gpu.items() if g is not None and ns != billed}
        if by_gpu.get(None, 0) != unnamed * billed:
            wrong[None] = (unnamed * billed, by_gpu.get(None, 0))
        if len(by_gpu) - (None in by_gpu) != slot.devices:
            wrong[None] = (slot.devices * billed, sum(ns for g, ns in by_gpu.items() if g is not None))
        if wrong:
            gpu, (expected, ns) = min(wrong.items(), key=lambda w: (w[0] is None, w[0] or ""))
            what = f"GPU {gpu}" if gpu is not None else "GPUs without a reading"
            raise LawError(
                f"law 2 (time): {slot.machine} hour {slot.hour:02d}: billed {billed} ns for each of "
                f"{width(slot, gpu_counts)} device(s); {what}: expected {expected} ns, categories add up to {ns} ns. Nothing "
                "was published.",
                machine=slot.machine,
                hour=slot.hour,
                expected=expected,
                found=ns,
            )

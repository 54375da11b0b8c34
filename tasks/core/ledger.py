"""One day's ledger: from charges and observed time to addresses, layer money and billed spans, with the laws asserted.

The order of the rules is the order of the code: label, hours, spans, vectors, first rounding, estimates, second rounding.
Knows no disk, no clock. Source: infra/rules/ledger.md 2 to 4.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import ADDRESSES, SPANS
from seedance.schema import INSTANT, MONEY
from tasks.core import money
from tasks.core.allocate import LEDGERS, Addressed, Index, Parts, first_rounding, hour_parts, tie_slots
from tasks.core.categories import label
from tasks.core.estimate import ALPHA_ONE, Estimate, MachineFacts, PriceBook, estimates, machine_facts, machine_services
from tasks.core.second import second_rounding
from tasks.core.spans import BILLING_GRAIN_NS, HOUR_NS, MachineHours, observe, vectors
from tasks.errors import LawError


@dataclass(frozen=True)
class Inputs:
    """What a day's ledger is a function of.

    Args:
        day: UTC usage day, YYYY-MM-DD.
        charges: rows of core_billing__charges with x_UsageDate on the day.
        device_hourly, layer_hourly, attachments, jobs: the usage tables of the day.
        gpu_counts: devices of an instance type.
        prices: rows of core_pricing__list.
        watermarks: `cloud|account|service` to ns, clamped to the day.
        default_region: region of machines that the bill has not named yet.
        alpha: calibration factor in units of 1e-12.
        revision: number of the commit that will hold the result.
        cause: why the day is written again; None for the first time.
    """

    day: str
    charges: pa.Table
    device_hourly: pa.Table
    layer_hourly: pa.Table
    attachments: pa.Table
    jobs: pa.Table
    gpu_counts: Mapping[str, int]
    prices: pa.Table
    watermarks: Mapping[str, int]
    default_region: str
    alpha: int = ALPHA_ONE
    revision: int = 1
    cause: str | None = None

    @property
    def day_ns(self) -> int:
        """Start of the day, ns UTC."""
        midnight = dt.datetime.combine(dt.date.fromisoformat(self.day), dt.time(), dt.UTC)
        return int(midnight.timestamp()) * 1_000_000_000


@dataclass(frozen=True)
class Ledger:
    """A day's ledger: the tables, and the slots and estimates that the reconciliation reports on."""

    addresses: pa.Table
    layers: pa.Table
    spans: pa.Table
    hours: MachineHours
    estimated: list[Estimate]
    usage_units: dict[int, tuple[int, int]]
    """Cash and amortised cost of the machine's own usage rows, by slot, in whole units."""
    lost_ns: int
    """Observed time on devices whose machine no reading and no footer names: it can have no address."""


def settle(inputs: Inputs) -> Ledger:
    """The ledger of one day.

    Raises:
        LawError: money or time of the day does not add up; names the first charge or machine-hour that breaks the law.
    """
    charges = inputs.charges
    hours = observe(inputs.device_hourly, inputs.day_ns)
    telemetry_machines = pa.array(sorted({s.machine for s in hours.slots}), pa.string())
    attached = _attached(inputs.attachments, inputs.day_ns)
    labels = label(charges, telemetry_machines, pa.array(sorted({name for name, _ in attached}), pa.string()))
    parts = hour_parts(charges, labels, inputs.day_ns, hours)
    slots = tie_slots(charges, parts, labels, hours, attached)
    facts, services = machine_facts(charges), machine_services(charges)
    _type_slots(hours, facts)
    book = PriceBook(inputs.prices, inputs.default_region, inputs.day)
    found = estimates(hours, inputs.day_ns, facts, services, inputs.watermarks, book, inputs.alpha)
    open_slots = {e.slot: e for e in found if e.provisional}
    span = np.array(
        [open_slots[i].span_ns if i in open_slots else s.billed_ns or 0 for i, s in enumerate(hours.slots)], np.int64
    )
    vector = vectors(hours, inputs.gpu_counts, span)
    addressed = first_rounding(parts, slots, labels, vector)
    teams = {
        (j, a): t for j, a, t in zip(*(inputs.jobs[c].to_pylist() for c in ("job_id", "attempt", "team")), strict=True)
    }
    priced = np.array([i in open_slots and open_slots[i].units is not None for i in range(len(hours.slots))], bool)
    addresses = pa.concat_tables(
        [
            _billed_rows(addressed, charges, vector, hours, inputs, teams),
            _estimated_rows(_only(vector, priced), open_slots, hours, inputs, teams, facts),
        ]
    )
    for slot in hours.slots:
        if slot.billed_ns is not None and slot.running_ns > slot.billed_ns + BILLING_GRAIN_NS:
            slot.findings.add("observed_exceeds_billed")
    spans = _span_rows(_only(vector, span > 0), hours, span, open_slots, inputs.day_ns)
    assert_money(charges, addresses)
    assert_time(spans, hours, inputs.gpu_counts, span, inputs.day_ns)
    unplaced = pc.or_(pc.is_null(inputs.device_hourly["instance_id"]), pc.is_null(inputs.device_hourly["cloud"]))
    lost = pc.sum(inputs.device_hourly["ns"].filter(unplaced)).as_py() or 0
    usage = _usage_units(parts, slots, labels.spans)
    return Ledger(addresses, second_rounding(addresses, inputs.layer_hourly), spans, hours, found, usage, lost)


def _type_slots(hours: MachineHours, facts: Mapping[str, MachineFacts]) -> None:
    """An hour whose rows and readings state no instance type has that of the machine's other rows of the day."""
    for slot in hours.slots:
        if slot.instance_type is None and slot.machine in facts:
            slot.instance_type = facts[slot.machine].instance_type


def _usage_units(parts: Parts, slots: list[list[int]], spans: npt.NDArray[np.bool_]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for i in np.nonzero(spans[parts.row])[0].tolist():
        cash, amortised = found.get(slots[i][0], (0, 0))
        found[slots[i][0]] = (
            cash + int(parts.amounts["BilledCost"][i]),
            amortised + int(parts.amounts["EffectiveCost"][i]),
        )
    return found


def _attached(attachments: pa.Table, day_ns: int) -> dict[tuple[str, int], list[str]]:
    machines: dict[tuple[str, int], list[str]] = {}
    hour = (np.asarray(attachments["hour_utc"].cast(pa.int64())) - day_ns) // HOUR_NS
    keys, objects = (
        pc.binary_join_element_wise(attachments["cloud"], attachments[c], "|").to_pylist()
        for c in ("instance_id", "object_id")
    )
    for name, h, machine in zip(objects, hour.tolist(), keys, strict=True):
        machines.setdefault((name, h), []).append(machine)
    return {k: sorted(set(v)) for k, v in machines.items()}


def _only(vector: pa.Table, which: npt.NDArray[np.bool_]) -> pa.Table:
    if not len(vector):
        return vector
    return vector.filter(pa.array(which[np.asarray(vector["slot"])]))


def _coverage(vector: pa.Table, count: int) -> Index:
    """Observed share of each slot's span in ppm; -1 for slots without span."""
    slot, ns = np.asarray(vector["slot"]), np.asarray(vector["ns"])
    seen = ~np.asarray(pc.equal(vector["category"], "unobserved")) if len(vector) else np.zeros(0, bool)
    total, observed = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(total, slot, ns)
    np.add.at(observed, slot[seen], ns[seen])
    return np.where(
        total > 0, [int(o) * 1_000_000 // int(t) if t else 0 for o, t in zip(observed, total, strict=True)], -1
    )


def _hour_instants(hour: Index, day_ns: int) -> pa.Array:
    return pa.array(day_ns + hour.astype(np.int64) * HOUR_NS, pa.int64()).cast(INSTANT)


def _billed_rows(
    found: Addressed,
    charges: pa.Table,
    vector: pa.Table,
    hours: MachineHours,
    inputs: Inputs,
    teams: Mapping[tuple[str, int], str | None],
) -> pa.Table:
    n = len(found.row)
    take = pa.array(found.row, pa.int64())
    place = pa.array(found.vector, pa.int64(), mask=found.vector < 0)
    of_vector = (
        vector.take(place)
        if len(vector)
        else pa.table([pa.nulls(n, f.type) for f in vector.schema], schema=vector.schema)
    )
    slots = of_vector["slot"].to_pylist()
    coverage = _coverage(vector, len(hours.slots))
    jobs, attempts = of_vector["job"].to_pylist(), of_vector["attempt"].to_pylist()
    columns = {
        "x_ChargeKey": charges["x_ChargeKey"].take(take),
        "x_Occurrence": charges["x_Occurrence"].take(take),
        "x_HourUtc": _hour_instants(found.hour, inputs.day_ns),
        "x_MachineId": pa.array(
            [None if s is None else hours.slots[s].machine.split("|", 1)[1] for s in slots], pa.string()
        ),
        "x_InstanceType": pa.array([None if s is None else hours.slots[s].instance_type for s in slots], pa.string()),
        "x_CoveragePpm": pa.array(
            [None if s is None or coverage[s] < 0 else int(coverage[s]) for s in slots], pa.int32()
        ),
        "x_Category": pa.array(found.category.tolist(), pa.string()),
        "x_Team": pa.array(
            [teams.get((j, a)) if j is not None else None for j, a in zip(jobs, attempts, strict=True)], pa.string()
        ),
        "x_EstimatedCost": pa.nulls(n, MONEY),
        "x_State": pa.array(["billed"] * n, pa.string()),
    }
    columns |= _of_vector(of_vector)
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
    return _complete(columns, n, inputs)


def _of_vector(rows: pa.Table) -> dict[str, pa.Array]:
    names = {
        "x_DeviceId": "device",
        "x_JobId": "job",
        "x_Attempt": "attempt",
        "x_Rank": "rank",
        "x_Reason": "reason",
        "x_Evidence": "evidence",
    }
    return {ours: rows[theirs] for ours, theirs in names.items()}


def _complete(columns: dict[str, pa.Array], n: int, inputs: Inputs) -> pa.Table:
    columns["x_Revision"] = pa.array([inputs.revision] * n, pa.int32())
    columns["x_Cause"] = pa.array([inputs.cause] * n, pa.string())
    return pa.table(
        [columns.get(c.name, pa.nulls(n, c.type)) for c in ADDRESSES.columns], names=list(ADDRESSES.names)
    ).combine_chunks()


def _estimated_rows(
    vector: pa.Table,
    open_slots: Mapping[int, Estimate],
    hours: MachineHours,
    inputs: Inputs,
    teams: Mapping[tuple[str, int], str | None],
    facts: Mapping[str, object],
) -> pa.Table:
    """Addresses of estimates; a machine-hour without a price has none, and is a finding: unknown is not zero."""
    n = len(vector)
    slot = np.asarray(vector["slot"])
    start = np.append(np.nonzero(np.append(True, slot[1:] != slot[:-1]))[0], n) if n else np.zeros(1, np.int64)
    order = slot[start[:-1]] if n else slot
    totals = np.array([open_slots[int(i)].units or 0 for i in order], object)
    totals = totals.astype(np.int64) if all(abs(int(t)) < 1 << 62 for t in totals) else totals
    shares = money.apportion(totals, start, np.asarray(vector["ns"])) if n else np.zeros(0, np.int64)
    rows = [hours.slots[int(i)] for i in slot]
    coverage = _coverage(vector, len(hours.slots))
    jobs, attempts = vector["job"].to_pylist(), vector["attempt"].to_pylist()
    accounts = [_account(facts.get(r.machine)) for r in rows]
    columns = {
        "x_ChargeKey": pa.array([f"estimate:{r.machine.replace('|', '/', 1)}" for r in rows], pa.string()),
        "x_Occurrence": pa.array([0] * n, pa.int32()),
        "x_HourUtc": _hour_instants(np.array([r.hour for r in rows], np.int64), inputs.day_ns),
        "x_Cloud": pa.array([r.machine.split("|", 1)[0] for r in rows], pa.string()),
        "ResourceId": pa.array([r.machine.split("|", 1)[1] for r in rows], pa.string()),
        "x_MachineId": pa.array([r.machine.split("|", 1)[1] for r in rows], pa.string()),
        "x_InstanceType": pa.array([r.instance_type for r in rows], pa.string()),
        "BillingAccountId": pa.array([a[0] for a in accounts], pa.string()),
        "SubAccountId": pa.array([a[1] for a in accounts], pa.string()),
        "ServiceName": pa.array([a[2] for a in accounts], pa.string()),
        "x_CoveragePpm": pa.array([int(coverage[int(i)]) for i in slot], pa.int32()),
        "x_Category": vector["category"],
        "x_Team": pa.array(
            [teams.get((j, a)) if j is not None else None for j, a in zip(jobs, attempts, strict=True)], pa.string()
        ),
        "x_EstimatedCost": money.from_units(shares),
        "BillingCurrency": pa.array([open_slots[int(i)].currency for i in slot], pa.string()),
        "x_State": pa.array(["provisional"] * n, pa.string()),
        "ChargeCategory": pa.array(["Usage"] * n, pa.string()),
        "PricingCategory": pa.array(["Standard"] * n, pa.string()),
        **_of_vector(vector),
    }
    return _complete(columns, n, inputs)


def _account(facts: object) -> tuple[str | None, str | None, str | None]:
    accounts = sorted(getattr(facts, "accounts", ()), key=lambda a: tuple((x is None, x or "") for x in a))
    return accounts[0] if accounts else (None, None, None)


def _span_rows(
    vector: pa.Table, hours: MachineHours, spans: Index, open_slots: Mapping[int, Estimate], day_ns: int
) -> pa.Table:
    n = len(vector)
    slot = np.asarray(vector["slot"])
    rows = [hours.slots[int(i)] for i in slot]
    columns = {
        "x_HourUtc": _hour_instants(np.array([r.hour for r in rows], np.int64), day_ns),
        "x_Cloud": pa.array([r.machine.split("|", 1)[0] for r in rows], pa.string()),
        "x_MachineId": pa.array([r.machine.split("|", 1)[1] for r in rows], pa.string()),
        "x_InstanceType": pa.array([r.instance_type for r in rows], pa.string()),
        "x_Category": vector["category"],
        "x_Ns": vector["ns"],
        "x_EnergyMj": vector["energy_mj"],
        "x_BilledSpanNs": pa.array(spans[slot] if n else spans[:0], pa.int64()),
        "x_ObservedNs": pc.coalesce(vector["observed_ns"], 0),
        "x_State": pa.array(["provisional" if int(i) in open_slots else "billed" for i in slot], pa.string()),
        **_of_vector(vector),
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
    wanted = charges.select([*key, *("x_Day" + name for name in LEDGERS)])
    joined = wanted.join(found, key, join_type="full outer", use_threads=False)
    for name in LEDGERS:
        want, have = joined["x_Day" + name], joined[name + "_sum"]
        wrong = pc.not_equal(
            pc.coalesce(want, pa.scalar(0, want.type)), pc.coalesce(have.cast(want.type), pa.scalar(0, want.type))
        )
        if pc.any(wrong).as_py():
            row = joined.filter(wrong).slice(0, 1).to_pylist()[0]
            raise LawError(
                f"law 1 (money): charge {row['x_ChargeKey']} occurrence {row['x_Occurrence']}: {name} expected "
                f"{row['x_Day' + name]}, addresses add up to {row[name + '_sum']}. Nothing was published.",
                charge=row["x_ChargeKey"],
                ledger=name,
                expected=row["x_Day" + name],
                found=row[name + "_sum"],
            )


def assert_time(spans: pa.Table, hours: MachineHours, gpu_counts: Mapping[str, int], span: Index, day_ns: int) -> None:
    """Law 2: the time of a machine-hour over all devices and categories is its billed span times its devices.

    Raises:
        LawError: names machine, hour, ns expected and found.
    """
    total: dict[tuple[str, int], int] = {}
    keys = zip(
        spans["x_Cloud"].to_pylist(),
        spans["x_MachineId"].to_pylist(),
        spans["x_HourUtc"].cast(pa.int64()).to_pylist(),
        spans["x_Ns"].to_pylist(),
        strict=True,
    )
    for cloud, machine, hour, ns in keys:
        key = (f"{cloud}|{machine}", (hour - day_ns) // HOUR_NS)
        total[key] = total.get(key, 0) + ns
    for number, slot in enumerate(hours.slots):
        if span[number] <= 0:
            continue
        width = max(gpu_counts.get(slot.instance_type or "", 1), slot.devices, 1)
        expected, found = int(span[number]) * width, total.get((slot.machine, slot.hour), 0)
        if expected != found:
            raise LawError(
                f"law 2 (time): {slot.machine} hour {slot.hour:02d}: billed {expected} ns over {width} device(s), categories "
                f"add up to {found} ns. Nothing was published.",
                machine=slot.machine,
                hour=slot.hour,
                expected=expected,
                found=found,
            )

"""The category of each charge: the first thirteen of infra/rules/ledger.md 3, and what is tied to a machine instead.

Charges and what is known of the day's machines in; one label a charge out. First match wins, so the order below is the rule.
Knows no amounts beyond their sign, no disk, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money

DAY_NS = 24 * 3_600_000_000_000
TIED_MACHINE = "(machine)"
TIED_DEPENDANT = "(dependant)"
"""Labels of charges whose money follows a machine's time; their category is decided per nanosecond."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Labels:
    """What each charge is.

    Args:
        category: shape (n,), a category name, or TIED_MACHINE, TIED_DEPENDANT.
        plain: shape (n,), true for tied usage that is neither negative nor a correction: it follows running time.
        spans: shape (n,), of these the machine's own rows: their quantity is the billed span of a machine-hour.
        touches: shape (n,), every usage row of a machine: an hour that one touches has been billed.
        whole: shape (n,), true for charges that book whole at ChargePeriodStart.
    """

    category: npt.NDArray[np.object_]
    plain: Mask
    spans: Mask
    touches: Mask
    whole: Mask


def equals(column: pa.ChunkedArray, value: str) -> Mask:
    """Where a column has this value; null is no."""
    return np.asarray(pc.fill_null(pc.equal(column, value), False))


def machine_keys(charges: pa.Table) -> pa.ChunkedArray:
    """`cloud|instance` of each charge; null where the row names no instance."""
    return pc.binary_join_element_wise(charges["x_Cloud"], charges["x_MachineId"], "|")


def object_keys(charges: pa.Table) -> pa.ChunkedArray:
    """`cloud|object` of each charge that names a volume or an address; null for every other."""
    return pc.binary_join_element_wise(charges["x_Cloud"], charges["x_DependantId"], "|")


def label(charges: pa.Table, machines: pa.Array, attached: pa.Array) -> Labels:
    """Label every charge.

    Args:
        charges: rows of core_billing__charges of one usage day.
        machines: `cloud|instance` of every machine known that day, from telemetry; the machine rows of the bill are added here.
        attached: `cloud|id` of volumes and addresses that telemetry saw on an instance that day.

    Source: infra/rules/ledger.md 3, 4.3 and 4.6; ChargeCategory, ChargeClass and the statuses as FOCUS 1.2 defines them.
    """
    usage = equals(charges["ChargeCategory"], "Usage")
    usage_based = equals(charges["ChargeFrequency"], "Usage-Based")
    kind = {name: equals(charges["x_Class"], name) for name in pc.unique(charges["x_Class"]).to_pylist()}
    none = np.zeros(len(charges), bool)

    def of_class(name: str) -> Mask:
        return kind.get(name, none)

    billed, _ = money.to_units(charges["BilledCost"])
    effective, _ = money.to_units(charges["EffectiveCost"])
    negative = np.asarray((billed < 0) | (effective < 0), bool)
    commitment = np.asarray(charges["CommitmentDiscountId"].is_valid()) | np.asarray(
        charges["CapacityReservationId"].is_valid()
    )
    unused_box = np.asarray(pc.fill_null(pc.match_substring_regex(charges["x_UsageType"], "Unused(Box|Ded)"), False))
    unused = equals(charges["CommitmentDiscountStatus"], "Unused")
    capacity_unused = equals(charges["CapacityReservationStatus"], "Unused") | unused_box | of_class("capacity_unused")

    keys = machine_keys(charges)
    known = pa.concat_arrays(
        [machines.cast(pa.string()), keys.filter(pa.array(of_class("machine"))).combine_chunks().cast(pa.string())]
    )
    names_machine = np.asarray(pc.and_(keys.is_valid(), pc.is_in(keys, value_set=known)))
    objects = object_keys(charges)
    names_attached = np.asarray(pc.and_(objects.is_valid(), pc.is_in(objects, value_set=attached)))
    rules: list[tuple[Mask, str]] = [
        (equals(charges["ChargeCategory"], "Tax"), "tax"),
        (of_class("rounding"), "rounding"),
        # A fee of Google that its offset is nested in: what is left is the part of the commitment that nobody used.
        (of_class("commitment_unused"), "commitment_unused"),
        (equals(charges["ChargeCategory"], "Purchase") & commitment, "commitment_purchase"),
        (unused, "commitment_unused"),
        (capacity_unused, "capacity_unused"),
        (of_class("support"), "support"),
        (names_machine, TIED_MACHINE),
        (names_attached, TIED_DEPENDANT),
        (equals(charges["ChargeCategory"], "Credit"), "credit"),
        (equals(charges["ChargeCategory"], "Adjustment") | equals(charges["ChargeClass"], "Correction"), "adjustment"),
        (negative, "refund"),
        (of_class("storage"), "storage"),
        (of_class("shared"), "shared"),
        (of_class("untied") | of_class("dependant") | of_class("machine"), "untied"),
    ]
    category = np.full(len(charges), "other_usage", object)
    for mask, name in reversed(rules):
        category[mask] = name
    start, end = (np.asarray(charges[name].cast(pa.int64())) for name in ("ChargePeriodStart", "ChargePeriodEnd"))
    tied = category == TIED_MACHINE
    long = (end - start > DAY_NS) & ~of_class("machine") & ~of_class("dependant") & ~tied
    plain = tied & usage & ~negative & ~np.asarray(charges["ChargeClass"].is_valid())
    return Labels(
        category=category,
        plain=plain,
        spans=plain & of_class("machine"),
        touches=usage & of_class("machine") & np.asarray(keys.is_valid()),
        whole=~usage_based | long | (end <= start),
    )

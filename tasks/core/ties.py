"""What a charge is tied to, from the row alone: class, rule, machine, dependant, instance type, units per machine.

Rules are data (`tasks/rules/ties.csv`): every filled condition is a regular expression (RE2, caseless, searched) on one
column, all must match, and the first rule that matches gives the class. Knows no telemetry, no costs, no disk.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CLASSES
from seedance.catalogue import GpuInstance
from seedance.schema import MONEY
from tasks.core.focus_values import map_distinct
from tasks.errors import SettingsError

CONDITIONS: Mapping[str, str] = {
    "cloud": "x_Cloud",
    "service": "ServiceName",
    "resource": "ResourceId",
    "machine": "machine",
    "resource_type": "ResourceType",
    "usage_type": "x_UsageType",
    "description": "ChargeDescription",
    "meter": "meter",
    "cost_type": "x_CostType",
    "category": "ChargeCategory",
    "commitment": "CommitmentDiscountId",
    "credits": "x_Credits",
    "unit": "unit",
    "labels": "x_SystemLabels",
}
"""Condition of a rule: column that it looks at.

`machine` is the machine that the row names, else empty text; `meter` is SkuMeter and ChargeDescription, with a blank
between them; `unit` is ConsumedUnit, else PricingUnit, else empty text.
"""
DERIVED = ("machine", "meter", "unit")
PER = ("vcpu", "memory_gib", "gpu_count")
"""What a meter can count: how many of it one machine has, the catalogue says by instance type."""
HEADER = ("rule", "class", *CONDITIONS, "gpu_family", "dependant", "per", "about")
RESULT = ("x_Class", "x_TieRule", "x_MachineId", "x_DependantId", "x_InstanceType", "x_UnitsPerMachine")

AWS_INSTANCE = r"(?i)(?:^|[:/])(?P<id>i-[0-9a-z]{8,})$"
AZURE_MACHINE = (
    r"(?i)^(?P<id>.*/providers/microsoft\.compute/"
    r"(?:virtualmachines/[^/]+|virtualmachinescalesets/[^/]+/virtualmachines/[^/]+))$"
)
AZURE_SET = r"^(?P<id>.*/providers/microsoft\.compute/virtualmachinescalesets/(?P<set>[^/]+))$"
AZURE_MEMBER = re.compile(r"(?P<set>.+)_(?P<number>[0-9]+)")
"""Name of a virtual machine in a scale set: the set's name and its number there."""
GCP_INSTANCE = r"(?i)^(?P<id>(?:.*/)?instances/[^/]+|[0-9]{10,})$"

_AWS_TYPE = r"[a-z][a-z0-9-]*\.(?:[0-9]+)?(?:nano|micro|small|medium|large|xlarge|metal(?:-[0-9a-z]+)?)"
USAGE_TYPE = rf"(?:Box|Spot|Dedicated|Host|Unused)[A-Za-z]*:(?P<type>{_AWS_TYPE})$"
"""BoxUsage:g5.4xlarge, SpotUsage:…, DedicatedUsage:…, UnusedBox:… with any region prefix, as AWS writes lineItem/UsageType."""
DESCRIPTION = rf"(?:^|[ (])(?P<type>{_AWS_TYPE})(?:[ ,)].*)?(?:I|i)nstance[ -](?:H|h)our"
""""$1.624 per On Demand Linux g5.4xlarge Instance Hour", "p4d.24xlarge Linux/UNIX Spot Instance-hour in …"."""

MACHINE_SPEC = "compute.googleapis.com/machine_spec"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """One tie rule.

    Args:
        name: goes to x_TieRule.
        kind: class that it gives.
        conditions: (column, pattern), all of which must match.
        gpu_family: pattern of instance types that have GPUs beside the catalogue's; None when the type does not matter.
        dependant: pattern whose first group, in ResourceId, is the dependant's id; None when the row names none.
        per: one of PER that the row's meter counts; None where it counts whole machines.
    """

    name: str
    kind: str
    conditions: tuple[tuple[str, str], ...]
    gpu_family: str | None
    dependant: str | None
    per: str | None


def parse_rules(text: str, *, where: str) -> tuple[Rule, ...]:
    """Rules from CSV text, in order.

    Raises:
        SettingsError: a column is missing or unknown, a class is unknown, a pattern is no regular expression, or a rule
            matches everything. Carries where, rule, found, expected.
    """
    reader = csv.DictReader(io.StringIO(text))
    if tuple(reader.fieldnames or ()) != HEADER:
        raise _wrong(where, "header", ",".join(HEADER), ",".join(reader.fieldnames or ()))
    rules = []
    for row in reader:
        name = row["rule"]
        if None in row or any(v is None for v in row.values()):
            raise _wrong(where, name, f"{len(HEADER)} fields (quote a pattern that holds a comma)", "another number")
        if row["class"] not in CLASSES:
            raise _wrong(where, name, "class among " + ", ".join(CLASSES), row["class"])
        if row["per"] not in ("", *PER):
            raise _wrong(where, name, "per empty or among " + ", ".join(PER), row["per"])
        for column in (*CONDITIONS, "gpu_family", "dependant"):
            _check_pattern(row[column], where, name, grouped=column == "dependant")
        conditions = tuple((CONDITIONS[c], row[c]) for c in CONDITIONS if row[c])
        if not conditions:
            raise _wrong(where, name, "at least one condition", "none")
        last = (row[column] or None for column in ("gpu_family", "dependant", "per"))
        rules.append(Rule(name, row["class"], conditions, *last))
    return tuple(rules)


def _check_pattern(pattern: str, where: str, name: str, *, grouped: bool) -> None:
    try:
        groups = re.compile(pattern).groups
        pc.match_substring_regex(pa.array([""]), pattern)
    except (re.error, pa.ArrowInvalid) as error:
        raise _wrong(where, name, "a regular expression (RE2)", f"{pattern!r}: {error}") from error
    if pattern and grouped and groups != 1:
        raise _wrong(where, name, "one group around the dependant's id", repr(pattern))


def _wrong(where: str, name: str, expected: str, found: str) -> SettingsError:
    return SettingsError(
        f"{where}, rule {name}: expected {expected}, found {found}. Correct the file.",
        where=where,
        rule=name,
        expected=expected,
        found=found,
    )


def tie(charges: pa.Table, rules: Sequence[Rule], instances: Iterable[GpuInstance]) -> pa.Table:
    """Class, rule, machine, dependant, instance type and units per machine of each charge.

    Args:
        charges: stored charges with x_Cloud, and x_SkuDetails, x_SystemLabels and x_CostType where the export has them.
        rules: tie rules in order.
        instances: instance types with GPUs, as their clouds spell them; of several of one type the first counts.

    Returns:
        Columns RESULT, one row a charge. A charge without a matching rule is of class `other` and has no rule.

    Source: infra/rules/ledger.md 4.2; AWS Cost and Usage Report documentation, line item columns (usage types, resource ids).
    """
    facts = {(i.cloud, i.instance_type.casefold()): i for i in reversed(list(instances))}
    types = instance_types(charges, {i.instance_type.casefold(): i.instance_type for i in facts.values()})
    machines = machine_ids(charges)
    matcher = _Matcher(_conditions(charges, machines))
    spelled = sorted({i.instance_type for i in facts.values()})
    gpu = np.asarray(pc.fill_null(pc.is_in(types, value_set=pa.array(spelled, pa.string())), False))
    free = np.ones(len(charges), bool)
    kind = np.full(len(charges), "other", object)
    rule_name = np.full(len(charges), None, object)
    dependant = np.full(len(charges), None, object)
    per = np.full(len(charges), None, object)
    for rule in rules:
        hit = free.copy()
        for column, pattern in rule.conditions:
            hit &= matcher.mask(column, pattern)
        if rule.gpu_family is not None and hit.any():
            family = pc.match_substring_regex(types, rule.gpu_family, ignore_case=True)
            hit &= gpu | np.asarray(pc.fill_null(family, False))
        if not hit.any():
            continue
        kind[hit], rule_name[hit], per[hit] = rule.kind, rule.name, rule.per
        if rule.dependant is not None:
            resource = charges["ResourceId"].filter(pa.array(hit)).combine_chunks()
            dependant[hit] = _dependants(resource, rule)
        free &= ~hit
    return pa.table(
        {
            "x_Class": pa.array(kind, pa.string()),
            "x_TieRule": pa.array(rule_name, pa.string()),
            "x_MachineId": machines,
            "x_DependantId": pa.array(dependant, pa.string()),
            "x_InstanceType": types,
            "x_UnitsPerMachine": _units(charges["x_Cloud"], types, pa.array(per, pa.string()), facts),
        }
    )


def _conditions(charges: pa.Table, machines: pa.Array) -> dict[str, pa.ChunkedArray]:
    """The columns that rules look at; one that the export does not have is null."""
    blank = pa.scalar("", pa.string())
    columns = {n: _column(charges, n) for n in CONDITIONS.values() if n not in DERIVED}
    texts = (pc.fill_null(charges[n], blank) for n in ("SkuMeter", "ChargeDescription"))
    columns["machine"] = pa.chunked_array([pc.fill_null(machines, blank)])
    columns["meter"] = pc.binary_join_element_wise(*texts, " ")
    columns["unit"] = pc.coalesce(charges["ConsumedUnit"], charges["PricingUnit"], blank)
    return columns


def _column(charges: pa.Table, name: str) -> pa.ChunkedArray:
    if name in charges.column_names:
        return charges[name]
    return pa.chunked_array([pa.nulls(len(charges), pa.string())])


def _units(
    clouds: pa.ChunkedArray, types: pa.Array, per: pa.Array, facts: Mapping[tuple[str, str], GpuInstance]
) -> pa.Array:
    """How many of `per` one machine of the type has; null where the rule names none, 0 where the catalogue does not say."""

    def count(text: str) -> Decimal:
        cloud, kind, what = text.split("|")
        found = facts.get((cloud, kind.casefold()))
        if found is None:
            return Decimal(0)
        amount = {"vcpu": found.vcpus, "memory_gib": found.memory_gib, "gpu_count": found.gpu_count}[what]
        return Decimal(amount or 0)

    spelled = pc.replace_substring(pc.fill_null(types, ""), "|", "/")
    named = pc.binary_join_element_wise(clouds.combine_chunks(), spelled, per, "|")
    return map_distinct(named, count, MONEY)


class _Matcher:
    """Masks of (column, pattern), each pattern tried once per distinct value."""

    def __init__(self, columns: Mapping[str, pa.ChunkedArray]) -> None:
        self._columns = {n: _encode(c) for n, c in columns.items()}
        self._masks: dict[tuple[str, str], Mask] = {}

    def mask(self, column: str, pattern: str) -> Mask:
        """Where the pattern is found in the column; null is no."""
        found = self._masks.get((column, pattern))
        if found is None:
            encoded = self._columns[column]
            hit = pc.match_substring_regex(encoded.dictionary, pattern, ignore_case=True)
            found = np.asarray(pc.fill_null(hit.take(encoded.indices), False))
            self._masks[column, pattern] = found
        return found


def _encode(values: pa.ChunkedArray) -> pa.DictionaryArray:
    array = values.combine_chunks()
    return (pa.array([], pa.string()) if isinstance(array, pa.ChunkedArray) else array).dictionary_encode()


def _dependants(resource: pa.Array, rule: Rule) -> npt.NDArray[np.object_]:
    pattern = re.compile(rule.dependant or "", re.IGNORECASE)
    azure = ("x_Cloud", "^azure$") in rule.conditions

    def convert(value: str) -> str | None:
        match = pattern.search(value)
        found = match.group(1) if match else None
        return found.lower() if found and azure else found

    return np.array(map_distinct(resource, convert, pa.string()).to_pylist(), object)


def machine_ids(charges: pa.Table) -> pa.Array:
    """Instance that each row names, as telemetry writes it: AWS `i-…`, Azure id in lower case, GCP as it stands.

    Azure names the set of a machine in a scale set as resource, and the machine by name in its details.

    Args:
        charges: rows with x_Cloud and ResourceId; x_SkuDetails where the export has it.
    """
    cloud = charges["x_Cloud"]
    resource = charges["ResourceId"]
    found = pa.nulls(len(charges), pa.string())
    for name, pattern in (("aws", AWS_INSTANCE), ("azure", AZURE_MACHINE), ("gcp", GCP_INSTANCE)):
        mine = pc.equal(cloud, name)
        if not pc.any(mine).as_py():
            continue
        text = resource if name == "gcp" else pc.utf8_lower(resource)
        ids = _extract(text, pattern, "id")
        found = pc.if_else(mine, ids if name != "azure" else pc.coalesce(ids, _members(text, charges)), found)
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _members(resource: pa.ChunkedArray, charges: pa.Table) -> pa.Array:
    """Machines of scale sets, from the set in lower case and the machine's name in the details of the row."""
    sets = _extract(resource, AZURE_SET, "id")
    if sets.null_count == len(sets):
        return sets
    names = pc.coalesce(_detail(charges, "x_SkuDetails", "VMName"), _detail(charges, "SkuPriceDetails", "x_VMName"))

    def member(text: str) -> str | None:
        where, _, name = text.partition("|")
        match = AZURE_MEMBER.fullmatch(name)
        if match is None or match["set"] != where.rpartition("/")[2]:
            return None
        return f"{where}/virtualmachines/{match['number']}"

    return map_distinct(pc.binary_join_element_wise(sets, pc.utf8_lower(names), "|"), member, pa.string())


def instance_types(charges: pa.Table, known: Mapping[str, str]) -> pa.Array:
    """Instance type of each row, or null: the first that says one of

    SkuPriceDetails.InstanceType; x_SkuDetails.ServiceType or SkuPriceDetails.x_ServiceType (Azure); the system label
    compute.googleapis.com/machine_spec (Google); the usage type and the description (AWS).

    Args:
        charges: rows with SkuPriceDetails, x_UsageType, ChargeDescription; x_SkuDetails and x_SystemLabels where the
            export has them.
        known: types of the catalogue, by their lower-case spelling; a type found in another case is spelled like these.
    """
    found = pc.coalesce(
        _detail(charges, "SkuPriceDetails", "InstanceType"),
        _detail(charges, "x_SkuDetails", "ServiceType"),
        _detail(charges, "SkuPriceDetails", "x_ServiceType"),
        _detail(charges, "x_SystemLabels", MACHINE_SPEC),
        _extract(charges["x_UsageType"], USAGE_TYPE, "type"),
        _extract(charges["ChargeDescription"], DESCRIPTION, "type"),
    )
    return map_distinct(found, lambda t: known.get(t.casefold(), t), pa.string())


def _detail(charges: pa.Table, column: str, name: str) -> pa.Array:
    """The text under a name of a column of JSON objects; null where there is none."""

    def convert(details: str) -> str | None:
        value = json.loads(details)
        found = value.get(name) if isinstance(value, dict) else None
        return found if isinstance(found, str) and found else None

    return map_distinct(_decoded(_column(charges, column)), convert, pa.string())


def _decoded(values: pa.ChunkedArray) -> pa.Array:
    encoded = _encode(values)
    return encoded.dictionary.take(encoded.indices)


def _extract(values: pa.ChunkedArray, pattern: str, group: str) -> pa.Array:
    encoded = _encode(values)
    found = pc.struct_field(pc.extract_regex(encoded.dictionary, pattern), group)
    valid = pc.extract_regex(encoded.dictionary, pattern).is_valid()
    return pc.if_else(valid, found, pa.scalar(None, pa.string())).take(encoded.indices)

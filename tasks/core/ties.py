"""What a charge is tied to, from the row alone: class, rule, machine, dependant and instance type.

Rules are data (`tasks/rules/ties.csv`): every filled condition is a regular expression (RE2, caseless, searched) on one
column, all must match, and the first rule that matches gives the class. Knows no telemetry, no amounts, no disk.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CLASSES
from tasks.core.focus_values import map_distinct
from tasks.errors import SettingsError

CONDITIONS: Mapping[str, str] = {
    "cloud": "x_Cloud",
    "service": "ServiceName",
    "resource": "ResourceId",
    "resource_type": "ResourceType",
    "usage_type": "x_UsageType",
    "description": "ChargeDescription",
    "category": "ChargeCategory",
    "unit": "unit",
}
"""Condition of a rule: column that it looks at. `unit` is ConsumedUnit, else PricingUnit, else empty text."""
HEADER = ("rule", "class", *CONDITIONS, "gpu_family", "dependant", "about")
RESULT = ("x_Class", "x_TieRule", "x_MachineId", "x_DependantId", "x_InstanceType")

AWS_INSTANCE = r"(?i)(?:^|[:/])(?P<id>i-[0-9a-z]{8,})$"
AZURE_MACHINE = (
    r"(?i)^(?P<id>.*/providers/microsoft\.compute/"
    r"(?:virtualmachines/[^/]+|virtualmachinescalesets/[^/]+/virtualmachines/[^/]+))$"
)
GCP_INSTANCE = r"(?i)^(?P<id>(?:.*/)?instances/[^/]+|[0-9]{10,})$"

_AWS_TYPE = r"[a-z][a-z0-9-]*\.(?:[0-9]+)?(?:nano|micro|small|medium|large|xlarge|metal(?:-[0-9a-z]+)?)"
USAGE_TYPE = rf"(?:Box|Spot|Dedicated|Host|Unused)[A-Za-z]*:(?P<type>{_AWS_TYPE})$"
"""BoxUsage:g5.4xlarge, SpotUsage:…, DedicatedUsage:…, UnusedBox:… with any region prefix, as AWS writes lineItem/UsageType."""
DESCRIPTION = rf"(?:^|[ (])(?P<type>{_AWS_TYPE})(?:[ ,)].*)?(?:I|i)nstance[ -](?:H|h)our"
""""$1.624 per On Demand Linux g5.4xlarge Instance Hour", "p4d.24xlarge Linux/UNIX Spot Instance-hour in …"."""

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
    """

    name: str
    kind: str
    conditions: tuple[tuple[str, str], ...]
    gpu_family: str | None
    dependant: str | None


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
        for column in (*CONDITIONS, "gpu_family", "dependant"):
            _check_pattern(row[column], where, name, grouped=column == "dependant")
        conditions = tuple((CONDITIONS[c], row[c]) for c in CONDITIONS if row[c])
        if not conditions:
            raise _wrong(where, name, "at least one condition", "none")
        rules.append(Rule(name, row["class"], conditions, row["gpu_family"] or None, row["dependant"] or None))
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


def tie(charges: pa.Table, rules: Sequence[Rule], gpu_types: Iterable[str]) -> pa.Table:
    """Class, rule, machine, dependant and instance type of each charge.

    Args:
        charges: stored charges with x_Cloud.
        rules: tie rules in order.
        gpu_types: instance types with GPUs, as their clouds spell them.

    Returns:
        Columns RESULT, one row a charge. A charge without a matching rule is of class `other` and has no rule.

    Source: infra/rules/ledger.md 4.2; AWS Cost and Usage Report documentation, line item columns (usage types, resource ids).
    """
    known = {t.casefold(): t for t in gpu_types}
    types = instance_types(charges, known)
    columns = {n: charges[n] for n in CONDITIONS.values() if n != "unit"}
    columns["unit"] = pc.coalesce(charges["ConsumedUnit"], charges["PricingUnit"], pa.scalar("", pa.string()))
    matcher = _Matcher(columns)
    gpu = np.asarray(pc.fill_null(pc.is_in(types, value_set=pa.array(sorted(known.values()), pa.string())), False))
    free = np.ones(len(charges), bool)
    kind = np.full(len(charges), "other", object)
    rule_name = np.full(len(charges), None, object)
    dependant = np.full(len(charges), None, object)
    for rule in rules:
        hit = free.copy()
        for column, pattern in rule.conditions:
            hit &= matcher.mask(column, pattern)
        if rule.gpu_family is not None and hit.any():
            family = pc.match_substring_regex(types, rule.gpu_family, ignore_case=True)
            hit &= gpu | np.asarray(pc.fill_null(family, False))
        if not hit.any():
            continue
        kind[hit], rule_name[hit] = rule.kind, rule.name
        if rule.dependant is not None:
            resource = charges["ResourceId"].filter(pa.array(hit)).combine_chunks()
            dependant[hit] = _dependants(resource, rule)
        free &= ~hit
    return pa.table(
        {
            "x_Class": pa.array(kind, pa.string()),
            "x_TieRule": pa.array(rule_name, pa.string()),
            "x_MachineId": machine_ids(charges),
            "x_DependantId": pa.array(dependant, pa.string()),
            "x_InstanceType": types,
        }
    )


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

    Args:
        charges: rows with x_Cloud and ResourceId.
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
        found = pc.if_else(mine, ids, found)
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def instance_types(charges: pa.Table, known: Mapping[str, str]) -> pa.Array:
    """Instance type of each row: SkuPriceDetails.InstanceType, else the usage type, else the description; else null.

    Args:
        charges: rows with SkuPriceDetails, x_UsageType, ChargeDescription.
        known: types of the catalogue, by their lower-case spelling; a type found in another case is spelled like these.
    """
    details = map_distinct(_decoded(charges["SkuPriceDetails"]), _detail, pa.string())
    usage = _extract(charges["x_UsageType"], USAGE_TYPE, "type")
    text = _extract(charges["ChargeDescription"], DESCRIPTION, "type")
    return map_distinct(pc.coalesce(details, usage, text), lambda t: known.get(t.casefold(), t), pa.string())


def _detail(details: str) -> str | None:
    value = json.loads(details)
    found = value.get("InstanceType") if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else None


def _decoded(values: pa.ChunkedArray) -> pa.Array:
    encoded = _encode(values)
    return encoded.dictionary.take(encoded.indices)


def _extract(values: pa.ChunkedArray, pattern: str, group: str) -> pa.Array:
    encoded = _encode(values)
    found = pc.struct_field(pc.extract_regex(encoded.dictionary, pattern), group)
    valid = pc.extract_regex(encoded.dictionary, pattern).is_valid()
    return pc.if_else(valid, found, pa.scalar(None, pa.string())).take(encoded.indices)

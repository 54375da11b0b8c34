"""The ledger: addresses, layer costs and billed spans. `core_cost__addresses` alone closes to the bill.

Billing columns are FOCUS column IDs; ours carry `x_`. BilledCost (cash) and EffectiveCost (amortised) are never mixed;
both are null on estimates, whose money stands in x_EstimatedCost. Source: infra/rules/ledger.md.
"""

from dataclasses import replace

import pyarrow as pa

from schemas.usage import CATEGORIES, EVIDENCE
from seedance.schema import INSTANT, MONEY, PASSES, PHASES, Column, Table, number, text

STATES = ("provisional", "billed", "closed")
CAUSES = ("bill", "shard", "price", "settings", "schema", "code")


def money(name: str, about: str, *, null: bool = True) -> Column:
    """An amount in BillingCurrency, decimal(38, 12)."""
    return Column(name, MONEY, about, unit="BillingCurrency", null=null, summed=True)


HOUR = Column("x_HourUtc", INSTANT, "start of the hour", unit="ns UTC")
CLOUD = text("x_Cloud", "aws, azure, gcp, or the lower-case provider name")
CURRENCY = text("BillingCurrency", "currency of the amounts")
BILLED = money("BilledCost", "cash ledger; null on estimates")
EFFECTIVE = money("EffectiveCost", "amortised ledger; null on estimates")
LIST = money("ListCost", "list value; null where the bill has none")
ESTIMATED = money("x_EstimatedCost", "estimate times alpha; null once billed")
PROMOTIONAL = money(
    "x_PromotionalCost", "of EffectiveCost, what promotional credits paid, zero or negative; null on estimates"
)
PARENT = text("x_ParentId", "GPU that a MIG slice is cut from; null for a whole device", null=True)
CATEGORY = text("x_Category", "where the money went: the first allowed value whose rule fits", values=CATEGORIES)
JOB = text("x_JobId", "job; null where no job's work explains the money", null=True)
ATTEMPT = number("x_Attempt", 16, "count", "restart number of the job", null=True, summed=False)
ACCOUNT = (
    text("BillingAccountId", "billing account; null on estimates of unknown accounts", null=True),
    text("SubAccountId", "sub-account", null=True),
)
PERIOD = (
    Column("BillingPeriodStart", INSTANT, "start of the billing period; null on estimates", unit="ns UTC", null=True),
    text("InvoiceId", "invoice; null until issued", null=True),
)
STATE = (
    text("x_State", "provisional, billed or closed", values=STATES),
    number("x_Revision", 32, "count", "commit of the day that wrote the row, from 1", min=1, summed=False),
    text("x_Cause", "why the day was written again; null at revision 1", null=True, values=CAUSES),
)
LAYER = (
    text("x_Layer", "layer, or (optimizer), (graph), (model) …", null=True),
    text("x_Pass", "fwd, bwd, recompute, optim, comm, copy", null=True, values=PASSES),
    text("x_Op", "op family", null=True),
    text("x_Phase", "train, prefill, decode, mixed, eval", null=True, values=PHASES),
    number("x_BatchSize", 32, "count", "batch size", null=True, summed=False),
    text("x_Dtype", "compute dtype", null=True),
)
BOUND = number(
    "x_BoundPpm",
    32,
    "ppm",
    "how far the true cost may lie from the row's: four standard errors of the sampled units, in ppm of the cost of all "
    "work of the job in the hour on the instance type and terms; 0 where every unit was sampled",
    max=1_000_000,
    summed=False,
)

ADDRESSES = Table(
    "core_cost__addresses",
    "the part of one charge in one hour at one address",
    (
        "x_ChargeKey",
        "x_Occurrence",
        "x_HourUtc",
        "x_MachineId",
        "x_DeviceId",
        "x_JobId",
        "x_Attempt",
        "x_Rank",
        "x_Category",
    ),
    (
        text("x_ChargeKey", "content key of the charge; estimate:<cloud>/<instance> beyond the watermark"),
        number("x_Occurrence", 32, "count", "number among charges of equal key", summed=False),
        HOUR,
        CLOUD,
        *ACCOUNT,
        text("ResourceId", "resource that the bill names, spelt as there", null=True),
        text("x_MachineId", "instance whose time shares out the money", null=True),
        text("x_InstanceType", "instance type", null=True),
        text("x_DeviceId", "device; null where the money has none", null=True),
        JOB,
        ATTEMPT,
        number("x_Rank", 32, "count", "global rank", null=True, summed=False),
        CATEGORY,
        text("x_Reason", "of unobserved: no_agent or gap", null=True, values=("no_agent", "gap")),
        text("x_Team", "owner team", null=True),
        text("x_CostCentre", "cost centre", null=True),
        BILLED,
        EFFECTIVE,
        LIST,
        ESTIMATED,
        PROMOTIONAL,
        CURRENCY,
        *STATE,
        *PERIOD,
        text("ChargeCategory", "Usage, Purchase, Tax, Credit, Adjustment"),
        text("PricingCategory", "Standard, Dynamic, Committed, Other", null=True),
        text("ServiceName", "service", null=True),
        text("x_TieRule", "tie rule that matched", null=True),
        text(
            "x_Evidence",
            "measured, interpolated or assumed; null where no telemetry is involved",
            null=True,
            values=EVIDENCE,
        ),
        number(
            "x_CoveragePpm",
            32,
            "ppm",
            "observed part of the machine-hour's billed span",
            null=True,
            max=1_000_000,
            summed=False,
        ),
    ),
    version=2,
)

LAYERS = Table(
    "core_cost__layers",
    "work of one pool by layer, pass, op, phase, batch size and dtype",
    (
        "x_HourUtc",
        "x_Cloud",
        "x_JobId",
        "x_Attempt",
        "x_InstanceType",
        "PricingCategory",
        "BillingAccountId",
        "SubAccountId",
        "BillingPeriodStart",
        "InvoiceId",
        "BillingCurrency",
        "x_State",
        "x_Layer",
        "x_Pass",
        "x_Op",
        "x_Phase",
        "x_BatchSize",
        "x_Dtype",
    ),
    (
        HOUR,
        CLOUD,
        text("x_JobId", "job"),
        number("x_Attempt", 16, "count", "restart number of the job", summed=False),
        text("x_InstanceType", "instance type", null=True),
        text("PricingCategory", "Standard, Dynamic, Committed, Other", null=True),
        *ACCOUNT,
        *PERIOD,
        CURRENCY,
        *STATE,
        *LAYER,
        BILLED,
        EFFECTIVE,
        ESTIMATED,
        PROMOTIONAL,
        BOUND,
        text("x_Evidence", "measured, interpolated or assumed", values=EVIDENCE),
    ),
    version=2,
)

SPANS = Table(
    "core_cost__spans",
    "billed span of one machine in one hour over device, job, rank and category: the second law",
    ("x_HourUtc", "x_Cloud", "x_MachineId", "x_DeviceId", "x_JobId", "x_Attempt", "x_Rank", "x_Category"),
    (
        HOUR,
        CLOUD,
        text("x_MachineId", "instance"),
        text("x_InstanceType", "instance type", null=True),
        text("x_DeviceId", "device; null for devices that no reading names", null=True),
        PARENT,
        JOB,
        ATTEMPT,
        number("x_Rank", 32, "count", "global rank", null=True, summed=False),
        text("x_Category", "category of time", values=CATEGORIES[13:]),
        text("x_Reason", "of unobserved: no_agent or gap", null=True, values=("no_agent", "gap")),
        number("x_Ns", 64, "ns", "time; adds up over a machine-hour to billed span times devices"),
        number("x_EnergyMj", 64, "mJ", "energy; null when no reading gave any", null=True),
        number("x_BilledSpanNs", 64, "ns", "billed span of the machine-hour, of one device", summed=False),
        number("x_ObservedNs", 64, "ns", "observed time of the device before it was fitted to the span", summed=False),
        text("x_State", "provisional or billed", values=STATES),
        text("x_Evidence", "measured, interpolated or assumed; null where unobserved", null=True, values=EVIDENCE),
    ),
    version=2,
)

LEDGER = {t.name: t for t in (ADDRESSES, LAYERS, SPANS)}

_DAY = Column("x_UsageDate", pa.date32(), "UTC day")
_RATIO = pa.float64()


def _ratio(name: str, unit: str, about: str) -> Column:
    return Column(name, _RATIO, about, unit=unit, null=True)


_JOB_FACTS = (
    text("x_JobName", "name people know the job by", null=True),
    text("x_Team", "owner team", null=True),
    text("x_Project", "owner project", null=True),
    text("x_Model", "model", null=True),
)
_UNIT_COSTS = (
    _ratio(
        "x_EffectiveCostPerUnit",
        "BillingCurrency per unit of work",
        "EffectiveCost over the job's units (steps, iterations)",
    ),
    _ratio("x_EffectiveCostPer1kSamples", "BillingCurrency per 1,000 samples", "inferences or training samples"),
    _ratio("x_EffectiveCostPer1MTokens", "BillingCurrency per 1,000,000 tokens", "tokens in and out"),
)

_OF_THE_JOB = "of the job on the day, the same in each of its rows: take the maximum, not the sum"
_JOB_COUNTS = tuple(
    number(name, 64, "count", f"{what} {_OF_THE_JOB}", null=True, summed=False)
    for name, what in (
        ("x_Units", "units of work (optimiser steps, engine iterations, batches)"),
        ("x_Samples", "samples"),
        ("x_TokensIn", "tokens in"),
        ("x_TokensOut", "tokens out"),
    )
)

LAYER_DAILY = Table(
    "report_cost__layer_daily",
    "cost of a day by job, layer, pass, op, phase, batch size and dtype; money without layers has null layer columns",
    (
        "x_Cloud",
        "BillingCurrency",
        "x_State",
        "x_JobId",
        "x_Attempt",
        "x_Category",
        "x_GpuModel",
        "x_Layer",
        "x_Pass",
        "x_Op",
        "x_Phase",
        "x_BatchSize",
        "x_Dtype",
    ),
    (
        _DAY,
        CLOUD,
        CURRENCY,
        STATE[0],
        JOB,
        ATTEMPT,
        *_JOB_FACTS,
        CATEGORY,
        text("x_GpuModel", "GPU model of the work", null=True),
        *LAYER,
        number(
            "x_LayerIndex",
            32,
            "count",
            "position of the layer in the model; -1 without a module",
            null=True,
            min=-1,
            summed=False,
        ),
        BILLED,
        EFFECTIVE,
        ESTIMATED,
        PROMOTIONAL,
        number("x_Ns", 64, "ns", "device time of the work", null=True),
        Column("x_Flops", pa.decimal128(38, 0), "model FLOPs", unit="FLOP", null=True, summed=True),
        Column("x_HwFlops", pa.decimal128(38, 0), "hardware FLOPs", unit="FLOP", null=True, summed=True),
        Column("x_Calls", pa.decimal128(38, 0), "calls", unit="count", null=True, summed=True),
        Column(
            "x_UncountedCalls",
            pa.decimal128(38, 0),
            "calls without a FLOP formula",
            unit="count",
            null=True,
            summed=True,
        ),
        number("x_UncountedNs", 64, "ns", "device time of calls without a FLOP formula", null=True),
        _ratio("x_FlopsPerEffectiveUsd", "FLOP per BillingCurrency", "model FLOPs over EffectiveCost, or the estimate"),
        _ratio(
            "x_Mfu", "ratio", "model FLOPs over time at the dense peak of the dtype; null where the peak is unknown"
        ),
        _ratio("x_Hfu", "ratio", "hardware FLOPs over time at the dense peak"),
        _ratio("x_TflopsPerWatt", "TFLOP/s per W", "model FLOPs over energy, at the job's mean power"),
        *_UNIT_COSTS,
        replace(BOUND, null=True, about=BOUND.about + "; null for money without layers"),
    ),
    version=2,
)

JOB_DAILY = Table(
    "report_cost__job_daily",
    "cost of a day by job and category; money that no job's work explains has a null job",
    ("x_Cloud", "BillingCurrency", "x_State", "x_JobId", "x_Attempt", "x_Category"),
    (
        _DAY,
        CLOUD,
        CURRENCY,
        STATE[0],
        JOB,
        ATTEMPT,
        *_JOB_FACTS,
        CATEGORY,
        BILLED,
        EFFECTIVE,
        LIST,
        ESTIMATED,
        PROMOTIONAL,
        number("x_GpuNs", 64, "ns", "GPU time of the billed span", null=True),
        _ratio("x_GpuHours", "h", "x_GpuNs in hours"),
        number("x_EnergyMj", 64, "mJ", "energy", null=True),
        *_JOB_COUNTS,
        *_UNIT_COSTS,
    ),
    version=2,
)

RESOURCE_DAILY = Table(
    "report_cost__resource_daily",
    "cost of a day by resource, device and category: which GPU was idle, and why time is unobserved",
    (
        "x_Cloud",
        "BillingCurrency",
        "x_State",
        "BillingAccountId",
        "SubAccountId",
        "ServiceName",
        "ResourceId",
        "x_DeviceId",
        "x_Category",
        "x_Reason",
    ),
    (
        _DAY,
        CLOUD,
        CURRENCY,
        STATE[0],
        *ACCOUNT,
        text("ServiceName", "service", null=True),
        text("ResourceId", "resource, in lower case on azure; null where the bill names none", null=True),
        text("x_InstanceType", "instance type", null=True),
        text("x_DeviceId", "device; null where the money has none, or no reading names it", null=True),
        PARENT,
        CATEGORY,
        text("x_Reason", "of unobserved: no_agent or gap", null=True, values=("no_agent", "gap")),
        BILLED,
        EFFECTIVE,
        LIST,
        ESTIMATED,
        PROMOTIONAL,
        number("x_GpuNs", 64, "ns", "GPU time of billed spans, each in one row; null if no machine's own", null=True),
        _ratio("x_GpuHours", "h", "x_GpuNs in hours"),
        number(
            "x_CoveragePpm",
            32,
            "ppm",
            "observed part of the day's billed spans of the machine; of a scale set, of those of its machines in the row",
            null=True,
            max=1_000_000,
            summed=False,
        ),
    ),
    version=2,
)

RECONCILIATION = Table(
    "report_reconciliation__hourly",
    "estimate beside bill, one machine or one volume in one hour",
    ("x_HourUtc", "x_Cloud", "x_ResourceId"),
    (
        HOUR,
        CLOUD,
        text("x_ResourceId", "instance, or volume whose size and type its hosts state"),
        text("x_MachineId", "instance; null on volumes", null=True),
        text("x_Family", "SKU family: instance type, else meter; type of a volume", null=True),
        text("BillingAccountId", "billing account", null=True),
        text("ServiceName", "service", null=True),
        text("BillingCurrency", "currency; null where neither a bill nor a price is known", null=True),
        money(
            "x_ListEstimate",
            "price times observed running time (volumes: times size), before alpha; null without a price or telemetry, and "
            "where the bill is in another currency than the price",
        ),
        money("x_EstimatedCost", "x_ListEstimate times alpha; null where x_Alpha is"),
        money(
            "BilledCost",
            "cash of the resource's usage rows in the hour; null until billed, and where they have several currencies",
        ),
        money(
            "EffectiveCost",
            "amortised cost of the resource's usage rows in the hour; null until billed, and where they have several currencies",
        ),
        Column(
            "x_Alpha",
            MONEY,
            "calibration factor from the 14 days before; 1 where nothing was learnt; null on days that the bill covers whole",
            unit="ratio",
            null=True,
        ),
        text(
            "x_PriceSource",
            "rung of the price ladder: contracted, spot or list",
            null=True,
            values=("contracted", "spot", "list"),
        ),
        _ratio("x_ApeBefore", "ratio", "|estimate before alpha - EffectiveCost| / EffectiveCost"),
        _ratio("x_ApeAfter", "ratio", "|estimate after alpha - EffectiveCost| / EffectiveCost"),
        number("x_ObservedNs", 64, "ns", "running time that telemetry saw; null on volumes", null=True),
        number("x_BilledSpanNs", 64, "ns", "span that the bill charges; null until billed and on volumes", null=True),
        text(
            "x_State",
            "provisional, billed, or unmatched: observed, within the watermark, and not billed",
            values=(*STATES, "unmatched"),
        ),
        text(
            "x_Finding",
            "what does not fit: unmatched, observed_exceeds_billed, no_price, no_telemetry, meters_disagree, unknown_type, "
            "other_currency; and of the family: deviation (bill over estimate beyond 1.5 % from 1), out_of_band (beyond 2 %)",
            null=True,
        ),
        text(
            "x_DeviationCause",
            "with deviation: the greatest part of the difference between bill and estimate",
            null=True,
            values=("rate", "missing_resource", "commitment", "credit", "lateness"),
        ),
    ),
    version=2,
)

BRIDGE = Table(
    "report_bridge__monthly",
    "from the rows of a bill to its addresses, and from billed to effective, per account and billing period",
    ("x_Cloud", "BillingAccountId", "BillingPeriodStart", "BillingCurrency"),
    (
        CLOUD,
        text("BillingAccountId", "billing account"),
        Column("BillingPeriodStart", INSTANT, "start of the billing period", unit="ns UTC"),
        CURRENCY,
        text(
            "x_RawBilledCost",
            "BilledCost as the files have it, exact decimal text; null where rows of several accounts were quantised",
            null=True,
        ),
        text(
            "x_QuantisedAway", "raw minus stored BilledCost, exact decimal text; null like x_RawBilledCost", null=True
        ),
        money("x_StoredBilledCost", "BilledCost of stored rows", null=False),
        money("x_AddressedBilledCost", "BilledCost of addresses of committed days", null=False),
        money("x_ScheduledBilledCost", "parts on days that have not been run", null=False),
        money("x_StoredEffectiveCost", "EffectiveCost of stored rows", null=False),
        money("x_AddressedEffectiveCost", "EffectiveCost of addresses of committed days", null=False),
        money("x_ScheduledEffectiveCost", "parts on days that have not been run", null=False),
        money("x_CommitmentPurchases", "BilledCost of commitment purchases", null=False),
        money("x_CommitmentUsed", "EffectiveCost minus BilledCost of rows with commitment status Used", null=False),
        money("x_CommitmentUnused", "EffectiveCost minus BilledCost of rows with commitment status Unused", null=False),
        money(
            "x_Unexplained",
            "EffectiveCost minus (BilledCost - purchases + used + unused): the file's own difference",
            null=False,
        ),
        text("x_Invoice", "invoice total, or not supplied"),
    ),
)

QUALITY = Table(
    "report_quality__runs",
    "one check of one run",
    ("x_RunId", "x_Stage", "x_Check"),
    (
        text("x_RunId", "run"),
        _DAY,
        text("x_Stage", "collect, reduce, bill, reconcile, publish"),
        text("x_Check", "what was checked or counted"),
        text("x_Outcome", "passed, failed, or counted", values=("passed", "failed", "counted")),
        number("x_RowsIn", 64, "count", "rows in", null=True),
        number("x_RowsOut", 64, "count", "rows out", null=True),
        number("x_RowsQuarantined", 64, "count", "rows in quarantine", null=True),
        number("x_QuarantinedPpm", 32, "ppm", "share of the day in quarantine", null=True, max=1_000_000, summed=False),
        text("x_Detail", "figures, versions, the charge or the shard that it is about", null=True),
        number("x_DurationMs", 64, "ms", "time of the stage", null=True),
        text("x_Reused", "computed or reused", null=True, values=("computed", "reused")),
    ),
)

REPORTS = {t.name: t for t in (LAYER_DAILY, JOB_DAILY, RESOURCE_DAILY, RECONCILIATION, BRIDGE, QUALITY)}

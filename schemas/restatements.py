"""What changed: between two snapshots of a bill, and between two revisions of a usage day.

Billing columns are FOCUS column IDs; ours carry `x_`. Source: infra/rules/ledger.md 5 and 6.
"""

from dataclasses import replace

import pyarrow as pa

from schemas.ledger import (
    ACCOUNT,
    ATTEMPT,
    CATEGORY,
    CAUSES,
    CLOUD,
    CURRENCY,
    JOB,
    PERIOD,
    STATES,
    money,
)
from seedance.schema import INSTANT, Column, Table, number, text

CHANGES = ("added", "removed", "changed")

DIFFERENCES = Table(
    "report_bills__differences",
    "a charge that is not the same in the snapshot of a bill in force and in the one before it",
    ("x_Source", "BillingPeriodStart", "x_ChargeKey", "x_Occurrence", "x_FormerOccurrence"),
    (
        text("x_Source", "name of the bill source"),
        Column("BillingPeriodStart", INSTANT, "start of the billing period", unit="ns UTC"),
        text("x_Delivery", "delivery in force that has the charge; null when removed", null=True),
        text("x_FormerDelivery", "delivery before it that had the charge; null when added", null=True),
        text("x_ChargeKey", "what the charge is known by"),
        number(
            "x_Occurrence", 32, "count", "number among charges of equal key; null when removed", null=True, summed=False
        ),
        number(
            "x_FormerOccurrence",
            32,
            "count",
            "its number in the former snapshot; null when added",
            null=True,
            summed=False,
        ),
        text("x_Change", "added, removed or changed", values=CHANGES),
        Column(
            "x_Closed", pa.bool_(), "every row of the account and period bore an invoice before: the period was closed"
        ),
        Column("x_UsageDate", pa.date32(), "UTC day of ChargePeriodStart"),
        CLOUD,
        text("BillingAccountId", "billing account"),
        text("ResourceId", "resource that the bill names", null=True),
        text("ServiceName", "service", null=True),
        text("ChargeCategory", "Usage, Purchase, Tax, Credit, Adjustment"),
        text("ChargeClass", "Correction of an invoiced period, else null", null=True),
        CURRENCY,
        money("BilledCost", "cash ledger; null when removed"),
        money("x_FormerBilledCost", "cash ledger before; null when added"),
        money("EffectiveCost", "amortised ledger; null when removed"),
        money("x_FormerEffectiveCost", "amortised ledger before; null when added"),
        text("InvoiceId", "invoice; null until issued, or when removed", null=True),
        text("x_FormerInvoiceId", "invoice before", null=True),
    ),
)

RESTATEMENTS = Table(
    "report_restatements__daily",
    "by how much a revision of a usage day changed the money of one address group",
    (
        "x_UsageDate",
        "x_Revision",
        "x_Cloud",
        "BillingAccountId",
        "SubAccountId",
        "BillingPeriodStart",
        "InvoiceId",
        "BillingCurrency",
        "x_State",
        "ResourceId",
        "x_MachineId",
        "x_DeviceId",
        "x_JobId",
        "x_Attempt",
        "x_Category",
    ),
    (
        Column("x_UsageDate", pa.date32(), "UTC day"),
        number("x_Revision", 32, "count", "commit of the day that made the change, from 2", min=2, summed=False),
        text("x_Cause", "why the day was written again", values=CAUSES),
        CLOUD,
        *ACCOUNT,
        *PERIOD,
        CURRENCY,
        text("x_State", "provisional, billed or closed: an estimate that a bill replaces is taken back", values=STATES),
        text("ResourceId", "resource that the bill names, in lower case on azure", null=True),
        text("x_MachineId", "instance whose time shares out the money", null=True),
        text("x_DeviceId", "device; null where the money has none", null=True),
        JOB,
        ATTEMPT,
        replace(CATEGORY, about="where the money went"),
        money("BilledCost", "change of the cash ledger; null where neither revision states any"),
        money("EffectiveCost", "change of the amortised ledger; null where neither revision states any"),
        money("x_EstimatedCost", "change of the estimate; null where neither revision states any"),
    ),
)

RESTATED = {t.name: t for t in (DIFFERENCES, RESTATEMENTS)}

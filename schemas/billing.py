"""Bills and prices in FOCUS columns, letter for letter; ours carry `x_`. Types, null rule and version per column.

Source: FOCUS 1.2 specification, columns of Cost and Usage; split columns of 1.3. Reading is caseless for enumerations; at rest
they are spelled as FOCUS spells them.
"""

import pyarrow as pa

from seedance.schema import INSTANT, MONEY, Column, Table, number, text

FOCUS = "FOCUS 1.2"


def _money(name: str, about: str, *, null: bool = False) -> Column:
    return Column(name, MONEY, about, unit="BillingCurrency", null=null, summed=True, source=FOCUS)


def _quantity(name: str, about: str, unit: str) -> Column:
    return Column(name, MONEY, about, unit=unit, null=True, source=FOCUS)


def _focus(name: str, about: str, *, null: bool = True, values: tuple[str, ...] | None = None) -> Column:
    return Column(name, pa.string(), about, null=null, values=values, source=FOCUS)


def _time(name: str, about: str) -> Column:
    return Column(name, INSTANT, about, unit="ns UTC", source=FOCUS)


CLASSES = (
    "machine",
    "dependant",
    "storage",
    "shared",
    "support",
    "rounding",
    "commitment_unused",
    "capacity_unused",
    "untied",
    "other",
)
"""What a tie rule makes of a row, from the row alone. `untied`: the service is in the tie table and nothing matched."""

CHARGES = Table(
    "core_billing__charges",
    "one stored row of a bill on one usage day: a charge that is spread over days has a row in each",
    ("x_ChargeKey", "x_Occurrence", "x_UsageDate"),
    (
        text(
            "x_ChargeKey",
            "what the charge is known by: sha256 over all columns except costs, quantities, prices, InvoiceId and those that "
            "say how the row was delivered",
        ),
        number("x_Occurrence", 32, "count", "number among rows of equal key in the delivery, from 0", summed=False),
        Column("x_UsageDate", pa.date32(), "UTC day that this row is about"),
        Column("x_IsHomeDay", pa.bool_(), "true on the day of ChargePeriodStart: full amounts add up over these rows"),
        text("x_Cloud", "aws, azure, gcp, or the lower-case provider name"),
        text("x_Source", "name of the bill source in the settings"),
        text("x_Class", "what the tie table makes of the row", values=CLASSES),
        text("x_TieRule", "name of the rule that gave the class", null=True),
        text("x_MachineId", "instance that the row names, in the form telemetry uses", null=True),
        text("x_DependantId", "volume, address or balancer that the row names", null=True),
        text("x_InstanceType", "instance type, from SkuPriceDetails, x_UsageType or ChargeDescription", null=True),
        _money("x_DayBilledCost", "part of BilledCost on this day"),
        _money("x_DayEffectiveCost", "part of EffectiveCost on this day"),
        _money("x_DayListCost", "part of ListCost on this day", null=True),
        _money("x_DayPromotionalCost", "part of x_PromotionalCost on this day"),
        _money(
            "x_PromotionalCost",
            "what of EffectiveCost a promotional credit paid, zero or negative: the row itself where it is a Credit, else the "
            "promotions nested in it; unit costs leave it out",
        ),
        text(
            "x_Credits", "credits nested in the row (GCP), JSON array; they are in the row's costs already", null=True
        ),
        _quantity(
            "x_UnitsPerMachine",
            "units of the row's meter that one machine has: cores, GPUs, GiB; null is one, 0 unknown",
            "count",
        ),
        text("x_ServiceCode", "AWS service code", null=True),
        text("x_UsageType", "AWS usage type", null=True),
        _focus("AvailabilityZone", "zone"),
        _money("BilledCost", "cash ledger"),
        _focus("BillingAccountId", "billing account", null=False),
        _focus("BillingAccountName", "billing account name"),
        _focus("BillingAccountType", "billing account type"),
        _focus("BillingCurrency", "currency of the costs", null=False),
        _time("BillingPeriodEnd", "end of the billing period, exclusive"),
        _time("BillingPeriodStart", "start of the billing period"),
        _focus("CapacityReservationId", "capacity reservation"),
        _focus("CapacityReservationStatus", "Used or Unused", values=("Used", "Unused")),
        _focus(
            "ChargeCategory",
            "what kind of charge",
            null=False,
            values=("Usage", "Purchase", "Tax", "Credit", "Adjustment"),
        ),
        _focus("ChargeClass", "Correction of an invoiced period, else null", values=("Correction",)),
        _focus("ChargeDescription", "text of the provider"),
        _focus("ChargeFrequency", "how often it is charged", values=("One-Time", "Recurring", "Usage-Based")),
        _time("ChargePeriodEnd", "end of the charge period, exclusive"),
        _time("ChargePeriodStart", "start of the charge period"),
        _focus("CommitmentDiscountCategory", "Spend or Usage", values=("Spend", "Usage")),
        _focus("CommitmentDiscountId", "commitment"),
        _focus("CommitmentDiscountName", "name of the commitment"),
        _quantity("CommitmentDiscountQuantity", "quantity of the commitment", "CommitmentDiscountUnit"),
        _focus("CommitmentDiscountStatus", "Used or Unused", values=("Used", "Unused")),
        _focus("CommitmentDiscountType", "kind of commitment"),
        _focus("CommitmentDiscountUnit", "unit of CommitmentDiscountQuantity"),
        _quantity("ConsumedQuantity", "quantity consumed", "ConsumedUnit"),
        _focus("ConsumedUnit", "unit of ConsumedQuantity"),
        _money("ContractedCost", "contracted unit price times quantity", null=True),
        _quantity("ContractedUnitPrice", "contracted unit price", "BillingCurrency per PricingUnit"),
        _money("EffectiveCost", "amortised ledger"),
        _focus("InvoiceId", "invoice; null until issued"),
        _focus("InvoiceIssuerName", "who invoices"),
        _money("ListCost", "list unit price times quantity", null=True),
        _quantity("ListUnitPrice", "list unit price", "BillingCurrency per PricingUnit"),
        _focus(
            "PricingCategory",
            "Standard, Dynamic, Committed, Other",
            values=("Standard", "Dynamic", "Committed", "Other"),
        ),
        _focus("PricingCurrency", "currency of prices"),
        _quantity("PricingCurrencyContractedUnitPrice", "contracted unit price", "PricingCurrency per PricingUnit"),
        _quantity("PricingCurrencyEffectiveCost", "EffectiveCost in PricingCurrency", "PricingCurrency"),
        _quantity("PricingCurrencyListUnitPrice", "list unit price", "PricingCurrency per PricingUnit"),
        _quantity("PricingQuantity", "quantity priced", "PricingUnit"),
        _focus("PricingUnit", "unit of PricingQuantity"),
        _focus("ProviderName", "provider; absent from FOCUS 1.4 on"),
        _focus("PublisherName", "publisher; absent from FOCUS 1.4 on"),
        _focus("RegionId", "region"),
        _focus("RegionName", "region name"),
        _focus("ResourceId", "resource"),
        _focus("ResourceName", "resource name"),
        _focus("ResourceType", "resource type"),
        _focus("ServiceCategory", "service category"),
        _focus("ServiceName", "service"),
        _focus("ServiceSubcategory", "service subcategory"),
        _focus("SkuId", "SKU"),
        _focus("SkuMeter", "meter of the SKU"),
        _focus("SkuPriceDetails", "JSON object"),
        _focus("SkuPriceId", "SKU price"),
        _focus("SubAccountId", "sub-account"),
        _focus("SubAccountName", "sub-account name"),
        _focus("SubAccountType", "sub-account type"),
        _focus("Tags", "JSON object, keys sorted"),
        _focus("AllocatedMethodId", "1.3: method of a provider's split"),
        _focus("AllocatedMethodDetails", "1.3: JSON object"),
        _focus("AllocatedResourceId", "1.3: part of the split"),
        _focus("AllocatedResourceName", "1.3: name of the part"),
        _focus("AllocatedTags", "1.3: JSON object"),
        _focus("HostProviderName", "1.3: host provider"),
        _focus("ServiceProviderName", "1.3: service provider"),
    ),
    version=2,
)

PRICES = Table(
    "core_pricing__list",
    "list or spot price of one SKU in one region, as of a date",
    ("x_Cloud", "SkuId", "RegionId", "PricingCategory", "x_AsOf"),
    (
        text("x_Cloud", "aws, azure, gcp"),
        text("SkuId", "instance type, or type of a volume"),
        text("RegionId", "region"),
        text("PricingCategory", "Standard or Dynamic (spot)", values=("Standard", "Dynamic")),
        text("x_AsOf", "date or month of the price, or undated"),
        Column("ListUnitPrice", MONEY, "price", unit="BillingCurrency per PricingUnit", min=0),
        text("PricingUnit", "Hours of a machine, or GiB-Mo: a GiB of a volume for a calendar month"),
        text("BillingCurrency", "currency"),
        text("x_GpuModel", "GPU of the instance type; null for volumes", null=True),
        number("x_GpuCount", 16, "count", "GPUs of the instance type; null for volumes", null=True, summed=False),
        text("x_PriceSource", "where the price comes from"),
    ),
)

BILLING = {t.name: t for t in (CHARGES, PRICES)}

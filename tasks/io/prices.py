"""The built-in price catalogue as rows of `core_pricing__list`. Knows no bill and no cloud API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import ceil
from typing import Any

import pyarrow as pa

from schemas.billing import PRICES
from seedance.catalogue import GpuInstance, StoragePrice, gpu_instances, storage_prices
from seedance.schema import conform
from tasks.core.estimate import VOLUME_UNIT

UNDATED = "undated"


def list_prices() -> pa.Table:
    """List and spot prices of machines and list prices of volumes, a row per SKU, region, pricing category and date, by key.

    A type without a price has no row. When two rows meet in a key, the lower price stands, then the lesser source text:
    the outcome never depends on the order of the file.
    """
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (*_machines(), *map(_volume, storage_prices())):
        key = tuple(row[k] for k in PRICES.key)
        if key not in best or _rank(row) < _rank(best[key]):
            best[key] = row
    rows = [best[key] for key in sorted(best)]
    return conform(pa.Table.from_pylist(rows, schema=PRICES.arrow), PRICES, where="built-in price catalogue")


def latest_prices(prices: pa.Table) -> Mapping[tuple[str, str, str, str], Decimal]:
    """Unit price by (x_Cloud, SkuId, RegionId, PricingCategory): of the newest date, undated last."""
    newest: dict[tuple[str, str, str, str], tuple[str, Decimal]] = {}
    for row in prices.select([*PRICES.key, "ListUnitPrice"]).to_pylist():
        key = (row["x_Cloud"], row["SkuId"], row["RegionId"], row["PricingCategory"])
        as_of = "" if row["x_AsOf"] == UNDATED else row["x_AsOf"]
        if key not in newest or as_of > newest[key][0]:
            newest[key] = (as_of, row["ListUnitPrice"])
    return {key: price for key, (_, price) in newest.items()}


def _machines() -> Iterator[dict[str, Any]]:
    for instance in gpu_instances():
        offers = (("Standard", instance.on_demand_usd_per_hour), ("Dynamic", instance.spot_usd_per_hour))
        for category, price in offers:
            if price is not None and instance.region is not None:
                yield _row(instance, category, price)


def _volume(price: StoragePrice) -> dict[str, Any]:
    return {
        "x_Cloud": price.cloud,
        "SkuId": price.volume_type,
        "RegionId": price.region,
        "PricingCategory": "Standard",
        "x_AsOf": price.as_of or UNDATED,
        "ListUnitPrice": price.usd_per_gib_month,
        "PricingUnit": VOLUME_UNIT,
        "BillingCurrency": "USD",
        "x_GpuModel": None,
        "x_GpuCount": None,
        "x_PriceSource": price.source,
    }


def _row(instance: GpuInstance, category: str, price: Decimal) -> dict[str, Any]:
    return {
        "x_Cloud": instance.cloud,
        "SkuId": instance.instance_type,
        "RegionId": instance.region,
        "PricingCategory": category,
        "x_AsOf": instance.as_of or UNDATED,
        "ListUnitPrice": price,
        "PricingUnit": "Hours",
        "BillingCurrency": "USD",
        "x_GpuModel": instance.gpu_model,
        # A slice of a GPU is seen as one device.
        "x_GpuCount": ceil(instance.gpu_count) if instance.gpu_count is not None else 1,
        "x_PriceSource": instance.source,
    }


def _rank(row: Mapping[str, Any]) -> tuple[Decimal, str]:
    return row["ListUnitPrice"], row["x_PriceSource"]

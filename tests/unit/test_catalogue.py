"""The committed tables of GPUs, instance types and prices: facts to the digit, and no float on the way."""

from decimal import Decimal

import pytest

from schemas.billing import PRICES
from seedance.catalogue import PEAK_COLUMNS, gpu_count, gpu_instance, gpu_instances, gpus, normal_name, peak_flops
from tasks.io.prices import latest_prices, list_prices


def test_each_type_once_a_region_with_its_source() -> None:
    types = [(i.cloud, i.instance_type, i.region) for i in gpu_instances()]
    assert len(types) == len(set(types)) == 108
    counts = {(i.cloud, i.instance_type, i.gpu_count, i.gpu_model) for i in gpu_instances()}
    assert len(counts) == len({(cloud, kind) for cloud, kind, _, _ in counts})
    assert all(i.source for i in gpu_instances())
    assert {i.cloud for i in gpu_instances()} == {"aws", "azure", "gcp"}


@pytest.mark.parametrize(
    ("cloud", "kind", "count"),
    [
        ("aws", "g5.4xlarge", Decimal(1)),
        ("aws", "p4d.24xlarge", Decimal(8)),
        ("aws", "g6f.large", Decimal("0.125")),
        ("azure", "standard_nd96isr_h100_v5", Decimal(8)),
        ("gcp", "a2-megagpu-16g", Decimal(16)),
        ("aws", "p6e-gb200.36xlarge", None),
        ("aws", "m5.large", None),
        ("gcp", "g5.4xlarge", None),
    ],
)
def test_gpu_count(cloud: str, kind: str, count: Decimal | None) -> None:
    assert gpu_count(cloud, kind) == count


def test_a_known_type_without_a_count_is_still_known() -> None:
    found = gpu_instance("aws", "P6e-GB200.36xlarge")
    assert found is not None
    assert (found.gpu_count, found.on_demand_usd_per_hour, found.region) == (None, None, None)


@pytest.mark.parametrize(
    ("model", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312 * 10**12),
        ("A100-SXM4-40GB", "torch.bfloat16", 312 * 10**12),
        ("NVIDIA H100 80GB HBM3", "fp16", 9894 * 10**11),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979 * 10**12),
        ("NVIDIA H100 80GB HBM3", "tf32", 4947 * 10**11),
        ("NVIDIA H100 80GB HBM3", "float64", 67 * 10**12),
        ("NVIDIA L40S", "BF16", 36205 * 10**10),
        ("NVIDIA A10", "bf16", 125 * 10**12),
        ("NVIDIA A10G", "bf16", 70 * 10**12),
        ("Tesla T4", "float32", 81 * 10**11),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-PCIE-32GB", "half", 112 * 10**12),
        ("NVIDIA A10 ", "bf16", None),
        ("NVIDIA T4", "fp16", 65 * 10**12),
        ("t4", "fp16", 65 * 10**12),
        ("NVIDIA T4G", "fp16", None),
        ("NVIDIA A100-PCIE-40GB MIG 7g.40gb", "bf16", None),
        ("Tesla T4", "complex64", None),
    ],
)
def test_dense_peak_by_whole_name(model: str, dtype: str, peak: int | None) -> None:
    found = peak_flops(model, dtype)
    assert found == peak
    assert found is None or type(found) is int


def test_no_sparse_peak_is_ever_a_dense_one() -> None:
    assert not any("sparse" in c for columns in PEAK_COLUMNS.values() for c in columns)
    assert all(c in row for row in gpus() for columns in PEAK_COLUMNS.values() for c in columns)


def test_nvml_names_are_unambiguous() -> None:
    names = [(normal_name(n), row["key"]) for row in gpus() for n in row["nvml_names"].split("|")]
    assert len({name for name, _ in names}) == len(set(names))


def test_prices_are_the_catalogue_s_to_the_digit() -> None:
    table = list_prices()
    assert table.schema.equals(PRICES.arrow)
    priced = [(i.cloud, i.instance_type) for i in gpu_instances() if i.on_demand_usd_per_hour is not None]
    standard = [r for r in table.to_pylist() if r["PricingCategory"] == "Standard" and r["PricingUnit"] == "Hours"]
    assert sorted(priced) == sorted((r["x_Cloud"], r["SkuId"]) for r in standard)
    latest = latest_prices(table)
    assert latest["aws", "g5.4xlarge", "us-east-1", "Standard"] == Decimal("1.624")
    assert latest["aws", "g4dn.12xlarge", "us-east-1", "Dynamic"] == Decimal("1.2875")
    assert latest["gcp", "a2-ultragpu-2g", "us-central1", "Standard"] == Decimal("10.137595781")
    assert ("aws", "g5.4xlarge", "eu-west-1", "Standard") not in latest


def test_prices_are_sorted_by_key_and_unique() -> None:
    keys = [tuple(r[k] for k in PRICES.key) for r in list_prices().to_pylist()]
    assert keys == sorted(set(keys))


def test_the_newest_date_wins_and_undated_comes_last() -> None:
    row = list_prices().slice(0, 1)

    def dated(as_of: str, price: str) -> dict[str, object]:
        return {**row.to_pylist()[0], "x_AsOf": as_of, "ListUnitPrice": Decimal(price)}

    rows = [dated("undated", "9"), dated("2026-05", "2"), dated("2026-09-01", "3")]
    for order in (rows, rows[::-1]):
        found = latest_prices(row.from_pylist(order, schema=PRICES.arrow))
        assert list(found.values()) == [Decimal(3)]

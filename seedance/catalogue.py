"""What is known about GPUs, the instance types that carry them, and volumes: committed tables in, plain values out.

`data/gpu_instances.csv` has one row per instance type and region (GPUs, memory, vCPUs, list and spot price, date),
`data/gpus.csv` one row per GPU model (names as NVML spells them, peaks per dtype in TFLOP/s, memory, bandwidth, power),
`data/storage_prices.csv` one row per volume type and region (list price of a GiB for a month). Each row names its
source; an empty field means that no source was found. Knows no bill and no network.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from types import MappingProxyType

TERA = 10**12

PEAK_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp64": ("fp64_matrix", "fp64"),
        "fp32": ("fp32",),
        "tf32": ("tf32_dense",),
        "fp16": ("fp16_dense",),
        "bf16": ("bf16_dense",),
        "fp8": ("fp8_dense",),
        "int8": ("int8_dense",),
        "fp4": ("fp4_dense",),
    }
)
"""Columns of `gpus.csv` that hold the dense peak of a dtype; the first that is filled counts."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "fp64",
        "double": "fp64",
        "float32": "fp32",
        "float": "fp32",
        "tfloat32": "tf32",
        "float16": "fp16",
        "half": "fp16",
        "bfloat16": "bf16",
        "float8": "fp8",
        "float8_e4m3fn": "fp8",
        "float8_e4m3fnuz": "fp8",
        "float8_e5m2": "fp8",
        "float8_e5m2fnuz": "fp8",
        "uint8": "int8",
        "float4_e2m1fn_x2": "fp4",
    }
)
"""Other spellings of a dtype, as frameworks write them."""


MAKERS = ("nvidia ", "tesla ")
"""What drivers put before a name, or leave out, by their age."""

MIG_MARK = " mig "
"""What CUDA puts between the name of a card and the profile of a slice of it."""


@dataclass(frozen=True)
class GpuInstance:
    """One instance type of one cloud. None where no source was found.

    Args:
        cloud: aws, azure or gcp.
        instance_type: as the cloud spells it.
        region: region of the prices.
        gpu_model: model, as the cloud names it (not as NVML does).
        gpu_count: GPUs; below 1 where the type has a slice of one.
        gpu_memory_gib: memory of each GPU, GiB.
        vcpus: virtual CPUs.
        memory_gib: host memory, GiB.
        on_demand_usd_per_hour: list price of the whole instance.
        spot_usd_per_hour: spot price of the whole instance at that date.
        as_of: date of the prices, or undated.
        source: where the row comes from.
    """

    cloud: str
    instance_type: str
    region: str | None
    gpu_model: str
    gpu_count: Decimal | None
    gpu_memory_gib: Decimal | None
    vcpus: int | None
    memory_gib: Decimal | None
    on_demand_usd_per_hour: Decimal | None
    spot_usd_per_hour: Decimal | None
    as_of: str | None
    source: str


@cache
def gpu_instances() -> tuple[GpuInstance, ...]:
    """Every instance type with a GPU that the catalogue knows, in file order: one row per cloud, type and region."""
    return tuple(
        GpuInstance(
            cloud=row["cloud"],
            instance_type=row["instance_type"],
            region=row["region"] or None,
            gpu_model=row["gpu_model"],
            gpu_count=_decimal(row["gpu_count"]),
            gpu_memory_gib=_decimal(row["gpu_memory_gib"]),
            vcpus=int(row["vcpus"]) if row["vcpus"] else None,
            memory_gib=_decimal(row["memory_gib"]),
            on_demand_usd_per_hour=_decimal(row["on_demand_usd_per_hour"]),
            spot_usd_per_hour=_decimal(row["spot_usd_per_hour"]),
            as_of=row["as_of"] or None,
            source=row["source"],
        )
        for row in _rows("gpu_instances.csv")
    )


@dataclass(frozen=True)
class StoragePrice:
    """List price of one type of volume in one region.

    Args:
        cloud: aws, azure or gcp.
        volume_type: as the cloud spells it.
        region: region of the price.
        usd_per_gib_month: list price of a GiB for a calendar month.
        as_of: date of the price; None where the source states none.
        source: where the row comes from.
    """

    cloud: str
    volume_type: str
    region: str
    usd_per_gib_month: Decimal
    as_of: str | None
    source: str


@cache
def storage_prices() -> tuple[StoragePrice, ...]:
    """Every volume type with a list price that the catalogue knows, in file order."""
    return tuple(
        StoragePrice(
            cloud=row["cloud"],
            volume_type=row["volume_type"],
            region=row["region"],
            usd_per_gib_month=Decimal(row["usd_per_gib_month"]),
            as_of=row["as_of"] or None,
            source=row["source"],
        )
        for row in _rows("storage_prices.csv")
    )


def gpu_instance(cloud: str, instance_type: str) -> GpuInstance | None:
    """What is known about an instance type (first region in file order), or None.

    Caseless, because bills do not agree on the case of a type.
    """
    return _by_type().get((cloud.casefold(), instance_type.casefold()))


def gpu_count(cloud: str, instance_type: str) -> Decimal | None:
    """GPUs of an instance type (0.5 is half a GPU), or None when unknown."""
    found = gpu_instance(cloud, instance_type)
    return None if found is None else found.gpu_count


@cache
def gpus() -> tuple[Mapping[str, str], ...]:
    """Every GPU model of `gpus.csv`, as text by column name; an empty text is an unknown value."""
    return tuple(MappingProxyType(row) for row in _rows("gpus.csv"))


def gpu_row(gpu_model: str) -> Mapping[str, str] | None:
    """Row of `gpus.csv` of a GPU, by its whole name without maker and MIG profile, caseless; None when unknown.

    Args:
        gpu_model: name as NVML and CUDA spell it, with or without `NVIDIA `, and with ` MIG 1g.10gb` for a slice.

    Near names are other cards (A10, A10G and A100; H20 and H200; L4 and L40S), so no part of a name is ever compared.
    """
    return _by_name().get(normal_name(gpu_model))


def normal_name(gpu_model: str) -> str:
    """A GPU's name as names are compared: no maker in front, no MIG profile behind, caseless."""
    name = gpu_model.casefold()
    for maker in MAKERS:
        name = name.removeprefix(maker)
    return name.partition(MIG_MARK)[0]


def mig_profile(gpu_model: str) -> str | None:
    """Profile of a slice, `1g.10gb`, from the name that CUDA gives it; None for a whole card."""
    return gpu_model.casefold().partition(MIG_MARK)[2] or None


def peak_flops(gpu_model: str, dtype: str) -> int | None:
    """Dense peak of a GPU, FLOP/s (of int8, operations/s); None when the model or its peak for the dtype is unknown.

    Args:
        gpu_model: name as `gpu_row` takes it. Of a slice it says too little, so that its peak is unknown here.
        dtype: compute dtype: fp64, fp32, tf32, fp16, bf16, fp8, int8, fp4, or a framework's spelling of one of these.

    Source: data/gpus.csv, whose rows name theirs. Sparse peaks are never used.
    """
    row = gpu_row(gpu_model)
    columns = PEAK_COLUMNS.get(short_dtype(dtype))
    if row is None or columns is None or mig_profile(gpu_model) is not None:
        return None
    tflops = next((row[c] for c in columns if row[c]), None)
    return None if tflops is None else int(Decimal(tflops) * TERA)


def short_dtype(dtype: str) -> str:
    """Short name of a compute dtype: bf16 for `torch.bfloat16`; a spelling that nobody knows stays as it is."""
    name = dtype.casefold().removeprefix("torch.")
    return ALIASES.get(name, name)


@cache
def catalogue_digest() -> str:
    """sha256 hex over the bytes of the catalogue's tables."""
    names = ("gpu_instances.csv", "gpus.csv", "storage_prices.csv")
    files = (resources.files("seedance").joinpath("data", name) for name in names)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _by_type() -> Mapping[tuple[str, str], GpuInstance]:
    return {(i.cloud.casefold(), i.instance_type.casefold()): i for i in reversed(gpu_instances())}


@cache
def _by_name() -> Mapping[str, Mapping[str, str]]:
    return {normal_name(name): row for row in gpus() for name in row["nvml_names"].split("|")}


def _rows(file: str) -> list[dict[str, str]]:
    text = resources.files("seedance").joinpath("data", file).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def _decimal(text: str) -> Decimal | None:
    return Decimal(text) if text else None

"""GPUs by name, slices of them, and what bounds an operation: names that look alike, and worked numbers."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.catalogue import gpus, peak_flops
from seedance.errors import SeedanceError
from seedance.flops.roofline import (
    GIB,
    Bound,
    UnknownGpu,
    bound,
    energy_efficiency,
    exceeds_peak,
    find_gpu,
    matmul_intensity,
    utilisation_ppm,
)

TERA = 10**12


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("A10G", "A10G"),
        ("nvidia a10g", "A10G"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("nvidia l40s", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("Tesla T4", "T4"),
        ("T4", "T4"),
        ("Tesla V100-PCIE-32GB", "V100-PCIE"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_whole_names(name: str, key: str) -> None:
    assert find_gpu(name).key == key


def test_every_name_of_the_catalogue_finds_its_row() -> None:
    for row in gpus():
        for name in row["nvml_names"].split("|"):
            assert find_gpu(name).key == row["key"]
            assert find_gpu(name.upper()).key == row["key"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NVIDIA H20", "NVIDIA H200"),
        ("NVIDIA A10M", "NVIDIA A10"),
        ("NVIDIA A100", "NVIDIA A10"),
        ("NVIDIA A100-SXM4-80GB ", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA L40S-48Q", "NVIDIA L40S"),
        ("NVIDIA B300", "NVIDIA B200"),
        ("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA H20 MIG 1g.12gb", "NVIDIA H200"),
    ],
)
def test_unknown_names_fail_loudly(name: str, nearest: str) -> None:
    """The nearest names are for people: no peak is taken from them."""
    with pytest.raises(UnknownGpu) as error:
        find_gpu(name)
    assert error.value.name == name
    assert nearest in error.value.nearest
    assert nearest in str(error.value)
    assert repr(name) in str(error.value)
    assert isinstance(error.value, SeedanceError)
    assert pickle.loads(pickle.dumps(error.value)).nearest == error.value.nearest
    assert peak_flops(name, "bf16") is None


def test_a_name_like_none() -> None:
    with pytest.raises(UnknownGpu, match="The catalogue has no name like it") as error:
        find_gpu("Quantum QX-1")
    assert error.value.nearest == ()


@pytest.mark.parametrize(
    ("capability", "sms", "gib", "key"),
    [
        ("8.6", 80, 22.2, "A10G"),
        ((8, 6), 72, 22.5, "A10"),
        ("8.9", 58, 22.5, "L4"),
        ("9.0", 132, 79.2, "H100-SXM5"),
        ("9.0", 132, 93.6, "H100-NVL"),
        ("9.0", 132, 95.5, "GH200-96"),
        ("9.0", 114, 79.2, "H100-PCIe"),
        ("7.5", 40, 14.6, "T4"),
        ("10.0", 148, 179.1, "B200"),
    ],
)
def test_by_capability_processors_and_memory(capability: str | tuple[int, int], sms: int, gib: float, key: str) -> None:
    found = find_gpu("GRID X", compute_capability=capability, sm_count=sms, memory_bytes=int(gib * GIB))
    assert found.key == key


def test_several_that_fit_are_none() -> None:
    """L40, L40S and RTX 6000 Ada have the same SMs and memory, and peaks that differ by two."""
    with pytest.raises(UnknownGpu) as error:
        find_gpu("NVIDIA X", compute_capability="8.9", sm_count=142, memory_bytes=45 * GIB)
    assert error.value.candidates == ("L40", "L40S", "RTX6000Ada")
    with pytest.raises(UnknownGpu, match=r"H200-SXM and H200-NVL have compute capability 9.0, 132 SMs"):
        find_gpu("NVIDIA X", compute_capability=(9, 0), sm_count=132, memory_bytes=140 * GIB)
    with pytest.raises(UnknownGpu, match=r"no card has compute capability 9.0, 78 SMs and 103,079,215,104 bytes"):
        find_gpu("NVIDIA H20", compute_capability="9.0", sm_count=78, memory_bytes=96 * GIB)
    with pytest.raises(UnknownGpu, match="state compute capability, SM count and memory"):
        find_gpu("NVIDIA X", compute_capability="9.0", sm_count=132)


def test_a_name_goes_before_the_sizes() -> None:
    assert find_gpu("NVIDIA A10G", compute_capability="8.6", sm_count=72, memory_bytes=24 * GIB).key == "A10G"


def test_facts_of_a_card() -> None:
    card = find_gpu("NVIDIA H100 80GB HBM3")
    assert (card.peak("bf16"), card.peak("torch.float16"), card.peak("tf32")) == (9894 * TERA // 10,) * 2 + (
        4947 * TERA // 10,
    )
    assert (card.peak("fp8"), card.peak("float8_e4m3fn"), card.peak("int8")) == (1979 * TERA,) * 3
    assert card.peaks["bf16"].sparse == 1979 * TERA
    assert card.peaks["fp32"].sparse is None
    assert card.peak("fp4") is None
    assert "fp4" not in card.peaks
    assert card.memory_bandwidth_bytes_per_s == 3350 * 10**9
    assert card.memory_bytes == 80 * GIB
    assert (card.tdp_mw, card.sm_count, card.compute_capability, card.mig_profile) == (700_000, 132, "9.0", None)
    assert find_gpu("Tesla V100-PCIE-16GB").memory_bytes == 16 * GIB
    assert find_gpu("Tesla V100-PCIE-32GB").memory_bytes == 32 * GIB
    assert find_gpu("Tesla T4").peak("bf16") is None


def test_dense_is_half_of_sparse_and_never_taken_for_it() -> None:
    for row in gpus():
        card = find_gpu(row["nvml_names"].split("|")[0])
        for dtype, peak in card.peaks.items():
            assert type(peak.dense) is int
            assert peak.dense == peak_flops(card.names[0], dtype)
            if peak.sparse is not None:
                assert 1.95 < peak.sparse / peak.dense < 2.05, (card.key, dtype)


@pytest.mark.parametrize(
    ("name", "ridge"),
    [
        ("Tesla V100-SXM2-16GB", 139),
        ("NVIDIA A100-SXM4-80GB", 153),
        ("NVIDIA A10G", 117),
        ("NVIDIA L4", 403),
        ("NVIDIA H100 80GB HBM3", 295),
        ("NVIDIA H200", 206),
        ("NVIDIA B200", 281),
        ("AMD Instinct MI300X", 247),
    ],
)
def test_ridges(name: str, ridge: int) -> None:
    assert round(find_gpu(name).ridge("fp16") or 0) == ridge


# Slices.


def test_a_slice_has_its_own_processors_and_eighths_of_the_memory() -> None:
    """An A100's seven slices have 98 of its 108 SMs: the whole of them peaks at 283, not 312."""
    whole = find_gpu("NVIDIA A100-PCIE-40GB MIG 7g.40gb", sm_count=98)
    assert whole.peak("bf16") == 312 * TERA * 98 // 108
    assert round((whole.peak("bf16") or 0) / TERA) == 283
    assert (whole.memory_bytes, whole.memory_bandwidth_bytes_per_s) == (40 * GIB, 1555 * 10**9)
    assert (whole.sm_count, whole.mig_profile, whole.tdp_mw) == (98, "7g.40gb", None)
    small = find_gpu("NVIDIA A100-SXM4-80GB MIG 1g.10gb", sm_count=14)
    assert small.peak("fp16") == 312 * TERA * 14 // 108
    assert small.memory_bytes == 10 * GIB
    assert small.memory_bandwidth_bytes_per_s == 2039 * 10**9 // 8
    half = find_gpu("NVIDIA H100 80GB HBM3 MIG 3g.40gb", sm_count=60)
    assert half.memory_bandwidth_bytes_per_s == 3350 * 10**9 // 2
    assert half.peaks["bf16"].sparse == 1979 * TERA * 60 // 132
    odd = find_gpu("NVIDIA H100 NVL MIG 1g.12gb", sm_count=16)
    assert odd.memory_bandwidth_bytes_per_s == 3938 * 10**9 // 8
    extra = find_gpu("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", sm_count=14)
    assert extra.memory_bytes == 10 * GIB


def test_a_slice_of_unknown_size_has_no_peak() -> None:
    found = find_gpu("NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    assert (found.peak("bf16"), found.peaks, found.sm_count) == (None, {}, None)
    assert peak_flops("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16") is None
    assert bound(10, 10, "bf16", found).kind == "unknown"


# Roofline.

H100 = find_gpu("NVIDIA H100 80GB HBM3")


def test_square_products_are_bound_by_memory_below_three_ridges() -> None:
    """A square product of n in 2 bytes has n / 3 FLOPs a byte."""
    for n in (96, 384, 768, 1536, 12288):
        assert matmul_intensity(n, n, n, 2) == Fraction(n, 3)
        found = bound(2 * n**3, 2 * 3 * n * n, "bf16", H100)
        assert found.kind == ("memory" if n < 3 * 295 else "compute")
        assert found.intensity == Fraction(n, 3)
    assert matmul_intensity(2, 3, 5, 4) == Fraction(2 * 30, 4 * (6 + 15 + 10))


def test_decoding_llama_reads_its_weights() -> None:
    """16.06 GB over 3.35 TB/s: 4.8 ms a token, about 209 tokens a second before any key is read."""
    weights = 2 * 8_030_261_248
    found = bound(15_009_316_864, weights, "bf16", H100)
    assert found.kind == "memory"
    assert found.least_ns == -(-weights * 10**9 // (3350 * 10**9))
    assert round((found.least_ns or 0) / 1e6, 1) == 4.8
    assert 10**9 // (found.least_ns or 1) == 208
    # At batch b the weights are read once for b tokens: bound by memory below the ridge.
    kinds = [bound(b * 15_009_316_864, weights, "bf16", H100).kind for b in (1, 64, 256, 512)]
    assert kinds == ["memory", "memory", "memory", "compute"]


def test_attainable_rates() -> None:
    assert bound(100, 0, "bf16", H100) == Bound("compute", H100.peak("bf16"), None, 1)
    assert bound(0, 3350, "bf16", H100) == Bound("memory", 0, Fraction(0), 1)
    assert bound(0, 0, "bf16", H100).least_ns == 0
    found = bound(5 * 10**9, 10**9, "fp32", H100)
    assert (found.kind, found.attainable_flops_per_s) == ("memory", 5 * 3350 * 10**9)
    unknown = bound(10, 5, "bf16", find_gpu("Tesla T4"))
    assert unknown == Bound("unknown", None, Fraction(2), None)


@given(st.integers(0, 10**18), st.integers(0, 10**15), st.sampled_from(["bf16", "fp8", "fp64"]))
def test_bound_is_the_lower_roof(flops: int, nbytes: int, dtype: str) -> None:
    found, peak, bandwidth = bound(flops, nbytes, dtype, H100), H100.peak(dtype) or 0, 3350 * 10**9
    attainable = found.attainable_flops_per_s or 0
    assert attainable <= peak
    assert attainable * nbytes <= flops * bandwidth or found.kind == "compute"
    assert (found.kind == "memory") == (flops * bandwidth < peak * nbytes)
    assert found.least_ns is not None
    assert found.least_ns * peak >= flops * 10**9
    assert found.least_ns * bandwidth >= nbytes * 10**9
    assert (found.least_ns - 1) * peak < flops * 10**9 or (found.least_ns - 1) * bandwidth < nbytes * 10**9


def test_nothing_goes_faster_than_the_peak() -> None:
    assert exceeds_peak(990 * TERA, 10**9, "bf16", H100) is True
    assert exceeds_peak(989 * TERA, 10**9, "bf16", H100) is False
    assert exceeds_peak(1, 0, "bf16", H100) is None
    assert exceeds_peak(1, 1, "fp4", H100) is None


def test_utilisation_takes_each_dtype_by_its_own_peak() -> None:
    second = 10**9
    assert utilisation_ppm({"bf16": 9894 * TERA // 20}, second, H100) == 500_000
    assert utilisation_ppm({"bf16": 9894 * TERA // 40, "fp8": 1979 * TERA // 4}, second, H100) == 500_000
    assert utilisation_ppm({"bf16": 1, "fp4": 1}, second, H100) is None
    assert utilisation_ppm({"bf16": 0, "fp4": 0}, second, H100) == 0
    assert utilisation_ppm({"bf16": 1}, 0, H100) is None


# Efficiency.


def test_efficiency_is_flops_a_joule_by_dtype() -> None:
    """700 W for two seconds, 400 TFLOP/s of bf16 and 100 of fp8: no weight turns one into the other."""
    energy_mj = 700 * 2 * 1000
    found = energy_efficiency({"bf16": 800 * TERA, "fp8": 200 * TERA}, energy_mj)
    assert found is not None
    assert dict(found.by_dtype) == {"bf16": Fraction(400, 700), "fp8": Fraction(100, 700)}
    assert found.total == Fraction(500, 700)


@pytest.mark.parametrize("energy_mj", [None, 0, -5])
def test_no_energy_is_no_efficiency(energy_mj: int | None) -> None:
    """A card without a counter, or one that went backwards, is not infinitely efficient."""
    assert energy_efficiency({"bf16": TERA}, energy_mj) is None


def test_work_without_flops_has_an_efficiency_of_zero() -> None:
    found = energy_efficiency({}, 1000)
    assert found is not None
    assert found.total == 0

"""What a GPU can do, and what bounds an operation on it: from the catalogue's facts to peaks, bounds and efficiency.

`find_gpu` matches a device to its row by whole names only, then by compute capability, SM count and memory; what nothing
fits is an error that names the nearest, never a guess. Peaks are dense unless they say sparse. Of int8 they are operations,
not floating-point ones. Quotients are exact fractions, rounded by whoever prints them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

from seedance import catalogue
from seedance.errors import SeedanceError

GIGA = 10**9
GIB = 2**30
NS_PER_S = 10**9
PPM = 10**6
MIG_SLICES = 8
"""Memory and bandwidth of a card are dealt out in eighths."""

_MEMORY_SEEN = (Fraction(90, 100), Fraction(102, 100))
"""Share of the nominal memory that drivers report: error correction and firmware take theirs."""

_OTHER_MEMORY = re.compile(r"-(\d+)gb$")


class UnknownGpu(SeedanceError):
    """No row of the catalogue is this device's: name, nearest, candidates."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Most operations a second in one dtype; sparse is with two of four weights zero. None is unknown."""

    dense: int
    sparse: int | None


@dataclass(frozen=True)
class Hardware:
    """One GPU, or one slice of it.

    Args:
        key: name of its row.
        names: names that drivers give it.
        peaks: by dtype: fp64, fp32, tf32, fp16, bf16, fp8, int8, fp4; a dtype that it lacks is not there.
        memory_bandwidth_bytes_per_s: of its own memory.
        memory_bytes: nominal; a driver reports a few per cent less.
        tdp_mw: power limit of the card; None for a slice, whose power nobody measures.
        sm_count: multiprocessors; of a slice those that it has.
        compute_capability: `9.0`; of AMD `gfx942`.
        mig_profile: `1g.10gb` for a slice; None for a whole card.

    Source: data/gpus.csv, whose rows name theirs.
    """

    key: str
    names: tuple[str, ...]
    peaks: Mapping[str, Peak]
    memory_bandwidth_bytes_per_s: int | None
    memory_bytes: int | None
    tdp_mw: int | None
    sm_count: int | None
    compute_capability: str
    mig_profile: str | None = None

    def peak(self, dtype: str) -> int | None:
        """Dense peak in a dtype (any spelling), operations/s; None when unknown."""
        found = self.peaks.get(catalogue.short_dtype(dtype))
        return None if found is None else found.dense

    def ridge(self, dtype: str) -> Fraction | None:
        """FLOPs per byte above which an operation is bound by compute; None when peak or bandwidth is unknown."""
        peak = self.peak(dtype)
        if peak is None or not self.memory_bandwidth_bytes_per_s:
            return None
        return Fraction(peak, self.memory_bandwidth_bytes_per_s)


def find_gpu(
    name: str,
    *,
    compute_capability: str | tuple[int, int] | None = None,
    sm_count: int | None = None,
    memory_bytes: int | None = None,
) -> Hardware:
    """What is known of a device.

    Args:
        name: name as NVML or CUDA gives it.
        compute_capability: `9.0` or (9, 0).
        sm_count: multiprocessors that the device reports; of a MIG slice its own, which give its peak: without them a
            slice has no peaks.
        memory_bytes: memory that the device reports.

    Raises:
        UnknownGpu: no name and no (capability, SM count, memory) of the catalogue fits, or several do.
    """
    profile = catalogue.mig_profile(name)
    row = catalogue.gpu_row(name)
    if row is None:
        if profile is not None:
            raise _unknown(name, "its card is unknown, and a slice has not the SMs and memory of its card")
        row = _by_size(name, compute_capability, sm_count, memory_bytes)
    card = _hardware(row, catalogue.normal_name(name))
    return card if profile is None else _slice(card, profile, sm_count)


def _hardware(row: Mapping[str, str], name: str) -> Hardware:
    # One row can stand for cards that differ in memory alone; the name says which.
    names = tuple(row["nvml_names"].split("|"))
    other = _OTHER_MEMORY.search(name)
    memory = Decimal(other[1]) if other and len(names) > 1 else _number(row["mem_gb"])
    bandwidth, tdp = _number(row["mem_bw_gbs"]), _number(row["tdp_w"])
    return Hardware(
        key=row["key"],
        names=names,
        peaks=MappingProxyType(_peaks(row)),
        memory_bandwidth_bytes_per_s=None if bandwidth is None else int(bandwidth * GIGA),
        memory_bytes=None if memory is None else int(memory * GIB),
        tdp_mw=None if tdp is None else int(tdp * 1000),
        sm_count=int(row["sm_or_cu"]) if row["sm_or_cu"] else None,
        compute_capability=row["compute_capability"],
    )


def _peaks(row: Mapping[str, str]) -> dict[str, Peak]:
    peaks: dict[str, Peak] = {}
    for dtype, columns in catalogue.PEAK_COLUMNS.items():
        dense = next((row[column] for column in columns if row[column]), None)
        if dense is not None:
            sparse = _number(row.get(f"{dtype}_sparse", ""))
            peaks[dtype] = Peak(_flops(Decimal(dense)), None if sparse is None else _flops(sparse))
    return peaks


def _flops(tera: Decimal) -> int:
    return int(tera * catalogue.TERA)


def _slice(card: Hardware, profile: str, sm_count: int | None) -> Hardware:
    """A slice's compute is its share of the SMs; its memory and bandwidth are eighths of the card's."""
    share = None if sm_count is None or card.sm_count is None else Fraction(sm_count, card.sm_count)
    gib = re.search(r"\.(\d+)gb", profile)
    eighths = None
    if gib is not None and card.memory_bytes is not None:
        eighths = Fraction(round(Fraction(int(gib[1]) * GIB * MIG_SLICES, card.memory_bytes)), MIG_SLICES)
    peaks = {
        dtype: Peak(int(peak.dense * share), None if peak.sparse is None else int(peak.sparse * share))
        for dtype, peak in card.peaks.items()
        if share is not None
    }
    return Hardware(
        key=card.key,
        names=card.names,
        peaks=MappingProxyType(peaks),
        memory_bandwidth_bytes_per_s=_times(card.memory_bandwidth_bytes_per_s, eighths),
        memory_bytes=_times(card.memory_bytes, eighths),
        tdp_mw=None,
        sm_count=sm_count,
        compute_capability=card.compute_capability,
        mig_profile=profile,
    )


def _times(whole: int | None, share: Fraction | None) -> int | None:
    return None if whole is None or share is None else int(whole * share)


def _by_size(
    name: str, compute_capability: str | tuple[int, int] | None, sm_count: int | None, memory_bytes: int | None
) -> Mapping[str, str]:
    """The one row with this capability and SM count whose memory is nearest."""
    if compute_capability is None or sm_count is None or memory_bytes is None:
        raise _unknown(name, "state compute capability, SM count and memory to search by those")
    capability = compute_capability if isinstance(compute_capability, str) else ".".join(map(str, compute_capability))
    found: list[tuple[Fraction, Mapping[str, str]]] = []
    for row in catalogue.gpus():
        share = Fraction(memory_bytes) / (Fraction(row["mem_gb"]) * GIB)
        fits = row["compute_capability"] == capability and row["sm_or_cu"] == str(sm_count)
        if fits and _MEMORY_SEEN[0] <= share <= _MEMORY_SEEN[1]:
            found.append((abs(share - 1), row))
    best = [row for distance, row in found if distance == min(d for d, _ in found)]
    if len(best) == 1:
        return best[0]
    seen = f"compute capability {capability}, {sm_count} SMs and {memory_bytes:,} bytes"
    if not best:
        raise _unknown(name, f"no card has {seen}")
    raise _unknown(name, f"{' and '.join(row['key'] for row in best)} have {seen}", [row["key"] for row in best])


def _unknown(name: str, why: str, candidates: Iterable[str] = ()) -> UnknownGpu:
    known = {catalogue.normal_name(n): n for row in catalogue.gpus() for n in row["nvml_names"].split("|")}
    nearest = [known[n] for n in difflib.get_close_matches(catalogue.normal_name(name), known, n=3, cutoff=0.4)]
    return UnknownGpu(
        f"unknown GPU {name!r}: {why}. The catalogue has {', '.join(nearest) or 'no name like it'}; "
        "a card that it lacks has no peak, and no MFU.",
        name=name,
        nearest=tuple(nearest),
        candidates=tuple(candidates),
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """What bounds an operation.

    Args:
        kind: compute, memory, or unknown when the hardware's peak or bandwidth is.
        attainable_flops_per_s: the most it can reach, min(peak, intensity x bandwidth); None when unknown.
        intensity: FLOPs per byte; None when no byte is moved.
        least_ns: shortest time, rounded up; None when unknown.
    """

    kind: str
    attainable_flops_per_s: int | None
    intensity: Fraction | None
    least_ns: int | None


def bound(flops: int, nbytes: int, dtype: str, hardware: Hardware) -> Bound:
    """Roofline of an operation.

    Args:
        flops: FLOPs of the operation.
        nbytes: bytes that it moves to and from memory.
        dtype: compute dtype, any spelling.
        hardware: where it runs.

    Caches break the model when what is worked on fits into them.
    """
    intensity = Fraction(flops, nbytes) if nbytes else None
    peak, bandwidth = hardware.peak(dtype), hardware.memory_bandwidth_bytes_per_s
    if peak is None or not bandwidth:
        return Bound("unknown", None, intensity, None)
    by_compute, by_memory = Fraction(flops, peak), Fraction(nbytes, bandwidth)
    least_ns = math.ceil(max(by_compute, by_memory) * NS_PER_S)
    if intensity is not None and by_memory > by_compute:
        return Bound("memory", int(intensity * bandwidth), intensity, least_ns)
    return Bound("compute", peak, intensity, least_ns)


def matmul_intensity(m: int, k: int, n: int, element_bytes: int) -> Fraction:
    """FLOPs per byte of a product of an m x k by a k x n matrix, each element moved once."""
    return Fraction(2 * m * k * n, element_bytes * (m * k + k * n + m * n))


def exceeds_peak(flops: int, time_ns: int, dtype: str, hardware: Hardware) -> bool | None:
    """A rate above the dense peak, which no dense kernel has: the count or the time is wrong. None when unknown."""
    peak = hardware.peak(dtype)
    if peak is None or time_ns <= 0:
        return None
    return flops * NS_PER_S > peak * time_ns


def utilisation_ppm(flops_by_dtype: Mapping[str, int], time_ns: int, hardware: Hardware) -> int | None:
    """Share of the peak that was reached, ppm, each dtype by its own dense peak; None when a peak is unknown.

    With model FLOPs it is MFU, with hardware FLOPs HFU.
    """
    if time_ns <= 0:
        return None
    seconds = Fraction(0)
    for dtype, flops in flops_by_dtype.items():
        peak = hardware.peak(dtype)
        if not flops:
            continue
        if peak is None:
            return None
        seconds += Fraction(flops, peak)
    return int(seconds * NS_PER_S * PPM / time_ns)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """TFLOP/s per watt, which is FLOPs per joule in units of 10^12.

    Args:
        by_dtype: what each dtype's FLOPs are of all the energy: no weight makes one dtype another.
        total: their sum, whatever the dtype.
    """

    by_dtype: Mapping[str, Fraction]
    total: Fraction


def energy_efficiency(flops_by_dtype: Mapping[str, int], energy_mj: int | None) -> Efficiency | None:
    """Efficiency of work that took this energy; None when the energy is unknown or none was measured.

    Args:
        flops_by_dtype: FLOPs of the work by compute dtype.
        energy_mj: energy of the device over the same time, millijoules.
    """
    if not energy_mj or energy_mj < 0:
        return None
    parts = {dtype: Fraction(flops * 1000, energy_mj * catalogue.TERA) for dtype, flops in flops_by_dtype.items()}
    return Efficiency(MappingProxyType(parts), sum(parts.values(), Fraction(0)))


def _number(text: str) -> Decimal | None:
    return Decimal(text) if text else None

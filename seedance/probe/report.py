"""Units of work to the line that people read while a job runs: tokens per second and GPU, MFU, USD per step.

Everything is an integer or a decimal until it is printed. What is not known is left out of the line, never 0. Knows no clock
and no framework.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

from seedance import catalogue
from seedance.durations import HOUR_NS, SECOND_NS
from seedance.flops.profile import Profile
from seedance.flops.roofline import Hardware, UnknownGpu, find_gpu, utilisation_ppm
from seedance.probe import identity
from seedance.probe.settings import ProbeSettings
from seedance.probe.unit import Unit

LOGGER = logging.getLogger("seedance.probe")
CLOUDS = ("aws", "azure", "gcp")
MILLION = 1_000_000
FOUR_DIGITS = Context(prec=4, rounding=ROUND_HALF_EVEN)


@dataclass(slots=True)
class _Sums:
    """What the units of one phase added up to since the last line."""

    units: int = 0
    wall_ns: int = 0
    counted_wall_ns: int = 0
    tokens: int = 0
    samples: int = 0
    input_ns: int = 0
    checkpoint_ns: int = 0


class Reporter:
    """Adds up the units of one rank and says now and then what they came to. Rank 0 alone speaks.

    Args:
        settings: price, device, ranks, and how often to speak.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self._settings = settings
        self._hardware = hardware_of(settings)
        self._price = usd_per_device_hour(settings)
        self._sums: dict[str, _Sums] = {}
        self._profiles: dict[str, dict[int, tuple[Profile, int]]] = {}
        self._spoken_ns: int | None = None

    def add(self, unit: Unit) -> None:
        """Count a unit, or several marked together."""
        sums = self._sums.setdefault(unit.phase, _Sums())
        wall_ns = unit.end_ns - unit.start_ns
        sums.units += unit.units
        sums.wall_ns += wall_ns
        sums.tokens += unit.tokens_in + unit.tokens_out
        sums.samples += unit.samples
        sums.input_ns += sum(end - start for start, end in unit.input_wait)
        sums.checkpoint_ns += sum(end - start for start, end in unit.checkpoint)
        if unit.profile is None or unit.uncounted:
            return
        sums.counted_wall_ns += wall_ns
        seen = self._profiles.setdefault(unit.phase, {})
        for profile in (unit.profile, *unit.parts):
            # The profile stands beside its identity, so that no other object can take that meanwhile.
            seen[id(profile)] = (profile, seen.get(id(profile), (profile, 0))[1] + unit.units)

    def log(self, at_ns: int) -> None:
        """Say the line if it is time, and begin anew.

        Args:
            at_ns: now, ns on any one clock.
        """
        every = self._settings.log_interval_ns
        if self._spoken_ns is None:
            self._spoken_ns = at_ns
        if self._settings.rank or not every or at_ns - self._spoken_ns < every:
            return
        self._spoken_ns = at_ns
        line = self.line()
        if line is not None:
            LOGGER.info(line)

    def line(self) -> str | None:
        """What the units since the last line came to, and begin anew; None when there were none.

        Of several phases training speaks, else the one that took most time.
        """
        sums, profiles, self._sums, self._profiles = self._sums, self._profiles, {}, {}
        if not sums:
            return None
        phase = "train" if "train" in sums else max(sums, key=lambda name: (sums[name].wall_ns, name))
        found = sums[phase]
        if found.wall_ns <= 0 or not found.units:
            return None
        flops: dict[str, int] = {}
        for profile, units in profiles.get(phase, {}).values():
            for op in profile.ops:
                flops[op.dtype] = flops.get(op.dtype, 0) + op.flops * units
        return self._text(phase, found, flops)

    def _text(self, phase: str, sums: _Sums, flops: Mapping[str, int]) -> str:
        settings = self._settings
        is_cpu = settings.device_uuid.startswith("cpu:")
        device = "rank" if is_cpu else "GPU"
        step = "step" if phase == "train" else "batch"
        parts = []
        counts = {"tokens": sums.tokens} if sums.tokens else {"samples": sums.samples}
        for what, count in counts.items():
            if count:
                rate = Fraction(count * SECOND_NS, sums.wall_ns * settings.ranks_per_replica)
                parts.append(f"{_short(rate)} {what}/s/{device}")
        ppm = mfu_ppm(flops, sums.counted_wall_ns, self._hardware)
        if ppm is not None:
            above = " (above the peak: the count or the name of the GPU is wrong)" if ppm > MILLION else ""
            parts.append(f"MFU {ppm / 10_000:.1f} %{above}")
        if self._price is not None:
            parts.append(f"{usd_per_step(self._price, settings, sums.wall_ns, sums.units)} USD/{step}")
        waits = {"input": sums.input_ns, "checkpoint": sums.checkpoint_ns}
        told = [f"{name} {waited * 1000 // sums.wall_ns / 10:.1f} %" for name, waited in waits.items() if waited]
        many = f"{sums.units:,} {step}{'' if sums.units == 1 else 'es' if step == 'batch' else 's'}"
        return ", ".join([*parts, f"{many} in {sums.wall_ns / SECOND_NS:.1f} s", *told])


def mfu_ppm(flops: Mapping[str, int], wall_ns: int, hardware: Hardware | None) -> int | None:
    """Share of the device's dense peak that model FLOPs took, ppm, each dtype of its own peak.

    Products of float32 that run in TF32 are held to the peak of TF32.

    Args:
        flops: model FLOPs by dtype.
        wall_ns: wall time they took, ns.
        hardware: the device; None when unknown.

    Returns:
        Above 1,000,000 where a count or a peak is wrong; None without FLOPs, time, device, or the peak of a dtype that has any.
    """
    if hardware is None or wall_ns <= 0 or not any(flops.values()):
        return None
    if flops.get("fp32") and identity.uses_tf32() and hardware.peak("tf32"):
        flops = {**flops, "tf32": flops.get("tf32", 0) + flops["fp32"], "fp32": 0}
    return utilisation_ppm(flops, wall_ns, hardware)


def hardware_of(settings: ProbeSettings) -> Hardware | None:
    """The process's device by the catalogue; None for a CPU and, with a warning, for a GPU that it does not know."""
    if settings.gpu_model is None or settings.device_uuid.startswith("cpu:"):
        return None
    try:
        return find_gpu(settings.gpu_model, **identity.gpu_facts())
    except UnknownGpu as error:
        LOGGER.warning("probe: MFU is left out: %s", error)
        return None


def usd_per_device_hour(settings: ProbeSettings) -> Decimal | None:
    """Price of one device for an hour, USD: as set, else the list price of the instance type over its GPUs.

    A CPU device is the whole machine, a slice of a GPU its compute slices of those of the GPU. None when nothing is known.
    """
    if settings.usd_per_hour is not None:
        return settings.usd_per_hour
    if settings.instance_type is None:
        return None
    clouds = CLOUDS if settings.cloud is None else (settings.cloud,)
    found = next((i for c in clouds if (i := catalogue.gpu_instance(c, settings.instance_type)) is not None), None)
    if found is None or found.on_demand_usd_per_hour is None:
        return None
    if settings.device_uuid.startswith("cpu:"):
        return found.on_demand_usd_per_hour
    if not found.gpu_count:
        return None
    # A type with half a GPU sells that half: a whole device cannot be dearer than the machine.
    whole = found.on_demand_usd_per_hour / max(found.gpu_count, Decimal(1))
    if not settings.device_uuid.startswith("MIG-"):
        return whole
    slices = re.match(r"\d+", catalogue.mig_profile(settings.gpu_model or "") or "")
    if slices is None or settings.gpu_model is None:
        return None
    most = 4 if catalogue.normal_name(settings.gpu_model) == "a30" else 7
    return whole * int(slices[0]) / most


def usd_per_step(price: Decimal, settings: ProbeSettings, wall_ns: int, units: int) -> str:
    """What one unit of the whole job costs, USD in at most four digits: price times devices times wall time over units.

    Devices: one a rank, and one a machine where ranks share its CPU.
    """
    devices = settings.world_size
    if settings.device_uuid.startswith("cpu:"):
        devices = -(-settings.world_size // settings.local_world_size)
    usd = price * devices * wall_ns / (HOUR_NS * units)
    return f"{FOUR_DIGITS.create_decimal(usd):f}"


def _short(rate: Fraction) -> str:
    """A rate for people: whole from 100, with one digit below."""
    return f"{round(rate):,}" if rate >= 100 else f"{float(rate):.1f}"

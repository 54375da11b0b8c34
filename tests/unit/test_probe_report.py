"""The line that a running job says: each figure against arithmetic by hand, and nothing where something is unknown."""

from __future__ import annotations

import dataclasses
import logging
import sys
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from seedance import catalogue
from seedance.flops.profile import OpCount, Profile
from seedance.flops.roofline import Hardware, find_gpu
from seedance.probe import identity
from seedance.probe.report import Reporter, hardware_of, mfu_ppm, usd_per_device_hour, usd_per_step
from seedance.probe.settings import HOUR_NS, SECOND_NS, ProbeSettings
from seedance.probe.unit import Unit

H100 = "NVIDIA H100 80GB HBM3"
GPU = {"device_uuid": "GPU-1", "gpu_model": H100}
PEAK = {"bf16": 989_400_000_000_000, "fp32": 67_000_000_000_000}


def settings(**values: Any) -> ProbeSettings:
    return ProbeSettings(**{"device_uuid": "cpu:1", **values})


def profile(**flops: int) -> Profile:
    """A profile with model FLOPs by dtype; hardware FLOPs are twice that, and must not be read."""
    return Profile(
        tuple(
            OpCount(f"l{dtype}", 0, "matmul", "fwd", dtype, "", 1, count, 2 * count, 3 * count, 0, 0)
            for dtype, count in flops.items()
        )
    )


def unit(at_s: int, **values: Any) -> Unit:
    """A unit of one second that ends at `at_s`."""
    given = {"number": at_s, "phase": "train", "batch_size": 4, "begin_ns": at_s * SECOND_NS - SECOND_NS // 2}
    return Unit(**{**given, "start_ns": (at_s - 1) * SECOND_NS, "end_ns": at_s * SECOND_NS, **values})


def line(made: ProbeSettings, *units: Unit) -> str | None:
    reporter = Reporter(made)
    for one in units:
        reporter.add(one)
    return reporter.line()


# --- the whole line -------------------------------------------------------------------------------------------------


def test_the_line_of_a_gpu() -> None:
    """Two steps of a second: 8,192 tokens each; half the peak of bf16, and a little fp32, whose peak is its own."""
    counts = profile(bf16=PEAK["bf16"] // 2, fp32=PEAK["fp32"] // 100)
    made = settings(**GPU, usd_per_hour=Decimal(3), world_size=8, local_world_size=8)
    wait = ((0, SECOND_NS // 10),)
    said = line(made, *(unit(at, tokens_in=8192, samples=4, profile=counts, input_wait=wait) for at in (1, 2)))
    # 3 USD x 8 GPUs x 1 s / 3600 s
    assert said == "8,192 tokens/s/GPU, MFU 51.0 %, 0.006667 USD/step, 2 steps in 2.0 s, input 10.0 %"


def test_the_line_of_a_cpu_knows_no_mfu_and_counts_the_machine_once() -> None:
    made = settings(usd_per_hour=Decimal("0.36"), world_size=2, local_world_size=2)
    said = line(made, unit(1, samples=7, profile=profile(fp32=10**9), checkpoint=((0, SECOND_NS // 4),)))
    assert said == "7.0 samples/s/rank, 0.0001 USD/step, 1 step in 1.0 s, checkpoint 25.0 %"


def test_what_is_unknown_is_left_out_and_never_nought() -> None:
    assert line(settings()) is None
    assert line(settings(), unit(1)) == "1 step in 1.0 s"
    unknown = settings(device_uuid="GPU-1", gpu_model="NVIDIA H999")
    assert line(unknown, unit(1, tokens_in=1, profile=profile(bf16=10**12))) == "1.0 tokens/s/GPU, 1 step in 1.0 s"
    no_flops = settings(**GPU)
    assert line(no_flops, unit(1, tokens_in=1, profile=profile(bf16=0))) == "1.0 tokens/s/GPU, 1 step in 1.0 s"


def test_ranks_of_one_replica_share_its_tokens() -> None:
    made = settings(**GPU, world_size=8, tp=4)
    assert line(made, unit(1, tokens_in=4000)) == "1,000 tokens/s/GPU, 1 step in 1.0 s"


def test_units_without_a_count_do_not_water_down_mfu() -> None:
    counted = profile(bf16=PEAK["bf16"] // 4)
    made = settings(**GPU)
    said = line(made, unit(1, profile=counted), unit(2), unit(3, profile=counted, uncounted=1))
    assert said is not None
    assert "MFU 25.0 %" in said


def test_micro_batches_and_units_marked_together_count() -> None:
    half = profile(bf16=PEAK["bf16"] // 8)
    said = line(settings(**GPU), unit(1, units=2, profile=half, parts=(half,), tokens_in=10, tokens_out=2))
    assert said == "12.0 tokens/s/GPU, MFU 50.0 %, 2 steps in 1.0 s"


def test_an_impossible_mfu_says_so() -> None:
    said = line(settings(**GPU), unit(1, profile=profile(bf16=2 * PEAK["bf16"])))
    assert said is not None
    assert "MFU 200.0 % (above the peak: the count or the name of the GPU is wrong)" in said


def test_training_speaks_before_evaluation_and_serving_says_batches() -> None:
    train, serve = unit(1, tokens_in=10), unit(9, phase="decode", start_ns=SECOND_NS, tokens_out=80, units=8)
    assert line(settings(), train, serve) == "10.0 tokens/s/rank, 1 step in 1.0 s"
    assert line(settings(), serve) == "10.0 tokens/s/rank, 8 batches in 8.0 s"


def test_each_line_begins_anew() -> None:
    reporter = Reporter(settings())
    reporter.add(unit(1, tokens_in=5))
    assert reporter.line() == "5.0 tokens/s/rank, 1 step in 1.0 s"
    assert reporter.line() is None
    reporter.add(unit(2, tokens_in=7))
    assert reporter.line() == "7.0 tokens/s/rank, 1 step in 1.0 s"


# --- when it speaks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [60, 120]),
        ({"log_interval_ns": 25 * SECOND_NS}, [30, 60, 90, 120]),
        ({"log_interval_ns": 0}, []),
        ({"rank": 1, "world_size": 2}, []),
    ],
)
def test_it_speaks_when_it_is_time(
    caplog: pytest.LogCaptureFixture, values: dict[str, Any], expected: list[int]
) -> None:
    reporter = Reporter(settings(**values))
    spoken = []
    with caplog.at_level(logging.INFO, "seedance.probe"):
        for at in range(0, 130, 10):
            reporter.add(unit(at))
            before = len(caplog.records)
            reporter.log(at * SECOND_NS)
            spoken += [at] * (len(caplog.records) - before)
    assert spoken == expected
    assert all(record.levelno == logging.INFO for record in caplog.records)


# --- its parts ------------------------------------------------------------------------------------------------------


def test_mfu_takes_each_dtype_by_its_own_peak() -> None:
    h100, bf16, fp32 = find_gpu(H100), PEAK["bf16"], PEAK["fp32"]
    assert mfu_ppm({"bf16": bf16, "fp32": 0}, 2 * SECOND_NS, h100) == 500_000
    assert mfu_ppm({"bf16": bf16 // 2, "fp32": fp32 // 2}, SECOND_NS, h100) == 1_000_000
    assert mfu_ppm({"bf16": bf16, "fp12": 1}, SECOND_NS, h100) is None, "a dtype without a peak"
    assert mfu_ppm({"bf16": 0}, SECOND_NS, h100) is None
    assert mfu_ppm({"bf16": 3}, 0, h100) is None
    assert mfu_ppm({"bf16": 3}, SECOND_NS, None) is None


def test_products_that_run_in_tf32_are_held_to_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = find_gpu(H100)
    tf32 = h100.peak("tf32")
    assert tf32 is not None
    torch = SimpleNamespace(get_float32_matmul_precision=lambda: "high")
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    assert identity.uses_tf32()
    assert mfu_ppm({"fp32": tf32 // 2}, SECOND_NS, h100) == 500_000
    assert mfu_ppm({"fp32": tf32 // 2, "bf16": PEAK["bf16"] // 4}, SECOND_NS, h100) == 750_000
    torch.get_float32_matmul_precision = lambda: "highest"
    assert mfu_ppm({"fp32": PEAK["fp32"] // 2}, SECOND_NS, h100) == 500_000


def test_the_device_is_the_catalogues(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = hardware_of(settings(**GPU))
    assert isinstance(found, Hardware)
    assert found.peak("bf16") == catalogue.peak_flops(H100, "bf16") == PEAK["bf16"]
    assert hardware_of(settings()) is None
    assert hardware_of(settings(gpu_model=H100)) is None, "a job on the CPU beside a GPU"
    assert not caplog.records
    assert hardware_of(settings(device_uuid="GPU-1", gpu_model="NVIDIA H999")) is None
    assert "MFU is left out" in caplog.text
    assert "H999" in caplog.text


def test_a_slice_has_the_peak_of_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = settings(device_uuid="MIG-1", gpu_model=f"{H100} MIG 3g.40gb")
    bare = hardware_of(made)
    assert bare is not None
    assert bare.peak("bf16") is None
    device = SimpleNamespace(major=9, minor=0, multi_processor_count=66, total_memory=40 * 2**30)
    cuda = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: device
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    half = hardware_of(made)
    assert half is not None
    assert half.peak("bf16") == PEAK["bf16"] // 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"usd_per_hour": Decimal(7), "instance_type": "p5.48xlarge"}, Decimal(7)),
        ({"instance_type": "p5.48xlarge", "cloud": "aws"}, Decimal("55.04") / 8),
        ({"instance_type": "P5.48xlarge"}, Decimal("55.04") / 8),
        ({"instance_type": "p5.48xlarge", "cloud": "gcp"}, None),
        ({"instance_type": "p5.48xlarge", "device_uuid": "cpu:1"}, Decimal("55.04")),
        ({"instance_type": "p5.48xlarge", "device_uuid": "MIG-1"}, None),
        (
            {"instance_type": "p5.48xlarge", "device_uuid": "MIG-1", "gpu_model": f"{H100} MIG 3g.40gb"},
            Decimal("55.04") / 8 * 3 / 7,
        ),
        ({"instance_type": "a3-highgpu-8g"}, Decimal("88.490000119") / 8),
        ({"instance_type": "m7i.large"}, None),
        ({"instance_type": "p5e.48xlarge"}, None),
        ({}, None),
    ],
)
def test_the_price_of_a_device(values: dict[str, Any], expected: Decimal | None) -> None:
    assert usd_per_device_hour(settings(**{**GPU, **values})) == expected


def test_the_price_of_a_step_is_that_of_every_device_of_the_job() -> None:
    gpus = settings(**GPU, world_size=16, local_world_size=8)
    machines = settings(world_size=16, local_world_size=8)
    assert usd_per_step(Decimal(1), gpus, HOUR_NS, 16) == "1"
    assert usd_per_step(Decimal(1), machines, HOUR_NS, 16) == "0.125"
    assert usd_per_step(Decimal(1), dataclasses.replace(machines, world_size=17), HOUR_NS, 3) == "1"
    assert usd_per_step(Decimal("0.1"), machines, 1, 1) == "0.00000000000005556"

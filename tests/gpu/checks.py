"""What is checked on a GPU, one function each: raises AssertionError where something is wrong, returns facts worth keeping.

Each takes the device ("cuda"; "cpu" tries the function itself where there is no GPU) and a folder for what it records. Timings
are facts, never conditions.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from seedance.flops import formulas
from seedance.flops.counter import FlopCounter
from seedance.probe.probe import attach
from tests.bench import probe as bench
from tests.bench._pairs import measure
from tests.bench._training import Training

ROOT = Path(__file__).resolve().parent.parent.parent


class NotHere(Exception):
    """This machine lacks what a check needs."""


def device_facts() -> dict[str, Any]:
    """The device and the versions that the facts hold for."""
    props = torch.cuda.get_device_properties(0)
    return {
        "name": props.name,
        "compute_capability": f"{props.major}.{props.minor}",
        "sm_count": props.multi_processor_count,
        "memory_bytes": props.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
    }


# --- FLOPs ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention by torch's fused operator, with fewer key heads than query heads."""

    def __init__(self, width: int = 256, heads: int = 4, key_heads: int = 4, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.key_heads, self.is_causal = heads, key_heads, is_causal
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width * key_heads // heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        q = self.q(x).view(batch, length, self.heads, size).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.key_heads, size).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.is_causal, enable_gqa=self.key_heads != self.heads
        )
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def flops(device: str, _: Path) -> dict[str, Any]:
    """Forward and backward FLOPs equal torch's counter on this device; by block, a copy without data counts the same."""
    found: dict[str, Any] = {}
    for name, model, x in _models(device):
        with FlopCounter(model) as ours, FlopCounterMode(display=False) as theirs:
            model(x).float().sum().backward()
        found[name] = {"ours": ours.profile.hw_flops, "torch": theirs.get_total_flops()}
        assert found[name]["ours"] == found[name]["torch"] > 0, f"{name}: {found[name]}"
    return found | _backends(device) | _causal(device) | _recurrent(device) | _scaled(device)


def _backends(device: str) -> dict[str, Any]:
    """Attention by each kernel: the same model FLOPs, and hardware FLOPs as torch has them (2.5 times backward if fused)."""
    found: dict[str, Any] = {}
    linear, tokens = formulas.linear, 2 * 128
    expected = (
        2 * linear(tokens, 256, 256)  # queries: no gradient of the input
        + 2 * linear(tokens, 256, 512)
        + 3 * formulas.attention(2, 4, 128 * 128, 64, 64)
        + 3 * linear(tokens, 256, 256)
    )
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        model, x = Attention().to(device, torch.bfloat16), torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells in warnings why it cannot
                model(x)
        except RuntimeError as error:
            found[f"attention {backend.name}"] = {"skipped": str(error).splitlines()[0]}
            continue
        with sdpa_kernel(backend), FlopCounter(model) as ours, FlopCounterMode(display=False) as theirs:
            model(x).float().sum().backward()
        facts = {"model": ours.profile.flops, "hardware": ours.profile.hw_flops, "torch": theirs.get_total_flops()}
        found[f"attention {backend.name}"] = facts
        assert facts["model"] == expected, f"{backend.name}: {facts}, expected {expected}"
        if device == "cuda" or backend is SDPBackend.MATH:  # torch's counter sees no fused attention on CPUs
            assert facts["hardware"] == facts["torch"], f"{backend.name}: {facts}"
    return found


def _models(device: str) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    torch.manual_seed(1)
    wide = torch.randn(64, 128, device=device)
    mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
    yield "mlp", mlp, wide
    yield (
        "mlp bf16",
        nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)).to(device, torch.bfloat16),
        wide.bfloat16(),
    )
    convolutions = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, dilation=2)
    )
    image = torch.randn(4, 3, 64, 64, device=device)
    yield "convolutions", convolutions.to(device), image
    yield (
        "convolutions channels last",
        convolutions.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        image.to(memory_format=torch.channels_last),
    )
    yield "transposed", nn.ConvTranspose2d(8, 16, 4, stride=2).to(device), torch.randn(2, 8, 16, 16, device=device)
    yield "checkpointed", Checkpointed().to(device), wide.requires_grad_()


def _causal(device: str) -> dict[str, Any]:
    """Torch counts causal attention in full; ours says both."""
    model, x = Attention(key_heads=2, is_causal=True).to(device), torch.randn(2, 128, 256, device=device)
    with torch.no_grad(), FlopCounter(model) as ours:
        model(x)
    pairs = formulas.attention_pairs(128, 128, causal=True)
    attention = sum(op.flops for op in ours.profile.ops if op.op == "attention")
    assert attention == formulas.attention(2, 4, pairs, 64, 64), attention
    full = sum(op.flops_full for op in ours.profile.ops if op.op == "attention")
    assert full == formulas.attention(2, 4, 128 * 128, 64, 64), full
    return {"causal": {"exact": attention, "full": full}}


def _recurrent(device: str) -> dict[str, Any]:
    """The fused LSTM, of which torch's counter knows nothing."""
    model, x = nn.LSTM(32, 64, num_layers=2).to(device), torch.randn(10, 4, 32, device=device)
    with FlopCounter(model) as ours:
        model(x)[0].sum().backward()
    forward = formulas.lstm(4, 10, 32, 64, layers=2)
    by_pass = {name: sum(op.flops for op in ours.profile.ops if op.pass_ == name) for name in ("fwd", "bwd")}
    assert by_pass["fwd"] == forward, by_pass
    return {"lstm": by_pass | {"formula": forward}}


def _scaled(device: str) -> dict[str, Any]:
    """A product of 8-bit floats, where the device has them."""
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        return {"scaled_mm": {"skipped": "no 8-bit floats on this device"}}
    a = torch.randn(64, 128, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(32, 128, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    with FlopCounter() as ours:
        torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    (row,) = [op for op in ours.profile.ops if op.op == "matmul"]
    assert (row.flops, row.dtype) == (2 * 64 * 128 * 32, "fp8"), row
    return {"scaled_mm": {"flops": row.flops, "dtype": row.dtype}}


# --- the probe ------------------------------------------------------------------------------------------------------


@contextmanager
def no_complaints() -> Iterator[None]:
    """The probe warns of nothing in here; a probe that failed says so and is off."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seedance")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not said, said


def small_training(device: str) -> Training:
    """A step that is short on any device."""
    return Training(blocks=2, width=64, heads=4, vocabulary=128, batch=2, length=32, device=device)


def identity(device: str, _: Path) -> dict[str, Any]:
    """The same bits after twenty steps, with every unit sampled and with none."""

    def after(probed: bool, folder: str) -> bytes:
        training = small_training(device)
        if probed:
            probe = attach(training.model, optimizer=training.optimizer, spool=Path(folder), max_sample_ppm=1_000_000)
        for _ in range(20):
            training.step()
        if probed:
            probe.detach()
        return b"".join(p.detach().cpu().numpy().tobytes() for p in training.model.parameters())

    torch.use_deterministic_algorithms(True)
    try:
        with tempfile.TemporaryDirectory() as folder, no_complaints():
            assert after(False, folder) == after(False, folder), (
                "two bare runs differ: nothing can be said of the probe"
            )
            assert after(False, folder) == after(True, folder), "the probe changed the training"
    finally:
        torch.use_deterministic_algorithms(False)
    return {"steps": 20}


def graphs(device: str, _: Path) -> dict[str, Any]:
    """CUDA graphs are captured and replayed with the probe attached, and give what eager code gives."""
    if device != "cuda":
        raise NotHere("CUDA graphs need a GPU")
    training = small_training(device)
    model, static = training.model.eval(), training.tokens[:, :-1].clone()
    with tempfile.TemporaryDirectory() as folder, no_complaints(), torch.no_grad():
        expected = model(static).clone()
        with attach(model, spool=Path(folder), job_id="graphs", max_sample_ppm=1_000_000):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    model(static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(static)
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected), "a replayed graph gives something else"
            assert torch.equal(model(static), expected), "eager calls after a capture give something else"
    return {"replays": 5, "compiled": _reduce_overhead()}


def _reduce_overhead() -> str:
    """torch.compile with CUDA graphs of its own, attached before and after; where it works without the probe."""
    try:
        _compiled_steps(probed=None)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises
        return f"skipped, it fails without the probe: {str(error).splitlines()[0]}"
    with no_complaints():
        for probed in ("before", "after"):
            _compiled_steps(probed)
    return "ok"


def _compiled_steps(probed: str | None) -> None:
    torch.compiler.reset()
    training = small_training("cuda")
    with tempfile.TemporaryDirectory() as folder:
        told = {"optimizer": training.optimizer, "spool": Path(folder), "job_id": "compiled"}
        probe = attach(training.model, **told) if probed == "before" else None
        plain = training.model
        training.model = torch.compile(plain, mode="reduce-overhead")
        probe = attach(training.model, **told) if probed == "after" else probe
        for _ in range(8):
            training.step()
        training.wait()
        if probe is not None:
            probe.detach()


def overhead(device: str, folder: Path) -> dict[str, Any]:
    """What the probe costs, of a large step and of one that is nearly all launches."""
    rows = []
    rounds = 6  # fewer than on a CPU: the check is to end within minutes
    torch.set_float32_matmul_precision("high")
    sizes = {
        "large": {"blocks": 24, "width": 1_024, "heads": 16, "vocabulary": 32_000, "batch": 8, "length": 512},
        "launches": {"blocks": 6, "width": 192, "heads": 6, "vocabulary": 1_024, "batch": 2, "length": 128},
    }
    for name, size in sizes.items() if device == "cuda" else [("launches", sizes["launches"])]:
        groups = 12 if device == "cuda" else 2
        with tempfile.TemporaryDirectory() as spool:
            told = {**size, "device": device}
            measured = measure(told, bench.KINDS, Path(spool), groups=groups, rounds=rounds, rare=tuple(bench.PEERS))
        rows += bench.overhead_rows(measured, f"gpu.{name}")
    (folder / "overhead.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return {f"{row['name']} | {row['peer']}": [row["value"], row["peer_value"]] for row in rows}


def energy(device: str, _: Path) -> dict[str, Any]:
    """The energy counter moves with the work: joules, watts and TFLOP/s per watt of bf16 products, beside the catalogue."""
    if importlib.util.find_spec("pynvml") is None or device != "cuda":
        raise NotHere("nvidia-ml-py is not installed" if device == "cuda" else "energy is read from a GPU")
    import pynvml

    from seedance.flops import roofline

    props = torch.cuda.get_device_properties(0)
    hardware = roofline.find_gpu(
        props.name,
        compute_capability=f"{props.major}.{props.minor}",
        sm_count=props.multi_processor_count,
        memory_bytes=props.total_memory,
    )
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{props.uuid}")
        size, loops = 8_192, 0
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        a @ a
        torch.cuda.synchronize()
        before, start = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.monotonic_ns()
        while time.monotonic_ns() - start < 3_000_000_000:  # the counter moves every 100 ms: 3 % of this window
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()
            loops += 20
        spent, ns = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before, time.monotonic_ns() - start
    finally:
        pynvml.nvmlShutdown()
    assert spent > 0, "the energy counter stood still under load"
    done = loops * formulas.matmul(size, size, size)
    return {
        "catalogue": hardware.key,
        "energy_mj": spent,
        "watts": spent / 1e3 / (ns / 1e9),
        "tdp_watts": hardware.tdp_mw / 1e3 if hardware.tdp_mw else None,
        "bf16_tflops": done / ns / 1e3,
        "tflops_per_watt": float(roofline.energy_efficiency({"bf16": done}, spent).total),  # type: ignore[union-attr]
    }


def shards(device: str, folder: Path) -> dict[str, Any]:
    """A short run whose shards are kept: training with a checkpoint, then calls without gradients."""
    training = small_training(device)
    spool = Path(tempfile.mkdtemp())
    steps = 300 if device == "cuda" else 40
    told = {"job_id": "gpu-record", "name": "recording", "team": "tests", "project": "tests"}
    took = []
    with no_complaints(), attach(training.model, optimizer=training.optimizer, spool=spool, **told):
        for number in range(steps):
            start = time.perf_counter_ns()
            training.step()
            training.wait()
            took.append(time.perf_counter_ns() - start)
            if number == steps // 2:
                torch.save(training.model.state_dict(), spool.parent / f"{spool.name}.pt")
        with torch.no_grad():
            training.model.eval()
            for _ in range(20):
                training.model(training.tokens[:, :-1])
        training.wait()
    rows = [json.loads(line) for path in spool.rglob("*.jsonl") for line in path.read_bytes().splitlines()]
    steps_of = [row[1] for row in rows if isinstance(row, list) and row[0] == "raw_telemetry__step_windows"]
    units = sum(row["units"] for row in steps_of if row["phase"] == "train")
    lost = sum(row["dropped_units"] for row in steps_of)
    assert 0 < units <= steps, (units, steps)
    facts = {
        "steps": steps,
        "units": units,
        "dropped_units": lost,
        "active_ns_a_unit": sum(row["active_ns"] for row in steps_of if row["phase"] == "train") // units,
        "step_ns_median": int(statistics.median(took)),
        "probe_ns_a_unit": sum(row["probe_ns"] for row in steps_of) // units,
        "methods": sorted({row[1]["method"] for row in rows if isinstance(row, list) and "method" in row[1]}),
    }
    return facts | {"kept": _keep(spool, folder)}


def _keep(spool: Path, folder: Path) -> str:
    """Shards of the spool as one archive; its lines where Parquet cannot be written here."""
    drop, kept = Path(tempfile.mkdtemp()), "shards"
    if importlib.util.find_spec("pyarrow") is None:
        drop, kept = spool, "spool (no pyarrow here: `seedance upload` elsewhere)"
    else:
        command = [sys.executable, "-m", "seedance", "upload", "--spool", spool, "--to", drop, "--final"]
        subprocess.run([str(c) for c in command], cwd=ROOT, check=True, capture_output=True, timeout=120)
    with tarfile.open(folder / "shards.tar.gz", "w:gz") as archive:
        archive.add(drop, arcname="telemetry")
    return kept


CHECKS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "flops": flops,
    "identity": identity,
    "graphs": graphs,
    "energy": energy,
    "shards": shards,
    "overhead": overhead,
}

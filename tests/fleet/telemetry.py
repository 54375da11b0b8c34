"""What the agents of a fleet write: rows of the six tables, and shards from them.

Readings tile the observed time exactly, each covering one period that lies in one hour, in one state of the device; busy
time of held stretches comes out of a reading without a rest. Knows no bill and no truth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from seedance.schema import DEVICE_SAMPLES, EVENTS, JOBS, OP_WINDOWS, PROCESS_SAMPLES, STEP_WINDOWS, TELEMETRY, Table
from seedance.shard import write_shard
from tests.fleet.model import HOUR_S, MILLION, SECOND, Fleet, Machine, Stretch, Tenant
from tests.fleet.shapes import PARAMETERS
from tests.fleet.timeline import OpRow, StepRow, Timeline, periods, present

Row = dict[str, Any]
SM_COUNT = {
    "NVIDIA A100": 108,
    "NVIDIA A100 40GB": 108,
    "NVIDIA A100 80GB": 108,
    "NVIDIA A100 80GB PCIe": 108,
    "NVIDIA A10G": 80,
    "NVIDIA H100": 132,
    "NVIDIA L4": 58,
    "NVIDIA T4": 40,
}
NVML_NAME = {
    "NVIDIA A100 40GB": "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100 80GB": "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "NVIDIA A100": "NVIDIA A100-SXM4-40GB",
    "NVIDIA A10G": "NVIDIA A10G",
    "NVIDIA H100": "NVIDIA H100 80GB HBM3",
    "NVIDIA L4": "NVIDIA L4",
    "NVIDIA T4": "Tesla T4",
}
"""A card as the instance catalogue calls it, and as its driver does."""
POWER_MW = {
    "NVIDIA A100": (52_000, 400_000),
    "NVIDIA A100 40GB": (52_000, 400_000),
    "NVIDIA A100 80GB": (58_000, 400_000),
    "NVIDIA A100 80GB PCIe": (44_000, 300_000),
    "NVIDIA A10G": (24_000, 300_000),
    "NVIDIA H100": (70_000, 700_000),
    "NVIDIA L4": (16_000, 72_000),
    "NVIDIA T4": (9_000, 70_000),
}
"""Idle and highest board power."""


@dataclass(frozen=True)
class Shard:
    """One shard of one machine, hour and table."""

    machine: int
    hour: int
    table: str
    path: str
    data: bytes


def op_key(layer: str, direction: str, op: str, phase: str, batch: int, dtype: str) -> int:
    """BLAKE2b-64 of layer|pass|op|phase|batch|dtype, as a signed integer, big-endian."""
    text = f"{layer}|{direction}|{op}|{phase}|{batch}|{dtype}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def shards(timeline: Timeline) -> list[Shard]:
    """Every shard of the fleet, by machine, hour and table; twins and damage are the writer's business."""
    fleet = timeline.fleet
    rows: dict[tuple[int, int, str], list[Row]] = {}

    def add(machine: int, hour: int, table: Table, row: Row) -> None:
        rows.setdefault((machine, hour, table.name), []).append(row)

    for number, machine in enumerate(fleet.machines):
        if machine.has_agent:
            for hour, row in _device_rows(fleet, number):
                add(number, hour, DEVICE_SAMPLES, row)
            for hour, row in _process_rows(fleet, number):
                add(number, hour, PROCESS_SAMPLES, row)
            for hour, row in _event_rows(fleet, number):
                add(number, hour, EVENTS, row)
    for step in timeline.steps:
        add(_host(fleet, step.tenant, step.rank), step.window_s // HOUR_S, STEP_WINDOWS, _step_row(fleet, step))
    for op in timeline.ops:
        add(_host(fleet, op.tenant, op.rank), op.window_s // HOUR_S, OP_WINDOWS, _op_row(fleet, op))
    for machine_number, hour, row in _job_rows(timeline):
        add(machine_number, hour, JOBS, row)
    return [_shard(fleet, key, found) for key, found in sorted(rows.items())]


def _shard(fleet: Fleet, key: tuple[int, int, str], rows: list[Row]) -> Shard:
    number, hour, name = key
    machine, spec = fleet.machines[number], TELEMETRY[name]
    windows = {STEP_WINDOWS.name: fleet.spec.window_s, OP_WINDOWS.name: fleet.spec.op_window_s}
    columns = [pa.array([row.get(c.name) for row in rows], c.type) for c in spec.columns]
    path, data = write_shard(
        pa.table(columns, schema=spec.arrow),
        spec,
        producer=machine.node,
        node=machine.node,
        cloud=fleet.spec.cloud,
        instance_id=machine.stated_id,
        instance_type=machine.instance_type,
        hour=f"{fleet.spec.day}T{hour:02}",
        seq=hour,
        period_ns=windows.get(name, fleet.spec.period_s) * SECOND,
    )
    return Shard(number, hour, name, path, data)


def _host(fleet: Fleet, tenant: int, rank: int) -> int:
    return fleet.tenants[tenant].seats[rank][0]


def _seat(fleet: Fleet, tenant: int, rank: int) -> Row:
    machine, index = fleet.tenants[tenant].seats[rank]
    who = fleet.tenants[tenant]
    return {
        "job_id": who.job_id,
        "attempt": who.attempt,
        "rank": rank,
        "device_uuid": fleet.machines[machine].device(index),
    }


def at(fleet: Fleet, second: int) -> int:
    """Instant of a second of the day, ns UTC."""
    return fleet.spec.day_ns + second * SECOND


def _device_rows(fleet: Fleet, number: int) -> Iterator[tuple[int, Row]]:
    machine = fleet.machines[number]
    facts, period = machine.facts, fleet.spec.period_s
    idle_mw, full_mw = POWER_MW[facts.gpu_model]
    boot = f"boot-{machine.device(0)[4:12]}" if fleet.spec.cloud != "aws" else f"boot-{machine.instance_id[2:10]}"
    for start, end, usable in periods(fleet, number):
        for index in machine.readable(start):
            on = _processes(fleet, number, index, start)
            # Tenants that step at the same time state what they show together; a held stretch states what is truly busy.
            busy = max((s.busy_ppm for _, s in on), default=0)
            power = idle_mw + (full_mw - idle_mw) * busy // MILLION * 8 // 10
            row = {
                "gpu_uuid": machine.device(index),
                "mig_uuid": None,
                "sampled_at_utc": at(fleet, end),
                "node": machine.node,
                "boot_id": boot,
                "cloud": fleet.spec.cloud,
                "instance_id": machine.stated_id,
                "gpu_model": NVML_NAME[facts.gpu_model],
                "mig_profile": None,
                "source": "nvml",
                "state": "ok" if usable else "lost: driver not loaded",
                "gpu_index": index,
                "sm_count": SM_COUNT[facts.gpu_model],
                "process_count": len(on),
                "temperature_c": 31 + 40 * busy // MILLION,
                "sm_clock_mhz": 210 if not busy else 1_410,
                "memory_clock_mhz": 1_215,
                "gpu_util_ppm": busy,
                "sm_active_ppm": busy * 7 // 10,
                "tensor_active_ppm": busy * 4 // 10,
                "dram_active_ppm": busy * 3 // 10,
                "power_mw": power,
                "covered_ns": period * SECOND,
                "memory_used_bytes": facts.gpu_memory_bytes * 3 // 4 if on else 0,
                "memory_total_bytes": facts.gpu_memory_bytes,
                "throttle_mask": 0,
                "energy_mj": power * period,
                "pcie_tx_bytes": busy * period,
                "pcie_rx_bytes": busy * period,
                "nvlink_tx_bytes": None,
                "nvlink_rx_bytes": None,
            }
            yield (end - 1) // HOUR_S, row | _under_mig(machine, index, start, busy)


def _processes(fleet: Fleet, number: int, index: int, second: int) -> list[tuple[Tenant, Stretch]]:
    """Who is on a device; on a GPU that is cut, everyone on its slices."""
    machine = fleet.machines[number]
    if not machine.is_cut(index, second):
        return present(fleet, number, index, second)
    count = machine.facts.gpu_count
    places = [count + n for n, piece in enumerate(machine.slices) if piece.gpu == index]
    return [found for place in places for found in present(fleet, number, place, second)]


def _under_mig(machine: Machine, index: int, second: int, busy: int) -> Row:
    """What differs in a reading of a slice, and of a GPU that is cut: the driver says [N/A] to utilisation of both.

    Only the profiling counters tell how busy a slice is; power belongs to the board.
    """
    piece, facts = machine.slice_at(index), machine.facts
    if piece is None:
        return {"gpu_util_ppm": None, "sm_active_ppm": None} if machine.is_cut(index, second) else {}
    part, whole = piece.compute, machine.compute_slices
    memory = facts.gpu_memory_bytes * part // (whole + 1)
    return {
        "gpu_uuid": machine.device(piece.gpu),
        "mig_uuid": machine.device(index),
        "mig_profile": piece.profile or None,
        "gpu_index": piece.gpu,
        "sm_count": SM_COUNT[facts.gpu_model] * part // whole,
        "gpu_util_ppm": None,
        "sm_active_ppm": busy,
        "power_mw": None,
        "memory_used_bytes": memory * 3 // 4 if busy else 0,
        "memory_total_bytes": memory,
        "energy_mj": None,
        "pcie_tx_bytes": None,
        "pcie_rx_bytes": None,
    }


def _process_rows(fleet: Fleet, number: int) -> Iterator[tuple[int, Row]]:
    machine, period = fleet.machines[number], fleet.spec.period_s
    for start, end, usable in periods(fleet, number):
        if not usable:
            continue
        for index in machine.readable(start):
            on = present(fleet, number, index, start)
            for tenant, stretch in on:
                place = fleet.tenants.index(tenant)
                owner = tenant.declared_by or ("env" if tenant.job_id else "none")
                # Per-process utilisation is not supported under MIG, nor for the clients of an MPS server.
                is_known = machine.slice_at(index) is None and not tenant.declared_by
                share = tenant.share_ppm if len(on) > 1 else stretch.busy_ppm
                yield (
                    (end - 1) // HOUR_S,
                    {
                        "device_uuid": machine.device(index),
                        "host_pid": 4_000 + 100 * place + index,
                        "pid_started_ns": at(fleet, tenant.pid_started_s),
                        "sampled_at_utc": at(fleet, end),
                        "node": machine.node,
                        "job_id": tenant.job_id,
                        "owner_source": owner,
                        "attempt": tenant.attempt if tenant.job_id else None,
                        "rank": tenant.seats.index((number, index)) if tenant.job_id else None,
                        "sm_util_ppm": share if is_known else None,
                        "mps_limit_ppm": tenant.share_ppm if tenant.declared_by else None,
                        "covered_ns": period * SECOND,
                        "memory_used_bytes": machine.facts.gpu_memory_bytes * 3 // 4 // len(on),
                    },
                )


def _step_row(fleet: Fleet, step: StepRow) -> Row:
    tenant = fleet.tenants[step.tenant]
    work = tenant.work
    assert work is not None
    samples = step.units * step.batch
    memory = fleet.machines[tenant.seats[step.rank][0]].facts.gpu_memory_bytes
    return {
        **_seat(fleet, step.tenant, step.rank),
        "phase": work.phase,
        "batch_size": step.batch,
        "window_start_utc": at(fleet, step.window_s),
        "window_ns": fleet.spec.window_s * SECOND,
        "units": step.units,
        "wall_ns": step.wall,
        "active_ns": step.active,
        "input_stall_ns": step.input_stall,
        "checkpoint_ns": step.checkpoint,
        "held_idle_ns": step.held_idle,
        "sampled_units": step.sampled_units,
        "sampled_active_ns": step.sampled_active,
        "samples": samples,
        "tokens_in": samples * work.seq,
        "tokens_out": 0,
        "requests": samples if tenant.kind == "serve" else 0,
        "input_wait_ns": step.input_stall,
        "probe_ns": step.units * 20_000,
        "dropped_units": 0,
        "allocated_bytes": memory // 2,
        "reserved_bytes": memory * 3 // 4,
        "active_bytes": memory // 2,
        "inactive_split_bytes": memory // 100,
        "alloc_retries": 0,
        "ooms": 0,
    }


def _op_row(fleet: Fleet, row: OpRow) -> Row:
    tenant, op = fleet.tenants[row.tenant], row.op
    work = tenant.work
    assert work is not None
    dtype = "none" if op.direction == "none" else work.dtype
    calls = row.units * op.calls
    return {
        **_seat(fleet, row.tenant, row.rank),
        "op_key": op_key(op.layer, op.direction, op.kind, work.phase, row.batch, dtype),
        "variant": "",
        "method": "events",
        "window_start_utc": at(fleet, row.window_s),
        "layer": op.layer,
        "op": op.kind,
        "pass": op.direction,
        "phase": work.phase,
        "dtype": dtype,
        "layer_index": op.index,
        "batch_size": row.batch,
        "window_ns": fleet.spec.op_window_s * SECOND,
        "calls": calls,
        "flops": row.units * op.flops,
        "hw_flops": row.units * op.flops,
        "bytes_ideal": row.units * op.bytes,
        "uncounted_calls": 0 if op.is_counted else calls,
        "sampled_calls": row.sampled_units * op.calls,
        # Collectives run beside compute: their raw time is longer than what they add.
        "busy_ns": row.exclusive * 5 // 4 if op.direction == "comm" else row.exclusive,
        "exclusive_ns": row.exclusive,
        "exclusive_us2": row.us2,
    }


def _job_rows(timeline: Timeline) -> Iterator[tuple[int, int, Row]]:
    fleet = timeline.fleet
    for tenant in fleet.tenants:
        if tenant.job_id is None or tenant.work is None:
            continue
        machine = fleet.machines[tenant.seats[0][0]]
        # What was said before the day began, or while nobody listened, is not in the day's shards.
        begin = max(tenant.start_s, machine.agent_s)
        end = tenant.end_s - 1
        said = [
            ("started", begin),
            *(("beat", t) for t in range((begin // HOUR_S + 1) * HOUR_S, end, HOUR_S)),
            ("ended", end),
        ]
        if tenant.kind == "train":
            said.append(("result", end))
        for statement, second in said:
            yield tenant.seats[0][0], second // HOUR_S, _job_row(fleet, tenant, machine, statement, second)


def _job_row(fleet: Fleet, tenant: Tenant, machine: Machine, statement: str, second: int) -> Row:
    work = tenant.work
    assert work is not None and tenant.job_id is not None
    ranks = len(tenant.seats)
    return {
        "job_id": tenant.job_id,
        "attempt": tenant.attempt,
        "rank": None,
        "stated_at_utc": at(fleet, second),
        "statement": statement,
        "node": machine.node,
        "device_uuid": None,
        "name": tenant.job_id.rsplit("-", 1)[0],
        "team": "research" if tenant.kind == "train" else "platform",
        "project": "fleet",
        "owner": "ml-engineers",
        "kind": tenant.kind,
        "model": work.network,
        "config_id": f"{work.network}-{max(work.batches)}",
        "hardware_profile": machine.instance_type,
        "quantisation": "none",
        "code_version": "1.0.0",
        "run_url": None,
        "quality_metric": "loss" if statement == "result" else None,
        "exit_reason": "completed" if statement == "ended" else None,
        "labels": [("parameters", str(PARAMETERS[work.network])), ("stage", tenant.kind)],
        "dp": ranks,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "world_size": ranks,
        "quality": Decimal("2.125000000") if statement == "result" else None,
    }


def _event_rows(fleet: Fleet, number: int) -> Iterator[tuple[int, Row]]:
    """The volumes that a host sees, at the start of each hour and when one grows; and the saves of its jobs."""
    machine = fleet.machines[number]
    for volume in fleet.volumes:
        for host, first, last in volume.attached:
            for hour in range(first, last) if host == number else ():
                for second in volume.told(machine, hour):
                    facts = {"bytes": volume.size(second), "type": volume.type} if volume.type else {}
                    payload = {"device": "/dev/nvme1n1", **(facts or {"gib": volume.gib})}
                    yield (
                        hour,
                        _event(fleet, machine, second, "kernel", "block_device", volume.stated_id, payload, None),
                    )
    for tenant in fleet.tenants:
        if tenant.work is not None and tenant.work.checkpoint_every and tenant.seats[0][0] == number:
            second = tenant.end_s - 1
            path = f"s3://checkpoints/{tenant.job_id}/{tenant.attempt}/last"
            yield (
                second // HOUR_S,
                _event(fleet, machine, second, "checkpoint", "saved", path, {"blocking": True}, tenant),
            )


def _event(
    fleet: Fleet, machine: Machine, second: int, source: str, kind: str, about: str, payload: Row, tenant: Tenant | None
) -> Row:
    stamp = datetime.fromtimestamp(at(fleet, second) // SECOND, UTC).strftime("%Y%m%dT%H%M%S")
    return {
        "at_utc": at(fleet, second),
        "event_id": f"{machine.node}/{kind}/{about}/{stamp}",
        "source": source,
        "kind": kind,
        "severity": "info",
        "object": about,
        "node": machine.node,
        "device_uuid": None,
        "job_id": tenant.job_id if tenant else None,
        "payload": json.dumps(payload, sort_keys=True),
        "attempt": tenant.attempt if tenant else None,
        "rank": None,
        "count": 1,
    }

"""Who a process is: job, rank, host, device and machine, from its environment, `/proc` and firmware.

Asks no network and starts no program. Looks at torch only where the process has imported it already, and at CUDA only
where the process has initialised it. What cannot be known is left out.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seedance.durations import SECOND_NS

PROC = Path("/proc")
FIRMWARE = Path("/sys/class/dmi/id")
_CLOUDS = {"amazon ec2": "aws", "microsoft corporation": "azure", "google": "gcp"}
"""Maker of the machine by its firmware, and the cloud."""
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Asset tag of every Azure machine; a desktop by the same maker has another."""


def host(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that launchers and the host can tell.

    Args:
        environ: the process's variables.
        known: what was set by hand: it decides what follows from it (node and drop name the spool).

    Returns:
        Values by name of the setting; without those that are unknown.
    """
    place = _place(environ, known)
    node = str(known.get("node") or node_name(environ))
    found: dict[str, Any] = {
        **place,
        "node": node,
        "job_id": job_id(environ, node, place["world_size"], place["local_world_size"]),
        "attempt": attempt(environ),
        "device_uuid": device_uuid(environ=environ),
        "gpu_model": gpu_model(),
        **machine(),
        "spool": default_spool(environ, node, known.get("drop")),
        "name": script_name(),
    }
    found["config_id"] = known.get("name", found["name"])
    return {name: value for name, value in found.items() if value is not None}


def _place(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, int]:
    """Rank, world size and their local kin: torch's process group, then torchrun, then Slurm, then one rank alone."""
    rank, world = _group() or (None, None)
    if rank is None:
        rank = _first(environ, "RANK", "SLURM_PROCID")
    if world is None:
        # Not SLURM_NTASKS: a batch script has it too, though it runs one task.
        world = _first(environ, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    rank = int(known.get("rank", rank or 0))
    world = max(int(known.get("world_size", world or 1)), rank + 1)
    local = _first(environ, "LOCAL_RANK", "SLURM_LOCALID")
    beside = _first(environ, "LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE")
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": rank if local is None else local,
        "local_world_size": min(world if beside is None else max(1, beside), world),
    }


def _group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:  # noqa: BLE001 - a group in any state; launchers still have their word
        return None
    return None


def _first(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that begins with a number; Slurm writes 2(x3) for two on each of three nodes."""
    for name in names:
        match = re.match(r"\d{1,9}", environ.get(name, ""))
        if match:
            return int(match[0])
    return None


def node_name(environ: Mapping[str, str]) -> str:
    """Host name, in the characters that names of shards may have."""
    said = environ.get("SLURMD_NODENAME") or environ.get("HOSTNAME") or socket.gethostname()
    return clean(said)


def clean(name: str) -> str:
    """The name with `-` for everything but letters, digits, dot, dash and underscore; never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "localhost"


def attempt(environ: Mapping[str, str]) -> int:
    """Restart number: of torchrun's workers, of the Slurm job, or both: 100 a requeue and 1 a restart of workers."""
    workers = _first(environ, "TORCHELASTIC_RESTART_COUNT") or 0
    requeued = _first(environ, "SLURM_RESTART_COUNT") or 0
    both = "TORCHELASTIC_RESTART_COUNT" in environ
    return min(requeued * 100 + workers if both else requeued, 2**15 - 1)


def job_id(environ: Mapping[str, str], node: str, world_size: int, local_world_size: int) -> str:
    """Name of the run that all its ranks agree on.

    torchrun's run id (but not `none`, which stands for no id), else Slurm's job, else what the ranks share: their
    rendezvous address over several hosts, their parent process on one host, the process itself when it is alone.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if run and run != "none":
        return run
    slurm = environ.get("SLURM_JOB_ID", "").strip()
    if slurm:
        return slurm
    if world_size > local_world_size and environ.get("MASTER_ADDR"):
        return clean(f"{environ['MASTER_ADDR']}-{environ.get('MASTER_PORT', '')}")
    pid = os.getppid() if world_size > 1 else os.getpid()
    started = started_ns(pid)
    if started is None:
        return f"{node}-{pid}"
    at = datetime.fromtimestamp(started // SECOND_NS, UTC)
    return f"{node}-{at:%Y%m%dT%H%M%SZ}-{pid}"


def started_ns(pid: int, proc: Path = PROC) -> int | None:
    """When a process started, ns UTC to 10 ms; None when the host does not say. With the pid it names the process."""
    try:
        # The name in parentheses may hold spaces and parentheses.
        ticks = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) * SECOND_NS + ticks * SECOND_NS // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def boot_id(proc: Path = PROC) -> str | None:
    """Id of this boot of the host; None when the host does not say."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def device_uuid(index: int | None = None, *, environ: Mapping[str, str] | None = None) -> str:
    """Device that this process computes on: `GPU-…`, `MIG-…`, or `cpu:<boot id>` (the host's name without a boot id).

    Args:
        index: CUDA index of the device; None: the current one.
        environ: variables to read; None takes the process's own.
    """
    environ = os.environ if environ is None else environ
    cuda = _cuda()
    if cuda is not None:
        try:
            at = cuda.current_device() if index is None else index
            shown = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
            # The driver tells the uuid of the whole GPU for a slice of it; the variable names the slice.
            if at < len(shown) and shown[at].startswith("MIG-"):
                return shown[at]
            return f"GPU-{str(cuda.get_device_properties(at).uuid).removeprefix('GPU-')}"
        except Exception:  # noqa: BLE001 - a driver in any state; the CPU still has its name
            pass
    return f"cpu:{boot_id() or node_name(environ)}"


def gpu_model(index: int | None = None) -> str | None:
    """Name of the GPU as CUDA spells it; None where the process uses none."""
    cuda = _cuda()
    if cuda is None:
        return None
    try:
        return str(cuda.get_device_name(index))
    except Exception:  # noqa: BLE001 - a driver in any state
        return None


def gpu_facts(index: int | None = None) -> dict[str, Any]:
    """What tells a GPU whose name nobody knows, and a slice of one: compute capability, SM count, memory in bytes."""
    cuda = _cuda()
    if cuda is None:
        return {}
    try:
        found = cuda.get_device_properties(cuda.current_device() if index is None else index)
        return {
            "compute_capability": (found.major, found.minor),
            "sm_count": found.multi_processor_count,
            "memory_bytes": found.total_memory,
        }
    except Exception:  # noqa: BLE001 - a driver in any state
        return {}


def uses_tf32() -> bool:
    """Whether matrix products of float32 run in TF32 in this process; True says that torch was told so."""
    torch = sys.modules.get("torch")
    try:
        return torch is not None and _cuda() is not None and torch.get_float32_matmul_precision() != "highest"
    except Exception:  # noqa: BLE001 - settings of both kinds at once, which torch refuses to read
        return False


def _cuda() -> Any:
    """`torch.cuda` where the process has begun to use it; asking earlier would begin it, and break a later fork."""
    cuda = sys.modules.get("torch.cuda")
    try:
        return cuda if cuda is not None and cuda.is_initialized() else None
    except Exception:  # noqa: BLE001 - a driver in any state
        return None


def machine(firmware: Path = FIRMWARE) -> dict[str, str]:
    """Cloud, instance id and instance type as far as the firmware tells them: all three on EC2, the cloud elsewhere.

    Source: DMI fields sys_vendor, board_asset_tag (EC2 Nitro: instance id), product_name (EC2 Nitro: instance type).
    """
    cloud = _CLOUDS.get(_line(firmware / "sys_vendor").casefold())
    if cloud == "azure" and _line(firmware / "chassis_asset_tag") != _AZURE_TAG:
        return {}
    if cloud == "gcp" and _line(firmware / "product_name") != "Google Compute Engine":
        return {}
    found = {} if cloud is None else {"cloud": cloud}
    if cloud == "aws":
        instance, kind = _line(firmware / "board_asset_tag"), _line(firmware / "product_name")
        if re.fullmatch(r"i-[0-9a-f]{8,17}", instance):
            found["instance_id"] = instance
        if re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", kind):
            found["instance_type"] = kind
    return found


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def default_spool(environ: Mapping[str, str], node: str, drop: object = None) -> Path:
    """Where rows go when nobody says: the user's state folder, else the temporary one; below it a folder a host, because a
    home may be shared by many, and a place that shards go to, because whoever uploads next takes all that is there.
    """
    if drop is not None:
        node += "-" + hashlib.sha256(str(drop).encode(errors="replace")).hexdigest()[:8]
    state = environ.get("XDG_STATE_HOME") or (f"{environ['HOME']}/.local/state" if environ.get("HOME") else "")
    if state and Path(state).is_absolute():
        there = next(p for p in (Path(state), *Path(state).parents) if p.exists())
        if os.access(there, os.W_OK | os.X_OK):
            return Path(state) / "seedance" / "spool" / node
    return Path(tempfile.gettempdir()) / f"seedance-{os.getuid()}" / "spool" / node


def script_name() -> str | None:
    """Name of the script or module that the process runs; None where there is none (a prompt, `-c`)."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem or None if file else None

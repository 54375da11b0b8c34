"""Settings of the probe: arguments, environment and what launchers say in, one frozen object out.

Precedence: argument, `SEEDANCE_…`, launcher (torchrun, Slurm), default. A value that cannot be read from the environment
is warned about and left at its default, because telemetry must never stop a run; an argument that is wrong is an error.
Knows no framework; what only the host knows comes from `identity`.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from seedance.durations import HOUR_NS, SECOND_NS
from seedance.errors import SeedanceError
from seedance.probe import identity

PREFIX = "SEEDANCE_"
LOGGER = logging.getLogger("seedance.probe")
KINDS = ("train", "serve")
UNKNOWN = "unknown"
"""What a statement about a job says where nobody said anything: the contract has no null there."""
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})
INT16 = 2**15 - 1
INT32 = 2**31 - 1
ALIASES = {"JOB": "job_id", "DEVICE": "device_uuid", "PRICE": "usd_per_hour"}
"""Short names that people write after `SEEDANCE_`."""
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("SETTINGS", "HOME", "REAL_DATA", "LAKE", "TELEMETRY", "BILLS", "BUCKETS", "LOOK_BACK_DAYS", "SCHEDULER"),
        *("LEASE_SECONDS", "WORKERS", "MAX_QUARANTINED_PPM", "MAX_UNOBSERVED_PPM", "DEFAULT_REGION"),
    )
)
"""Variables of the pipeline: no settings of the probe, and no mistakes."""
_told: set[str] = set()


class SettingsError(SeedanceError):
    """A setting cannot be used: setting, settings (all that are involved), expected, found."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How a process is probed, and what it says about itself. Made by `from_environment`."""

    enabled: bool = True
    """False: `attach` does nothing at all."""
    diagnostic: bool = False
    """True: models are found and probed without a line of code (`SEEDANCE_DIAGNOSTIC=1`)."""

    job_id: str = UNKNOWN
    """Job that the process belongs to; the same on all its ranks, another for each run."""
    attempt: int = 0
    """Restart number of the job, from 0."""
    rank: int = 0
    """Global rank in the job."""
    local_rank: int = 0
    """Rank on this host."""
    world_size: int = 1
    """Ranks of the job."""
    local_world_size: int = 1
    """Ranks of the job on this host."""

    node: str = UNKNOWN
    """Host name as shards and bills know it."""
    device_uuid: str = UNKNOWN
    """GPU-…, MIG-… or cpu:<boot id>."""
    gpu_model: str | None = None
    """Model as NVML names it; None without a GPU. Decides the peak that MFU is taken of."""
    cloud: str | None = None
    """aws, azure, gcp or the lower-case provider name; None when unknown."""
    instance_id: str | None = None
    """Instance in the form that the bill uses; None when unknown."""
    instance_type: str | None = None
    """Instance type in the provider's words; None when unknown."""
    usd_per_hour: Decimal | None = None
    """Price of one device for an hour, USD: a GPU, or the whole machine where ranks run on its CPU. None: the list price
    of `instance_type` by the catalogue, over its GPUs."""

    spool: Path = Path()
    """Local folder that rows are appended to; one a host."""
    drop: str | None = None
    """fsspec URL that finished shards are put to; None leaves them in the spool for `seedance upload`."""
    spool_limit_bytes: int = 512 * 2**20
    """Most bytes that the spool may take; beyond, rows are dropped and counted."""
    upload_timeout_s: int = 60
    """Most seconds that the end of the process waits for the upload."""

    name: str = UNKNOWN
    """Name that people know the job by."""
    team: str = UNKNOWN
    """Owner team."""
    project: str = UNKNOWN
    """Owner project."""
    owner: str = UNKNOWN
    """Owner, a role or group."""
    kind: str = "train"
    """train or serve."""
    model: str = UNKNOWN
    """Model."""
    config_id: str = UNKNOWN
    """Configuration; runs of one configuration are compared with each other."""
    hardware_profile: str = UNKNOWN
    """Hardware profile."""
    quantisation: str = "none"
    """Quantisation scheme."""
    code_version: str = UNKNOWN
    """Version of the job's code."""
    run_url: str | None = None
    """Where the run is tracked."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Free labels; in the environment `key=value,key=value`."""
    dp: int | None = None
    """Data parallel size; None: what the other sizes leave of the ranks."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    cp: int = 1
    """Context parallel size."""
    ep: int = 1
    """Expert parallel size."""

    max_sample_ppm: int = 20_000
    """Most units that are sampled, ppm: 1/50. 1,000,000 samples each one, 0 none."""
    step_window_ns: int = 10 * SECOND_NS
    """Length of a step window, ns."""
    op_window_ns: int = 300 * SECOND_NS
    """Length of an op window, ns."""
    log_interval_ns: int = 60 * SECOND_NS
    """Least time between two log lines, ns: a line comes with the first step window that ends after it. 0: no lines."""

    def __post_init__(self) -> None:
        for setting, (low, high) in _LIMITS.items():
            value = getattr(self, setting)
            if value is not None and not low <= value <= high:
                raise _refusal((setting,), f"{low:,} to {high:,}", value)
        if self.rank >= self.world_size:
            raise _refusal(("rank", "world_size"), f"below world_size = {self.world_size}", self.rank)
        if self.kind not in KINDS:
            raise _refusal(("kind",), " or ".join(KINDS), self.kind)
        if self.usd_per_hour is not None and not (self.usd_per_hour.is_finite() and self.usd_per_hour >= 0):
            raise _refusal(("usd_per_hour",), "a price of 0 USD or more", self.usd_per_hour)
        if self.op_window_ns % self.step_window_ns or HOUR_NS % self.op_window_ns:
            expected = f"a multiple of step_window_ns = {self.step_window_ns:,} ns that divides an hour"
            raise _refusal(("op_window_ns", "step_window_ns"), expected, self.op_window_ns)
        for setting in _NAMES:
            value = getattr(self, setting)
            if not value or any(ord(c) < 32 for c in value):
                raise _refusal((setting,), "text without control characters, not empty", value)

    @property
    def data_parallel(self) -> int:
        """Replicas: `dp`, else the ranks over the sizes of tensor, pipeline and context parallelism, at least 1."""
        return self.dp or max(1, self.world_size // self.ranks_per_replica)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same samples."""
        return self.tp * self.pp * self.cp

    @property
    def writes_samples(self) -> bool:
        """True on the one rank of a replica that writes samples, tokens and requests: the first of its block."""
        return self.rank % self.ranks_per_replica == 0


_LIMITS = {
    "attempt": (0, INT16),
    "rank": (0, INT32),
    "local_rank": (0, INT32),
    "world_size": (1, INT32),
    "local_world_size": (1, INT32),
    "spool_limit_bytes": (1, 2**63),
    "upload_timeout_s": (0, 86_400),
    "dp": (1, INT16),
    "tp": (1, INT16),
    "pp": (1, INT16),
    "cp": (1, INT16),
    "ep": (1, INT16),
    "max_sample_ppm": (0, 1_000_000),
    "step_window_ns": (SECOND_NS // 10, HOUR_NS),
    "op_window_ns": (SECOND_NS // 10, HOUR_NS),
    "log_interval_ns": (0, 86_400 * SECOND_NS),
}
_NAMES = (
    *("job_id", "node", "device_uuid", "name", "team", "project", "owner", "model", "config_id"),
    *("hardware_profile", "quantisation", "code_version"),
)
_FIELDS = {f.name: f for f in dataclasses.fields(ProbeSettings)}
NAMES = tuple(_FIELDS)
"""Every setting, in order."""


def from_environment(environ: Mapping[str, str] | None = None, **overrides: Any) -> ProbeSettings:
    """Settings of this process: argument, then `SEEDANCE_…`, then what launchers say, then default.

    Args:
        environ: variables to read; None takes the process's own.
        overrides: settings by name. None counts as not given. Text is read as in the environment.

    Raises:
        SettingsError: an override is unknown or cannot be used. The environment alone never raises: a bad value is
            warned about, once, and ignored.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in overrides.items() if value is not None}
    for name in given:
        if name not in _FIELDS:
            raise SettingsError(
                f"probe: no setting {name!r}{_nearest(name, NAMES)}. Settings: {', '.join(NAMES)}.",
                setting=name,
                settings=(name,),
                expected=NAMES,
                found=name,
            )
    said = {**_read(environ), **{name: _of_argument(name, value) for name, value in given.items()}}
    unusable: set[str] = set()
    while True:
        values = {**identity.host(environ, said), **said}
        try:
            return ProbeSettings(**{name: value for name, value in values.items() if name not in unusable})
        except SettingsError as error:
            bad = next((n for n in error.settings if n in values and n not in given and n not in unusable), None)
            if bad is None:
                raise
            _warn(f"{error} Going on without {PREFIX}{bad.upper()}.")
            if said.pop(bad, None) is None:
                unusable.add(bad)


def _read(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `SEEDANCE_…` says; a name that is no setting and a value that cannot be read are warned about."""
    values: dict[str, Any] = {}
    for variable in sorted(v for v in environ if v.startswith(PREFIX) and v not in OTHER_VARIABLES):
        short = variable.removeprefix(PREFIX)
        name = ALIASES.get(short, short.lower())
        if name not in _FIELDS:
            near = _nearest(short, [n.upper() for n in NAMES], PREFIX)
            _warn(f"probe: {variable} is no setting{near}. It has no effect.")
            continue
        if not environ[variable] and name not in ("enabled", "diagnostic"):
            continue  # set to nothing is not set
        try:
            values[name] = _READERS[name](environ[variable])
        except (ValueError, InvalidOperation):
            _warn(
                f"probe: {variable}={environ[variable]!r} is no {_EXPECTED.get(_READERS[name], 'value')}. "
                "It has no effect."
            )
    return values


def _of_argument(name: str, value: Any) -> Any:
    reader = _READERS[name]
    if name == "labels" and isinstance(value, Mapping):
        return {str(k): str(v) for k, v in value.items()}
    if name in ("spool", "drop") and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        try:
            return reader(value)
        except (ValueError, InvalidOperation) as error:
            raise _refusal((name,), _EXPECTED.get(reader, "a value"), value) from error
    if reader is _decimal and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return Decimal(str(value))
    fits = isinstance(value, bool) if reader is _bool else isinstance(value, int) and not isinstance(value, bool)
    if reader not in (_bool, int) or not fits:
        raise _refusal((name,), _EXPECTED.get(reader, "text"), value)
    return value


def _bool(text: str) -> bool:
    folded = text.strip().casefold()
    if folded in TRUE | FALSE:
        return folded in TRUE
    raise ValueError(text)


def _decimal(text: str) -> Decimal:
    return Decimal(text.strip())


def _labels(text: str) -> Mapping[str, str]:
    pairs = [pair.split("=", 1) for pair in text.split(",") if pair.strip()]
    if any(len(pair) != 2 or not pair[0].strip() for pair in pairs):
        raise ValueError(text)
    return {key.strip(): value.strip() for key, value in pairs}


def _url(text: str) -> str:
    """A URL as it is; a folder as seen from here, since the uploader works in another one."""
    return text if "://" in text else str(_path(text))


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _reader(name: str) -> Callable[[str], Any]:
    special: dict[str, Callable[[str], Any]] = {
        "labels": _labels,
        "spool": _path,
        "drop": _url,
        "usd_per_hour": _decimal,
        "dp": int,
        "node": identity.clean,
    }
    default = _FIELDS[name].default
    if name in special:
        return special[name]
    if isinstance(default, bool):
        return _bool
    return int if isinstance(default, int) else str


_READERS = {name: _reader(name) for name in NAMES}
_EXPECTED: Mapping[Callable[[str], Any], str] = {
    int: "integer",
    _bool: "switch (1 or 0)",
    _decimal: "number of USD",
    _labels: "key=value,key=value",
    _path: "folder",
    _url: "folder or URL",
    str: "text",
}


def _refusal(settings: tuple[str, ...], expected: str, found: object) -> SettingsError:
    message = f"probe: setting {settings[0]} is {found!r}, expected {expected}."
    return SettingsError(message, setting=settings[0], settings=settings, expected=expected, found=found)


def _nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; the nearest is {prefix}{near[0]}" if near else ""


def _warn(message: str) -> None:
    """Say it once a process."""
    if message not in _told:
        _told.add(message)
        LOGGER.warning(message)

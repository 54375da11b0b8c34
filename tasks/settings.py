"""One frozen settings object per process, from arguments, environment, file and defaults, in this order of precedence.

Built in a flow or a command and passed down; nothing below reads the environment. A key that nobody knows is refused
with the nearest valid name, wherever it stands. Holds no secrets: those come from the cloud SDKs' own chains. Knows no lake.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as EnvError

from seedance.probe import settings as probe
from tasks.errors import SettingsError

PREFIX = "SEEDANCE_"
DEFAULT_FILE = "seedance.toml"
OTHER_VARIABLES = {
    "SEEDANCE_SETTINGS": "names the settings file when no argument does",
    "SEEDANCE_HOME": "folder that deployed flows run in",
    "SEEDANCE_REAL_DATA": "where tests find real exports and recordings",
}
"""Variables that begin like settings and are none."""
OF_THE_PROBE = frozenset(PREFIX + name.upper() for name in (*probe.NAMES, *probe.ALIASES))
"""Settings of the probe: one shell may train and price."""


class BillSource(BaseModel):
    """One place where a provider drops bills."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the source, as it appears in x_Source.", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    url: str = Field(description="Folder of the export: a path or any fsspec URL.", min_length=1)


class Regions(BaseModel):
    """A region of each cloud that has list prices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aws: str = Field("us-east-1", min_length=1)
    azure: str = Field("eastus", min_length=1)
    gcp: str = Field("us-central1", min_length=1)


class Settings(BaseSettings):
    """Where data lies and how the work is spread. Frozen; every value has a default."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX, case_sensitive=False)

    lake: str = Field("lake", description="Folder or fsspec URL of the lake.", min_length=1)
    telemetry: str | None = Field(
        None, description="Drop folder or URL of telemetry shards; the lake's own raw/ when absent.", min_length=1
    )
    bills: tuple[BillSource, ...] = Field((), description="Places where bills are delivered, each name once.")
    buckets: int = Field(8, description="Buckets that hosts are hashed into for a new lake, per hour.", ge=1, le=4096)
    look_back_days: int = Field(
        35, description="Days before the newest that are looked at for late shards and bills.", ge=0, le=3660
    )
    scheduler: str = Field(
        "threads",
        description="threads (in this process), local (a cluster of processes), or the address of a Dask scheduler.",
        pattern=r"^(threads|local|(tcp|tls)://.+)$",
    )
    lease_seconds: int = Field(
        600, description="Longest wait for another run that computes the same days, in seconds.", ge=0, le=86_400
    )
    workers: int = Field(2, description="Threads or processes of the scheduler.", ge=1, le=1024)
    max_quarantined_ppm: int = Field(
        1_000_000,
        description="Share of a day's telemetry that may be in quarantine, ppm; a day beyond it is not published.",
        ge=0,
        le=1_000_000,
    )
    max_unobserved_ppm: int = Field(
        1_000_000,
        description="Share of billed GPU time that may be unobserved, ppm; a day beyond it is not published.",
        ge=0,
        le=1_000_000,
    )
    default_region: Regions = Field(
        Regions(),
        description="Region of each cloud whose list price estimates a machine that the day's bill does not name.",
    )

    @field_validator(
        "buckets",
        "look_back_days",
        "lease_seconds",
        "workers",
        "max_quarantined_ppm",
        "max_unobserved_ppm",
        mode="before",
    )
    @classmethod
    def _whole(cls, value: object) -> object:
        # Pydantic takes true for 1 and 1e3 for 1000: neither was meant as a count. The environment gives text.
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            return value
        raise PydanticCustomError("int_type", "Input should be a valid integer, in digits alone")

    @field_validator("bills")
    @classmethod
    def _names_once(cls, bills: tuple[BillSource, ...]) -> tuple[BillSource, ...]:
        names = [b.name for b in bills]
        again = sorted({n for n in names if names.count(n) > 1})
        if again:
            raise ValueError(f"bill source named twice: {', '.join(again)}")
        return bills

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes: it reads the environment itself, to name the source of each wrong value."""
        return (init_settings,)


def load(path: str | None = None, **overrides: Any) -> Settings:
    """Settings from arguments, environment, file and defaults; the first that says anything about a key wins.

    Args:
        path: a settings file (TOML). None: the file that SEEDANCE_SETTINGS names, else `seedance.toml` in the working
            directory if there is one. Relative paths in the file are relative to the file's folder.
        overrides: values by field name; None means "not given".

    Raises:
        SettingsError: the file is missing or not TOML, a key is unknown, or a value is out of bounds. Carries
            key, where, found, and nearest or expected.
    """
    given = {k: v for k, v in overrides.items() if v is not None}
    _refuse_unknown(overrides, "the arguments")
    layers = [("the arguments", given), ("the environment", _from_environment())]
    named = path if path is not None else os.environ.get("SEEDANCE_SETTINGS")
    if named is not None or Path(DEFAULT_FILE).is_file():
        file = Path(named if named is not None else DEFAULT_FILE)
        layers.append((str(file), _from_file(file)))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, values in layers:
        for key, value in values.items():
            if key not in merged:
                merged[key], origin[key] = value, where
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _refusal(error, origin) from error


def _from_environment() -> dict[str, Any]:
    names = {n for n in os.environ if n.upper().startswith(PREFIX)}
    names = {n for n in names if n.upper() not in OTHER_VARIABLES and n.upper() not in OF_THE_PROBE}
    _refuse_unknown({n.upper().removeprefix(PREFIX).lower(): n for n in names}, "the environment", prefix=PREFIX)
    try:
        return dict(EnvSettingsSource(Settings)())
    except EnvError as error:
        raise SettingsError(
            f"settings in the environment: {error}. Write lists and objects as JSON, for example "
            f"""{PREFIX}BILLS='[{{"name": "aws", "url": "s3://bucket/export"}}]'.""",
            key=None,
            where="the environment",
        ) from error


def _from_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(
            f"settings file {file} does not exist (looked in {Path.cwd()}). Pass the path of a TOML file.",
            where=str(file),
        ) from error
    except (ValueError, OSError) as error:  # not TOML, not UTF-8, a folder, a name with a NUL
        raise SettingsError(f"settings file {file} cannot be read as TOML: {error}.", where=str(file)) from error
    _refuse_unknown(values, str(file))
    folder = file.resolve().parent
    for key in ("lake", "telemetry"):
        if isinstance(values.get(key), str):
            values[key] = _beside(folder, values[key])
    for bill in values.get("bills", []) if isinstance(values.get("bills"), list) else []:
        if isinstance(bill, dict) and isinstance(bill.get("url"), str):
            bill["url"] = _beside(folder, bill["url"])
    return values


def _beside(folder: Path, url: str) -> str:
    """A relative local path made absolute; URLs and absolute paths as they are."""
    return url if "://" in url or not url or Path(url).is_absolute() else os.path.normpath(folder / url)


def _refuse_unknown(keys: Iterable[str], where: str, *, prefix: str = "") -> None:
    for key in sorted(keys):
        if key not in Settings.model_fields:
            raise _unknown(key, where, tuple(Settings.model_fields), prefix)


def _unknown(key: str, where: str, known: tuple[str, ...], prefix: str = "") -> SettingsError:
    near = difflib.get_close_matches(key.lower(), known, 1, 0.0)[0]

    def spell(name: str) -> str:
        return prefix + name.upper() if prefix else name

    return SettingsError(
        f"unknown setting {spell(key)} in {where}. Did you mean {spell(near)}? "
        f"Valid names: {', '.join(spell(name) for name in known)}.",
        key=spell(key),
        where=where,
        nearest=spell(near),
    )


def _refusal(error: ValidationError, origin: Mapping[str, str]) -> SettingsError:
    first = error.errors(include_url=False)[0]
    at = first["loc"]
    where = origin.get(str(at[0]), "the defaults") if at else "the settings"
    if first["type"] == "extra_forbidden" and at[0] == "bills":
        return _unknown(str(at[-1]), f"bills of {where}", tuple(BillSource.model_fields))
    key = ".".join(str(part) for part in at)
    found = first.get("input")
    expected = first["msg"][0].lower() + first["msg"][1:]
    return SettingsError(
        f"setting {key} in {where}: {expected}, found {found!r}. {_about(at)}",
        key=key,
        where=where,
        expected=expected,
        found=found,
    )


def _about(at: tuple[int | str, ...]) -> str:
    field = Settings.model_fields.get(str(at[0])) if at else None
    return f"Meaning: {field.description}" if field is not None else ""

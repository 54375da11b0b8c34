"""The policy of checkpoint tiers: what is hot, warm and cold, what is pinned, and where the folders are.

Values of a TOML file in, a frozen policy out; a key that nobody knows is refused with the nearest valid name. Knows no disk.
Source: infra/rules/tiers.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tasks.errors import SettingsError

_CONFIG = ConfigDict(frozen=True, extra="forbid")
GROUPS = ("job", "step")


class Hot(BaseModel):
    """What stays where it is because it is in use."""

    model_config = _CONFIG

    days: int = Field(7, description="Days since the last write or read.", ge=0, le=36_500)
    newest: int = Field(5, description="Newest checkpoints of each running job, whatever their age.", ge=0, le=10_000)


class Tier(BaseModel):
    """Where older checkpoints go."""

    model_config = _CONFIG

    storage_class: str = Field(alias="class", description="Class of tasks/rules/storage_tiers.csv.", min_length=1)
    days: int = Field(description="Days since the last write or read after which the tier ends.", ge=1, le=36_500)
    reads_per_month: Decimal = Field(
        Decimal(0), description="How often an object is expected to be read whole there, a month.", ge=0, le=10_000
    )


class Pins(BaseModel):
    """Shell patterns of paths that never move; `*` also matches `/`."""

    model_config = _CONFIG

    legal_hold: tuple[str, ...] = Field((), description="Under legal hold.")
    best: tuple[str, ...] = Field((), description="Best of a run.")
    final: tuple[str, ...] = Field((), description="Final of a run.")


class Policy(BaseModel):
    """What to do with checkpoints."""

    model_config = _CONFIG

    cloud: str = Field(description="Cloud whose classes are used: aws, azure, gcp.", min_length=1)
    region: str = Field(description="Region of the prices.", min_length=1)
    folders: tuple[str, ...] = Field((), description="Checkpoint folders: local paths, or s3:// URLs.")
    pattern: str | None = Field(
        None,
        description="Regular expression, searched in the path below the folder, with the named groups job and step or one "
        "of them. Without it each object is a checkpoint of its folder.",
    )
    part_mib: int = Field(64, description="MiB that one request of a move carries at most.", ge=5, le=5_120)
    local_usd_per_gb_month: Decimal | None = Field(
        None,
        description="What a GB costs on local disk, a month; without it nothing is moved from there.",
        ge=0,
        le=1_000,
    )
    hot: Hot = Hot(days=7, newest=5)
    warm: Tier
    cold: Tier
    pins: Pins = Pins(legal_hold=(), best=(), final=())

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            names = set(re.compile(pattern).groupindex)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        if not names or names - set(GROUPS):
            raise ValueError(f"expected the named groups job, step or both, found {', '.join(sorted(names)) or 'none'}")
        return pattern

    @model_validator(mode="after")
    def _in_order(self) -> Policy:
        if not self.hot.days < self.warm.days < self.cold.days:
            raise ValueError(
                f"days must rise from hot to warm to cold, found {self.hot.days}, {self.warm.days}, {self.cold.days}"
            )
        return self


def parse(values: Mapping[str, Any], *, where: str) -> Policy:
    """The policy of a TOML file's values (numbers with a point read as Decimal).

    Raises:
        SettingsError: a key is unknown (carries key, where, nearest), or a value is missing or out of bounds (carries key,
            where, expected, found).
    """
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A misspelt name is the cause of the missing one.
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        at = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise _unknown(at, where) from error
        key, expected = ".".join(at) or "policy", first["msg"][0].lower() + first["msg"][1:]
        found = "nothing" if first["type"] == "missing" else repr(first["input"]) if at else "the values above"
        raise SettingsError(
            f"{where}: {key}: {expected}, found {found}.", key=key, where=where, expected=expected, found=found
        ) from error


def _unknown(at: list[str], where: str) -> SettingsError:
    model: Any = Policy
    for part in at[:-1]:
        field = _names(model)[part]
        model = field if isinstance(field, type) else get_args(field)[0]
    known = _names(model)
    near = difflib.get_close_matches(at[-1], known, 1, 0.0)[0]
    section = f" in [{'.'.join(at[:-1])}]" if at[:-1] else ""
    return SettingsError(
        f"{where}: unknown key {at[-1]}{section}. Did you mean {near}? Valid names: {', '.join(known)}.",
        key=".".join(at),
        where=where,
        nearest=near,
    )


def _names(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}

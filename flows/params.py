"""Parameters of the flows: one model a concern; their descriptions and bounds are the form in the Prefect UI."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tasks.explain import Question, days_between
from tasks.settings import Settings, load


class Where(BaseModel):
    """Which settings a run uses."""

    model_config = ConfigDict(extra="forbid")

    # Text, not text or nothing: the form shows a field to type in, and an empty one is not given.
    settings: str = Field(
        "", title="Settings file", description="Path of a seedance.toml; the one in the working directory when empty."
    )
    lake: str = Field(
        "", title="Lake", description="Folder or fsspec URL of the lake; the one of the settings when empty."
    )

    def load(self) -> Settings:
        """The settings that the run uses."""
        overrides = {"lake": self.lake} if self.lake else {}
        return load(self.settings or None, **overrides)


OLDEST = dt.date(1970, 1, 1)
"""Instants are counted from its midnight, and look-backs reach before a day."""


def _not_in_the_future(day: dt.date) -> dt.date:
    today = dt.datetime.now(dt.UTC).date()
    if day < OLDEST:
        raise ValueError(f"{day} lies before {OLDEST}, the oldest day that can be run")
    if day > today:
        raise ValueError(f"{day} is in the future; the newest day that can be run is {today} (UTC)")
    return day


class Nightly(Where):
    """A night: every day that is due, up to one day."""

    day: dt.date | None = Field(
        None,
        title="Newest day",
        description="Newest UTC usage day to look at; yesterday when empty. Days before it are looked at within "
        "the look-back of the settings.",
    )

    @field_validator("day")
    @classmethod
    def _past(cls, day: dt.date | None) -> dt.date | None:
        return None if day is None else _not_in_the_future(day)

    @property
    def newest(self) -> str:
        """The newest usage day, YYYY-MM-DD."""
        return (self.day or dt.datetime.now(dt.UTC).date() - dt.timedelta(days=1)).isoformat()


class OneDay(Where):
    """One stage of one day."""

    day: dt.date = Field(title="Day", description="UTC usage day.")

    _past = field_validator("day")(_not_in_the_future)


class Bills(Where):
    """The bill stage."""

    day: dt.date | None = Field(
        None, title="Day", description="UTC usage day whose charges in force are shown; none when empty."
    )


class Backfill(Where):
    """Every stage for a range of days."""

    first_day: dt.date = Field(title="First day", description="Oldest UTC usage day.")
    last_day: dt.date = Field(title="Last day", description="Newest UTC usage day, included.")
    recode: bool = Field(
        False,
        title="Recode",
        description="Also compute days again whose code or environment changed since they were committed.",
    )

    _past = field_validator("first_day", "last_day")(_not_in_the_future)

    @model_validator(mode="after")
    def _in_order(self) -> Backfill:
        _assert_in_order(self.first_day, self.last_day)
        return self


def _assert_in_order(first_day: dt.date | None, last_day: dt.date | None) -> None:
    if first_day is not None and last_day is not None and first_day > last_day:
        raise ValueError(f"first_day {first_day} lies after last_day {last_day}")


def _past_or_none(day: dt.date | None) -> dt.date | None:
    return None if day is None else _not_in_the_future(day)


class Plan(Where):
    """Which days a night would compute."""

    first_day: dt.date | None = Field(
        None, title="First day", description="Oldest UTC usage day; the look-back of the settings when empty."
    )
    last_day: dt.date | None = Field(
        None, title="Last day", description="Newest UTC usage day, included; yesterday when empty."
    )
    recode: bool = Field(
        False, title="Recode", description="Also days whose code or environment changed since they were committed."
    )

    _past = field_validator("first_day", "last_day")(_past_or_none)

    @model_validator(mode="after")
    def _in_order(self) -> Plan:
        _assert_in_order(self.first_day, dt.date.fromisoformat(self.newest))
        return self

    @property
    def newest(self) -> str:
        """The newest usage day, YYYY-MM-DD."""
        return (self.last_day or dt.datetime.now(dt.UTC).date() - dt.timedelta(days=1)).isoformat()


class Verify(Where):
    """Whether the lake holds what its commits promise."""

    first_day: dt.date | None = Field(None, title="First day", description="Oldest UTC usage day; all when empty.")
    last_day: dt.date | None = Field(None, title="Last day", description="Newest UTC usage day; all when empty.")
    repair: bool = Field(
        False,
        title="Repair",
        description="Compute lost objects again from raw/, and bring report/ back to the committed days.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Verify:
        _assert_in_order(self.first_day, self.last_day)
        return self


class Sweep(Where):
    """Garbage of the lake."""

    delete: bool = Field(
        False, title="Delete", description="Delete what is listed. Without it nothing is deleted and nothing is noted."
    )


class Rebuild(Where):
    """A new lake from what another one keeps in raw/."""

    into: str = Field(title="Into", description="Folder or fsspec URL where the new lake is made.", min_length=1)
    last_day: dt.date | None = Field(
        None, title="Last day", description="Newest UTC usage day; the newest that raw/ has anything for when empty."
    )

    _past = field_validator("last_day")(_past_or_none)


class Explain(Where):
    """Where the money of one charge went, or what one job or resource pays for."""

    charge: str = Field(
        "",
        title="Charge",
        description="x_ChargeKey of a charge, or its first characters; an estimate's begins with estimate:.",
    )
    job: str = Field("", title="Job", description="Id of a job, or the name that people know it by.")
    resource: str = Field("", title="Resource", description="Resource of the bill, or a machine, or a device.")
    day: dt.date | None = Field(
        None, title="Day", description="UTC usage day; with a last day, the oldest. Every committed day when empty."
    )
    last_day: dt.date | None = Field(
        None, title="Last day", description="Newest UTC usage day, included; the same day when empty."
    )
    ledger: Literal["both", "cash", "amortised"] = Field(
        "both",
        title="Ledger",
        description="Which amounts are shown: both, cash (BilledCost) or amortised (EffectiveCost).",
    )
    most: int = Field(
        10,
        title="Parts of a level",
        description="How many are shown; the others are one line with their number and their sum.",
        ge=2,
        le=1000,
    )
    depth: int = Field(8, title="Levels", description="How many levels are shown below the first line.", ge=1, le=8)

    _past = field_validator("day", "last_day")(lambda day: None if day is None else _not_in_the_future(day))

    @field_validator("charge", "job", "resource")
    @classmethod
    def _stripped(cls, text: str) -> str:
        return text.strip()

    @model_validator(mode="after")
    def _one_question(self) -> Explain:
        given = [name for name in ("charge", "job", "resource") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of charge, job and resource; found {' and '.join(given) or 'none'}")
        if self.last_day is not None and self.day is None:
            raise ValueError(f"last_day {self.last_day} is given without day, the oldest one")
        if self.last_day is not None and self.day is not None and self.day > self.last_day:
            raise ValueError(f"day {self.day} lies after last_day {self.last_day}")
        return self

    def question(self) -> Question:
        """What is asked."""
        kind = next(name for name in ("charge", "job", "resource") if getattr(self, name))
        days = days_between(self.day, self.last_day)
        return Question(kind, getattr(self, kind), *days, self.ledger, self.most, self.depth)

"""Parameters of the flows: one model a concern; their descriptions and bounds are the form in the Prefect UI."""

from __future__ import annotations

import datetime as dt

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tasks.settings import Settings, load


class Where(BaseModel):
    """Which settings a run uses."""

    model_config = ConfigDict(extra="forbid")

    settings: str | None = Field(
        None, title="Settings file", description="Path of a seedance.toml; the one in the working directory when empty."
    )
    lake: str | None = Field(
        None,
        title="Lake",
        description="Folder or fsspec URL of the lake, instead of the one in the settings.",
        min_length=1,
    )

    def load(self) -> Settings:
        """The settings that the run uses."""
        overrides = {"lake": self.lake} if self.lake else {}
        return load(self.settings, **overrides)


def _not_in_the_future(day: dt.date) -> dt.date:
    today = dt.datetime.now(dt.UTC).date()
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
        if self.first_day > self.last_day:
            raise ValueError(f"first_day {self.first_day} lies after last_day {self.last_day}")
        return self

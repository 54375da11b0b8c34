"""What a rank says of its job: that it began, that it lives, how good it is, that it ended. Rows of raw_telemetry__jobs.

Knows no framework and no clock.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

from seedance.errors import SeedanceError
from seedance.probe.settings import ProbeSettings

TABLE = "raw_telemetry__jobs"
PLACES = Decimal("1E-9")
"""Digits of a quality."""
MOST = Decimal(10) ** 9
"""A quality is below this."""
Row = dict[str, Any]


class QualityError(SeedanceError):
    """A quality that cannot be stated: metric, expected, found."""


class Statements:
    """Makes statements of one rank; no two have the same instant.

    Args:
        settings: who the rank is.
        model: name of the model.
    """

    def __init__(self, settings: ProbeSettings, model: str) -> None:
        self.last_ns = 0
        """Instant of the latest statement, ns UTC."""
        names = ("job_id", "attempt", "rank", "node", "device_uuid", "name", "team", "project", "owner", "kind")
        more = ("config_id", "hardware_profile", "quantisation", "code_version", "run_url")
        sizes = ("tp", "pp", "cp", "ep", "world_size")
        self._facts: Row = {name: getattr(settings, name) for name in (*names, *more, *sizes)}
        self._facts |= {"model": model, "labels": dict(settings.labels), "dp": settings.data_parallel}

    def say(
        self,
        statement: str,
        at_ns: int,
        *,
        metric: str | None = None,
        quality: Decimal | None = None,
        exit_reason: str | None = None,
    ) -> tuple[str, Row]:
        """Table and row of a statement.

        Args:
            statement: started, beat, ended, result.
            at_ns: when, ns UTC; moved on where an earlier statement has that instant.
            metric, quality: of a result.
            exit_reason: of an end.
        """
        self.last_ns = at_ns = max(at_ns, self.last_ns + 1)
        said = {"stated_at_utc": at_ns, "statement": statement, "quality_metric": metric, "quality": quality}
        return TABLE, self._facts | said | {"exit_reason": exit_reason}


def quality_of(metric: str, value: object) -> Decimal:
    """A quality as it is stated: a decimal of nine places.

    Args:
        metric: what was measured, `accuracy`.
        value: number, decimal, or anything with one value (`.item()`).

    Raises:
        QualityError: it is no finite number below a thousand million.
    """
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    try:
        quality = Decimal(str(plain))
        if isinstance(plain, bool) or not quality.is_finite() or abs(quality) >= MOST:
            raise InvalidOperation
        return quality.quantize(PLACES)
    except InvalidOperation as error:
        raise QualityError(
            f"result {metric}: expected a finite number below {MOST:,}, found {plain!r}. Pass the number itself.",
            metric=metric,
            expected="a finite number",
            found=repr(plain),
        ) from error

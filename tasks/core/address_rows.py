"""Parts of address rows that billed and estimated money share: instants, coverage, the columns of a vector, the last touches.

Columns in, a table of core_cost__addresses out. Knows no rule of money and no rule of time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import ADDRESSES
from seedance.schema import INSTANT
from tasks.core.spans import HOUR_NS

Index = npt.NDArray[np.int64]
Teams = Mapping[tuple[str, int], str | None]
"""Owner team by job and attempt."""


def hour_instants(hour: Index, day_ns: int) -> pa.Array:
    """Instants of hours of the day.

    Args:
        hour: shape (n,), 0 to 23.
        day_ns: start of the day, ns UTC.
    """
    return pa.array(day_ns + hour.astype(np.int64) * HOUR_NS, pa.int64()).cast(INSTANT)


def coverage(vector: pa.Table, count: int) -> Index:
    """Observed share of each slot's span in ppm, rounded down; -1 for slots without span.

    Args:
        vector: rows of spans.VECTOR.
        count: how many slots there are.
    """
    slot, ns = np.asarray(vector["slot"]), np.asarray(vector["ns"])
    seen = ~np.asarray(pc.equal(vector["category"], "unobserved")) if len(vector) else np.zeros(0, bool)
    total, observed = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(total, slot, ns)
    np.add.at(observed, slot[seen], ns[seen])
    shares = [int(o) * 1_000_000 // int(t) if t else 0 for o, t in zip(observed, total, strict=True)]
    return np.where(total > 0, np.array(shares, np.int64), -1)


def of_vector(rows: pa.Table) -> dict[str, pa.Array]:
    """Columns of an address that are those of its row of the vector."""
    names = {
        "x_DeviceId": "device",
        "x_JobId": "job",
        "x_Attempt": "attempt",
        "x_Rank": "rank",
        "x_Reason": "reason",
        "x_Evidence": "evidence",
    }
    return {ours: rows[theirs] for ours, theirs in names.items()}


def teams_of(rows: pa.Table, teams: Teams) -> pa.Array:
    """Team of each row's job."""
    jobs, attempts = rows["job"].to_pylist(), rows["attempt"].to_pylist()
    return pa.array(
        [teams.get((j, a)) if j is not None else None for j, a in zip(jobs, attempts, strict=True)], pa.string()
    )


def complete(columns: dict[str, pa.Array], n: int, revision: int, cause: str | None) -> pa.Table:
    """The table of n addresses; a column that is not given is null.

    Args:
        columns: by name.
        n: rows.
        revision: number of the commit that will hold them.
        cause: why the day is written again; None for the first time.
    """
    columns["x_Revision"] = pa.array([revision] * n, pa.int32())
    columns["x_Cause"] = pa.array([cause] * n, pa.string())
    return pa.table(
        [columns.get(c.name, pa.nulls(n, c.type)) for c in ADDRESSES.columns], names=list(ADDRESSES.names)
    ).combine_chunks()

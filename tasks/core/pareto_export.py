"""The front as JSON and YAML for programs: rows of `report_pareto__configs` in, texts out.

Both are described by `schemas/pareto.schema.json`. The timestamp is the end of the day, not the time of a run, so that the same
rows give the same bytes. Knows no disk and no clock. Source: infra/rules/pareto.md.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tasks.core.pareto import OBJECTIVES

FORMAT = "seedance-pareto-1"
_USD = "USD"


def to_json(rows: Sequence[Mapping[str, Any]], as_of: dt.date) -> bytes:
    """The front, what it beats, and what cannot be compared: definition `front` of the schema."""
    body = _head(as_of) | {
        "objectives": [{"name": o.name, "best": "max" if o.highest else "min", "about": o.about} for o in OBJECTIVES],
        "pareto_points": [_point(row) for row in rows if row["x_OnFront"]],
        "dominated": [
            _point(row) | {"dominated_by": row["x_DominatedBy"]} for row in rows if row["x_OnFront"] is False
        ],
        "incomparable": [_name(row) | {"reason": row["x_Why"]} for row in rows if row["x_OnFront"] is None],
    }
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def to_yaml(rows: Sequence[Mapping[str, Any]], as_of: dt.date) -> bytes:
    """Every configuration with what it takes to run it: definition `configurations` of the schema."""
    entries = [
        _name(row)
        | {
            "on_front": row["x_OnFront"],
            "dominated_by": row["x_DominatedBy"],
            "comparison_set": row["x_ComparisonSet"],
            "cost": _cost(row),
        }
        for row in rows
    ]
    body = _head(as_of) | {"configurations": entries}
    text: str = yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=120)
    return text.encode()


def is_top1_accuracy(metric: str | None) -> bool:
    """Whether a quality metric is top-1 accuracy, by the words of its name."""
    words = re.sub(r"[^a-z0-9]+", "", (metric or "").casefold())
    return words in {"accuracytop1", "top1accuracy", "top1", "acc1", "acctop1", "top1acc", "valtop1", "evaltop1"}


def _head(as_of: dt.date) -> dict[str, Any]:
    end = as_of + dt.timedelta(days=1)
    return {"format": FORMAT, "timestamp": f"{end.isoformat()}T00:00:00Z", "as_of_date": as_of.isoformat()}


def _name(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config_id": row["x_ConfigId"],
        "model": row["x_Model"],
        "kind": row["x_Kind"],
        "hardware_profile": row["x_HardwareProfile"],
        "quantization_scheme": row["x_Quantisation"],
    }


def _cost(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if row["x_CostPerWork"] is None:
        return None
    return {"amount": row["x_CostPerWork"], "currency": row["BillingCurrency"], "per": row["x_WorkUnit"]}


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    in_usd = row["BillingCurrency"] == _USD
    return _name(row) | {
        "comparison_set": row["x_ComparisonSet"],
        "cost": _cost(row),
        "cost_usd": row["x_CostPerWork"] if in_usd else None,
        "cost_total": f"{row['x_Cost']:f}",
        "provisional": row["x_State"] == "provisional",
        "accuracy_top1": row["x_Quality"] if is_top1_accuracy(row["x_QualityMetric"]) else None,
        "quality": row["x_Quality"],
        "quality_metric": row["x_QualityMetric"],
        "quality_direction": row["x_QualityDirection"],
        "throughput_per_second": row["x_ThroughputPerSecond"],
        "latency_ms": row["x_LatencyMs"],
        "energy_joules": row["x_EnergyPerWork"],
        "in_box": row["x_InBox"],
    }

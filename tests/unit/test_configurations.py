"""Configurations from runs: sums first and ratios last, nothing compared that cannot be, exports that meet their schema."""

from __future__ import annotations

import csv
import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.ledger import JOB_DAILY, LAYER_DAILY, SPANS
from schemas.pareto import PARETO, PARETO_RUNS
from schemas.usage import JOB_RUNS
from tasks.core.configurations import day_runs, gather, less_is_better
from tasks.core.pareto import Point, fronts
from tasks.core.pareto_export import is_top1_accuracy, to_json, to_yaml
from tasks.io import parquet
from tests.property.test_pareto import brute
from tests.real import real_data
from tests.tables import DAY, HOUR, SECOND, build

D1, D2 = dt.date(2026, 10, 1), dt.date(2026, 10, 2)
SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "schemas" / "pareto.schema.json").read_text())
TFLOP = 10**12


def run(job: str, config: str | None, cost: str | None, **facts: Any) -> dict[str, Any]:
    """One row of core_pareto__runs: 100 samples in 10 s of wall time, 20 s of GPU time, 500 J."""
    row: dict[str, Any] = {
        "job_id": job,
        "attempt": 0,
        "BillingCurrency": None if cost is None else "USD",
        "config_id": config,
        "model": "resnet50",
        "hardware_profile": "1xA10G",
        "quantisation": "fp16",
        "kind": "serve",
        "EffectiveCost": None if cost is None else Decimal(cost),
        "units": 10,
        "samples": 100,
        "tokens": 0,
        "requests": 0,
        "wall_ns": 10 * SECOND,
        "rank_units": 10,
        "gpu_ns": 20 * SECOND,
        "energy_mj": 500_000,
        "energy_ns": 20 * SECOND,
        "flops": 0,
    }
    return row | facts


def top1(value: str) -> dict[str, Any]:
    return {"quality_metric": "accuracy_top1", "quality": Decimal(value)}


def table(*rows: dict[str, Any]) -> pa.Table:
    return build(PARETO_RUNS, list(rows))


def configs(*rows: dict[str, Any], **days: pa.Table) -> dict[tuple[str, str | None], dict[str, Any]]:
    by_day = {D1: table(*rows)} | {dt.date.fromisoformat(d[1:].replace("_", "-")): t for d, t in days.items()}
    found, _, _ = gather(by_day)
    parquet.to_bytes(found, PARETO)  # the key holds
    return {(r["x_ConfigId"], r["BillingCurrency"]): r for r in found.to_pylist()}


def test_a_configuration_adds_up_its_runs_and_divides_last() -> None:
    first = run("j1", "c", "0.10", **top1("0.70"), x_PromotionalCost=Decimal("-0.05"))
    more = run("j2", "c", "0.20", **top1("0.80"), samples=300, wall_ns=30 * SECOND)
    next_day = table(run("j1", "c", None, BillingCurrency="USD", x_EstimatedCost=Decimal("0.15"), samples=100))
    row = configs(first, more, d2026_10_02=next_day)["c", "USD"]
    assert (row["x_Cost"], row["x_Work"], row["x_WorkUnit"]) == (Decimal("0.50"), 500, "1k samples")
    assert (row["EffectiveCost"], row["x_PromotionalCost"], row["x_EstimatedCost"]) == (
        Decimal("0.30"),
        Decimal("-0.05"),
        Decimal("0.15"),
    )
    assert (row["x_CostPerWork"], row["x_Quality"], row["x_State"]) == (1.0, 0.75, "provisional")
    # 10 units in 10, 30 and 10 s: 500 samples in 50 s, 50 s over 30 units.
    assert (row["x_ThroughputPerSecond"], row["x_LatencyMs"]) == (10.0, 5000 / 3)
    assert (row["x_EnergyPerWork"], row["x_EnergyCoveragePpm"]) == (3000.0, 1_000_000)
    assert (row["x_Jobs"], row["x_Runs"], row["x_FirstDay"], row["x_LastDay"]) == (2, 2, D1, D2)
    assert row["x_ComparisonSet"] == (
        "USD, serve, per 1k samples, accuracy_top1: cost, quality, throughput, latency, energy"
    )


def test_ranks_that_step_together_count_their_time_once() -> None:
    """Four ranks, ten steps of one second: 4 x 10 s of wall time over 40 rank steps."""
    row = configs(run("j", "c", "1", wall_ns=40 * SECOND, rank_units=40))["c", "USD"]
    assert (row["x_LatencyMs"], row["x_ThroughputPerSecond"]) == (1000.0, 10.0)


def test_what_beats_what() -> None:
    found = configs(
        run("a", "dear-and-good", "2", **top1("0.9")),
        run("b", "cheap", "1", **top1("0.8")),
        run("c", "worse", "1.5", **top1("0.8")),
        run("d", "same-as-cheap", "1", **top1("0.8")),
    )
    assert {k[0]: (r["x_OnFront"], r["x_DominatedBy"], r["x_SetSize"]) for k, r in found.items()} == {
        "cheap": (True, None, 4),
        "dear-and-good": (True, None, 4),
        "same-as-cheap": (True, None, 4),
        "worse": (False, "cheap", 4),
    }


def test_of_a_loss_less_is_better() -> None:
    loss = {"quality_metric": "val_loss"}
    found = configs(
        run("a", "good", "1", **loss, quality=Decimal("2.0")), run("b", "bad", "1", **loss, quality=Decimal("3.0"))
    )
    assert found["bad", "USD"]["x_DominatedBy"] == "good"
    assert found["good", "USD"]["x_QualityDirection"] == "min"
    assert found["good", "USD"]["x_Objectives"] == "cost, loss, throughput, latency, energy"


@pytest.mark.parametrize(
    "metric", ["loss", "val_loss", "top1_err", "valLoss", "WER", "perplexity", "eval/cross-entropy-loss"]
)
def test_metrics_of_which_less_is_better(metric: str) -> None:
    assert less_is_better(metric)


@pytest.mark.parametrize("metric", ["loss", "val_loss", "eval/perplexity"])
def test_a_loss_ranks_no_two_models(metric: str) -> None:
    """A small model's loss is no better quality than a large one's; within a model it is."""
    stated = {"quality_metric": metric}
    found = configs(
        run("a", "llama", "9", model="llama", quality=Decimal("2.1"), **stated),
        run("b", "bert", "1", model="bert", quality=Decimal("2.0"), **stated),
        run("c", "bert-worse", "2", model="bert", quality=Decimal("2.5"), **stated),
    )
    assert found["llama", "USD"]["x_OnFront"] and found["llama", "USD"]["x_SetSize"] == 1
    assert found["bert-worse", "USD"]["x_DominatedBy"] == "bert"


@pytest.mark.parametrize("metric", ["accuracy_top1", "f1", "bleu", "mmlu", "watermark", "map50", "psnr"])
def test_metrics_of_which_more_is_better(metric: str) -> None:
    assert not less_is_better(metric)


def test_currencies_kinds_metrics_and_units_of_work_each_have_their_front() -> None:
    found = configs(
        run("a", "usd", "9", **top1("0.1")),
        run("b", "eur", "1", **top1("0.9"), BillingCurrency="EUR"),
        run("c", "train", "1", **top1("0.9"), kind="train"),
        run("d", "tokens", "1", **top1("0.9"), tokens=5_000_000),
        run("e", "f1", "1", quality_metric="f1", quality=Decimal("0.9")),
        run("f", "bert", "1", model="bert"),
        run("g", "resnet", "1"),
    )
    assert {r["x_SetSize"] for r in found.values()} == {1}
    assert {r["x_OnFront"] for r in found.values()} == {True}
    assert len({r["x_ComparisonSet"] for r in found.values()}) == 7
    assert (found["tokens", "USD"]["x_CostPerWork"], found["tokens", "USD"]["x_WorkUnit"]) == (0.2, "1M tokens")


def test_what_cannot_be_compared_says_why() -> None:
    found = configs(
        run("a", "unbilled", None),
        run("b", "free", "0"),
        run("c", "two", "1"),
        run("c", "two", "1", BillingCurrency="EUR"),
        run("d", "idle", "1", units=0, samples=0, rank_units=0, wall_ns=0),
        run("e", "nobody", "1", model=None),
        run("f", "mixed", "1", **top1("0.5")),
        run("g", "mixed", "1", quality_metric="f1", quality=Decimal("0.5")),
    )
    why = {config: row["x_Why"] for (config, _), row in found.items()}
    assert why["unbilled"] == "nothing is billed or estimated for its jobs"
    assert why["free"].startswith("its cost is 0.000000000000: a price that is not known")
    assert why["two"] == ("its jobs are billed 1.000000000000 EUR and 1.000000000000 USD, and nothing is converted")
    assert why["idle"] == "it did no counted work"
    assert why["nobody"].startswith("neither a quality nor a model is stated")
    assert why["mixed"] == "no quality: its jobs state accuracy_top1, f1"
    fronts_of = {config: row["x_OnFront"] for (config, _), row in found.items()}
    assert fronts_of.pop("mixed") is True  # compared without a quality, within its model
    assert set(fronts_of.values()) == {None}


def test_runs_without_a_configuration_are_told_not_dropped() -> None:
    _, verdicts, outside = gather({D1: table(run("a", None, "1.5"), run("b", None, "0.5"), run("c", "c", "1"))})
    assert len(verdicts) == 1
    assert outside["nameless"] == {"runs": 2, "cost": {"USD": "2.000000000000"}}


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.integers(0, 2), st.sampled_from([D1, D2]), st.sampled_from(["USD", "EUR", None]),
            st.sampled_from(["c", "d", None]), st.decimals(-5, 5, places=12), st.booleans(),
        ),
        unique_by=lambda r: r[:4],
        max_size=12,
    )
)  # fmt: skip
def test_no_cent_of_a_job_is_lost(rows: list[tuple[str, int, dt.date, str | None, str | None, Decimal, bool]]) -> None:
    """Rows of the table, jobs without a configuration and jobs of several currencies add up to what came in."""
    days: dict[dt.date, list[dict[str, Any]]] = {}
    came: dict[str, Decimal] = {}
    for job, attempt, day, currency, config, amount, estimated in rows:
        facts = {"EffectiveCost": None, "x_EstimatedCost": amount} if estimated else {"EffectiveCost": amount}
        cost = facts if currency is not None else {"EffectiveCost": None}
        days.setdefault(day, []).append(
            run(job, config, None) | {"attempt": attempt, "BillingCurrency": currency} | cost
        )
        if currency is not None:
            came[currency] = came.get(currency, Decimal(0)) + amount
    found, verdicts, outside = gather({day: table(*of_day) for day, of_day in days.items()})
    told: dict[str, Decimal] = dict.fromkeys(came, Decimal(0))
    for row in found.to_pylist():
        if row["x_Cost"] is not None:
            told[row["BillingCurrency"]] += row["x_Cost"]
    for side in outside.values():
        for currency, text in side["cost"].items():
            told[currency] += Decimal(text)
    assert told == came
    assert len(verdicts) == found.num_rows
    assert found.num_rows == 0 or sum(found["x_Jobs"].to_pylist()) <= len({r[0] for r in rows})


def test_a_restart_counts_and_the_last_word_on_quality_stands() -> None:
    row = configs(
        run("j", "c", "1", **top1("0.5")),
        run("j", "c", "1", attempt=1, **top1("0.7")),
        d2026_10_02=table(run("j", None, "1", attempt=1, model=None, kind=None)),
    )["c", "USD"]
    assert (row["x_Jobs"], row["x_Runs"], row["x_Quality"], row["x_Work"]) == (1, 2, 0.7, 300)


def test_energy_that_is_mostly_known_is_scaled_and_else_left_out() -> None:
    known = configs(run("j", "c", "1", energy_ns=19 * SECOND, energy_mj=19_000))["c", "USD"]
    assert (known["x_EnergyPerWork"], known["x_EnergyCoveragePpm"]) == (200.0, 950_000)
    partly = configs(run("j", "c", "1", energy_ns=10 * SECOND, energy_mj=10_000))["c", "USD"]
    assert (partly["x_EnergyPerWork"], partly["x_EnergyCoveragePpm"]) == (None, 500_000)
    assert partly["x_Objectives"] == "cost, throughput, latency"


@pytest.mark.parametrize(
    ("tflops", "cost", "inside"),
    [(80, "4.0", True), (80, "4.000000000001", False), (79, "1", False), (300, "15", True)],
)
def test_the_box_is_a_mark(tflops: int, cost: str, inside: bool) -> None:
    """One GPU-hour at so many TFLOP/s: 80 TFLOP/s for 4 USD are 0.05 USD per TFLOP/s and hour."""
    row = configs(run("j", "c", cost, gpu_ns=HOUR, flops=tflops * TFLOP * 3600))["c", "USD"]
    assert row["x_TflopsPerGpu"] == float(tflops)
    assert row["x_InBox"] is inside
    assert row["x_OnFront"] is True


def test_the_box_needs_flops_and_dollars() -> None:
    assert configs(run("j", "c", "1"))["c", "USD"]["x_InBox"] is None
    euro = run("j", "c", "1", BillingCurrency="EUR", gpu_ns=HOUR, flops=TFLOP)
    assert configs(euro)["c", "EUR"]["x_InBox"] is None


def test_one_name_for_two_configurations_is_told_apart() -> None:
    rows = [
        run("a", "c", "1", quantisation="int8", **top1("0.9")),
        run("b", "c", "2", quantisation="fp16", **top1("0.9")),
    ]
    found, _, _ = gather({D1: table(*rows)})
    assert [r["x_DominatedBy"] for r in found.to_pylist()] == ["c (resnet50, 1xA10G, int8, serve, USD)", None]


def test_a_day_is_gathered_from_its_reports() -> None:
    runs = build(
        JOB_RUNS,
        [
            {"job_id": "A", "attempt": 0, "config_id": "c1", "model": "bert", "kind": "serve", "tokens_in": 7, "tokens_out": 5},
            {"job_id": "B", "attempt": 1, "config_id": "", "samples": 4},
        ],
        first_seen_utc=DAY, last_seen_utc=DAY, ranks_seen=1, units=3, samples=0, tokens_in=0, tokens_out=0, requests=0,
        wall_ns=9, rank_units=6,
    )  # fmt: skip
    money = {"x_UsageDate": D1, "x_Cloud": "aws", "x_State": "billed", "BilledCost": Decimal(0)}
    daily = build(
        JOB_DAILY,
        [
            money | {"x_JobId": "A", "x_Attempt": 0, "x_Category": "work", "EffectiveCost": Decimal(3)},
            money | {"x_JobId": "A", "x_Attempt": 0, "x_Category": "held_idle", "EffectiveCost": Decimal(1)},
            money
            | {"x_JobId": "A", "x_Attempt": 0, "x_Category": "startup"}
            | {"EffectiveCost": Decimal(2), "BillingCurrency": "EUR"},
            money | {"x_JobId": None, "x_Category": "idle", "EffectiveCost": Decimal(50)},
            money | {"x_JobId": "Z", "x_Attempt": 0, "x_Category": "work", "EffectiveCost": Decimal(7)},
        ],
        BillingCurrency="USD",
    )  # fmt: skip
    span = {"x_HourUtc": DAY, "x_Cloud": "aws", "x_MachineId": "i-1", "x_Category": "work", "x_State": "billed"}
    spans = build(
        SPANS,
        [
            span | {"x_JobId": "A", "x_Attempt": 0, "x_Ns": 10, "x_EnergyMj": 4},
            span | {"x_JobId": "A", "x_Attempt": 0, "x_Ns": 5, "x_EnergyMj": None},
            span | {"x_JobId": None, "x_Category": "idle", "x_Ns": 99, "x_EnergyMj": 99},
        ],
        x_BilledSpanNs=20, x_ObservedNs=20,
    )  # fmt: skip
    layer = {"x_UsageDate": D1, "x_Cloud": "aws", "x_State": "billed", "BillingCurrency": "USD"}
    layers = build(
        LAYER_DAILY,
        [
            layer | {"x_JobId": "A", "x_Attempt": 0, "x_Category": "work", "x_Layer": "a", "x_Flops": 30},
            layer | {"x_JobId": "A", "x_Attempt": 0, "x_Category": "work", "x_Layer": "b", "x_Flops": 12},
            layer | {"x_JobId": "A", "x_Attempt": 0, "x_Category": "held_idle"},
        ],
    )
    rows = {
        (r["job_id"], r["attempt"], r["BillingCurrency"]): r for r in day_runs(runs, daily, spans, layers).to_pylist()
    }
    assert {key: r["EffectiveCost"] for key, r in rows.items()} == {
        ("A", 0, "USD"): Decimal(4),
        ("A", 0, "EUR"): Decimal(2),
        ("B", 1, None): None,
        ("Z", 0, "USD"): Decimal(7),
    }
    of_a = rows["A", 0, "EUR"]
    assert (of_a["tokens"], of_a["flops"], of_a["gpu_ns"], of_a["energy_mj"], of_a["energy_ns"]) == (12, 42, 15, 4, 10)
    assert (of_a["wall_ns"], of_a["rank_units"], of_a["kind"]) == (9, 6, "serve")
    assert (rows["B", 1, None]["config_id"], rows["B", 1, None]["samples"]) == (None, 4)
    assert (rows["Z", 0, "USD"]["config_id"], rows["Z", 0, "USD"]["units"]) == (None, 0)


def documents(*rows: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """JSON and YAML export of some runs, each held to the published schema."""
    found, _, _ = gather({D1: table(*rows)})
    front, listing = json.loads(to_json(found.to_pylist(), D1)), yaml.safe_load(to_yaml(found.to_pylist(), D1))
    for body, definition in ((front, "front"), (listing, "configurations")):
        jsonschema.validate(body, SCHEMA)
        jsonschema.validate(body, SCHEMA | {"oneOf": [{"$ref": f"#/$defs/{definition}"}]})
    return front, listing


def test_the_exports_meet_the_published_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    front, listing = documents(
        run("a", "good", "0.2", **top1("0.75")),
        run("b", "bad", "0.3", **top1("0.75"), quantisation=None),
        run("c", "free", "0"),
        run("d", "euro", "1", BillingCurrency="EUR", **top1("0.5")),
        run("e", "f1", "1", quality_metric="f1", quality=Decimal("0.5")),
        run("f", "yes: [&'\"\u2028<b>", "1", model="null", hardware_profile="1e3"),
    )
    assert (front["timestamp"], front["as_of_date"]) == ("2026-10-02T00:00:00Z", "2026-10-01")
    points = {p["config_id"]: p for p in front["pareto_points"]}
    assert (points["good"]["cost_usd"], points["good"]["accuracy_top1"]) == (2.0, 0.75)
    assert (points["euro"]["cost_usd"], points["euro"]["cost"]["currency"]) == (None, "EUR")
    assert (points["f1"]["accuracy_top1"], points["f1"]["quality"]) == (None, 0.5)
    assert [(p["config_id"], p["dominated_by"]) for p in front["dominated"]] == [("bad", "good")]
    assert [p["config_id"] for p in front["incomparable"]] == ["free"]
    by_id = {c["config_id"]: c for c in listing["configurations"]}
    assert (by_id["good"]["hardware_profile"], by_id["good"]["quantization_scheme"]) == ("1xA10G", "fp16")
    assert by_id["bad"]["quantization_scheme"] is None
    hostile = by_id["yes: [&'\"\u2028<b>"]
    assert (hostile["model"], hostile["hardware_profile"]) == ("null", "1e3")
    assert len(by_id) == len(points) + 2


def test_the_schema_refuses_what_is_no_export() -> None:
    front, _ = documents(run("a", "good", "0.2", **top1("0.75")))
    for path, wrong in (
        ("config_id", None), ("cost_usd", "0.2"), ("accuracy_top1", "0.75"), ("surprise", 1),
    ):  # fmt: skip
        broken = json.loads(json.dumps(front))
        broken["pareto_points"][0][path] = wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)
    del front["timestamp"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(front, SCHEMA)


def test_nothing_to_compare_is_an_empty_front() -> None:
    front, listing = documents()
    assert (front["pareto_points"], listing["configurations"]) == ([], [])


@pytest.mark.parametrize(
    ("metric", "is_top1"),
    [("accuracy_top1", True), ("top1", True), ("top-1 accuracy", True), ("acc@1", True), ("f1", False), (None, False)],
)
def test_which_metric_is_top1_accuracy(metric: str | None, is_top1: bool) -> None:
    assert is_top1_accuracy(metric) is is_top1


def by_hand(points: list[Point]) -> list[bool]:
    """A front in cost and quality by one sweep: sorted by cost, whatever reaches a new best stays."""
    order = sorted(range(len(points)), key=lambda i: (points[i].values["cost"], -points[i].values["quality"]))
    on, best, cost_of_best = [False] * len(points), None, None
    for i in order:
        cost, quality = points[i].values["cost"], points[i].values["quality"]
        if best is None or quality > best or (quality == best and cost == cost_of_best):
            on[i], best, cost_of_best = True, quality, cost
    return on


def test_the_front_of_measured_image_models() -> None:
    """Accuracy beside measured step time of several hundred image models on one GPU at 1.00 USD an hour."""
    with real_data("pareto", "timm_results-imagenet.csv").open(newline="") as file:
        accuracy: dict[tuple[str, str], Decimal] = {}
        for r in csv.DictReader(file):  # best first; a name may have several sets of weights
            accuracy.setdefault((r["model"].partition(".")[0], r["img_size"]), Decimal(r["top1"]))
    with real_data("pareto", "timm_benchmark-infer-amp-nchw-pt240-cu124-rtx4090.csv").open(newline="") as file:
        speed = {(r["model"], r["infer_img_size"]): Decimal(r["infer_samples_per_sec"]) for r in csv.DictReader(file)}
    points = [
        Point(f"{model}@{size}", ("USD",), {"cost": Decimal(1000) / 3600 / speed[model, size], "quality": top})
        for (model, size), top in accuracy.items()
        if (model, size) in speed
    ]
    assert len(points) > 500
    verdicts = fronts(points)
    assert [v.on_front for v in verdicts] == by_hand(points)
    assert 5 < sum(bool(v.on_front) for v in verdicts) < 200


def test_the_front_of_measured_language_models() -> None:
    """Four objectives of 328 serving configurations; each GPU costs 1.00 USD an hour."""
    measured = json.loads(real_data("pareto", "mlenergy_lm-arena-chat.json").read_text())["configurations"]
    points = [
        Point(
            f"{c['nickname']} {c['gpu_model']} x{c['num_gpus']} {c['max_num_seqs']} {i}",
            ("USD",),
            {
                "cost": c["num_gpus"] / c["output_throughput_tokens_per_sec"],
                "throughput": c["output_throughput_tokens_per_sec"],
                "latency": c["median_itl_ms"],
                "energy": c["energy_per_token_joules"],
            },
        )
        for i, c in enumerate(measured)
    ]
    assert len(points) == 328
    verdicts = fronts(points)
    assert [v.on_front for v in verdicts] == brute(points)
    assert 1 < sum(bool(v.on_front) for v in verdicts) < 328


@pytest.mark.parametrize("file", ["aider_polyglot_leaderboard.yml", "aider_edit_leaderboard.yml"])
def test_a_cost_of_zero_in_a_leaderboard_is_not_a_low_price(file: str) -> None:
    """Total cost 0.0000 there means free or unknown; such a run never beats one that was paid for."""
    entries = yaml.safe_load(real_data("pareto", file).read_text())
    quality = "pass_rate_2" if "polyglot" in file else "pass_rate_1"
    rows = [
        run(
            e["dirname"], e["dirname"], str(e["total_cost"]), samples=e["test_cases"], quality_metric=quality,
            quality=Decimal(str(e[quality])), wall_ns=0, rank_units=0, energy_mj=0, energy_ns=0, model=e["model"],
        )
        for e in entries
        if e.get("total_cost") is not None
    ]  # fmt: skip
    found = {k[0]: r for k, r in configs(*rows).items()}
    free = {name for name, row in found.items() if row["x_Cost"] == 0}
    assert len(free) >= 5
    assert {found[name]["x_OnFront"] for name in free} == {None}
    paid = [row for name, row in found.items() if name not in free]
    points = [Point(r["x_ConfigId"], (), {"cost": r["x_Cost"] / r["x_Work"], "quality": r["x_Quality"]}) for r in paid]
    assert [row["x_OnFront"] for row in paid] == by_hand(points)

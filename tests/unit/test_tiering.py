"""Checkpoint tiers: the policy, what it makes of each entry, and moves priced by hand."""

from __future__ import annotations

import datetime as dt
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.checkpoints import FOUND
from tasks.core.tier_policy import Policy, parse
from tasks.core.tiering import (
    DAY_NS,
    GB,
    Moment,
    Prices,
    find_newest,
    parse_prices,
    plan,
    price_move,
    read_name,
    totals,
)
from tasks.errors import SettingsError
from tasks.tier import PRICES, load_policy
from tests.tables import build

ROOT = Path(__file__).resolve().parents[2]
END = dt.datetime(2026, 10, 2, tzinfo=dt.UTC)
END_NS = int(END.timestamp()) * 10**9
PATTERN = r"^(?P<job>[^/]+)/step-(?P<step>\d+)/"
IA, GIR = "S3 Standard-IA", "S3 Glacier Instant Retrieval"


def policy(**facts: Any) -> Policy:
    """Standard-IA until 90 days, then instant retrieval for 7 years; nothing hot by number."""
    values: dict[str, Any] = {
        "cloud": "aws",
        "region": "us-east-1",
        "pattern": PATTERN,
        "hot": {"newest": 0},
        "warm": {"class": IA, "days": 90},
        "cold": {"class": GIR, "days": 2557},
    }
    return parse(values | facts, where="test")


def prices(rules: Policy) -> Prices:
    return parse_prices(PRICES.read_text(), rules, where="storage_tiers.csv")


def entry(path: str, age_days: float, size: int = GB, api: str | None = "STANDARD", **facts: Any) -> dict[str, Any]:
    return {
        "x_Path": path,
        "x_Bytes": size,
        "x_ModifiedUtc": END - dt.timedelta(days=age_days),
        "x_ApiClass": api,
    } | facts


def look(
    rules: Policy, *entries: dict[str, Any], ended: frozenset[str] = frozenset(), local: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, Any]]:
    """Inventory and moves by path, and the totals."""
    found = build(FOUND, list(entries))
    moment = Moment(END_NS, find_newest([found], rules), ended)
    inventory, moves = plan("s3://b/p", found, rules, prices(rules), moment, local=local)
    by_path = [{r["x_Path"]: r for r in t.to_pylist()} for t in (inventory, moves)]
    assert len(by_path[0]) == len(entries)
    return by_path[0], by_path[1], totals(inventory, moves)


def amounts(move: dict[str, Any]) -> dict[str, str]:
    names = ("x_SavedPerMonth", "x_Saved", "x_RequestCost", "x_RetrievalCost", "x_MinimumCost", "x_Net")
    return {n: f"{move[n]:f}" for n in names}


def test_a_move_priced_by_hand() -> None:
    """1 GiB, ten days old, to Standard-IA for the 80 days until 90; a month is 365 / 12 days."""
    _, moves, told = look(policy(), entry("a/step-1/x", 10))
    move = moves["a/step-1/x"]
    assert (move["x_FromClass"], move["x_ToClass"], move["x_AgeDays"], move["x_StayDays"]) == (
        "S3 Standard",
        IA,
        10,
        80,
    )
    assert amounts(move) == {
        "x_SavedPerMonth": "0.010500000000",  # 0.023 - 0.0125
        "x_Saved": "0.027616438356",  # 0.0105 x 80 x 12 / 365
        "x_RequestCost": "0.000186400000",  # 16 parts and 2 more at 0.01 / 1,000; 16 reads at 0.0004 / 1,000
        "x_RetrievalCost": "0.000000000000",
        "x_MinimumCost": "0.000000000000",
        "x_Net": "0.027430038356",
    }
    assert (move["x_Verdict"], move["x_Why"]) == ("move", None)
    assert told["moves"] == {"objects": 1, "bytes": GB} | amounts(move)
    assert told["cost_per_month"] == "0.023000000000"


def test_expected_reads_count_against_the_cheaper_class() -> None:
    """Read whole twice a month over 80 days: 5.26 reads of 1 GB at 0.01, and of 16 requests at 0.0006 / 1,000 more."""
    rules = policy(warm={"class": IA, "days": 90, "reads_per_month": Decimal(2)})
    _, moves, _ = look(rules, entry("a/step-1/x", 10))
    move = moves["a/step-1/x"]
    assert amounts(move) | {"x_Saved": ""} == {
        "x_SavedPerMonth": "0.010500000000",
        "x_Saved": "",
        "x_RequestCost": "0.000236898630",  # 0.0001864 + 2 x 80 x 12 / 365 x 16 x 0.0006 / 1,000
        "x_RetrievalCost": "0.052602739726",  # 2 x 80 x 12 / 365 x 0.01
        "x_MinimumCost": "0.000000000000",
        "x_Net": "-0.025223200000",
    }
    assert move["x_Verdict"] == "keep"
    assert move["x_Why"] == (
        "it saves 0.027616438356 USD in 80 days and costs 0.00023689863 USD for requests, 0.052602739726 USD for retrieval"
    )


def test_a_stay_below_the_minimum_is_charged_to_its_end() -> None:
    """70 of 90 days are over: 20 days in a class of at least 30 cost ten more."""
    _, moves, _ = look(policy(), entry("a/step-1/x", 70))
    move = moves["a/step-1/x"]
    assert (move["x_StayDays"], f"{move['x_MinimumCost']:f}") == (20, "0.004109589041")  # 10 x 0.0125 x 12 / 365


def test_leaving_a_class_before_its_minimum_is_charged_too() -> None:
    """Thirty days in instant retrieval (at least 90): 60 days of 0.004, and the retrieval of 1 GB at 0.03."""
    gir, ia = (prices(policy()).by_name[n] for n in (GIR, IA))
    found = price_move(GB, gir, ia, 30, 60, Decimal(0), GB)
    assert f"{found['x_MinimumCost']:f}" == "0.007890410959"  # 60 x 0.004 x 12 / 365
    assert f"{found['x_RetrievalCost']:f}" == "0.030000000000"
    assert f"{found['x_RequestCost']:f}" == "0.000020000000"  # one write at 0.01 / 1,000, one read at 0.01 / 1,000


def test_a_small_object_does_not_pay_and_says_why() -> None:
    _, moves, told = look(policy(), entry("a/step-1/x", 10, 1024))
    move = moves["a/step-1/x"]
    assert move["x_Verdict"] == "keep"
    assert move["x_Why"] == (  # (128 x 0.0125 - 0.023) / 2^20
        "a month there costs 0.000001503944 USD more than here (S3 Standard-IA charges at least 131,072 bytes)"
    )
    assert (told["moves"]["objects"], told["kept"]["objects"]) == (0, 1)


def test_an_archive_charges_for_its_index_and_for_metadata_in_standard() -> None:
    archive = prices(policy()).by_name["S3 Glacier Deep Archive standard"]
    expected = (GB + 32 * 1024) * Decimal("0.00099") / GB + 8 * 1024 * Decimal("0.023") / GB
    assert archive.per_month(GB) == pytest.approx(expected, rel=Decimal("1e-20"))


def test_age_decides_and_access_makes_young() -> None:
    ages = {"hot": 6.9, "warm": 7, "cold": 90, "expired": 2557}
    found, moves, _ = look(
        policy(),
        *(entry(f"a/step-1/{tier}", age) for tier, age in ages.items()),
        entry("a/step-1/read", 500, x_AccessedUtc=END - dt.timedelta(days=1)),
        entry("a/step-1/future", -5),
    )
    tiers = {path.rpartition("/")[2]: row["x_Tier"] for path, row in found.items()}
    assert tiers == {t: t for t in ages} | {"read": "hot", "future": "hot"}
    assert {p.rpartition("/")[2]: m["x_ToClass"] for p, m in moves.items()} == {"warm": IA, "cold": GIR}
    assert found["a/step-1/future"]["x_AgeDays"] == 0


def test_the_newest_checkpoints_of_each_job_stay() -> None:
    rules = policy(hot={"days": 7, "newest": 2})
    entries = [
        entry(f"{job}/step-{step}/{part}", 60 - step) for job in "ab" for step in (1, 2, 3) for part in ("w", "o")
    ]
    found, _, _ = look(rules, *entries)
    assert {(r["x_JobId"], r["x_Step"]) for r in found.values() if r["x_Tier"] == "hot"} == {
        ("a", 3), ("a", 2), ("b", 3), ("b", 2),
    }  # fmt: skip


def test_a_job_that_has_ended_keeps_its_final_checkpoint_only() -> None:
    rules = policy(hot={"days": 7, "newest": 2})
    entries = [entry(f"{job}/step-{step}/w", 60 - step) for job in "ab" for step in (1, 2, 3)]
    found, moves, told = look(rules, *entries, ended=frozenset("a"))
    assert (found["a/step-3/w"]["x_Pin"], found["a/step-2/w"]["x_Tier"]) == ("final", "warm")
    assert (found["b/step-3/w"]["x_Pin"], found["b/step-3/w"]["x_Tier"]) == (None, "hot")
    assert "a/step-3/w" not in moves
    assert told["pins"] == {"final": {"objects": 1, "bytes": GB}}


def test_pins_stay_whatever_their_age_and_the_strongest_is_named() -> None:
    rules = policy(pins={"best": ["*best*"], "final": ["*/final/*"], "legal_hold": ["case-7/*"]})
    found, moves, _ = look(
        rules, entry("a/step-1/best.pt", 400), entry("a/final/w", 4000), entry("case-7/step-1/best.pt", 400)
    )
    assert [r["x_Pin"] for r in found.values()] == ["best", "final", "legal_hold"]
    assert {r["x_Tier"] for r in found.values()} == {None}
    assert moves == {}


def test_what_cannot_be_used_is_listed_and_never_moved() -> None:
    broken = {"x_Path": "a/step-9/x", "x_Problem": "it may not be read"}
    found, moves, told = look(policy(hot={"newest": 1}), broken, entry("a/step-1/x", 400))
    assert found["a/step-9/x"]["x_Problem"] == "it may not be read"
    assert list(moves) == [] and found["a/step-1/x"]["x_Tier"] == "hot"  # the newest that can be used
    assert (told["objects"], told["unusable"], told["unpriced"]) == (2, 1, 0)


def test_local_disk_has_no_price_until_the_policy_states_one() -> None:
    _, moves, told = look(policy(), entry("a/step-1/x", 10, api=None), local=True)
    assert moves["a/step-1/x"]["x_Why"] == "the price of local is not known: state local_usd_per_gb_month in the policy"
    assert (moves["a/step-1/x"]["x_Net"], told["unpriced"], told["kept"]["x_Net"]) == (None, 1, None)
    rules = policy(local_usd_per_gb_month=Decimal("0.08"), warm={"class": "S3 Standard", "days": 90})
    _, moves, _ = look(rules, entry("a/step-1/x", 10, api=None), local=True)
    move = moves["a/step-1/x"]
    assert (move["x_FromClass"], move["x_Verdict"], f"{move['x_SavedPerMonth']:f}") == (
        "local",
        "move",
        "0.057000000000",
    )


def test_a_class_without_a_price_is_left_alone() -> None:
    _, moves, _ = look(policy(), entry("a/step-1/x", 10, api="INTELLIGENT_TIERING"))
    assert moves["a/step-1/x"]["x_Why"] == "the price of INTELLIGENT_TIERING is not known: add it to the price table"


def test_nothing_moves_to_a_dearer_class() -> None:
    """Cold already, and the policy would only want it warm."""
    _, moves, _ = look(policy(), entry("a/step-1/x", 30, api="GLACIER_IR"))
    assert moves["a/step-1/x"]["x_Why"] == "a month there costs 0.0085 USD more than here"


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("a/step-12/x.pt", PATTERN, ("a", 12, ("job", "a"), "12")),
        ("a/step-012/y.pt", PATTERN, ("a", 12, ("job", "a"), "12")),
        ("other/x.pt", PATTERN, (None, None, ("folder", "other"), "other/x.pt")),
        ("x.pt", None, (None, None, ("folder", ""), "x.pt")),
        ("r/ckpt_7.pt", r"ckpt_(?P<step>\d+)", (None, 7, ("folder", "r/ckpt_"), "7")),
        ("r/x.pt", r"^(?P<job>r)/", ("r", None, ("job", "r"), "r/x.pt")),
        ("a/step-99999999999999999999/x", PATTERN, ("a", None, ("job", "a"), "a/step-99999999999999999999/x")),
    ],
)
def test_what_a_path_says(path: str, pattern: str | None, expected: tuple[Any, ...]) -> None:
    name = read_name(path, policy(pattern=pattern))
    assert (name.job, name.step, name.group, name.checkpoint) == expected


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"clowd": "aws"}, "clowd", r"unknown key clowd. Did you mean cloud\?"),
        ({"warm": {"class": IA, "day": 90}}, "warm.day", r"unknown key day in \[warm\]. Did you mean days\?"),
        (
            {"pins": {"legalhold": []}},
            "pins.legalhold",
            r"unknown key legalhold in \[pins\]. Did you mean legal_hold\?",
        ),
        ({"hot": {"newst": 1}}, "hot.newst", r"unknown key newst in \[hot\]. Did you mean newest\?"),
        ({"warm": {"days": 90}}, "warm.class", "warm.class: field required, found nothing"),
        ({"hot": {"days": -1}}, "hot.days", "hot.days: input should be greater than or equal to 0, found -1"),
        ({"pattern": "(("}, "pattern", "no regular expression"),
        ({"pattern": "(?P<epoch>x)"}, "pattern", "named groups job, step or both, found epoch"),
        ({"warm": {"class": IA, "days": 5}}, "policy", "days must rise from hot to warm to cold, found 7, 5, 2557"),
        ({"cold": {"class": GIR, "days": 9, "reads_per_month": "NaN"}}, "cold.reads_per_month", "finite number"),
    ],
)
def test_a_policy_that_cannot_be_used_names_the_key(values: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        policy(**values)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"region": "mars-1"}, "no prices of aws in mars-1; it has aws us-east-1, azure eastus, gcp us-central1"),
        ({"warm": {"class": "S3 Standart", "days": 90}}, r"no class S3 Standart .* Did you mean S3 Standard\?"),
        (
            {"cold": {"class": "S3 Glacier Deep Archive bulk", "days": 400}},
            "begins after 48 h; a checkpoint must be readable",
        ),
    ],
)
def test_a_class_that_is_not_priced_or_not_instant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        prices(policy(**values))


def test_the_sample_policy_can_be_used() -> None:
    rules = load_policy(str(ROOT / "samples" / "tiers.toml"))
    assert (rules.hot.days, rules.hot.newest, rules.warm.days, rules.cold.days) == (7, 5, 90, 2557)
    assert prices(rules).by_name[rules.cold.storage_class].speed == "instant"
    assert read_name("llama/step-1200/model.safetensors", rules).step == 1200


def test_a_policy_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read as TOML"):
        load_policy(str(tmp_path / "none.toml"))
    file = tmp_path / "broken.toml"
    file.write_text("cloud = ")
    with pytest.raises(SettingsError, match=r"broken\.toml cannot be read as TOML"):
        load_policy(str(file))


def test_folders_are_relative_to_the_policy(tmp_path: Path) -> None:
    text = (
        (ROOT / "samples" / "tiers.toml").read_text().replace("folders = []", 'folders = ["ckpt", "s3://b/c", "/abs"]')
    )
    assert tomllib.loads(text)["folders"]
    (tmp_path / "tiers.toml").write_text(text)
    assert load_policy(str(tmp_path / "tiers.toml")).folders == (str(tmp_path / "ckpt"), "s3://b/c", "/abs")


def test_every_row_of_the_price_table_can_be_used() -> None:
    for cloud, region, warm, cold in (
        ("aws", "us-east-1", "S3 Standard", GIR),
        ("azure", "eastus", "Blob Hot LRS", "Blob Cold LRS"),
        ("gcp", "us-central1", "Standard regional", "Archive regional"),
    ):
        found = prices(
            policy(cloud=cloud, region=region, warm={"class": warm, "days": 90}, cold={"class": cold, "days": 900})
        )
        assert all(c.price > 0 and c.per_month(GB) >= c.price for c in found.by_name.values())
        assert found.by_name[cold].min_days * DAY_NS <= 365 * DAY_NS
        assert min(c.per_month(0) for c in found.by_name.values()) >= 0


def test_an_empty_listing_is_an_empty_plan() -> None:
    rules = policy()
    inventory, moves = plan(
        "f", FOUND.empty(), rules, prices(rules), Moment(END_NS, find_newest([], rules)), local=False
    )
    assert isinstance(inventory, pa.Table)
    assert totals(inventory, moves)["moves"]["x_Net"] == "0.000000000000"

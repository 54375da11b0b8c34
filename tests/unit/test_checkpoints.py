"""Listings of checkpoint folders on local disk, and the tier stage on them: everything is listed, nothing is touched."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import socket
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from schemas.checkpoints import INVENTORY, MOVES
from schemas.usage import JOB_RUNS
from seedance.errors import StoreError
from tasks.errors import SettingsError, UsageError
from tasks.io import checkpoints, show, show_tiers
from tasks.io.checkpoints import list_folder
from tasks.io.lake import Lake
from tasks.settings import Settings
from tasks.tier import ended_jobs, plan_tiers
from tests.tables import build

ROOT = Path(__file__).resolve().parents[2]
DAY = dt.date(2026, 10, 1)
END = dt.datetime(2026, 10, 2, tzinfo=dt.UTC).timestamp()


def save(folder: Path, path: str, age_days: float = 0, size: int = 10, read_days: float | None = None) -> Path:
    """A file that was written some days before the end of the day, and read later or never."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.truncate(size)
    written = END - age_days * 86_400
    os.utime(file, (written if read_days is None else END - read_days * 86_400, written))
    return file


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [row for table in list_folder(str(folder)) for row in table.to_pylist()]
    assert len({r["x_Path"] for r in rows}) == len(rows)
    return {r["x_Path"]: r for r in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "ckpt"


def test_files_at_any_depth_are_listed_with_size_and_times(folder: Path) -> None:
    save(folder, "a/step-1/model.pt", 3, 1234)
    save(folder, "a/step-1/optimizer/shard-0", 3, 5, read_days=1)
    save(folder, ".hidden", 3, 0)
    (folder / "empty").mkdir()
    found = listed(folder)
    assert {p: r["x_Bytes"] for p, r in found.items()} == {
        ".hidden": 0,
        "a/step-1/model.pt": 1234,
        "a/step-1/optimizer/shard-0": 5,
    }
    assert found["a/step-1/model.pt"]["x_ModifiedUtc"].to_pydatetime().timestamp() == END - 3 * 86_400
    assert found["a/step-1/model.pt"]["x_AccessedUtc"] is None  # not read since it was written
    assert found["a/step-1/optimizer/shard-0"]["x_AccessedUtc"].to_pydatetime().timestamp() == END - 86_400
    assert {(r["x_ApiClass"], r["x_Checksum"], r["x_Problem"]) for r in found.values()} == {(None, None, None)}


def test_links_and_odd_files_are_listed_with_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(folder, "a/step-2/x")
    (folder / "latest").symlink_to(target.parent)
    (folder / "nowhere").symlink_to("gone")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(folder)  # a socket's path must be short
        server.bind("sock")
        found = listed(folder)
    link = "a symbolic link: what it names is listed where it lies"
    assert {p: r["x_Problem"] for p, r in found.items()} == {
        "a/step-2/x": None,
        "latest": link,
        "nowhere": link,
        "loop": link,
        "pipe": "neither a file nor a folder",
        "sock": "neither a file nor a folder",
    }
    assert {r["x_Bytes"] for p, r in found.items() if p != "a/step-2/x"} == {None}


def test_a_name_that_is_no_text_is_shown_and_told(folder: Path) -> None:
    save(folder, "plain")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.pt")).touch()
    found = listed(folder)
    assert found["\\xff\\xfe.pt"]["x_Problem"] == "its name is not UTF-8"
    assert found["plain"]["x_Problem"] is None


def test_a_folder_that_may_not_be_read_is_listed_and_the_rest_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, "a/x")
    save(folder, "shut/y")
    honest = os.scandir

    def refuse(path: Path) -> Any:
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied")
        return honest(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = listed(folder)
    assert found["shut"]["x_Problem"] == "this folder cannot be listed: PermissionError: Permission denied"
    assert found["a/x"]["x_Problem"] is None
    monkeypatch.setattr(os, "scandir", lambda path: refuse(Path("shut")))
    with pytest.raises(StoreError, match="cannot be listed: PermissionError"):
        listed(folder)


def test_a_file_that_may_not_be_read_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, "a/x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert listed(folder)["a/x"]["x_Problem"] == "it may not be read"


def test_rows_come_in_bounded_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "ROWS", 4)
    for n in range(10):
        save(folder, f"{n}")
    assert [t.num_rows for t in list_folder(str(folder))] == [4, 4, 2]


@pytest.mark.parametrize("wrong", ["nothing", "a file", "gs://bucket/x", "s3://"])
def test_what_is_no_folder_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "a file").touch()
    url = wrong if "://" in wrong else str(tmp_path / wrong)
    with pytest.raises(UsageError, match=r"checkpoint folder .*expected"):
        list(list_folder(url))


# --- the stage -------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(lake=str(tmp_path / "lake"))


def write_policy(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """The sample policy with a price for local disk and one hot checkpoint a job."""
    text = (ROOT / "samples" / "tiers.toml").read_text()
    for old, new in (("# local_usd", "local_usd"), ("newest = 5", "newest = 1"), *changes):
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    return str(file)


def published(lake: str, name: str, day: str = "2026-10-01") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(
        Path(lake) / "report" / name / f"as_of_date={day}" / "data.parquet"
    ).to_pylist()
    return rows


def fill(folder: Path) -> None:
    for step in (1, 2, 3):
        save(folder, f"llama/step-{step}/weights", 40 - step, 2**30)
    save(folder, "llama/final/weights", 400, 2**30)
    save(folder, "old/step-1/weights", 200, 2**30)
    save(folder, "old/step-1/config.json", 200, 100)
    (folder / "latest").symlink_to("llama")


def test_the_stage_publishes_inventory_and_moves(folder: Path, tmp_path: Path, settings: Settings) -> None:
    fill(folder)
    facts = plan_tiers(settings, write_policy(tmp_path), [str(folder)], "2026-10-01")
    inventory = {r["x_Path"]: r for r in published(settings.lake, INVENTORY.name)}
    moves = {r["x_Path"]: r for r in published(settings.lake, MOVES.name)}
    assert {p: (r["x_Tier"], r["x_Pin"]) for p, r in inventory.items()} == {
        "llama/step-1/weights": ("warm", None),
        "llama/step-2/weights": ("warm", None),
        "llama/step-3/weights": ("hot", None),
        "llama/final/weights": (None, "final"),
        "old/step-1/weights": ("hot", None),  # the newest of its job, as far as anybody knows
        "old/step-1/config.json": ("hot", None),
        "latest": (None, None),
    }
    assert {(r["x_Folder"], r["x_StorageClass"]) for p, r in inventory.items() if p != "latest"} == {
        (str(folder), "local")
    }
    assert {p: (m["x_ToClass"], m["x_Verdict"]) for p, m in moves.items()} == {
        "llama/step-1/weights": ("S3 Standard", "move"),
        "llama/step-2/weights": ("S3 Standard", "move"),
    }
    assert facts["moves"]["objects"] == 2
    assert Decimal(facts["moves"]["x_Net"]) == sum(m["x_Net"] for m in moves.values())
    assert [e["path"] for e in facts["examples"]["unusable"]] == [f"{folder}/latest"]
    assert "\n".join(show_tiers.lines(facts)).endswith(show_tiers.DRY)


def test_a_dry_run_writes_nothing_but_reports(folder: Path, tmp_path: Path, settings: Settings) -> None:
    fill(folder)

    def state() -> dict[str, tuple[int, int, str]]:
        """Every entry with its times, and the content of those that are small."""
        entries = [(p, p.lstat()) for p in sorted(folder.rglob("*"))]
        return {
            str(p): (
                facts.st_mtime_ns,
                facts.st_ctime_ns,
                hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() and facts.st_size < 10_000 else "",
            )
            for p, facts in entries
        }

    before = state()
    first = plan_tiers(settings, write_policy(tmp_path), [str(folder)], "2026-10-01")
    assert state() == before
    lake = Path(settings.lake)
    written = {p.relative_to(lake).parts[0] for p in lake.rglob("*") if p.is_file()}
    assert written == {"lake.json", "lake.check", "objects", "report"}
    reports = {p: p.read_bytes() for p in (lake / "report").rglob("*.parquet")}
    assert len(reports) == 2
    assert plan_tiers(settings, write_policy(tmp_path), [f"file://{folder}/"], "2026-10-01") == first
    assert {p: p.read_bytes() for p in (lake / "report").rglob("*.parquet")} == reports


def test_folders_of_the_policy_are_used_when_none_is_given(tmp_path: Path, settings: Settings) -> None:
    save(tmp_path / "one", "a/step-1/x", 30)
    save(tmp_path / "two", "a/step-1/x", 30)
    policy = write_policy(tmp_path, ("folders = []", 'folders = ["two", "one"]'))
    facts = plan_tiers(settings, policy, [], "2026-10-01")
    assert facts["folders"] == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert [r["x_Folder"] for r in published(settings.lake, INVENTORY.name)] == facts["folders"]
    with pytest.raises(UsageError, match="no checkpoint folder is named"):
        plan_tiers(settings, write_policy(tmp_path), [], "2026-10-01")


def test_a_wrong_policy_is_told_before_anything_is_written(tmp_path: Path, settings: Settings) -> None:
    policy = write_policy(tmp_path, ("[hot]", "[hott]"))
    with pytest.raises(SettingsError, match=r"unknown key hott. Did you mean hot\?"):
        plan_tiers(settings, policy, [str(tmp_path)], "2026-10-01")
    assert not Path(settings.lake).exists()


def test_a_job_that_the_lake_saw_end_keeps_only_its_final_checkpoint(
    folder: Path, tmp_path: Path, settings: Settings
) -> None:
    for step in (1, 2):
        for job in ("done", "retried"):
            save(folder, f"{job}/step-{step}/weights", 40 - step, 2**30)
    lake = Lake.open(settings.lake)
    moment = dt.datetime(2026, 9, 30, tzinfo=dt.UTC)

    def state(job: str, attempt: int, status: str, reason: str | None = None) -> dict[str, Any]:
        return {"job_id": job, "attempt": attempt, "status": status, "exit_reason": reason}

    days = {
        "2026-09-29": [state("retried", 0, "ended", "failed"), state("done", 0, "beat")],
        "2026-09-30": [state("retried", 1, "beat"), state("done", 0, "result", "completed")],
        "2026-10-05": [state("retried", 1, "ended", "completed")],
    }
    counts = dict.fromkeys(
        ("ranks_seen", "units", "samples", "tokens_in", "tokens_out", "requests", "wall_ns", "rank_units"), 0
    )
    for day, rows in days.items():
        table = build(JOB_RUNS, rows, first_seen_utc=moment, last_seen_utc=moment, **counts)
        lake.commit(day, {"key": day, "handles": {JOB_RUNS.name: lake.handle(JOB_RUNS, day, [table])}})
    assert ended_jobs(lake, settings, DAY) == {"done"}
    facts = plan_tiers(settings, write_policy(tmp_path), [str(folder)], "2026-10-01")
    found = {r["x_Path"]: (r["x_Tier"], r["x_Pin"]) for r in published(settings.lake, INVENTORY.name)}
    assert found == {
        "done/step-1/weights": ("warm", None),
        "done/step-2/weights": (None, "final"),
        "retried/step-1/weights": ("warm", None),
        "retried/step-2/weights": ("hot", None),
    }
    assert facts["ended"] == ["done"]


def test_without_a_price_an_amount_is_unknown_and_never_0(folder: Path, tmp_path: Path, settings: Settings) -> None:
    fill(folder)
    policy = write_policy(tmp_path, ("local_usd_per_gb_month", "# local_usd_per_gb_month"))
    facts = plan_tiers(settings, policy, [str(folder)], "2026-10-01")
    assert (facts["cost_per_month"], facts["unpriced"], facts["unpriced_classes"]) == (None, 6, ["local"])
    lines = show_tiers.lines(facts)
    assert "storage of a month at list price: unknown" in lines
    (told,) = [line for line in lines if "without a price" in line]
    assert "(cost unknown): 6 in local; " in told and "local_usd_per_gb_month in the policy sets" in told
    net = show_tiers.rows(facts)[-1]
    assert (net["moves that pay"], net["kept: no known gain"]) == ("0.000000000000", "unknown")
    printed = show.console()
    with printed.capture() as seen:
        printed.print(show_tiers.money_table(facts))
    assert "unknown" in seen.get()


def test_what_holds_an_entry_where_it_is_is_said(folder: Path, tmp_path: Path, settings: Settings) -> None:
    fill(folder)
    save(folder, "llama/step-4/weights", 3, 2**30)
    save(folder, "llama/step-5/weights", 2, 2**30)
    save(folder, "llama/step-0/weights", 4000, 2**30)
    for n in range(12):
        save(folder, f"llama/step-4/part-{n:02}", 3)
    facts = plan_tiers(settings, write_policy(tmp_path), [str(folder)], "2026-10-01")
    assert facts["stays"] == {"age": 14, "expired": 1, "newest": 2, "pin": 1}
    lines = show_tiers.lines(facts)
    for told in (
        "llama/step-4/part-00: age: 3 days old; hot.days is 7",
        "old/step-1/weights: newest: 200 days old, and part of one of the 1 newest of its job or folder",
        "llama/final/weights: pin: pinned as final",
        "llama/step-0/weights: expired: 4000 days old; the policy keeps nothing beyond cold.days, 2557",
    ):
        assert f"stays {folder}/{told}" in lines
    assert "4 more stay; report_checkpoints__inventory has age, tier and pin of each" in lines


def test_names_from_folders_never_become_markup(folder: Path, tmp_path: Path, settings: Settings) -> None:
    save(folder, "a/step-1/[red]`<b>|x", 30, 2**30)
    save(folder, "a/step-2/x", 20)
    facts = plan_tiers(settings, write_policy(tmp_path), [str(folder)], "2026-10-01")
    page = show_tiers.markdown(facts)
    assert "/a/step-1/[red]'<b>|x: local → S3 Standard" in page
    assert all(line.startswith("- `") and line.endswith("`") for line in page.splitlines() if "<b>" in line)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1,024.0 PiB")],
)
def test_sizes_are_told_in_binary_units(value: int, text: str) -> None:
    assert show_tiers.size(value) == text


@pytest.mark.parametrize(
    ("answer", "etag", "kind"),
    [
        ({"ChecksumSHA256": "q==", "ChecksumType": "FULL_OBJECT"}, "abc", "SHA256"),
        ({"ChecksumCRC64NVME": "q==", "ChecksumCRC32": "z==", "ChecksumType": "FULL_OBJECT"}, "abc-9", "CRC64NVME"),
        ({"ChecksumSHA256": "q==-3", "ChecksumType": "COMPOSITE"}, "abc-3", "SHA256 of parts"),
        ({"ChecksumSHA256": "q==-3"}, "abc", "SHA256 of parts"),
        ({"ChecksumSHA256": "q=="}, '"abc-3"', "SHA256 of parts"),
        ({"ChecksumSHA256": "q=="}, '"abc"', "SHA256"),
        ({}, '"abc"', None),
    ],
)
def test_a_checksum_of_parts_is_told_from_one_of_the_whole(answer: dict[str, str], etag: str, kind: str | None) -> None:
    class Client:
        def call_s3(self, method: str, **facts: Any) -> dict[str, str]:
            assert (method, facts["ChecksumMode"]) == ("head_object", "ENABLED")
            return answer

    item = {
        "Key": "p/x", "Size": 1, "LastModified": dt.datetime(2026, 10, 1, tzinfo=dt.UTC), "ETag": etag,
        "ChecksumAlgorithm": ["SHA256"],
    }  # fmt: skip
    row = checkpoints._object(Client(), "b", "p/", item)
    assert (row["x_Path"], row.get("x_ChecksumKind")) == ("x", kind)
    assert row.get("x_Checksum") != etag.strip('"')

"""Listings of checkpoint folders on S3, against an emulator: pages, classes, checksums, and what is refused."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
from pathlib import Path
from typing import Any

import pytest
import s3fs

from schemas.checkpoints import INVENTORY, MOVES
from seedance.errors import StoreError
from tasks.errors import UsageError
from tasks.io import checkpoints
from tasks.io.checkpoints import list_folder
from tasks.io.lake import Lake
from tasks.settings import Settings
from tasks.tier import plan_tiers
from tests.unit.test_checkpoints import published, write_policy

on_s3 = pytest.mark.parametrize("url", ["s3"], indirect=True)
TODAY = dt.datetime.now(dt.UTC).date()


def client() -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(use_listings_cache=False)


def put(url: str, path: str, data: bytes = b"x", **facts: Any) -> None:
    bucket, _, below = url.removeprefix("s3://").partition("/")
    client().call_s3("put_object", Bucket=bucket, Key=f"{below}/{path}", Body=data, **facts)


def listed(url: str) -> dict[str, dict[str, Any]]:
    return {row["x_Path"]: row for table in list_folder(url) for row in table.to_pylist()}


def digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


@on_s3
def test_objects_are_listed_with_class_time_and_the_checksum_that_the_store_keeps(url: str) -> None:
    put(url, "a/step-1/plain", b"one")
    put(url, "a/step-1/summed", b"two", ChecksumAlgorithm="SHA256", ChecksumSHA256=digest(b"two"))
    put(url, "a/step-1/ia", b"three", StorageClass="STANDARD_IA")
    put(url, "a/step-1/cold", b"four", StorageClass="GLACIER_IR")
    put(f"{url}2", "elsewhere", b"not below the prefix")
    found = listed(url)
    assert {p: (r["x_Bytes"], r["x_ApiClass"]) for p, r in found.items()} == {
        "a/step-1/plain": (3, "STANDARD"),
        "a/step-1/summed": (3, "STANDARD"),
        "a/step-1/ia": (5, "STANDARD_IA"),
        "a/step-1/cold": (4, "GLACIER_IR"),
    }
    summed = found["a/step-1/summed"]
    assert (summed["x_Checksum"], summed["x_ChecksumKind"]) == (digest(b"two"), "SHA256")
    assert {r["x_Problem"] for r in found.values()} == {None}
    age = dt.datetime.now(dt.UTC) - found["a/step-1/plain"]["x_ModifiedUtc"].to_pydatetime()
    assert abs(age) < dt.timedelta(minutes=5)


@on_s3
def test_an_etag_is_never_taken_for_a_checksum(url: str) -> None:
    """An upload in parts has an ETag that is no hash of the content, and a checksum of parts when it has one."""
    bucket, _, below = url.removeprefix("s3://").partition("/")
    key = f"{below}/a/big"
    fs, part = client(), bytes(5 << 20)
    for name in (key, f"{key}-summed"):
        facts = {"ChecksumAlgorithm": "SHA256"} if name.endswith("summed") else {}
        upload = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=name, **facts)["UploadId"]
        parts = []
        for n, body in ((1, part), (2, b"end")):
            answer = fs.call_s3(
                "upload_part", Bucket=bucket, Key=name, UploadId=upload, PartNumber=n, Body=body, **facts
            )
            told = {"ChecksumSHA256": answer["ChecksumSHA256"]} if facts and "ChecksumSHA256" in answer else {}
            parts.append({"PartNumber": n, "ETag": answer["ETag"]} | told)
        fs.call_s3(
            "complete_multipart_upload", Bucket=bucket, Key=name, UploadId=upload, MultipartUpload={"Parts": parts}
        )
    etags = {fs.call_s3("head_object", Bucket=bucket, Key=n)["ETag"].strip('"') for n in (key, f"{key}-summed")}
    for row in listed(url).values():
        assert row["x_Bytes"] == len(part) + 3
        assert row["x_Checksum"] not in etags
        assert row["x_ChecksumKind"] in (None, "SHA256 of parts")


@on_s3
def test_a_listing_of_many_pages_is_whole(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(10):
        put(url, f"a/{n:02}")
    monkeypatch.setattr(checkpoints, "PAGE", 4)
    assert [t.num_rows for t in list_folder(url)] == [4, 4, 2]
    assert sorted(listed(url)) == [f"a/{n:02}" for n in range(10)]


@on_s3
def test_odd_keys_are_listed_as_they_are(url: str) -> None:
    for key in ("a b+c%20.pt", "ünï/日本.pt", "a//b", "dir/"):
        put(url, key)
    assert sorted(listed(url)) == sorted(["a b+c%20.pt", "ünï/日本.pt", "a//b", "dir/"])


@on_s3
def test_an_object_whose_checksum_is_refused_is_listed_with_the_reason(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(url, "a/open", ChecksumAlgorithm="SHA256", ChecksumSHA256=digest(b"x"))
    put(url, "a/shut", ChecksumAlgorithm="SHA256", ChecksumSHA256=digest(b"x"))
    honest = s3fs.S3FileSystem.call_s3

    def refuse(self: Any, method: str, **facts: Any) -> Any:
        if method == "head_object" and facts["Key"].endswith("shut"):
            raise PermissionError("Access Denied")
        return honest(self, method, **facts)

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", refuse)
    assert {p: (r["x_Bytes"], r["x_Problem"]) for p, r in listed(url).items()} == {
        "a/open": (1, None),
        "a/shut": (1, "its checksum cannot be read: PermissionError: Access Denied"),
    }


def _place(url: str) -> tuple[str, str]:
    bucket, _, below = url.removeprefix("s3://").partition("/")
    return bucket, f"{below}/"


@on_s3
def test_nothing_below_a_prefix_and_no_bucket_are_told(url: str) -> None:
    with pytest.raises(UsageError, match="there is nothing below it"):
        list(list_folder(f"{url}/none"))
    with pytest.raises(StoreError, match=r"cannot be listed: FileNotFoundError") as caught:
        list(list_folder("s3://no-such-bucket-here/x"))
    assert caught.value.url == "s3://no-such-bucket-here/x"


@on_s3
def test_the_stage_plans_a_folder_and_touches_no_object(url: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(url, f"llama/step-{step}/weights", bytes(200_000))
    put(url, "llama/step-1/tiny", b"x")
    bucket, prefix = _place(url)
    before = client().call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)["Contents"]
    settings = Settings(lake=str(tmp_path / "lake"))
    policy = write_policy(
        tmp_path,
        ("[hot]                            # stays where it is\ndays = 7", "[hot]\ndays = 0"),
        ("days = 90", "days = 1"),
    )
    facts = plan_tiers(settings, policy, [url], (TODAY + dt.timedelta(days=30)).isoformat())
    day = facts["as_of"]
    found = {r["x_Path"]: r for r in published(settings.lake, INVENTORY.name, day)}
    assert {p: r["x_Tier"] for p, r in found.items()} == {
        "llama/step-1/weights": "cold", "llama/step-1/tiny": "cold", "llama/step-2/weights": "cold",
        "llama/step-3/weights": "hot",
    }  # fmt: skip
    moves = {r["x_Path"]: r for r in published(settings.lake, MOVES.name, day)}
    assert {m["x_ToClass"] for m in moves.values()} == {"S3 Glacier Instant Retrieval"}
    assert (moves["llama/step-1/weights"]["x_Verdict"], moves["llama/step-1/tiny"]["x_Verdict"]) == ("move", "keep")
    assert "charges at least 131,072 bytes" in moves["llama/step-1/tiny"]["x_Why"]
    after = client().call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)["Contents"]
    assert after == before
    assert Lake.open(settings.lake).committed_days() == []

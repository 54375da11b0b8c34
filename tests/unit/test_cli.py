"""The `seedance` command: what it prints, and its exit status."""

import re
from pathlib import Path

import pytest

from seedance import __version__
from seedance.cli import main
from seedance.schema import EVENTS, TELEMETRY
from seedance.shard import write_shard


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"seedance {__version__}\n"


def test_help_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "check-shard" in capsys.readouterr().out
    assert main([]) == 2


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TELEMETRY)
    assert main(["tables", "events"]) == 0
    short = capsys.readouterr().out
    assert main(["tables", EVENTS.name]) == 0
    assert capsys.readouterr().out == short
    assert all(re.search(rf"(?m)^{name} ", short) for name in EVENTS.names)


def test_unknown_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "event"]) == 2
    assert "no table event. Tables: raw_telemetry__device_samples" in capsys.readouterr().err


def _shard(folder: Path) -> Path:
    hour = 1_790_812_800_000_000_000  # 2026-10-01T00:00Z
    row: dict[str, object] = dict.fromkeys(EVENTS.names)
    row |= {"at_utc": hour, "event_id": "e1", "source": "kernel", "kind": "block_device", "severity": "info"}
    row |= {"object": "vol-1", "node": "n1", "payload": "{}", "count": 1}
    table = EVENTS.arrow.empty_table().from_pylist([row], schema=EVENTS.arrow)
    name, data = write_shard(
        table,
        EVENTS,
        producer="n1",
        node="n1",
        cloud="aws",
        instance_id="i-1",
        instance_type="g5.xlarge",
        hour="2026-10-01T00",
        seq=0,
        period_ns=10**10,
    )
    path = folder / Path(name).name
    path.write_bytes(data)
    return path


def test_a_good_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _shard(tmp_path)
    assert main(["check-shard", str(path)]) == 0
    out = capsys.readouterr().out
    assert '"instance_id": "i-1"' in out
    assert out.endswith(f"{path.name}: 1 rows of {EVENTS.name}, as declared.\n")


def test_a_renamed_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _shard(tmp_path)
    path = path.rename(tmp_path / "n1-0-0123456789abcdef.parquet")
    assert main(["check-shard", str(path)]) == 1
    assert "the name does not end in -" in capsys.readouterr().err


def test_a_truncated_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _shard(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["check-shard", str(path)]) == 1
    assert capsys.readouterr().err.startswith("seedance: ")


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-shard", str(tmp_path / "no.parquet")]) == 2
    assert "No such file or directory" in capsys.readouterr().err

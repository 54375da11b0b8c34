"""The data dictionary is written from the declarations, and the committed page is the current one."""

from pathlib import Path

import pytest

from schemas import dictionary
from schemas.billing import CHARGES
from seedance.describe import HEAD, allowed, describe
from seedance.schema import DEVICE_SAMPLES


def test_the_committed_page_is_current() -> None:
    assert dictionary.PAGE.read_text(encoding="utf-8") == dictionary.page(), (
        "run `python -m schemas.dictionary --write`"
    )


def test_every_table_and_column_stands_on_the_page() -> None:
    page = dictionary.page()
    for tables in dictionary.GROUPS.values():
        for name, spec in tables.items():
            section = page.split(f"### {name}\n")[1].split("\n### ")[0]
            assert spec.about in section
            assert all(f"`{c.name}`" in section for c in spec.columns)


def test_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dictionary, "PAGE", tmp_path / "dictionary.md")
    assert dictionary.main(["--check"]) == 1
    assert "dictionary.md is missing: run `python -m schemas.dictionary --write`." in capsys.readouterr().err
    assert dictionary.main(["--write"]) == 0
    assert dictionary.main(["--check"]) == 0
    dictionary.PAGE.write_text("old")
    assert dictionary.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert dictionary.main([]) == 0
    assert capsys.readouterr().out == dictionary.page()


def test_words_of_a_column() -> None:
    assert allowed(DEVICE_SAMPLES["gpu_util_ppm"]) == "0 to 1,000,000"
    assert allowed(DEVICE_SAMPLES["covered_ns"]) == "from 0"
    assert allowed(DEVICE_SAMPLES["node"]) == ""
    assert allowed(CHARGES["ChargeClass"]) == "Correction"
    words = dict(zip(HEAD, describe(DEVICE_SAMPLES["power_mw"]), strict=True))
    assert words == {
        "column": "power_mw",
        "type": "int32",
        "unit": "mW",
        "null": "null",
        "allowed": "from 0",
        "meaning": "board power, averaged by the driver",
        "source": "NVML power usage",
    }

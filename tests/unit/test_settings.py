"""Settings: precedence, relative paths, and refusals that name the key, the place and the nearest name."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from seedance.probe import settings as probe
from tasks.errors import SettingsError
from tasks.settings import OTHER_VARIABLES, BillSource, Settings, load

FILE = """
lake = "lake"
telemetry = "../drop"
workers = 3
look_back_days = 5

[[bills]]
name = "aws"
url = "bills/aws"

[[bills]]
name = "remote"
url = "s3://bucket/export"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "site" / "seedance.toml"
    path.parent.mkdir()
    path.write_text(FILE)
    return path


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load()
    assert found == Settings()
    assert (found.lake, found.telemetry, found.bills, found.buckets) == ("lake", None, (), 8)
    assert (found.look_back_days, found.scheduler, found.workers) == (35, "threads", 2)
    assert found.default_region.azure == "eastus"


def test_argument_before_environment_before_file_before_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_WORKERS", "4")
    monkeypatch.setenv("SEEDANCE_LAKE", "/elsewhere")
    found = load(str(file), lake="/argument")
    assert found.lake == "/argument"
    assert found.workers == 4
    assert found.look_back_days == 5
    assert found.buckets == 8


def test_an_argument_of_none_says_nothing(file: Path) -> None:
    assert load(str(file), workers=None).workers == 3


def test_paths_in_the_file_are_beside_the_file_and_urls_stay(file: Path) -> None:
    found = load(str(file))
    assert found.lake == str(file.parent / "lake")
    assert found.telemetry == str(file.parent.parent / "drop")
    assert found.bills == (
        BillSource(name="aws", url=str(file.parent / "bills/aws")),
        BillSource(name="remote", url="s3://bucket/export"),
    )


def test_paths_of_arguments_and_environment_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_TELEMETRY", "here")
    found = load(str(file), lake="there")
    assert (found.lake, found.telemetry) == ("there", "here")


def test_file_of_the_working_directory_and_of_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_SETTINGS", str(file))
    assert load().workers == 3
    monkeypatch.delenv("SEEDANCE_SETTINGS")
    assert load().workers == 2
    monkeypatch.chdir(file.parent)
    assert load().workers == 3


def test_bills_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_BILLS", '[{"name": "azure", "url": "abfs://c/export"}]')
    assert load().bills == (BillSource(name="azure", url="abfs://c/export"),)
    monkeypatch.setenv("SEEDANCE_BILLS", "abfs://c/export")
    with pytest.raises(SettingsError, match=r'"bills".*Write lists and objects as JSON'):
        load()


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().workers = 3


def test_other_variables_of_the_project_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_REAL_DATA", "/somewhere")
    monkeypatch.setenv("SEEDANCE_HOME", "/somewhere")
    assert load() == Settings()


def _refused(path: str | None = None, **overrides: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(path, **overrides)
    return caught.value


def test_settings_of_the_probe_are_none_of_the_pipeline_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shell that trains under the probe can run the night, and no name means two things."""
    monkeypatch.chdir(tmp_path)
    names = {*probe.NAMES, *(short.lower() for short in probe.ALIASES)}
    for name in names:
        monkeypatch.setenv(f"SEEDANCE_{name.upper()}", "7")
    assert load() == Settings()
    assert not names & set(Settings.model_fields)
    pipeline = {f"SEEDANCE_{name.upper()}" for name in Settings.model_fields} | set(OTHER_VARIABLES)
    assert pipeline == probe.OTHER_VARIABLES


def test_unknown_key_in_the_file(file: Path) -> None:
    file.write_text(FILE.replace("look_back_days", "lookback_days"))
    error = _refused(str(file))
    assert str(error).startswith(f"unknown setting lookback_days in {file}. Did you mean look_back_days? Valid names: ")
    assert (error.key, error.where, error.nearest) == ("lookback_days", str(file), "look_back_days")


def test_unknown_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_WORKER", "4")
    error = _refused()
    assert str(error).startswith("unknown setting SEEDANCE_WORKER in the environment. Did you mean SEEDANCE_WORKERS?")
    assert (error.key, error.where, error.nearest) == ("SEEDANCE_WORKER", "the environment", "SEEDANCE_WORKERS")


def test_unknown_argument_even_when_it_says_nothing() -> None:
    error = _refused(bucket=None)
    assert (error.key, error.where, error.nearest) == ("bucket", "the arguments", "buckets")


def test_a_name_unlike_any_still_gets_a_suggestion() -> None:
    assert _refused(zzz=1).nearest in Settings.model_fields


def test_unknown_key_of_a_bill(file: Path) -> None:
    file.write_text(FILE.replace('url = "bills/aws"', 'path = "bills/aws"\nurl = "x"'))
    error = _refused(str(file))
    assert str(error).startswith(f"unknown setting path in bills of {file}. Did you mean ")
    assert error.nearest in BillSource.model_fields


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("workers", 0, "greater than or equal to 1"),
        ("buckets", 5000, "less than or equal to 4096"),
        ("look_back_days", -1, "greater than or equal to 0"),
        ("scheduler", "spark", "match pattern"),
        ("lake", "", "at least 1 character"),
        ("workers", "many", "valid integer"),
        ("bills", [{"name": "a", "url": "x"}, {"name": "a", "url": "y"}], "bill source named twice: a"),
    ],
)
def test_a_value_out_of_bounds(key: str, value: object, expected: str) -> None:
    error = _refused(**{key: value})
    assert str(error).startswith(f"setting {key} in the arguments: ")
    assert expected in str(error)
    assert "Meaning: " in str(error)
    assert (error.key, error.where, error.found) == (key, "the arguments", value)


@pytest.mark.parametrize("text", ["workers = 1e3", "workers = 2.0", "buckets = true", "look_back_days = '3.0'"])
def test_counts_are_whole_numbers_and_nothing_that_looks_like_one(file: Path, text: str) -> None:
    file.write_text(text)
    error = _refused(str(file))
    assert "input should be a valid integer, in digits alone, found " in str(error)
    assert error.key == text.split()[0]


@pytest.mark.parametrize("value", ["1e3", "true", "4.0", ""])
def test_counts_of_the_environment_are_digits(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_WORKERS", value)
    assert _refused().where == "the environment"


def test_a_settings_file_that_cannot_be_one() -> None:
    assert "cannot be read as TOML" in str(_refused("a\0b"))


def test_a_value_out_of_bounds_names_the_file(file: Path) -> None:
    file.write_text("buckets = 0\n")
    assert _refused(str(file)).where == str(file)


def test_missing_file(tmp_path: Path) -> None:
    error = _refused(str(tmp_path / "no.toml"))
    assert "no.toml does not exist" in str(error)
    assert error.where == str(tmp_path / "no.toml")


def test_a_file_that_is_not_toml(file: Path) -> None:
    file.write_text("lake = \n")
    assert "cannot be read as TOML: Invalid value (at line 1, column 8)" in str(_refused(str(file)))


def test_every_field_is_described() -> None:
    fields = [*Settings.model_fields.values(), *BillSource.model_fields.values()]
    assert all(field.description for field in fields)

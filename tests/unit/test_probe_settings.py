"""Settings of the probe: which source wins, what launchers say, and that no environment stops a run."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from seedance.probe import identity, settings
from seedance.probe.settings import NAMES, OTHER_VARIABLES, PREFIX, ProbeSettings, SettingsError, from_environment
from seedance.shard import _PRODUCER
from tasks.settings import OTHER_VARIABLES as PIPELINE_VARIABLES
from tasks.settings import Settings

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_RESTART_COUNT": "1",
    "SLURMD_NODENAME": "gpu-17",
    "SLURM_NTASKS": "64",
}


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """Warnings are given once a process; here, once a test."""
    settings._told.clear()
    yield
    settings._told.clear()


# --- which source wins ----------------------------------------------------------------------------------------------


def test_argument_then_environment_then_launcher_then_default() -> None:
    environ = {**TORCHRUN, "SEEDANCE_RANK": "6", "SEEDANCE_TEAM": "vision"}
    found = from_environment(environ, rank=7)
    assert (found.rank, found.team, found.world_size, found.local_rank, found.attempt) == (7, "vision", 8, 1, 2)
    assert from_environment(environ).rank == 6
    assert from_environment(TORCHRUN).rank == 5
    assert from_environment({}).rank == 0
    assert from_environment(environ, rank=None).rank == 6, "None is not given"
    assert from_environment({**environ, "SEEDANCE_RANK": ""}).rank == 5, "set to nothing is not set"


def test_every_setting_can_be_set_both_ways(tmp_path: Path) -> None:
    values: dict[str, tuple[str, object]] = {
        "enabled": ("no", False),
        "diagnostic": ("1", True),
        "attempt": ("3", 3),
        "rank": ("1", 1),
        "local_rank": ("1", 1),
        "world_size": ("16", 16),
        "local_world_size": ("8", 8),
        "node": ("gpu-1", "gpu-1"),
        "usd_per_hour": ("2.50", Decimal("2.50")),
        "spool": (str(tmp_path), tmp_path),
        "drop": ("s3://bucket/shards", "s3://bucket/shards"),
        "spool_limit_bytes": ("1000", 1000),
        "upload_timeout_s": ("5", 5),
        "kind": ("serve", "serve"),
        "labels": ("a=1, b=x=y", {"a": "1", "b": "x=y"}),
        **dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), ("2", 2)),
        "max_sample_ppm": ("1000000", 1_000_000),
        "step_window_ns": ("1000000000", 10**9),
        "op_window_ns": ("60000000000", 60 * 10**9),
        "log_interval_ns": ("0", 0),
    }
    texts = {name: values.get(name, (f"some {name}", f"some {name}")) for name in NAMES}
    environ = {PREFIX + name.upper(): text for name, (text, _) in texts.items()}
    expected = {name: value for name, (_, value) in texts.items()}
    assert dataclasses.asdict(from_environment(environ)) == expected
    assert dataclasses.asdict(from_environment({}, **{name: text for name, (text, _) in texts.items()})) == expected
    assert dataclasses.asdict(from_environment({}, **expected)) == expected
    assert expected.keys() == {f.name for f in dataclasses.fields(ProbeSettings)}
    changed = [name for name in NAMES if getattr(ProbeSettings(), name) == expected[name]]
    assert not changed, "a value equal to its default proves nothing"


def test_short_names() -> None:
    found = from_environment({"SEEDANCE_JOB": "j", "SEEDANCE_PRICE": "3", "SEEDANCE_DEVICE": "GPU-1"})
    assert (found.job_id, found.usd_per_hour, found.device_uuid) == ("j", Decimal(3), "GPU-1")


def test_settings_are_frozen_and_travel() -> None:
    found = from_environment({"SEEDANCE_LABELS": "a=1"})
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        ProbeSettings("positional")  # type: ignore[misc]


def test_every_field_says_what_it_is() -> None:
    source = Path(settings.__file__).read_text(encoding="utf-8")
    body = source.split("class ProbeSettings", 1)[1].split("def __post_init__", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("    ")]
    for name in NAMES:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"    {name}:"))
        assert lines[at + 1].startswith('    """'), name


# --- what cannot be used --------------------------------------------------------------------------------------------


def test_an_unknown_variable_is_warned_about_once_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "seedance.probe"):
        for _ in range(2):
            from_environment({"SEEDANCE_TAEM": "x", "SEEDANCE_QQQQQQ": "1"})
    assert [r.message for r in caplog.records] == [
        "probe: SEEDANCE_QQQQQQ is no setting. It has no effect.",
        "probe: SEEDANCE_TAEM is no setting; the nearest is SEEDANCE_TEAM. It has no effect.",
    ]


def test_the_pipelines_variables_are_no_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    theirs = {*PIPELINE_VARIABLES, *(PREFIX + name.upper() for name in Settings.model_fields)}
    assert theirs == OTHER_VARIABLES
    assert not theirs & {PREFIX + name.upper() for name in NAMES}
    with caplog.at_level(logging.WARNING, "seedance.probe"):
        from_environment(dict.fromkeys(theirs, "x"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("ENABLED", "perhaps", "enabled"),
        ("RANK", "first", "rank"),
        ("RANK", "-1", "rank"),
        ("WORLD_SIZE", "0", "world_size"),
        ("ATTEMPT", "32768", "attempt"),
        ("USD_PER_HOUR", "cheap", "usd_per_hour"),
        ("USD_PER_HOUR", "-1", "usd_per_hour"),
        ("USD_PER_HOUR", "nan", "usd_per_hour"),
        ("USD_PER_HOUR", "Infinity", "usd_per_hour"),
        ("LABELS", "a", "labels"),
        ("KIND", "test", "kind"),
        ("TP", "0", "tp"),
        ("DP", "0", "dp"),
        ("MAX_SAMPLE_PPM", "1000001", "max_sample_ppm"),
        ("STEP_WINDOW_NS", "7000000001", "step_window_ns"),
        ("OP_WINDOW_NS", "11000000000", "op_window_ns"),
        ("TEAM", "a\nb", "team"),
    ],
)
def test_a_bad_variable_is_warned_about_and_has_no_effect(
    caplog: pytest.LogCaptureFixture, variable: str, value: str, setting: str
) -> None:
    with caplog.at_level(logging.WARNING, "seedance.probe"):
        found = from_environment({PREFIX + variable: value})
    assert getattr(found, setting) == getattr(from_environment({}), setting)
    assert len(caplog.records) == 1
    assert PREFIX + variable in caplog.text


def test_a_bad_variable_does_not_take_a_good_argument_with_it(caplog: pytest.LogCaptureFixture) -> None:
    found = from_environment({"SEEDANCE_STEP_WINDOW_NS": "7000000000"}, op_window_ns=60 * 10**9)
    assert (found.step_window_ns, found.op_window_ns) == (10 * 10**9, 60 * 10**9)
    assert "SEEDANCE_STEP_WINDOW_NS" in caplog.text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"teem": "x"}, "no setting 'teem'; the nearest is team"),
        ({"rank": "first"}, "setting rank is 'first', expected integer"),
        ({"rank": 1.0}, "setting rank is 1.0, expected integer"),
        ({"rank": True}, "setting rank is True, expected integer"),
        ({"enabled": 1}, "setting enabled is 1, expected switch"),
        ({"team": 3}, "setting team is 3, expected text"),
        ({"team": ""}, "setting team is '', expected text without control characters"),
        ({"usd_per_hour": "x"}, "expected number of USD"),
        ({"rank": 4, "world_size": 4}, "setting rank is 4, expected below world_size = 4"),
        ({"op_window_ns": 15 * 10**9}, "a multiple of step_window_ns = 10,000,000,000 ns that divides an hour"),
        ({"spool": 5}, "expected folder"),
    ],
)
def test_a_bad_argument_is_an_error(given: dict[str, object], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({}, **given)
    assert expected in str(caught.value)
    assert caught.value.setting == next(iter(given))
    assert next(iter(given)) in caught.value.settings


def test_numbers_of_money_keep_their_digits() -> None:
    assert from_environment({}, usd_per_hour=0.1).usd_per_hour == Decimal("0.1")
    assert from_environment({}, usd_per_hour=2).usd_per_hour == Decimal(2)


# --- ranks and jobs -------------------------------------------------------------------------------------------------


def test_torchrun() -> None:
    found = from_environment(TORCHRUN)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 8, 4)
    assert (found.job_id, found.attempt) == ("run-7", 2)


def test_slurm_counts_the_tasks_of_the_step_and_not_of_the_allocation() -> None:
    found = from_environment(SLURM)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 6, 2)
    assert (found.job_id, found.attempt, found.node) == ("4711", 1, "gpu-17")
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert (from_environment(batch).rank, from_environment(batch).world_size) == (0, 1)


def test_torchrun_under_slurm_tells_every_restart_from_the_others() -> None:
    both = {**SLURM, **TORCHRUN}
    assert from_environment(both).rank == 5
    attempts = {
        from_environment({**both, "SLURM_RESTART_COUNT": str(s), "TORCHELASTIC_RESTART_COUNT": str(t)}).attempt
        for s in range(3)
        for t in range(4)
    }
    assert len(attempts) == 12
    none = {**both, "TORCHELASTIC_RUN_ID": "none"}
    assert from_environment(none).job_id == "4711", "torchrun's `none` is no name"


def test_a_rank_without_a_world_is_not_the_first_one() -> None:
    found = from_environment({"RANK": "3"})
    assert (found.rank, found.world_size) == (3, 4)
    assert from_environment({"RANK": "3", "WORLD_SIZE": "2"}).rank == 3


def test_a_run_without_a_name_is_one_job_on_its_ranks_and_another_each_time(tmp_path: Path) -> None:
    code = "from seedance.probe.settings import from_environment as f; print(f().job_id)"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SEEDANCE_", "RANK", "WORLD", "SLURM", "TORCH"))}
    ranks = {**kept, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}

    def job(environ: dict[str, str]) -> str:
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert job({**ranks, "RANK": "0"}) == job({**ranks, "RANK": "1"})
    alone = [job(kept), job(kept)]
    assert alone[0] != alone[1]
    assert identity.job_id({**ranks, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "n", 4, 2) == "10.0.0.1-29500"


def test_samples_are_written_by_one_rank_of_a_replica() -> None:
    writers = [rank for rank in range(16) if from_environment({}, rank=rank, world_size=16, tp=2, cp=2).writes_samples]
    assert writers == [0, 4, 8, 12]
    assert from_environment({}, rank=0, world_size=16, tp=2, cp=2).data_parallel == 4
    assert from_environment({}, rank=0, world_size=1, tp=2).data_parallel == 1
    assert from_environment({}, world_size=16, dp=3).data_parallel == 3


# --- the host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpu-1", "-x", ".a", "_b", "ä ö", "a/b:c", "", "...", "ip-10-0-0-1.eu-west-1.internal"]
)
def test_a_node_can_stand_in_the_name_of_a_shard(name: str) -> None:
    assert _PRODUCER.fullmatch(identity.clean(name))
    assert _PRODUCER.fullmatch(from_environment({"SEEDANCE_NODE": name, "HOSTNAME": name}).node)


def test_the_cpu_is_named_by_the_boot() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert identity.device_uuid() == f"cpu:{boot}"
    assert from_environment({}).gpu_model is None


def test_a_process_is_named_by_its_start(tmp_path: Path) -> None:
    own = identity.started_ns(os.getpid())
    assert own is not None
    assert own == identity.started_ns(os.getpid())
    assert identity.started_ns(2**30) is None
    (tmp_path / "5").mkdir()
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1000\n")
    fields = ["S", *["0"] * 18, "250", "0"]
    (tmp_path / "5" / "stat").write_text(f"5 (a) b) (c) {' '.join(fields)}")
    ticks = os.sysconf("SC_CLK_TCK")
    assert identity.started_ns(5, tmp_path) == 1000 * 10**9 + 250 * 10**9 // ticks
    assert identity.boot_id(tmp_path) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"sys_vendor": "Amazon EC2", "board_asset_tag": "i-0abc123def4567890", "product_name": "p5.48xlarge"},
            {"cloud": "aws", "instance_id": "i-0abc123def4567890", "instance_type": "p5.48xlarge"},
        ),
        ({"sys_vendor": "Amazon EC2", "board_asset_tag": "Not Specified"}, {"cloud": "aws"}),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            {"cloud": "azure"},
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Surface Laptop"}, {}),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, {"cloud": "gcp"}),
        ({"sys_vendor": "Google", "product_name": "Chromebook"}, {}),
        ({"sys_vendor": "LENOVO"}, {}),
        ({}, {}),
    ],
)
def test_the_machine_by_its_firmware(tmp_path: Path, fields: dict[str, str], expected: dict[str, str]) -> None:
    for name, text in fields.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert identity.machine(tmp_path) == expected


def test_the_spool_is_a_folder_of_the_user_and_the_host(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "HOSTNAME": "n1"}
    assert from_environment(home).spool == tmp_path / ".local/state/seedance/spool/n1"
    assert from_environment({**home, "XDG_STATE_HOME": "/elsewhere/state"}).spool == Path(
        "/elsewhere/state/seedance/spool/n1"
    )
    assert from_environment({**home, "SEEDANCE_NODE": "n2"}).spool.name == "n2"
    assert from_environment({"HOSTNAME": "n1"}).spool.name == "n1"
    assert from_environment({**home, "SEEDANCE_SPOOL": "here"}).spool == Path("here").absolute()


def test_a_drop_folder_is_seen_from_where_the_process_began_and_a_url_from_anywhere() -> None:
    """The uploader works in another folder."""
    assert from_environment({"SEEDANCE_DROP": "shards"}).drop == str(Path("shards").absolute())
    assert from_environment({}, drop=Path("shards")).drop == str(Path("shards").absolute())
    assert from_environment({"SEEDANCE_DROP": "gs://bucket/shards"}).drop == "gs://bucket/shards"
    with pytest.raises(SettingsError, match="expected folder or URL"):
        from_environment({}, drop=5)


def test_the_spool_of_a_user_without_a_home_is_temporary() -> None:
    found = from_environment({"HOME": "/dev/null", "HOSTNAME": "n1"}).spool
    assert found == Path(tempfile.gettempdir()) / f"seedance-{os.getuid()}/spool/n1"


def test_reading_settings_loads_nothing_heavy() -> None:
    code = (
        "import sys; from seedance.probe.settings import from_environment as f; f();"
        "print([m for m in ('torch', 'pyarrow', 'numpy', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class _Cuda:
    """Stands in for `torch.cuda` of a host with two GPUs, the second current."""

    initialized = True

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.initialized

    @staticmethod
    def current_device() -> int:
        return 1

    @staticmethod
    def get_device_properties(index: int) -> object:
        return SimpleNamespace(uuid=f"0000-000{index}")

    @staticmethod
    def get_device_name(index: int | None) -> str:
        return f"NVIDIA H100 80GB HBM3 {index}"


def test_a_gpu_is_named_by_its_uuid_and_a_slice_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", _Cuda)  # type: ignore[arg-type]
    assert identity.device_uuid(environ={}) == "GPU-0000-0001"
    assert identity.device_uuid(0, environ={}) == "GPU-0000-0000"
    assert identity.device_uuid(0, environ={"CUDA_VISIBLE_DEVICES": "3,4"}) == "GPU-0000-0000"
    slices = {"CUDA_VISIBLE_DEVICES": "MIG-11-22, MIG-33-44"}
    assert identity.device_uuid(0, environ=slices) == "MIG-11-22"
    assert identity.device_uuid(environ=slices) == "MIG-33-44"
    found = from_environment(slices)
    assert (found.device_uuid, found.gpu_model) == ("MIG-33-44", "NVIDIA H100 80GB HBM3 None")


def test_cuda_that_the_process_has_not_begun_to_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", _Cuda)  # type: ignore[arg-type]
    monkeypatch.setattr(_Cuda, "initialized", False)
    assert identity.device_uuid(environ={}).startswith("cpu:")
    assert identity.gpu_model() is None


def test_runs_that_upload_to_other_places_have_other_spools(tmp_path: Path) -> None:
    """Whoever uploads takes all that is in the spool: rows of another run would go to the wrong place."""
    environ = {"XDG_STATE_HOME": str(tmp_path), "SEEDANCE_NODE": "n"}

    def spool(**given: object) -> Path:
        return from_environment(environ=environ, **given).spool

    assert spool() == tmp_path / "seedance" / "spool" / "n"
    assert spool(drop="s3://a/b") == spool(drop="s3://a/b")
    assert len({spool(), spool(drop="s3://a/b"), spool(drop="s3://a/c")}) == 3
    assert spool(drop="s3://a/b", spool=tmp_path / "mine") == tmp_path / "mine"

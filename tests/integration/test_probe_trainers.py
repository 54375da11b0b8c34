"""The callbacks of two trainers, in real runs on the CPU: rows for the run, the same results to the bit, nothing left after."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    import lightning.pytorch as pl
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from seedance.probe import huggingface, lightning

from seedance.probe import settings as probe_settings

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers; what is ours is held to in the log
WORDS, LENGTH, BATCH, STEPS = 32, 16, 4, 6


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, the same each time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


@pytest.fixture(autouse=True)
def nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """No hook, no patched function, no warning of ours."""
    monkeypatch.setenv("SEEDANCE_SPOOL", str(tmp_path / "spool"))
    before = state()
    with caplog.at_level(logging.INFO, "seedance.probe"):
        yield
    assert state() == before
    assert [r.message for r in caplog.records if r.name == "seedance.probe" and r.levelno >= logging.WARNING] == []


def state() -> dict[str, Any]:
    """Everything that a probe changes in torch."""
    module = nn.modules.module
    hooks = [name for name in vars(module) if name.startswith("_global_") and isinstance(vars(module)[name], Mapping)]
    return {
        "call": nn.Module._compiled_call_impl,
        "compile": nn.Module.compile,
        "save": torch.save,
        "engine": torch.autograd._engine_run_backward,
        "next": torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        "hooks": {name: len(vars(module)[name]) for name in hooks},
        "steps": len(Optimizer.__init__.__globals__["_global_optimizer_post_hooks"]),
    }


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Rows of one table in a spool, in whatever state its segments are."""
    lines = [line for file in sorted(folder.rglob("*.jsonl")) for line in file.read_text().splitlines()]
    found = [item for item in map(json.loads, lines) if isinstance(item, list)]
    return [row for name, row in found if name == f"raw_telemetry__{table}"]


def parts(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()}


# --- HuggingFace ----------------------------------------------------------------------------------------------------


def hugging(folder: Path, *callbacks: Any, train: bool = True, **given: Any) -> LlamaForCausalLM:
    """A model after a run of HuggingFace's trainer that saves half way and at the end, and evaluates."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        save_steps=STEPS // 2,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **given,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=list(callbacks),
    )
    if train:
        trainer.train()
    else:
        trainer.evaluate()
    return trainer.model


def test_huggingface(tmp_path: Path) -> None:
    callback = huggingface.SeedanceCallback(job_id="hf", team="vision", max_sample_ppm=1_000_000)
    probed = hugging(tmp_path / "probed", callback)
    bare = hugging(tmp_path / "bare")
    assert all(torch.equal(a, b) for a, b in zip(probed.state_dict().values(), bare.state_dict().values(), strict=True))
    assert callback.probe is None
    assert probed.__dict__.keys() == bare.__dict__.keys()

    steps = rows(tmp_path / "spool", "step_windows")
    train = [row for row in steps if row["phase"] == "train"]
    assert sum(row["units"] + row["dropped_units"] for row in train) == STEPS
    assert {row["batch_size"] for row in train if row["units"]} == {BATCH}
    units = sum(row["units"] for row in train)
    assert sum(row["samples"] for row in train) == units * BATCH
    assert sum(row["tokens_in"] for row in train) == units * BATCH * LENGTH
    assert sum(row["units"] for row in steps if row["phase"] == "eval") == 2 * 64 // BATCH
    assert sum(row["checkpoint_ns"] for row in steps) > 0, "the trainer's own saving"
    assert all(row["job_id"] == "hf" for row in steps)

    ops = rows(tmp_path / "spool", "op_windows")
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"} <= {
        row["layer"] for row in ops
    }
    assert {row["layer"] for row in ops if not row["layer"].startswith("(")} <= parts(bare)
    assert {"fwd", "bwd", "optim"} <= {row["pass"] for row in ops}
    for part, each in (("fwd", 2), ("bwd", 4)):
        query = [r for r in ops if (r["layer"], r["pass"]) == ("model.layers.0.self_attn.q_proj", part)]
        assert sum(r["flops"] for r in query if r["phase"] == "train") == units * each * BATCH * LENGTH * 16 * 16

    jobs = rows(tmp_path / "spool", "jobs")
    assert {row["team"] for row in jobs} == {"vision"}
    assert {row["model"] for row in jobs} == {"LlamaForCausalLM"}
    assert {row["kind"] for row in jobs} == {"train"}
    assert {"started", "ended"} <= {row["statement"] for row in jobs}


def test_huggingface_with_micro_batches_and_checkpointing(tmp_path: Path) -> None:
    given = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    probed = hugging(tmp_path / "a", huggingface.SeedanceCallback(max_sample_ppm=1_000_000), **given)
    bare = hugging(tmp_path / "b", **given)
    assert all(torch.equal(a, b) for a, b in zip(probed.state_dict().values(), bare.state_dict().values(), strict=True))
    train = [row for row in rows(tmp_path / "spool", "step_windows") if row["phase"] == "train"]
    units = sum(row["units"] for row in train)
    assert units + sum(row["dropped_units"] for row in train) == STEPS
    assert sum(row["samples"] for row in train) == units * 2 * BATCH
    assert {row["batch_size"] for row in train if row["units"]} == {BATCH}
    recomputed = [row for row in rows(tmp_path / "spool", "op_windows") if row["pass"] == "recompute"]
    assert sum(row["hw_flops"] for row in recomputed) > 0
    assert sum(row["flops"] for row in recomputed) == 0


def test_huggingface_evaluates_alone(tmp_path: Path) -> None:
    callback = huggingface.SeedanceCallback()
    hugging(tmp_path / "a", callback, train=False)
    assert callback.probe is None
    steps = rows(tmp_path / "spool", "step_windows")
    assert {row["phase"] for row in steps} == {"eval"}
    # The callback hears of an evaluation after its first batch.
    assert sum(row["units"] for row in steps) == 64 // BATCH - 1
    assert {row["kind"] for row in rows(tmp_path / "spool", "jobs")} == {"serve"}


def test_a_run_that_fails_ends_like_one_without_the_probe(tmp_path: Path) -> None:
    class Breaks(huggingface.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("disk on fire")

    callback = huggingface.SeedanceCallback()
    with pytest.raises(RuntimeError, match="disk on fire"):
        hugging(tmp_path / "a", callback, Breaks())
    callback.on_train_end(None, None, None)  # nobody calls it; the next run, or the end of the process, does
    assert callback.probe is None
    assert sum(row["units"] for row in rows(tmp_path / "spool", "step_windows")) > 0


# --- Lightning ------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):  # type: ignore[misc]
    """Trains a part of itself: Lightning never calls the module, only its steps."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.net = nn.Sequential(nn.Embedding(WORDS, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, WORDS))

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("loss", self.training_step(batch, index))

    test_step = validation_step

    def predict_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.net(batch["input_ids"])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(folder: Path, *callbacks: Any, **given: Any) -> Any:
    made = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**made, **given})


def loader() -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Sentences(), batch_size=BATCH)


def lightened(folder: Path, *callbacks: Any, **given: Any) -> Module:
    """A module after a fit that begins with a sanity check, validates, and saves."""
    pl.seed_everything(0, verbose=False)
    module = Module()
    saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=STEPS // 2, save_top_k=-1)
    trainer(folder, saving, *callbacks, val_check_interval=STEPS // 2, **given).fit(module, loader(), loader())
    return module


def test_lightning(tmp_path: Path) -> None:
    callback = lightning.SeedanceCallback(job_id="pl", team="vision", max_sample_ppm=1_000_000)
    probed, bare = lightened(tmp_path / "probed", callback), lightened(tmp_path / "bare")
    assert all(torch.equal(a, b) for a, b in zip(probed.state_dict().values(), bare.state_dict().values(), strict=True))
    assert callback.probe is None
    assert len(list((tmp_path / "probed").glob("*.ckpt"))) == len(list((tmp_path / "bare").glob("*.ckpt"))) == 2

    steps = rows(tmp_path / "spool", "step_windows")
    train = [row for row in steps if row["phase"] == "train"]
    units = sum(row["units"] for row in train)
    assert units + sum(row["dropped_units"] for row in train) == STEPS
    assert sum(row["samples"] for row in train) == units * BATCH
    assert sum(row["tokens_in"] for row in train) == units * BATCH * LENGTH
    # Two batches of the sanity check, and two validations.
    assert sum(row["units"] for row in steps if row["phase"] == "eval") == 2 + 2 * 64 // BATCH
    assert sum(row["checkpoint_ns"] for row in steps) > 0, "the trainer's own saving"

    ops = rows(tmp_path / "spool", "op_windows")
    named = {row["layer"] for row in ops if not row["layer"].startswith("(")}
    assert {"net.2", "net.1.layers.0.linear1", "net.1.layers.1.linear2"} <= named
    assert named <= parts(bare)
    assert {"fwd", "bwd", "optim"} <= {row["pass"] for row in ops}
    jobs = rows(tmp_path / "spool", "jobs")
    assert {(row["team"], row["model"], row["kind"]) for row in jobs} == {("vision", "Module", "train")}


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_lightning_without_training(tmp_path: Path, what: str) -> None:
    callback = lightning.SeedanceCallback()
    getattr(trainer(tmp_path, callback), what)(Module(), loader())
    assert callback.probe is None
    steps = rows(tmp_path / "spool", "step_windows")
    assert {row["phase"] for row in steps} == {"eval"}
    assert sum(row["units"] for row in steps) == 64 // BATCH
    assert {row["kind"] for row in rows(tmp_path / "spool", "jobs")} == {"serve"}


def test_one_trainer_after_the_other(tmp_path: Path) -> None:
    callback = lightning.SeedanceCallback()
    made = trainer(tmp_path, callback)
    module = Module()
    made.fit(module, loader())
    first = sum(row["units"] for row in rows(tmp_path / "spool", "step_windows"))
    assert first
    made.validate(module, loader())
    assert sum(row["units"] for row in rows(tmp_path / "spool", "step_windows")) == first + 64 // BATCH


def test_a_lightning_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Breaks(Module):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if index == 3:
                raise RuntimeError("disk on fire")
            return super().training_step(batch, index)

    callback = lightning.SeedanceCallback()
    with pytest.raises(RuntimeError, match="disk on fire"):
        trainer(tmp_path, callback).fit(Breaks(), loader())
    assert callback.probe is None


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [huggingface.SeedanceCallback, lightning.SeedanceCallback])
def test_a_wrong_setting_is_said_at_once(kind: Any) -> None:
    with pytest.raises(probe_settings.SettingsError, match="no setting 'teem'; the nearest is team"):
        kind(teem="vision")


@pytest.mark.parametrize("kind", [huggingface.SeedanceCallback, lightning.SeedanceCallback])
def test_callbacks_are_copied_and_sent(kind: Any) -> None:
    made = kind(team="vision", labels={"a": "1"})
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again._follower.settings == {"team": "vision", "labels": {"a": "1"}}
        assert again.probe is None


def test_a_probe_that_is_switched_off_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDANCE_ENABLED", "0")
    hugging(tmp_path / "a", huggingface.SeedanceCallback())
    trainer(tmp_path, lightning.SeedanceCallback()).fit(Module(), loader())
    assert not (tmp_path / "spool").exists()

"""`seedance count`: published models to the last digit, on the meta device, and what it says to people and programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seedance.cli import main
from seedance.errors import CountError
from seedance.flops.count import Sizes, count_config
from seedance.flops.report import ModelCount, Work, scaled

torch.set_num_threads(1)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
RESNET = {
    "architectures": ["ResNetForImageClassification"],
    "model_type": "resnet",
    "id2label": {str(label): str(label) for label in range(1000)},
    "torch_dtype": "float32",
}
SMALL = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
PER_TOKEN = 15_009_316_864
PER_KEY = 524_288


def counted(folder: Path, config: dict[str, Any], *kinds: str, **sizes: Any) -> ModelCount:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return count_config(file, Sizes(**sizes), kinds)


def named(found: ModelCount, name: str) -> Work:
    return next(work for work in found.work if work.name.startswith(name))


# --- published models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq", "full"),
    [(1, 15_009_841_152), (128, 1_929_782_493_184), (2048, 32_938_104_193_024), (8192, 158_140_695_838_720)],
)
def test_llama_prefill(tmp_path: Path, seq: int, full: int) -> None:
    found = counted(tmp_path, LLAMA, "prefill", seq=seq)
    every = named(found, "prefill, every logit")
    assert every.flops_full == full == seq * PER_TOKEN + PER_KEY * seq**2
    assert every.flops == seq * PER_TOKEN + PER_KEY * seq * (seq + 1) // 2
    assert named(found, "prefill, last logit").flops_full == full - 2 * 4096 * 128_256 * (seq - 1)
    if seq == 8192:
        assert every.flops == 140_550_657_277_952
        assert named(found, "prefill, last logit").flops_full == 149_534_632_050_688
    assert every.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096) + min(seq, 128_256) * 2 * 4096 + seq * 131_072


@pytest.mark.parametrize(("context", "flops"), [(1, 15_009_841_152), (2048, 16_083_058_688), (8192, 19_304_284_160)])
def test_llama_decodes(tmp_path: Path, context: int, flops: int) -> None:
    found = counted(tmp_path, LLAMA, "decode", context=context)
    (work,) = found.work
    assert work.flops == work.flops_full == work.hw_flops == flops == PER_TOKEN + PER_KEY * context
    assert (found.parameters, found.matmul_parameters) == (8_030_261_248, 7_504_658_432)
    assert found.active_parameters == found.parameters
    assert found.cache_bytes_per_token == 131_072
    weights = 2 * (8_030_261_248 - 128_256 * 4096) + 2 * 4096
    assert work.weight_bytes == weights + (context - 1) * 131_072 + 131_072


def test_llama_decodes_a_batch_with_its_weights_read_once(tmp_path: Path) -> None:
    (work,) = counted(tmp_path, LLAMA, "decode", context=1024, batch=8).work
    assert work.units == 8
    assert work.flops == 8 * (PER_TOKEN + PER_KEY * 1024)
    assert work.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096) + 8 * (2 * 4096 + 1024 * 131_072)


def test_llama_trains(tmp_path: Path) -> None:
    (plain,) = counted(tmp_path, LLAMA, "train", seq=128, fused=False).work
    assert plain.flops_full == plain.hw_flops == 5_789_347_479_552 == 3 * 1_929_782_493_184
    assert plain.forward_flops == 128 * PER_TOKEN + PER_KEY * 128 * 129 // 2
    (again,) = counted(tmp_path, LLAMA, "train", seq=128, fused=False, checkpointing=True).work
    assert (again.flops, again.flops_full) == (plain.flops, plain.flops_full)
    assert again.hw_flops == 7_103_607_472_128
    assert again.recompute_flops == 1_314_259_992_576
    assert again.weight_bytes - plain.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096 + 128 * 4096)


def test_llama_trains_with_fused_attention(tmp_path: Path) -> None:
    (work,) = counted(tmp_path, LLAMA, "train", seq=128).work
    exact = PER_KEY * 128 * 129 // 2
    assert work.flops == 3 * (128 * PER_TOKEN + exact)
    assert work.hw_flops == work.flops + exact // 2  # the scores a second time


def test_mixtral(tmp_path: Path) -> None:
    found = counted(tmp_path, MIXTRAL, "decode", context=4096)
    (work,) = found.work
    assert work.flops == 27_644_657_664 == 25_497_174_016 + PER_KEY * 4096
    assert found.parameters == 46_702_792_704
    block = 41_943_040 + 32_768 + 8 * 176_160_768
    assert found.matmul_parameters == 32 * block + 131_072_000
    assert found.active_parameters == 46_702_792_704 - 32 * 6 * 176_160_768 == 12_879_925_248
    assert work.weight_bytes < 27 * 10**9 < found.parameter_bytes == 93_405_585_408
    assert work.operator_bytes < 28 * 10**9  # two experts are read, not eight


@pytest.mark.parametrize(("seq", "flops"), [(128, 22_348_431_360), (384, 70_666_813_440), (512, 96_637_943_808)])
def test_bert(tmp_path: Path, seq: int, flops: int) -> None:
    found = counted(tmp_path, BERT, "forward", seq=seq)
    (work,) = found.work
    assert work.flops == work.flops_full == flops
    assert (found.parameters, found.cache_bytes_per_token) == (109_482_240, None)


@pytest.mark.parametrize(
    ("bottleneck", "forward", "backward"),
    [(False, 8_178_368_512, 16_120_709_120), (True, 7_715_946_496, 15_195_865_088)],
    ids=["v1.5", "v1"],
)
def test_resnet(tmp_path: Path, bottleneck: bool, forward: int, backward: int) -> None:
    found = counted(tmp_path, RESNET | {"downsample_in_bottleneck": bottleneck})
    train = named(found, "train")
    assert named(found, "forward").flops == train.forward_flops == forward
    assert train.flops - train.forward_flops == backward
    assert (found.parameters, found.unit, found.dtype) == (25_557_032, "sample", "fp32")


# --- other models -----------------------------------------------------------------------------------------------------


def test_a_window_is_exact_and_bounds_the_cache(tmp_path: Path) -> None:
    window = SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    found = counted(tmp_path, window, seq=64, context=64)
    plain = counted(tmp_path, SMALL, seq=64, context=64)
    pairs, triangle = 16 * 17 // 2 + (64 - 16) * 16, 64 * 65 // 2
    difference = named(plain, "prefill, every").flops - named(found, "prefill, every").flops
    assert difference == 2 * 4 * 4 * 16 * (triangle - pairs)
    assert named(plain, "decode").flops - named(found, "decode").flops == 2 * 4 * 4 * 16 * (64 - 16)
    assert named(found, "decode").weight_bytes < named(plain, "decode").weight_bytes


def test_tied_embeddings_are_one_parameter_that_is_multiplied(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    found = counted(tmp_path, gpt2, "decode", context=1)
    assert found.parameters == 124_439_808
    assert found.matmul_parameters == 12 * 12 * 768**2 + 50_257 * 768
    assert found.work[0].flops == 2 * found.matmul_parameters + 12 * 4 * 768


def test_a_model_without_an_architecture_and_one_of_two_sides(tmp_path: Path) -> None:
    bare = {key: value for key, value in SMALL.items() if key != "architectures"}
    assert counted(tmp_path, bare, "decode").model == "LlamaForCausalLM"
    t5 = {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 256,
    }
    found = counted(tmp_path, t5, seq=32)
    assert [work.name for work in found.work] == ["forward", "train step with AdamW"]


def test_dtype_and_quantisation(tmp_path: Path) -> None:
    assert counted(tmp_path, SMALL, "decode").dtype == "bf16"
    wide = counted(tmp_path, SMALL, "decode", dtype="fp32")
    assert wide.parameter_bytes == 4 * wide.parameters
    packed = counted(tmp_path, SMALL | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "decode")
    assert packed.notes == ("Quantisation (awq) is left out: bytes are those of the dtype above.",)
    assert counted(tmp_path, SMALL | {"quantization_config": None}, "decode").notes == ()
    (odd,) = counted(tmp_path, SMALL | {"quantization_config": "gptq"}, "decode").notes
    assert odd.startswith("Quantisation (of an unknown kind) is left out")


def test_entries_that_change_nothing_here(tmp_path: Path) -> None:
    odd = {
        "return_dict": False,
        "torchscript": True,
        "architectures": "LlamaForCausalLM",
        "auto_map": {"AutoModel": "x.Y"},
    }
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(SMALL | odd), encoding="utf-8")
    found, plain = count_config(tmp_path, Sizes(), ("decode",)), counted(tmp_path, SMALL, "decode")
    assert (found.model, found.work) == (plain.model, plain.work)


def test_chunked_attention_is_exact(tmp_path: Path) -> None:
    llama4 = {
        key: value for key, value in SMALL.items() if key not in ("model_type", "architectures", "num_hidden_layers")
    } | {
        "model_type": "llama4_text",
        "num_hidden_layers": 2,
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "layer_types": ["chunked_attention", "full_attention"],
    }
    chunked = counted(tmp_path, llama4 | {"attention_chunk_size": 16}, "prefill", seq=40)
    whole = counted(tmp_path, llama4 | {"attention_chunk_size": 64}, "prefill", seq=40)
    pairs = 2 * (16 * 17 // 2) + 8 * 9 // 2
    assert whole.work[0].flops - chunked.work[0].flops == 4 * 4 * 16 * (40 * 41 // 2 - pairs)
    assert chunked.work[0].flops_full == whole.work[0].flops_full


def test_states_of_recurrent_layers_are_read_and_written_and_do_not_grow(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "state_size": 16, "head_dim": 16, "num_heads": 8, "n_groups": 1, "conv_kernel": 4}
    mamba = {"model_type": "mamba2", "num_hidden_layers": 2, "vocab_size": 100, "chunk_size": 16, **sizes}
    found = counted(tmp_path, mamba, "decode", batch=2, context=32)
    convolved, recurrent = 2 * (128 + 2 * 16) * 4, 4 * 8 * 16 * 16  # bytes of a layer and sequence; the latter in fp32
    assert found.cache_bytes_per_token is None
    unread = 2 * 64 * (100 - 2)
    assert named(found, "decode").weight_bytes == found.parameter_bytes - unread + 2 * 2 * 2 * (convolved + recurrent)


def test_a_model_of_text_and_images_says_that_images_are_left_out(tmp_path: Path) -> None:
    sides = {"text_config": SMALL, "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 1}}
    llava = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], **sides}
    found = counted(tmp_path, llava, seq=32)
    assert found.notes == ("Text alone is counted: its vision part is left out.",)
    assert named(found, "forward").flops == named(counted(tmp_path, SMALL, seq=32), "prefill, every").flops


def test_attention_that_cannot_be_replaced_is_counted_whole(tmp_path: Path) -> None:
    falcon = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = counted(tmp_path, falcon | {"vocab_size": 256, "architectures": ["FalconForCausalLM"]}, seq=32, context=32)
    assert found.notes == ("This model computes attention in its own way: whole scores are counted everywhere.",)
    every = named(found, "prefill, every")
    assert every.flops == every.flops_full == 32 * 2 * found.matmul_parameters + 2 * 2 * 4 * 4 * 32 * 32 * 16 // 2
    assert named(found, "decode").flops == 2 * found.matmul_parameters + 2 * 4 * 4 * 32 * 16


def test_work_that_needs_data_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    sound = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"], "num_hidden_layers": 1}
    found = counted(tmp_path, sound)
    assert [work.name for work in found.work] == ["forward"]
    assert len(found.notes) == 1 and found.notes[0].startswith("Without train: ")
    with pytest.raises(CountError, match="needs data to run"):
        counted(tmp_path, sound, "train")


# --- what it refuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[]", "names no model_type"),
        ('{"hidden_size": 8}', "names no model_type"),
        ('{"model_type": "nobodys"}', "'nobodys' is not one that this transformers knows"),
        ('{"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}', "Code that comes with a configuration is not run"),
        (json.dumps(SMALL | {"num_attention_heads": "four"}), "is no valid configuration"),
        (json.dumps(SMALL | {"torch_dtype": "int4"}), "dtype 'int4' is not one to compute in"),
        ("[" * 100_000, "is no JSON"),
        (json.dumps(SMALL | {"hidden_size": "64"}), "Field 'hidden_size' expected int, got str"),
        (json.dumps(SMALL | {"hidden_size": -64}), "cannot be built"),
        (json.dumps(SMALL | {"num_hidden_layers": -1}), "cannot be counted"),
        (json.dumps(SMALL | {"vocab_size": 0}), "cannot be counted"),
        (json.dumps(SMALL | {"num_key_value_heads": 3}), "4 heads of queries cannot share 3 heads of keys"),
        (json.dumps({"model_type": "voxtral_realtime_text"}), "has no model class"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CountError, match=r"config\.json: ") as caught:
        count_config(file)
    assert message in str(caught.value)
    assert caught.value.path == str(file)


def test_work_that_a_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(CountError, match=r"BertModel has no decode\. It has forward, train"):
        counted(tmp_path, BERT, "decode")


# --- the command --------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert main(["count", str(tmp_path), "--seq", "32", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"LlamaForCausalLM of {tmp_path / 'config.json'}: bf16, batch 2"
    assert [line.split("  ")[0] for line in lines if line.startswith(("prefill", "decode", "train"))] == 2 * [
        "prefill, last logit",
        "prefill, every logit",
        "decode at context 32",
        "train step with AdamW",
    ]
    table = [line for line in lines if line.startswith(("work", "prefill", "decode", "train"))][:5]
    assert len({len(line) for line in table}) == 1 and "MFLOP" in out
    assert main(["count", str(tmp_path), "--json", "--decode", "--context", "32"]) == 0
    found = json.loads(capsys.readouterr().out)
    (work,) = found["work"]
    assert work["name"] == "decode at context 32"
    assert isinstance(work["flops"], int) and f"{2 * work['flops']:,}" in out
    assert found["parameters"] == found["active_parameters"]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", str(tmp_path / "no.json")]) == 1
    assert capsys.readouterr().err.startswith(f"seedance: {tmp_path}/no.json: cannot be read: No such file")
    with pytest.raises(SystemExit) as caught:
        main(["count", "x.json", "--seq", "0"])
    assert caught.value.code == 2
    assert "expected a whole number of 1 or more, found '0'" in capsys.readouterr().err


def test_amounts_for_people() -> None:
    assert scaled(0, "B") == "0 B"
    assert scaled(999, "B") == "999 B"
    assert scaled(140_550_657_277_952, "FLOP") == "140.6 TFLOP"
    assert scaled(131_072, "B") == "131.1 kB"
    assert scaled(999_999, "B") == "1.00 MB"
    assert scaled(10, "FLOP", 4) == "2.50 FLOP"

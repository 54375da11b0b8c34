"""Small models of many architectures with an input each: what counters are compared on. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

Inputs = dict[str, torch.Tensor]

IDS = torch.arange(24).reshape(2, 12) % 64
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GROUPED = TEXT | {"num_key_value_heads": 2}
VISION = {**{k: TEXT[k] for k in list(TEXT)[:-1]}, "image_size": 32, "patch_size": 8}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
}


@dataclass(frozen=True)
class Architecture:
    """A model and what it is given.

    Args:
        make: makes the model.
        inputs: makes its arguments.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def text() -> Inputs:
    """Token ids."""
    return {"input_ids": IDS}


def pairs() -> Inputs:
    """Token ids of two sides."""
    return {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}


def images() -> Inputs:
    """Two pictures of 32 x 32."""
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _hf(model: str, config: str, inputs: Callable[[], Inputs], **sizes: Any) -> Architecture:
    def make() -> nn.Module:
        described = getattr(hf, config)(**sizes)
        described._attn_implementation = "eager"
        made = getattr(hf, model)(described)
        if getattr(made, "set_experts_implementation", None) and "num_experts_per_tok" in dir(described):
            made.set_experts_implementation("eager")
        return made.eval()

    return Architecture(make, inputs)


class Recurrent(nn.Module):
    """A language model of gated recurrent units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(64, 32), nn.GRU(32, 32, num_layers=2, bidirectional=True)
        self.head = nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.cells(self.embed(input_ids))[0])}


class UNet(nn.Module):
    """Convolutions down and up, with a bridge."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(16, 3, 2, stride=2)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.down(pixel_values)
        return {"image": self.up(torch.cat([low, self.middle(low)], 1))}


class Video(nn.Module):
    """Convolutions over time and space, and a product by indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv3d(3, 4, 3), nn.Parameter(torch.randn(4, 4))

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        pooled = self.conv(frames).mean((2, 3, 4))
        return {"logits": torch.einsum("bi,ij->bj", pooled, self.mix)}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _hf("LlamaForCausalLM", "LlamaConfig", text, **GROUPED),
    "mistral": _hf("MistralForCausalLM", "MistralConfig", text, **GROUPED, sliding_window=4),
    "qwen2": _hf("Qwen2ForCausalLM", "Qwen2Config", text, **GROUPED),
    "qwen3": _hf("Qwen3ForCausalLM", "Qwen3Config", text, **GROUPED, head_dim=8),
    "gemma2": _hf("Gemma2ForCausalLM", "Gemma2Config", text, **GROUPED, head_dim=8),
    "phi3": _hf("Phi3ForCausalLM", "Phi3Config", text, **GROUPED, pad_token_id=0),
    "gpt2": _hf("GPT2LMHeadModel", "GPT2Config", text, n_embd=32, n_layer=2, n_head=4, vocab_size=64),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", text, **TEXT),
    "opt": _hf(
        "OPTForCausalLM",
        "OPTConfig",
        text,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        word_embed_proj_dim=32,
    ),
    "bloom": _hf("BloomForCausalLM", "BloomConfig", text, hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
    "falcon": _hf("FalconForCausalLM", "FalconConfig", text, **{k: v for k, v in TEXT.items() if k[0] != "i"}),
    "mixtral": _hf("MixtralForCausalLM", "MixtralConfig", text, **GROUPED, num_local_experts=4),
    "qwen3_moe": _hf(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        text,
        **GROUPED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "deepseek_v3": _hf(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        text,
        **TEXT,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "mamba": _hf(
        "MambaForCausalLM", "MambaConfig", text, hidden_size=32, state_size=4, num_hidden_layers=1, vocab_size=64
    ),
    "mamba2": _hf(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        text,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=1,
        vocab_size=64,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    "bert": _hf("BertForMaskedLM", "BertConfig", text, **TEXT),
    "distilbert": _hf(
        "DistilBertModel", "DistilBertConfig", text, dim=32, hidden_dim=64, n_layers=2, n_heads=4, vocab_size=64
    ),
    "albert": _hf("AlbertModel", "AlbertConfig", text, **TEXT, embedding_size=16),
    "electra": _hf("ElectraModel", "ElectraConfig", text, **TEXT, embedding_size=16),
    "deberta": _hf("DebertaV2Model", "DebertaV2Config", text, **TEXT),
    "xlnet": _hf("XLNetModel", "XLNetConfig", text, d_model=32, n_layer=1, n_head=4, d_inner=64, vocab_size=64),
    "t5": _hf(
        "T5ForConditionalGeneration",
        "T5Config",
        pairs,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
    ),
    "bart": _hf("BartModel", "BartConfig", pairs, **SEQ2SEQ),
    "whisper": _hf(
        "WhisperModel",
        "WhisperConfig",
        lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": IDS[:, :5]},
        **SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "wav2vec2": _hf(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        lambda: {"input_values": torch.randn(2, 1600)},
        **{**TEXT, "num_hidden_layers": 1},
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer",
    ),
    "vit": _hf("ViTModel", "ViTConfig", images, **VISION),
    "swin": _hf(
        "SwinModel",
        "SwinConfig",
        images,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "clip": _hf(
        "CLIPModel",
        "CLIPConfig",
        lambda: text() | images(),
        text_config=TEXT | {"projection_dim": 16},
        vision_config=VISION,
        projection_dim=16,
    ),
    "resnet": _hf(
        "ResNetForImageClassification", "ResNetConfig", images, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "regnet": _hf(
        "RegNetModel", "RegNetConfig", images, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4
    ),
    "convnext": _hf(
        "ConvNextModel", "ConvNextConfig", images, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32
    ),
    "mobilenet_v2": _hf("MobileNetV2Model", "MobileNetV2Config", images, image_size=32),
    "segformer": _hf(
        "SegformerModel",
        "SegformerConfig",
        images,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    "gru": Architecture(Recurrent, text),
    "unet": Architecture(UNet, images),
    "video": Architecture(Video, lambda: {"frames": torch.randn(2, 3, 5, 8, 8)}),
}
"""Every architecture by name; attention as two matrix products, experts one by one, in evaluation mode."""


def outputs(out: Any) -> torch.Tensor:
    """The sum of all that an output's gradient can come from."""
    found = out.values() if isinstance(out, dict) else [out]
    total = torch.zeros(())
    for one in found:
        if isinstance(one, torch.Tensor) and one.requires_grad:
            total = total + one.float().sum()
    return total


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without what transformers has to say about small models."""
    level = hf.utils.logging.get_verbosity()
    hf.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        hf.utils.logging.set_verbosity(level)

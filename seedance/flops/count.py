"""Counts a model that is described by a configuration file of transformers, without weights and without memory for them.

The model is built on the meta device and run there, so that what is counted is the model's own code: prefill, decoding at
a context, a training step. Code that comes with a configuration is never run. Imports torch and transformers when it is
used.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedance.errors import CountError
from seedance.flops.profile import RECOMPUTE, OpCount, Profile
from seedance.flops.report import ModelCount, Work

if TYPE_CHECKING:
    import torch

KINDS = ("prefill", "decode", "train")
"""Kinds of work of a language model. Others have `forward` and `train`."""

_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DEFAULT_TOKENS = 2048
_LONGEST = ("max_position_embeddings", "max_target_positions", "n_positions")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_selected_experts")
_RUN_IT = "Run the model with data under seedance.flops.FlopCounter"
_LOOK = "Look at its values, or try another release of transformers"
_LEFT_OUT = ("auto_map", "quantization_config", "return_dict", "torchscript")
"""Entries that bring code of their own, change what weights are packed in, or only what a model returns."""
_ADAM_BYTES = 16
"""Two moments of 4 bytes for each parameter, read and written."""


@dataclass(frozen=True)
class Sizes:
    """How much of a model is run.

    Args:
        batch: sequences or samples at once.
        seq: tokens of a sequence in prefill and training; None: 2,048, or what the model takes at most.
        context: keys that a decoded token sees, itself among them; None: as `seq`.
        dtype: fp64, fp32, fp16 or bf16; None: that of the configuration, else bf16.
        fused: attention by a fused kernel, which computes the scores again in the backward.
        checkpointing: each block's forward is run again in the backward.
    """

    batch: int = 1
    seq: int | None = None
    context: int | None = None
    dtype: str | None = None
    fused: bool = True
    checkpointing: bool = False


def count_config(path: str | Path, sizes: Sizes | None = None, kinds: tuple[str, ...] = ()) -> ModelCount:
    """Count a model that a configuration file describes.

    Args:
        path: a `config.json`, or the folder of one.
        sizes: how much is run.
        kinds: kinds of work, of `KINDS`; none: all that the model has.

    Raises:
        CountError: no such file, not a configuration that transformers knows, or a model that needs data to run.
    """
    sizes = sizes or Sizes()
    file, described = read_config(path)
    with _quiet():
        model = _Model(file, described, sizes)
        with model.refused("cannot be counted", _LOOK):
            return model.count(kinds)


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """A configuration file and its content.

    Raises:
        CountError: it cannot be read, is no JSON object, or names no kind of model.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _bad(file, f"cannot be read: {error.strerror}", "Give a config.json, or the folder of one") from error
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"is no JSON: {error}", "Give the config.json that comes with a model") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise _bad(file, "names no model_type", "Expected the config.json of a transformers model")
    return file, found


def _bad(file: Path, what: str, instead: str) -> CountError:
    return CountError(f"{file}: {what.rstrip('.')}. {instead}.", path=str(file), reason=what)


class _Model:
    """A model on the meta device, and the sizes it is run at."""

    def __init__(self, file: Path, described: dict[str, Any], sizes: Sizes) -> None:
        from seedance.flops import abstract_attention

        abstract_attention.install()
        self.file, self.sizes = file, sizes
        self.notes: list[str] = []
        self.config = self._configuration(described)
        self.dtype = self._dtype(described)
        with self.refused("has no model class"):
            self.kind = self._class(described)
        self.is_eager = False
        self.module = self._built(abstract_attention.FUSED if sizes.fused else abstract_attention.UNFUSED)
        if hasattr(self.module, "set_experts_implementation") and self._number(_EXPERTS):
            with suppress(ValueError):  # a model whose experts are one product as they are
                self.module.set_experts_implementation("grouped_mm")
        self.parameters = list(inspect.signature(self.module.forward).parameters)
        self.cached: dict[int, int] = {0: 0}
        self.text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.is_decoder = self._is_causal() and not self.config.is_encoder_decoder
        limits = (getattr(self.text, name, None) for name in _LONGEST)
        longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
        self.seq = sizes.seq or min(longest or _DEFAULT_TOKENS, _DEFAULT_TOKENS)
        self.context = sizes.context or self.seq
        if longest is not None and longest < max(self.seq, self.context):
            self.notes.append(f"The model is made for at most {longest:,} positions.")

    # --- building ---------------------------------------------------------------------------------------------------

    def _configuration(self, described: dict[str, Any]) -> Any:
        from transformers import CONFIG_MAPPING

        name = described["model_type"]
        if name not in CONFIG_MAPPING:
            own = " Code that comes with a configuration is not run." if "auto_map" in described else ""
            raise _bad(
                self.file, f"model_type {name!r} is not one that this transformers knows", f"Update it.{own}"[:-1]
            )
        content = {key: value for key, value in described.items() if key not in _LEFT_OUT}
        packed = described.get("quantization_config")
        if packed is not None:
            method = (packed.get("quant_method") if isinstance(packed, Mapping) else None) or "of an unknown kind"
            self.notes.append(f"Quantisation ({method}) is left out: bytes are those of the dtype above.")
        with self.refused("is no valid configuration"):
            return CONFIG_MAPPING[name].from_dict(content)

    def _dtype(self, described: dict[str, Any]) -> str:
        named = self.sizes.dtype or str(described.get("dtype") or described.get("torch_dtype") or "bfloat16")
        short = {long: short for short, long in _DTYPES.items()}
        found = named if named in _DTYPES else short.get(named)
        if found is None:
            raise _bad(self.file, f"dtype {named!r} is not one to compute in", f"Expected one of {', '.join(_DTYPES)}")
        return found

    def _class(self, described: dict[str, Any]) -> Any:
        import transformers

        named = described.get("architectures")
        for name in named if isinstance(named, list) else (named,):
            found = getattr(transformers, str(name), None)
            if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
                return found
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
            if type(self.config) in auto._model_mapping:
                found = auto._model_mapping[type(self.config)]
                return found[0] if isinstance(found, list | tuple) else found
        raise _bad(self.file, f"no model class for {described['model_type']!r}", "Name one under architectures")

    def _built(self, attention: str) -> Any:
        import torch

        dtype = getattr(torch, _DTYPES[self.dtype])
        with self.refused("cannot be built"), torch.device("meta"):
            try:
                return self.kind._from_config(self.config, attn_implementation=attention, dtype=dtype)
            except (KeyError, ValueError):  # a model that knows its own kinds of attention only
                self.is_eager = True
                return self.kind._from_config(self.config, attn_implementation="eager", dtype=dtype)

    def _is_causal(self) -> bool:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

        classes = {name for found in NAMES.values() for name in ([found] if isinstance(found, str) else found)}
        return self.kind.__name__ in classes and self.module.main_input_name == "input_ids"

    def _number(self, names: tuple[str, ...]) -> int | None:
        config = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    @contextmanager
    def refused(self, what: str, instead: str = _LOOK) -> Iterator[None]:
        """Turn whatever transformers raises into a sentence."""
        try:
            yield
        except CountError:
            raise
        except Exception as error:
            line = " ".join(str(error).split())[:200]  # the name of a field comes first, what is wrong with it after
            raise _bad(self.file, f"{what}: {type(error).__name__}: {line}", instead) from error

    # --- running ----------------------------------------------------------------------------------------------------

    def count(self, kinds: tuple[str, ...]) -> ModelCount:
        """Run what is asked for."""
        possible = KINDS if self.is_decoder else ("forward", "train")
        wanted = kinds or possible
        missing = [kind for kind in wanted if kind not in possible]
        if missing:
            raise _bad(self.file, f"{self.kind.__name__} has no {', '.join(missing)}", f"It has {', '.join(possible)}")
        used = self._used_in_products()
        profiles: list[tuple[str, Profile, int, int]] = []
        for kind in possible:
            if kind in wanted:
                try:
                    profiles += getattr(self, f"_{kind}")()
                except CountError as error:
                    if kinds or not profiles:
                        raise
                    self.notes.append(f"Without {kind}: {error}")
        parameters = list(self.module.parameters())
        growth = self._cache_bytes(2) - self._cache_bytes(1) if self.is_decoder else 0
        attends = any(op.op == "attention" for _, profile, *_ in profiles for op in profile.ops)
        if self.is_decoder and not attends and getattr(self.text, "num_attention_heads", None):
            self.notes.append("This model computes attention in its own way: whole scores are counted everywhere.")
        others = [kind for kind in ("vision", "audio") if getattr(self.config, f"{kind}_config", None) is not None]
        if others and self.module.main_input_name == "input_ids" and not hasattr(self.module, "get_text_features"):
            self.notes.append(f"Text alone is counted: its {' and '.join(others)} part is left out.")
        names = {one.name for _, profile, *_ in profiles for one in profile.uncounted}
        return ModelCount(
            model=self.kind.__name__,
            config=str(self.file),
            dtype=self.dtype,
            batch=self.sizes.batch,
            unit="token" if self.module.main_input_name == "input_ids" else "sample",
            parameters=sum(one.numel() for one in parameters),
            matmul_parameters=sum(one.numel() for one in parameters if id(one) in used),
            active_parameters=self._active(tokens=1),
            parameter_bytes=sum(one.nbytes for one in parameters),
            cache_bytes_per_token=growth // self.sizes.batch or None,
            work=tuple(_work(name, profile, tokens, moved) for name, profile, tokens, moved in profiles),
            uncounted=tuple(sorted(names)),
            notes=tuple(self.notes),
        )

    def _prefill(self) -> Iterator[tuple[str, Profile, int, int]]:
        tokens = self.sizes.batch * self.seq
        moved = self._weights(tokens) + self._cache_bytes(self.seq)
        if "logits_to_keep" in self.parameters:
            yield "prefill, last logit", self._counted(self._ids(self.seq) | {"logits_to_keep": 1}), tokens, moved
        yield "prefill, every logit", self._counted(self._ids(self.seq)), tokens, moved

    def _decode(self) -> Iterator[tuple[str, Profile, int, int]]:
        cache = self._cache(self.context - 1)
        name = "cache" if "cache" in self.parameters else "past_key_values"
        profile = self._counted(self._ids(1, self.context - 1) | ({name: cache, "use_cache": True} if cache else {}))
        moved = self._weights(self.sizes.batch) + self._cache_bytes(self.context - 1) + self._cache_bytes(1)
        yield f"decode at context {self.context:,}", profile, self.sizes.batch, moved

    def _forward(self) -> Iterator[tuple[str, Profile, int, int]]:
        inputs, tokens = self._inputs()
        yield "forward", self._counted(inputs), tokens, self._weights(tokens)

    def _train(self) -> Iterator[tuple[str, Profile, int, int]]:
        inputs, tokens = self._inputs()
        passes = 2
        if self.sizes.checkpointing:
            with self.refused("cannot be checkpointed"):
                self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            passes = 3
        profile = self._counted(inputs, training=True)
        every = [one for one in self.module.parameters() if one.requires_grad]
        written = sum(one.nbytes for one in every)
        # The optimizer reads gradients and parameters, and writes parameters; its moments both ways.
        update = sum(3 * one.nbytes + _ADAM_BYTES * one.numel() for one in every)
        moved = passes * self._weights(tokens) + written + update
        optimizer = OpCount("(optimizer)", -1, "optimizer", "optim", self.dtype, "", 1, 0, 0, 0, update, 0)
        yield "train step with AdamW", profile.plus(Profile((optimizer,))), tokens, moved

    def _counted(self, inputs: Mapping[str, Any], *, training: bool = False) -> Profile:
        import torch

        from seedance.flops.counter import FlopCounter
        from seedance.flops.fake import floating

        self.module.train(training)
        with (
            self.refused("needs data to run", _RUN_IT),
            torch.set_grad_enabled(training),
            FlopCounter(self.module) as counter,
        ):
            out = self.module(**inputs)
            if training:
                roots = [one for one in floating(out) if one.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
        for parameter in self.module.parameters():
            parameter.grad = None
        return counter.profile

    def _used_in_products(self) -> set[int]:
        """Parameters, by id, that an operator with FLOPs reads: by their storage, which views of them share."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        from seedance.flops.operation import Operation

        storages: set[int] = set()

        class Reading(TorchDispatchMode):  # type: ignore[misc]
            supports_higher_order_operators = True

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                what = Operation(func)
                if what.bears_flops:
                    inputs, _ = what.tensors(args, kwargs or {}, None)
                    storages.update(one.untyped_storage()._cdata for one in inputs)
                return func(*args, **(kwargs or {}))

        inputs = self._ids(1) if self.is_decoder else self._inputs()[0]
        self.module.eval()
        with self.refused("needs data to run", _RUN_IT), torch.no_grad(), Reading():
            self.module(**inputs)
        matrices = (one for one in self.module.parameters() if one.dim() > 1)
        return {id(one) for one in matrices if one.untyped_storage()._cdata in storages}

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _ids(self, seq: int, before: int = 0) -> dict[str, Any]:
        inputs = {"input_ids": self._zeros(self.sizes.batch, seq)}
        if "position_ids" in self.parameters:
            inputs["position_ids"] = self._zeros(self.sizes.batch, seq)
        if self.is_eager and self.is_decoder:
            keys = seq + before
            inputs["attention_mask"] = self._values(self.sizes.batch, 1, seq, keys)
        if self.is_decoder and "use_cache" in self.parameters:
            return inputs | {"use_cache": False}
        return inputs

    def _inputs(self) -> tuple[dict[str, Any], int]:
        """Inputs of one forward, and how many tokens (or samples) they are."""
        batch, config = self.sizes.batch, self.config
        name = self.module.main_input_name
        if name == "input_ids":
            inputs = self._ids(self.seq)
            if self.config.is_encoder_decoder:
                inputs = {"input_ids": inputs["input_ids"], "decoder_input_ids": self._zeros(batch, self.seq)}
            if hasattr(self.module, "get_text_features"):  # two towers, compared with each other
                inputs["pixel_values"] = self._image()
            return inputs, batch * self.seq
        if name == "pixel_values":
            return {name: self._image()}, batch
        if name == "input_features":
            frames = 2 * getattr(config, "max_source_positions", 1500)
            inputs = {name: self._values(batch, getattr(config, "num_mel_bins", 80), frames)}
            return inputs | {"decoder_input_ids": self._zeros(batch, self.seq)}, batch * self.seq
        if name == "input_values":
            return {name: self._values(batch, 16_000)}, batch
        raise _bad(self.file, f"takes {name}, and its sizes are not in the configuration", "Count it with FlopCounter")

    def _image(self) -> torch.Tensor:
        vision = getattr(self.config, "vision_config", self.config)
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return self._values(self.sizes.batch, getattr(vision, "num_channels", 3), height, width)

    def _zeros(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=torch.long, device="meta")

    def _values(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=self.module.dtype, device="meta")

    def _cache(self, tokens: int) -> Any:
        """A cache that has seen so many tokens; None for none."""
        import torch
        from transformers import DynamicCache

        from seedance.flops.fake import floating

        if not tokens:
            return None
        cache = DynamicCache(config=self.config)
        name = "cache" if "cache" in self.parameters else "past_key_values"
        self.module.eval()
        with self.refused("has a cache of its own kind"), torch.no_grad():
            self.module(**self._ids(tokens) | {name: cache, "use_cache": True})
        # Keys and values grow with the tokens; states of recurrent layers, several in one, have one size.
        self.cached[tokens] = sum(held.nbytes for layer in cache.layers for held in floating(vars(layer)))
        return cache

    def _cache_bytes(self, tokens: int) -> int:
        if tokens not in self.cached:
            self._cache(tokens)
        return self.cached[tokens]

    def _active(self, tokens: int) -> int:
        """Parameters that so many tokens meet: of the experts as many as they choose, all of the rest."""
        return sum(one.numel() * chosen // of for one, chosen, of in self._shares(tokens))

    def _weights(self, tokens: int) -> int:
        """Bytes of weights that so many tokens read once: as if they chose different experts, and rows of embeddings."""
        import torch

        tables = {id(one.weight): one for one in self.module.modules() if isinstance(one, torch.nn.Embedding)}
        tied = {id(one.weight) for one in self.module.modules() if isinstance(one, torch.nn.Linear)}
        total = 0
        for one, chosen, of in self._shares(tokens):
            if id(one) in tables and id(one) not in tied:
                total += min(tokens, one.shape[0]) * one[0].nbytes
            else:
                total += one.nbytes * chosen // of
        return total

    def _shares(self, tokens: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        experts, chosen = self._number(_EXPERTS), self._number(_CHOSEN)
        for name, parameter in self.module.named_parameters():
            if experts and chosen and ".experts." in f".{name}":
                yield parameter, min(experts, chosen * tokens), experts
            else:
                yield parameter, 1, 1


def _work(name: str, profile: Profile, tokens: int, moved: int) -> Work:
    return Work(
        name=name,
        units=tokens,
        flops=profile.flops,
        flops_full=profile.flops_full,
        hw_flops=profile.hw_flops,
        forward_flops=sum(op.flops for op in profile.ops if op.pass_ == "fwd"),
        recompute_flops=sum(op.hw_flops for op in profile.ops if op.pass_ == RECOMPUTE),
        weight_bytes=moved,
        operator_bytes=sum(op.bytes_ideal for op in profile.ops),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """What libraries say while a model is built and run helps nobody here."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)

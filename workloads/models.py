"""Model configurations: named models with published sizes, dicts, and Hugging Face's `config.json`.

One reader serves all three: a named model is a table in `workloads/configs/*.toml` with the keys of its `config.json`,
its source and its published size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sim.arguments import explained
from sim.errors import WorkloadError, near
from workloads.families import FAMILIES, Config
from workloads.keys import MOST_EXPERTS, Reader
from workloads.megatron import megatron
from workloads.other_models import (
    HARMLESS,
    LONGEST,
    REFUSED,
    NotBuiltIn,
    refuse_other_models,
    refuse_unknown,
    refuse_unused,
    shown,
)

MODEL_TYPES = {
    # model_type of a config.json: family, which decides its ops
    "gpt2": "gpt2",
    "bert": "bert",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "mixtral": "mixtral",
    "deepseek": "mixtral",
    "nemotron": "nemotron",
    "megatron": "megatron",
    "gpt": "gpt",
}
"""Supported `model_type`s. `megatron` has the arguments of Megatron-LM as its keys (`workloads.megatron`), `gpt` is
PaddleNLP's (paddlenlp/transformers/gpt)."""

LARGEST_FILE = 64 << 20
"""Bytes of a `config.json` at most; those with a quantised module list have a few hundred thousand."""

ALIASES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
    "activation": ("hidden_act", "activation_function"),
    "tied": ("tie_word_embeddings",),
    "attention_bias": ("attention_bias",),
    "mlp_bias": ("mlp_bias",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "expert_every": ("moe_layer_freq",),
    "token_types": ("type_vocab_size",),
    "embedding_dropout": ("embd_pdrop", "hidden_dropout_prob"),
    "attention_dropout": ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout"),
    "residual_dropout": ("resid_pdrop", "hidden_dropout_prob"),
    "experts_form": ("experts_implementation",),
    "rotary": ("partial_rotary_factor",),
    "joint": ("fuse_attention_qkv",),
}
"""The keys under which different models store the same figure, in the order in which they are tried."""

OUTSIDE = ("architectures", "dtype", "torch_dtype")
"""Keys of a multimodal model as a whole that say nothing of its language model."""

READ = ("model_type", "sliding_window", "use_sliding_window", "layer_types", "published_parameters", "source")
"""The keys that are read under one name alone."""

_ALL = ("hidden", "layers", "heads", "ffn", "vocabulary", "positions", "activation", "tied")
_DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")
_LLAMA = (*_ALL, "head", "kv_heads", "attention_dropout", "attention_bias", "mlp_bias")
_EXPERTS = ("experts_per_token", "expert_ffn", "shared_experts", "dense_layers", "expert_every", "experts_form")

FIELDS: Mapping[str, tuple[str, ...]] = {
    "gpt2": (*_ALL, *_DROPOUTS, "attention_bias", "mlp_bias", "experts"),
    "bert": (*_ALL, *_DROPOUTS, "attention_bias", "mlp_bias", "experts", "token_types"),
    "llama": (*_LLAMA, "experts"),
    "mixtral": (*_LLAMA, "experts", *_EXPERTS),
    "nemotron": (*_LLAMA, "experts", "rotary"),
    "gpt": (*_ALL, *_DROPOUTS, "attention_bias", "mlp_bias", "experts", "token_types", "joint"),
}
"""The fields that a family has; `refuse_other_models` says which of their values it does not."""

FORMS = {"grouped": "grouped", "grouped_mm": "grouped", "loop": "loop", "eager": "loop"}

HUB_NAMES = {
    "gpt2": "gpt2-small",
    "openai-community/gpt2": "gpt2-small",
    "bert-base-uncased": "bert-base",
    "bert-large-uncased": "bert-large",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-70b-hf": "llama2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Llama-3.1-405B": "llama3.1-405b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
}
"""Names on model hubs, for models that have another name here."""


def model_names() -> tuple[str, ...]:
    """Names of the shipped models, sorted."""
    return tuple(sorted(_tables()))


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    import tomllib  # these two are needed for named models only
    from importlib.resources import files

    tables: dict[str, Mapping[str, Any]] = {}
    for file in sorted((files("workloads") / "configs").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tables.update(tomllib.loads(file.read_text(encoding="utf-8")))
    return tables


class HasDict(Protocol):
    """An object that returns its keys as a dict, like Hugging Face's configuration classes."""

    def to_dict(self) -> dict[str, Any]:
        """The keys of its `config.json`."""


@explained
def read_config(config: str | Path | Mapping[str, Any] | HasDict) -> Config:
    """Read a model's configuration.

    config: name of a model, path of a `config.json`, a dict with Hugging Face's keys, or a configuration object. A
        string is a name unless it ends in .json or is an existing path; a folder means the `config.json` in it.

    Raises WorkloadError for an unknown name, a missing or impossible key, or a file that does not exist or does not
    contain a JSON object, and NotBuiltIn for a model that no family here has.
    """
    if isinstance(config, (str, Path)) and config_file(config) is None:
        return _named(HUB_NAMES.get(str(config), str(config)))
    return parse_config(*read_values(config))


@cache
def _named(name: str) -> Config:
    """The configuration of a model that ships with the package."""
    return _Reader(_tables()[name], name, own=True).config(name)


def read_values(config: str | Path | Mapping[str, Any] | HasDict) -> tuple[Mapping[str, Any], str, str]:
    """The keys of a configuration, the model's name, and how errors refer to it.

    Raises WorkloadError as `read_config` does, except for what the keys say.
    """
    if not isinstance(config, (str, Path, Mapping)):
        if not hasattr(config, "to_dict"):
            raise WorkloadError(f"model: expected a name, a path, a dict or a configuration, not {shown(config)}")
        config = config.to_dict()
    if isinstance(config, Mapping):
        names = (config.get(key) for key in ("name", "_name_or_path", "model_type"))
        name = next((name[:LONGEST] for name in names if name and isinstance(name, str)), "dict")
        return config, name, name
    text = HUB_NAMES.get(str(config), str(config))
    path = config_file(config)
    if path is None:
        return _tables()[text], text, text
    _check_kind(path)
    if not (isinstance(config, Path) or text.endswith(".json") or path.exists()):
        known = [*_tables(), *HUB_NAMES]
        if {*text.split(",")} & {*known}:
            raise WorkloadError(f"model {text!r}: expected one; `tiersim sweep` compares models")
        hub = "; of any other model give the path of its config.json" if "/" in text else ""
        raise WorkloadError(f"model {text!r} is unknown{near(text, known)}{hub}")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe, which may have no end
            raise WorkloadError(f"{path}: is not a regular file")
        if path.stat().st_size > LARGEST_FILE:
            raise WorkloadError(f"{path}: has more than {LARGEST_FILE:,} bytes")
        values = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_each_once)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})"
        ) from error
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}: line {error.lineno}: not valid JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise WorkloadError(f"{path}: no valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise WorkloadError(f"{path}: needs a JSON object, has {type(values).__name__}")
    name = path.parent.name if path.name == "config.json" else path.stem
    return values, name or path.stem, str(path)


OTHER_FILES: Mapping[str, str] = {
    ".py": "a Python file needs the name of its step after it, as in {path}:step",
    ".jsonl": "a trace is given as --trace {path}, and not as a model",
    ".gz": "a trace is given as --trace {path}, and not as a model",
    **dict.fromkeys(
        (".safetensors", ".pt", ".pth", ".bin", ".gguf", ".onnx"),
        "holds weights; a model is given by the config.json that belongs to it",
    ),
}
"""What people give in place of a configuration, by the ending of its name, and what to give instead."""


def _check_kind(path: Path) -> None:
    name = str(path).rstrip(":")  # "step.py:", of which the step was forgotten
    if said := OTHER_FILES.get(Path(name).suffix.lower()):
        raise WorkloadError(f"{name}: {said.format(path=name)}")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a key that it has twice: which value counts differs among readers."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(key)} stands there twice")
    return found


def config_file(config: str | Path) -> Path | None:
    """The `config.json` that a text or path refers to, whether it exists or not; None for a shipped model's name."""
    if isinstance(config, str) and HUB_NAMES.get(config, config) in _tables():
        return None
    path = Path(config)
    return path / "config.json" if path.is_dir() else path


def parse_config(values: Mapping[str, Any], name: str, where: str = "") -> Config:
    """A configuration from the keys of a `config.json`.

    values: the keys.
    name: of the model.
    where: how errors refer to the file, by default the name.
    """
    return _Reader(values, where or name).config(name)


class _Reader(Reader):
    """Looks up keys of a `config.json` under all their aliases."""

    def __init__(self, values: Mapping[str, Any], where: str, own: bool = False) -> None:
        """own: a table that ships with the package, which has no keys but those that are read."""
        text = values.get("text_config")  # multimodal models keep the language model's figures there
        if isinstance(text, Mapping):
            values = {**{key: value for key, value in values.items() if key not in OUTSIDE}, **text}
        super().__init__(values, where, ALIASES)
        self.own = own

    def config(self, name: str) -> Config:
        kind = self.values.get("model_type")
        supported = ", ".join(sorted(MODEL_TYPES))
        if kind is None:
            raise WorkloadError(f"{self.where}: key 'model_type' is missing (supported: {supported})")
        if not isinstance(kind, str) or kind not in MODEL_TYPES:
            raise NotBuiltIn(f"{self.where}: model_type {shown(kind, 40)} is not supported (supported: {supported})")
        family = MODEL_TYPES[kind]
        if family == "megatron":
            return megatron(self.values, name, self.where)
        read = [*READ, *(key for keys in ALIASES.values() for key in keys)]
        beside = [*REFUSED, *(() if self.own else HARMLESS)]
        refuse_unknown(self.values, read, kind, self.where, beside=beside, own=self.own)
        refuse_other_models(self.values, kind, family, self.where)
        has, fields = FAMILIES[family], FIELDS[family]
        hidden = self.size("hidden")
        self.refuse_unused(kind, family, self.size("heads"), hidden)
        _, heads, kv_heads, head = self.heads(grouped=has.grouped)
        ffn = self.size("ffn", has.ffn * hidden or None)
        experts = self.size("experts") if family == "mixtral" else 0
        layers = self.size("layers")
        if experts * layers > MOST_EXPERTS:
            raise WorkloadError(
                f"{self.where}: {self.key('experts')}: {experts} in each of {layers} layers are more than "
                f"{MOST_EXPERTS:,}, up to which models are built"
            )
        chosen = self.size("experts_per_token") if experts else 0
        if chosen > experts:
            raise WorkloadError(f"{self.where}: {self.key('experts_per_token')} {chosen} of {experts} experts")
        return Config(
            name=name,
            family=family,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            ffn=ffn,
            vocabulary=self.size("vocabulary"),
            positions=self.size("positions", has.positions or None),
            activation=self.activation(has.activation),
            tied=self.flag("tied", has.tied),
            biases=self.biases(kind, has.biased),
            embedding_dropout=self.share("embedding_dropout", has.dropout) if has.drops_all else 0.0,
            attention_dropout=self.share("attention_dropout", has.dropout),
            residual_dropout=self.share("residual_dropout", has.dropout) if has.drops_all else 0.0,
            token_types=self.size("token_types", 2) if family == "bert" else 0,
            experts=experts,
            experts_per_token=chosen,
            expert_ffn=self.size("expert_ffn", ffn) if experts else 0,
            shared_experts=self.size("shared_experts", 0, least=0) if experts else 0,
            dense_layers=self.size("dense_layers", 0, least=0) if experts else 0,
            expert_every=self.size("expert_every", 1) if experts else 1,
            experts_form=self.choice("experts_form", FORMS, "grouped"),
            window=self.window(kind),
            next_sentence=self.next_sentence(),
            published=self.published(),
            source=self.source(),
            norm=has.norm,
            gated=has.gated,
            learned=has.learned,
            rotary=self.rotary(has.rotary, head) if "rotary" in fields else has.rotary,
            joint=self.flag("joint", has.joint) if "joint" in fields else has.joint,
        )

    def refuse_unused(self, kind: str, family: str, heads: int, hidden: int) -> None:
        """Raise WorkloadError for keys of fields that the family does not have."""
        neutral: dict[str, tuple[Any, ...]] = {
            "kv_heads": (heads,),
            "head": (hidden / heads,),
            "experts_per_token": (0, 1),
            "rotary": (1.0,),
            **dict.fromkeys((*_DROPOUTS, "shared_experts", "dense_layers", "token_types"), (0,)),
        }
        names = {key for field in FIELDS[family] for key in ALIASES[field]}
        unused = {
            key: neutral.get(field, ())
            for field, keys in ALIASES.items()
            if field not in FIELDS[family]
            for key in keys
            if key not in names
        }
        refuse_unused(self.values, unused, kind, self.where)

    def next_sentence(self) -> bool:
        """Whether the classes that the file names, if any, have more than the head for masked tokens."""
        classes = self.values.get("architectures") or ()
        names = classes if isinstance(classes, (list, tuple)) else [classes]
        return not names or not all(isinstance(name, str) and name.endswith("ForMaskedLM") for name in names)

    def window(self, kind: str) -> int:
        """Tokens of a sliding window, 0 where there is none or it is disabled."""
        on = self.values.get("use_sliding_window", kind != "qwen2")
        window = self.values.get("sliding_window")
        if window is None or not on:
            return 0
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise WorkloadError(f"{self.where}: sliding_window: needs an integer of at least 1, has {shown(window)}")
        return window

    def rotary(self, default: float, head: int) -> float:
        """The share of a head that is rotated; files of one release have it among other keys of rotary positions."""
        for key in ("rope_parameters", "rope_scaling"):
            inner = self.values.get(key)
            if isinstance(inner, Mapping) and inner.get("partial_rotary_factor") is not None:
                return Reader(inner, f"{self.where}: {key}", self.aliases).part("rotary", default, head)
        return self.part("rotary", default, head)

    def biases(self, kind: str, biased: bool) -> frozenset[str]:
        if biased:
            return frozenset(("qkv", "proj", "mlp"))
        if kind == "qwen2":  # its class has biases there and no key for them
            return frozenset(("qkv",))
        attention = ("qkv", "proj") if self.flag("attention_bias", False) else ()
        return frozenset((*attention, *(("mlp",) if self.flag("mlp_bias", False) else ())))

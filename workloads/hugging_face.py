"""Training steps of the models that `transformers` knows, captured from a `config.json` with random weights.

What the from-config families build themselves (`workloads.models`) is fast and needs no library. For any other
`model_type`, and for keys that those families don't model, the library builds the module without allocating it, and a
default step of it is captured: its own loss, on a batch without padding. A text model gets `sequence` tokens; an image
model images of its size; a speech model its longest recording. A trace says in `meta["assumed"]` what was chosen.

Needs the extra `huggingface`: pip install 'tiersim[huggingface]'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from fnmatch import fnmatchcase
from functools import wraps
from importlib import import_module
from io import StringIO
from types import MethodType
from typing import Any

from sim.errors import WorkloadError, closest, near
from sim.trace.graph import Trace
from workloads.capture import capture, with_facts
from workloads.capturing.selections import Selected
from workloads.other_models import misspelt, shown
from workloads.precision import PRECISIONS

HEADS = (
    # class that builds it, the library's table of its models, kind of its inputs
    ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "speech"),
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "text"),
    ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "text"),
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "text"),
    ("AutoModelForZeroShotImageClassification", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", "pair"),
    ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "image"),
    ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "audio"),
    ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "text"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "text_class"),
    ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "text"),
)
"""What a model can be trained for: the one that `architectures` names, else the first one that it has.

An encoder that can be a decoder, too, is in the tables of both.
"""

REFUSED = ("quantization_config", "quantization")
"""Keys of weights that the library can't build from a configuration."""

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw_foreach": ("AdamW", {"foreach": True}),
    "adamw_fused": ("AdamW", {"fused": True}),
    "adamw_loop": ("AdamW", {"foreach": False}),
    "adafactor": ("Adafactor", {}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
}
"""The optimizers of PyTorch by the names that they have here."""

ATTENTION = ("sdpa", "eager")


def hugging_face(values: Mapping[str, Any], name: str, where: str, **axes: Any) -> Trace:
    """One training iteration of a model that `transformers` builds.

    The arguments are those of `default_step`, which says what is captured.

    Raises WorkloadError without the library, naming the extra, and for what the library can't build or capture.
    """
    arguments, about = default_step(values, name, where, **axes)
    trace = capture(**arguments)
    return with_facts(trace, **{**about, "assumed": {**trace.meta.get("assumed", {}), **about["assumed"]}})


def default_step(
    values: Mapping[str, Any],
    name: str,
    where: str,
    *,
    batch: int = 1,
    sequence: int = 1024,
    precision: str = "fp32",
    attention: str = "sdpa",
    optimizer: str | None = "adamw_foreach",
    dropout: float | None = None,
    micro_batches: int = 1,
    frozen: tuple[str, ...] = (),
    selected: Selected = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A training step of a model that `transformers` builds: arguments of `capture`, and facts for the trace.

    What is assumed of the model becomes known while it is built, and is added to the facts then.

    values: the keys of a `config.json`. name: of the model. where: how errors refer to the file.
    optimizer: as for `workloads.transformer`; None for a step that ends with the gradients.
    frozen: parameters, or parts of the model, that are not trained, by path or pattern.
    selected: as for `workloads.capture`.
    The other arguments are those of `workloads.transformer`; `sequence` is of no use to models of images and speech.

    Raises WorkloadError without the library, naming the extra, and for what the library can't build.
    """
    library = _library(where)
    for axis, value, known in (
        (
            "precision",
            precision,
            [p.name for p in PRECISIONS.values() if not (p.master or p.linear or p.name == "tf32")],
        ),
        ("attention", attention, ATTENTION),
        ("optimizer", optimizer, (None, *OPTIMIZERS)),
    ):
        if value not in known:
            valid = ", ".join(filter(None, known))
            raise WorkloadError(f"{axis} {value!r} is not available for a model that is captured; valid: {valid}")
    assumed: dict[str, int] = {}
    config = _config(library, values, where, assumed)
    auto, kind = _head(library, config, values, where, assumed)
    if dropout is not None:
        _set_dropout(config, dropout)
    types = PRECISIONS[precision]
    inputs = _inputs(config, kind, batch // micro_batches, sequence, where)

    def module() -> Any:
        model = _built(auto, config, attention, types.weight, assumed)
        _check_positions(model, kind, sequence, where)
        _freeze(model, frozen)
        model.train()
        if types.autocast:
            model.forward = MethodType(_under_autocast(type(model).forward, types.compute), model)
        return model

    torch = import_module("torch")
    tokens = batch * sequence if kind in ("text", "text_class") else None
    arguments = {
        "module": module,
        "selected": selected,
        "inputs": {key: _typed(torch, value, types) for key, value in inputs.items()},
        "optimizer": _optimizer(torch, optimizer),
        "name": name,
        "samples": batch,
        "tokens": tokens,
        "micro_batches": micro_batches,
    }
    about = {
        "family": config.model_type,
        "built_by": f"transformers {library.__version__}, {auto.__name__}",
        "batch": batch,
        **({"sequence": sequence} if tokens else {}),
        "precision": precision,
        "attention": attention,
        "optimizer": optimizer,
        "assumed": assumed,
    }
    return arguments, about


def _optimizer(torch: Any, name: str | None) -> Callable[[Any], Any] | None:
    if name is None:
        return None
    kind, arguments = OPTIMIZERS[name]
    return lambda parameters: getattr(torch.optim, kind)(parameters, **arguments)


def library_versions() -> tuple[str, str]:
    """What a capture depends on beside its arguments: the releases of PyTorch and of the library, "" where missing."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    return of("torch"), of("transformers")


def _library(where: str) -> Any:
    try:
        import_module("torch")
        return import_module("transformers")
    except ImportError:
        raise WorkloadError(
            f"{where}: a model of this kind is built by the library transformers: pip install 'tiersim[huggingface]'"
        ) from None


def _config(library: Any, values: Mapping[str, Any], where: str, assumed: dict[str, int]) -> Any:
    """The library's configuration. A key that it does not state may have no effect, and is named."""
    for key in REFUSED:
        if values.get(key):
            raise WorkloadError(f"{where}: {key}: quantised weights can't be built from a configuration")
    given = {key: value for key, value in values.items() if key not in ("model_type", "transformers_version")}
    kind = values.get("model_type")
    known = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    if kind == "megatron":
        raise WorkloadError(f"{where}: model_type 'megatron' is built in, and transformers has no such models")
    if not isinstance(kind, str) or kind not in known:
        hint = near(str(kind), known)
        raise WorkloadError(f"{where}: model_type {shown(kind, 40)} is unknown to transformers too{hint}")
    try:
        default = library.AutoConfig.for_model(kind)
        names = {*vars(default), *default.to_dict(), *default.attribute_map, *dir(default)}
        config = library.AutoConfig.for_model(kind, **given)
    except Exception as error:
        raise WorkloadError(f"{where}: transformers refuses it: {type(error).__name__}: {_line(error)}") from error
    for key in given:
        if key not in names and not str(key).startswith("_"):
            if near_key := misspelt(str(key), names):
                raise WorkloadError(f"{where}: there is no key {key!r} (did you mean {near_key!r}?)")
            assumed[f"key {key!r} is not one of those that the library states, and may have no effect"] = 1
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        assumed["the decoder's first token is that of padding"] = 1
    for part in _parts(config):
        if getattr(part, "use_cache", False):
            part.use_cache = False
            assumed["no cache of keys and values"] = 1
        if getattr(part, "layerdrop", 0):
            part.layerdrop = 0.0
            assumed["no layer is dropped"] = 1
    return config


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for part in vars(config).values():
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            yield from _parts(part)


def _head(library: Any, config: Any, values: Mapping[str, Any], where: str, assumed: dict[str, int]) -> tuple[Any, str]:
    """The class that builds the model, and the kind of its inputs."""
    tables = import_module("transformers.models.auto.modeling_auto")
    has = {}
    for auto, table, kind in HEADS:
        named = getattr(tables, table, {}).get(config.model_type)
        if named:
            has[auto] = ((named,) if isinstance(named, str) else tuple(named), kind)
    asked = values.get("architectures") or ()
    for auto, (classes, kind) in has.items():
        if any(name in classes for name in asked):
            if kind == "text_class" and getattr(config, "pad_token_id", None) is None:
                # without one the library refuses more than one sample; which token it is changes no shape
                config.pad_token_id = 0
                assumed["the token of padding is 0"] = 1
            return getattr(library, auto), kind
    for auto, (classes, kind) in has.items():
        config.architectures = [classes[0]]  # the library needs it to choose among several classes
        if asked or len(has) > 1:
            assumed[f"trained as {auto.removeprefix('AutoModelFor')}"] = 1
        return getattr(library, auto), kind
    raise WorkloadError(
        f"{where}: no default step is known for model_type {config.model_type!r}; capture your own: "
        "tiersim trace capture FILE.py:FUNCTION"
    )


def _built(auto: Any, config: Any, attention: str, dtype: str, assumed: dict[str, int]) -> Any:
    """The module, on the default device. Models that don't have the attention asked for have their own."""
    torch = import_module("torch")
    type_ = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with redirect_stderr(StringIO()):
        try:
            return auto.from_config(config, dtype=type_, attn_implementation=attention)
        except (ValueError, TypeError) as error:
            if "attention" not in str(error) and "attn" not in str(error):
                raise
            assumed[f"attention is the model's own: it has no {attention!r}"] = 1
            return auto.from_config(config, dtype=type_, attn_implementation="eager")


def _under_autocast(forward: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    torch = import_module("torch")

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]):
            return forward(*args, **kwargs)

    return run


def _set_dropout(config: Any, probability: float) -> None:
    for part in _parts(config):
        for key, value in vars(part).items():
            if ("drop" in key or key.endswith("_pdrop")) and isinstance(value, (int, float)) and key != "layerdrop":
                setattr(part, key, probability)


def _freeze(model: Any, frozen: tuple[str, ...]) -> None:
    paths = [path for path, _ in model.named_parameters()]
    for pattern in frozen:
        found = [path for path in paths if any(fnmatchcase(part, pattern) for part in _prefixes(path))]
        if not found:
            raise WorkloadError(f"frozen: no weight or part {pattern!r}{near(pattern, paths)}")
        for path in found:
            model.get_parameter(path).requires_grad_(False)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _check_positions(model: Any, kind: str, sequence: int, where: str) -> None:
    """Fake tensors have no values, so that no lookup beyond a table of positions would fail."""
    if kind not in ("text", "text_class", "pair"):
        return
    embedding = import_module("torch").nn.Embedding
    for path, part in model.named_modules():
        last = path.rpartition(".")[2]
        if isinstance(part, embedding) and ("embed_pos" in last or "position_emb" in last or last == "wpe"):
            count = part.num_embeddings
            if "vision" not in path and sequence > count:
                longer = f"{where}: sequence: {sequence} is longer than the {count} positions of {path!r}"
                raise WorkloadError(f"{longer}{closest(sequence, 1, count)}")


def _inputs(config: Any, kind: str, batch: int, sequence: int, where: str) -> dict[str, Any]:
    """Shapes of a batch by keyword, integers as `("int", shape)`, numbers as `("float", shape)`."""
    ids = ("int", (batch, sequence))
    if kind == "text":
        return {"input_ids": ids, "labels": ids}
    if kind == "text_class":
        return {"input_ids": ids, "labels": ("int", (batch,))}
    if kind == "audio":
        return {"input_values": ("float", (batch, sequence)), "labels": ("int", (batch,))}
    if kind == "speech":
        if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
            raise WorkloadError(f"{where}: no default step is known for speech models of type {config.model_type!r}")
        length = 2 * config.max_source_positions
        return {"input_features": ("float", (batch, config.num_mel_bins, length)), "labels": ids}
    images = getattr(config, "vision_config", config)
    side = getattr(images, "image_size", None) or 224
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    pixels = ("float", (batch, getattr(images, "num_channels", 3), height, width))
    if kind == "image":
        return {"pixel_values": pixels, "labels": ("int", (batch,))}
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def _typed(torch: Any, value: Any, types: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    what, shape = value
    floats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[types.weight]
    return torch.empty(shape, dtype=torch.int64 if what == "int" else floats, device="meta")


def _line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")

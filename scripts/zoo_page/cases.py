"""Which steps are in the zoo: models of five libraries with random weights, and how many blocks each has.

Widths are those of the smaller published members of a family; depths are cut, since all blocks are alike. Steps end
with the gradients, so that the peak is where activations are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

LIBRARIES = ("torch", "transformers", "torchvision", "timm", "diffusers")
Step = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One step.

    library: that builds the model.
    build: makes the arguments of `workloads.capture.capture`, and what was assumed of the model.
    blocks: how many the model has; 0 where it is not a stack of blocks.
    short: small enough for the tests of every change.
    known: why a figure differs from PyTorch's: per figure ("peak", "flops", "recompute") a reason.
    """

    library: str
    build: Callable[[], tuple[Step, dict[str, int]]]
    blocks: int = 0
    short: bool = False
    known: Mapping[str, str] = field(default_factory=dict)


def cases() -> dict[str, Case]:
    """All steps by name."""
    return {**_own(), **_texts(), **_others_of_hugging_face(), **_torchvision(), **_timm(), **_diffusers()}


# ---- transformers --------------------------------------------------------------------------------


def _hf(
    kind: str, *, batch: int = 4, sequence: int = 64, precision: str = "fp32", **config: Any
) -> Callable[[], tuple[Step, dict[str, int]]]:
    def build() -> tuple[Step, dict[str, int]]:
        from workloads.hugging_face import default_step

        values = {"model_type": kind, **config}
        step, about = default_step(
            values, kind, kind, batch=batch, sequence=sequence, precision=precision, optimizer=None
        )
        return step, about["assumed"]

    return build


T5 = (
    "Under checkpoints the library asks for a gradient of the cross attention's bias, which is zero: that bias and its "
    "gradient stay, and a plain step has no gradient of it."
)

DECODER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
}
GATED = {**DECODER, "head_dim": 64}
ENCODER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


SPEECH = {
    "conv_dim": [64] * 7,
    "num_conv_pos_embeddings": 16,
    "apply_spec_augment": False,
    "architectures": ["Wav2Vec2ForSequenceClassification"],
}
WHISPER = {
    "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 1000, "max_source_positions": 300,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _texts() -> dict[str, Case]:
    gpt2 = {"n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 1000}
    local = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
    t5 = {"d_model": 256, "d_ff": 512, "d_kv": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    opt = {"ffn_dim": 1024, "word_embed_proj_dim": 256}
    latent = {  # DeepSeek's attention
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    found = {
        "bert": _text("bert", ENCODER),
        "bert, autocast bf16": _text("bert", ENCODER, short=True, precision="amp_bf16"),
        "albert": _text("albert", {**ENCODER, "embedding_size": 64}, short=True),
        "modernbert": _text("modernbert", {**ENCODER, "pad_token_id": 0}),
        "distilbert": _text("distilbert", {"n_layers": 2, "dim": 256, "hidden_dim": 1024, "n_heads": 4}, short=True),
        "xlnet": _text("xlnet", {**gpt2, "d_model": 256, "d_inner": 1024}),
        "gpt2": _text("gpt2", gpt2, short=True),
        "gpt2, bf16": _text("gpt2", gpt2, precision="bf16"),
        "gptj": _text("gptj", {**gpt2, "rotary_dim": 32}),
        "gpt_neo": _text("gpt_neo", {**local, "attention_types": [[["global", "local"], 1]]}),
        "bloom": _text("bloom", {"n_layer": 2, "hidden_size": 256, "n_head": 4, "vocab_size": 1000}),
        "mpt": _text("mpt", {"n_layers": 2, "d_model": 256, "n_heads": 4, "vocab_size": 1000}),
        "opt": _text("opt", {**_without(ENCODER, "intermediate_size"), **opt}),
        "phi": _text("phi", {**DECODER, "num_key_value_heads": 4}),
        "llama": _text("llama", DECODER, short=True),
        "mixtral": _text(
            "mixtral", {**DECODER, **_without(EXPERTS, "num_experts", "moe_intermediate_size")}, short=True
        ),
        "mixtral, bf16": _text(
            "mixtral", {**DECODER, **_without(EXPERTS, "num_experts", "moe_intermediate_size")}, precision="bf16"
        ),
        "qwen3_moe": _text("qwen3_moe", {**GATED, **_without(EXPERTS, "num_local_experts")}),
        "deepseek_v3": _text(
            "deepseek_v3",
            {**DECODER, **latent, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
            precision="bf16",
        ),
        "mamba": _text(
            "mamba", {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}, batch=1, sequence=128
        ),
        "t5": _text("t5", {**t5, "vocab_size": 1000}, blocks=4, short=True, known={"recompute": T5}),
        "bart": _text("bart", _seq2seq(), blocks=4),
    }
    for kind in ("roberta", "electra", "deberta-v2", "gpt_neox", "falcon", "mpnet"):
        found[kind] = _text(kind, ENCODER)
    for kind in ("mistral", "qwen2", "phi3", "starcoder2", "olmo2", "cohere", "granite"):
        found[kind] = _text(kind, {**DECODER, "pad_token_id": 0})
    for kind in ("qwen3", "gemma2", "gemma3_text"):
        found[kind] = _text(kind, {**GATED, "pad_token_id": 0})
    return {**found, **_more_texts()}


def _more_texts() -> dict[str, Case]:
    """Kinds that were tried after the others, as they came, to see what a model that nobody had tuned for does."""
    sliding = {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]}
    chunks = {"num_heads": 8, "head_dim": 32, "state_size": 16, "chunk_size": 32}
    state = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}
    found = {kind: _text(kind, {**DECODER, "pad_token_id": 0}) for kind in ("stablelm", "nemotron", "smollm3")}
    return {
        **found,
        "glm4": _text("glm4", {**GATED, "pad_token_id": 0}),
        "olmoe": _text("olmoe", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
        "gpt_oss": _text(
            "gpt_oss", {**DECODER, **sliding, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
        ),
        "roformer": _text("roformer", ENCODER),
        "convbert": _text("convbert", ENCODER),
        "fnet": _text("fnet", _without(ENCODER, "num_attention_heads")),
        "pegasus": _text("pegasus", _seq2seq(), blocks=4),
        "mamba2": _text("mamba2", {**state, **chunks}, batch=2),
        "rwkv": _text("rwkv", state, batch=2, sequence=32),
    }


def _text(
    kind: str,
    config: Mapping[str, Any],
    *,
    blocks: int = 2,
    short: bool = False,
    known: Mapping[str, str] | None = None,
    **axes: Any,
) -> Case:
    return Case("transformers", _hf(kind, **axes, **config), blocks, short, known or {})


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _seq2seq() -> dict[str, Any]:
    return {
        "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 1000,
    }  # fmt: skip


def _others_of_hugging_face() -> dict[str, Case]:
    image = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3, "num_hidden_layers": 2}
    swin = {"embed_dim": 48, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4]}
    return {
        "vit": _text("vit", {**image, "image_size": 64}, short=True),
        "deit": _text("deit", image),
        "beit": _text("beit", image),
        "dinov2": _text("dinov2", {**_without(image, "intermediate_size"), "image_size": 224}),
        "swin": _text("swin", swin, blocks=4),
        "swinv2": _text("swinv2", swin, blocks=4),
        "convnext": _text("convnext", {"depths": [1, 1, 2, 1]}, blocks=4),
        "segformer": _text("segformer", {"depths": [1, 1, 1, 1]}, blocks=4),
        "regnet": _text("regnet", {"depths": [1, 1, 2, 1], "hidden_sizes": [32, 64, 128, 256]}, blocks=5),
        "wav2vec2": _text("wav2vec2", {**ENCODER, **SPEECH}, blocks=9, sequence=8000),
        "whisper": _text("whisper", WHISPER, blocks=4),
        "clip": _text("clip", {"text_config": ENCODER, "vision_config": image}, blocks=4),
    }


# ---- images --------------------------------------------------------------------------------------


def _images(make: Callable[[], Any], side: int, batch: int = 2) -> Callable[[], tuple[Step, dict[str, int]]]:
    def build() -> tuple[Step, dict[str, int]]:
        torch = import_module("torch")
        x = torch.empty(batch, 3, side, side, device="meta")
        y = torch.empty(batch, dtype=torch.int64, device="meta")

        def loss(result: Any, target: Any) -> Any:
            return torch.nn.functional.cross_entropy(getattr(result, "logits", result), target)

        return {"module": make, "inputs": x, "targets": y, "loss": loss}, {}

    return build


def _torchvision() -> dict[str, Case]:
    def case(name: str, blocks: int, side: int = 224, **options: Any) -> Case:
        return Case(
            "torchvision",
            _images(lambda: getattr(import_module("torchvision.models"), name)(**options), side),
            blocks,
        )

    return {
        "resnet50": case("resnet50", 16),
        "resnext50": case("resnext50_32x4d", 16),
        "densenet121": case("densenet121", 7),
        "vit_b_16": case("vit_b_16", 12),
        "inception_v3": case("inception_v3", 16, 128, aux_logits=False, init_weights=False),
        "efficientnet_b0": case("efficientnet_b0", 18, 128),
        "mobilenet_v2": case("mobilenet_v2", 19, 128),
        "regnet_y_400mf": case("regnet_y_400mf", 16, 128),
    }


def _timm() -> dict[str, Case]:
    def case(name: str, blocks: int, side: int = 224) -> Case:
        return Case("timm", _images(lambda: import_module("timm").create_model(name), side), blocks)

    return {
        "timm vit_small": case("vit_small_patch16_224", 12),
        "timm mixer_s32": case("mixer_s32_224", 8),
        "timm convnextv2_atto": case("convnextv2_atto", 12, 128),
        "timm resmlp_12": case("resmlp_12_224", 12),
        "timm coatnet_0": case("coatnet_0_rw_224", 14),
        "timm efficientformer_l1": case("efficientformer_l1", 16),
    }


# ---- others --------------------------------------------------------------------------------------


def _diffusers() -> dict[str, Case]:
    def unet() -> tuple[Step, dict[str, int]]:
        torch = import_module("torch")
        sizes = {"block_out_channels": (64, 128, 128), "layers_per_block": 1, "norm_num_groups": 32}
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        }
        x = torch.empty(2, 3, 64, 64, device="meta")
        t = torch.empty(2, dtype=torch.int64, device="meta")
        step = {
            "module": lambda: import_module("diffusers").UNet2DModel(sample_size=64, **sizes, **blocks),
            "inputs": (x, t),
            "targets": x,
            "loss": lambda result, target: torch.nn.functional.mse_loss(result.sample, target),
        }
        return step, {}

    def conditional() -> tuple[Step, dict[str, int]]:
        torch = import_module("torch")
        sizes = {"block_out_channels": (64, 128), "layers_per_block": 1, "cross_attention_dim": 64}
        blocks = {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        }
        x = torch.empty(2, 4, 32, 32, device="meta")
        given = (x, torch.empty(2, dtype=torch.int64, device="meta"), torch.empty(2, 77, 64, device="meta"))
        step = {
            "module": lambda: import_module("diffusers").UNet2DConditionModel(sample_size=32, **sizes, **blocks),
            "inputs": given,
            "targets": x,
            "loss": lambda result, target: torch.nn.functional.mse_loss(result.sample, target),
        }
        return step, {}

    def dit() -> tuple[Step, dict[str, int]]:
        torch = import_module("torch")
        x = torch.empty(2, 4, 32, 32, device="meta")
        numbers = {key: torch.empty(2, dtype=torch.int64, device="meta") for key in ("timestep", "class_labels")}
        step = {
            "module": lambda: import_module("diffusers").DiTTransformer2DModel(
                num_attention_heads=4, attention_head_dim=32, num_layers=4, out_channels=4, sample_size=32
            ),
            "inputs": {"hidden_states": x, **numbers},
            "targets": x,
            "loss": lambda result, target: torch.nn.functional.mse_loss(result.sample, target),
        }
        return step, {}

    return {
        "diffusers unet": Case("diffusers", unet, 10),
        "diffusers unet, conditional": Case("diffusers", conditional, 11),
        "diffusers dit": Case("diffusers", dit, 4),
    }


def _own() -> dict[str, Case]:
    """What needs PyTorch alone."""

    def encoder() -> tuple[Step, dict[str, int]]:
        torch = import_module("torch")
        nn = torch.nn

        def module() -> Any:
            layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
            return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        x = torch.empty(4, 32, 64, device="meta")
        return {"module": module, "inputs": x, "loss": lambda result: result.square().mean()}, {}

    def cells() -> tuple[Step, dict[str, int]]:
        torch = import_module("torch")

        class Loop(torch.nn.Module):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.cell = torch.nn.GRUCell(64, 64)

            def forward(self, x: Any) -> Any:
                state = torch.zeros_like(x[:, 0])
                for t in range(x.shape[1]):
                    state = self.cell(x[:, t], state)
                return state.square().mean()

        return {"module": Loop, "inputs": torch.empty(16, 6, 64, device="meta")}, {}

    return {
        "torch encoder": Case("torch", encoder, 3, short=True),
        "torch recurrent cell": Case("torch", cells, 6, short=True),
    }

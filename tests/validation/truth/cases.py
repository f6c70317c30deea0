"""The cases: arguments of `workloads.transformer`, a policy, and what stands for truth."""

from __future__ import annotations

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_head": 8,
    "n_layer": 3,
    "n_positions": 1024,
    "vocab_size": 20000,
    "activation_function": "gelu_new",
}
BERT = {
    "model_type": "bert",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 2048,
    "vocab_size": 15000,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 1408,
    "vocab_size": 16000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 896,
    "sliding_window": None,
}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek",
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "sliding_window": None,
}
HUGGING_FACE = "Hugging Face's class"
CASES: list[dict] = []


def case(name, config, batch, sequence, precision, attention, *, policy="none", truth=HUGGING_FACE, **more):
    arguments = {
        "config": config,
        "batch": batch,
        "sequence": sequence,
        "precision": precision,
        "attention": attention,
        "optimizer": "adamw_foreach",
        **more,
    }
    words = [name, attention, f"b{batch}", f"s{sequence}", precision, policy]
    words += [
        f"{'x' if k == 'micro_batches' else ''}{v}"
        for k, v in more.items()
        if k in ("optimizer", "loss", "micro_batches")
    ]
    words += [f"lora{more['lora_rank']}"] if "lora_rank" in more else []
    CASES.append({"case": "_".join(words), "truth": truth, "policy": policy, "arguments": arguments})


# BERT: a family that no rule was tried on before
for precision in ("fp32", "bf16", "fp16", "amp_bf16", "amp_fp16"):
    for attention in ("eager", "sdpa"):
        case("bert", BERT, 6, 200, precision, attention)
case("bert", BERT, 1, 512, "bf16", "sdpa")
case("bert-nodrop", {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 4, 128, "fp32", "eager")
for policy in ("full_ckpt", "selective_ckpt", "save_on_cpu"):
    case("bert", BERT, 6, 200, "fp32", "sdpa", policy=policy)
    case("bert", BERT, 6, 200, "amp_bf16", "eager", policy=policy)

# GPT-2 in sizes, lengths and types that were not seen
for precision in ("fp16", "amp_fp16", "amp_bf16", "fp32"):
    case("gpt2", GPT2, 3, 77, precision, "sdpa")
    case("gpt2", GPT2, 3, 333, precision, "eager")
    case("gpt2", GPT2, 1, 1000, precision, "sdpa")
case("gpt2-relu", {**GPT2, "activation_function": "relu"}, 4, 256, "fp32", "sdpa")
case("gpt2-gelu", {**GPT2, "activation_function": "gelu", "resid_pdrop": 0.0}, 4, 256, "amp_bf16", "sdpa")
case("gpt2-narrow", {**GPT2, "n_embd": 320, "n_head": 5, "n_inner": 1000}, 5, 130, "bf16", "sdpa")
for policy in ("full_ckpt", "selective_ckpt", "save_on_cpu"):
    case("gpt2", GPT2, 3, 600, "amp_fp16", "sdpa", policy=policy)
    case("gpt2", GPT2, 3, 600, "bf16", "eager", policy=policy)
    case("gpt2", GPT2, 2, 900, "amp_bf16", "sdpa", policy=policy)
for optimizer in ("adamw_fused", "adamw_loop", "sgd_momentum"):
    case("gpt2", GPT2, 2, 100, "amp_bf16", "sdpa", optimizer=optimizer)
    case("llama", LLAMA, 2, 100, "bf16", "sdpa", optimizer=optimizer)

for precision in ("bf16", "amp_bf16"):
    case("gpt2", GPT2, 2, 100, precision, "sdpa", optimizer="adafactor")
    case("llama", LLAMA, 2, 100, precision, "sdpa", optimizer="adafactor")
# the update in the backward pass, where it's the highest point (short) and where activations are (long)
for optimizer, sequence in (("adamw_loop", 20), ("adamw_loop", 300), ("adafactor", 20)):
    case("gpt2", GPT2, 2, sequence, "bf16", "sdpa", policy="optimizer_in_backward", optimizer=optimizer)
    case("llama", LLAMA, 2, sequence, "bf16", "sdpa", policy="optimizer_in_backward", optimizer=optimizer)
    case("llama", LLAMA, 2, sequence, "fp32", "sdpa", policy="optimizer_in_backward", optimizer=optimizer)

# micro-batches whose gradients add up
for batch, micro_batches, precision in ((4, 2, "fp32"), (8, 4, "amp_bf16"), (6, 3, "bf16")):
    case("gpt2", GPT2, batch, 300, precision, "sdpa", micro_batches=micro_batches)
    case("llama", LLAMA, batch, 300, precision, "sdpa", micro_batches=micro_batches)
case("gpt2", GPT2, 8, 300, "amp_bf16", "eager", policy="full_ckpt", micro_batches=4)

# Llama and its kin
for precision in ("fp32", "bf16", "fp16", "amp_bf16", "amp_fp16"):
    case("llama", LLAMA, 3, 300, precision, "sdpa")
    case("llama", LLAMA, 2, 777, precision, "eager")
case("llama-tied", {**LLAMA, "tie_word_embeddings": True}, 2, 513, "bf16", "sdpa")
case("llama-full-heads", {**LLAMA, "num_key_value_heads": 8}, 2, 513, "fp32", "sdpa")
case("llama-full-heads", {**LLAMA, "num_key_value_heads": 8}, 1, 513, "bf16", "eager")
case("llama-bias", {**LLAMA, "attention_bias": True, "mlp_bias": True}, 2, 257, "amp_bf16", "sdpa")
case("llama-head", {**LLAMA, "head_dim": 128}, 2, 257, "bf16", "sdpa")
case("mistral", {**LLAMA, "model_type": "mistral", "sliding_window": None}, 2, 400, "bf16", "sdpa")
case("qwen2", {**LLAMA, "model_type": "qwen2"}, 2, 400, "amp_bf16", "sdpa")
# every second product recomputed, as torchtitan does; GPT-2's products have biases, which it keeps none of
case("llama", LLAMA, 3, 900, "bf16", "sdpa", policy="titan_ckpt")
case("llama", LLAMA, 3, 900, "fp32", "eager", policy="titan_ckpt")
case("llama", LLAMA, 2, 700, "amp_bf16", "sdpa", policy="titan_ckpt")
case("llama-full-heads", {**LLAMA, "num_key_value_heads": 8}, 4, 513, "bf16", "sdpa", policy="titan_ckpt")
case("gpt2", GPT2, 3, 600, "bf16", "sdpa", policy="titan_ckpt")
for policy in ("full_ckpt", "selective_ckpt", "save_on_cpu"):
    case("llama", LLAMA, 3, 900, "amp_bf16", "sdpa", policy=policy)
    case("llama", LLAMA, 3, 900, "bf16", "eager", policy=policy)

# mixtures of experts
case("mixtral", MIXTRAL, 2, 300, "bf16", "sdpa")  # the grouped product of PyTorch takes bf16 alone
ORACLE_SIZE = {
    **MIXTRAL,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
}
ORACLE_SIZE |= {"intermediate_size": 2816, "num_local_experts": 8, "vocab_size": 32000}
case("mixtral-small", ORACLE_SIZE, 4, 1024, "bf16", "sdpa", policy="full_ckpt")
case("mixtral", MIXTRAL, 4, 700, "bf16", "sdpa", policy="full_ckpt")
case("mixtral", MIXTRAL, 4, 700, "bf16", "sdpa", policy="save_on_cpu")
SHARED = "Hugging Face's Mixtral with shared experts and a dense first layer put in"
case("deepseek", DEEPSEEK, 2, 300, "bf16", "sdpa", truth=SHARED)
case("deepseek", DEEPSEEK, 4, 700, "bf16", "sdpa", policy="full_ckpt", truth=SHARED)
LOOP = "Hugging Face's Mixtral with a plain loop over experts put in; loads given"
for precision in ("bf16", "fp32"):
    case("mixtral-loop", {**MIXTRAL, "experts_implementation": "loop"}, 2, 300, precision, "sdpa", truth=LOOP)

# what plain PyTorch has no class for
CHUNKED = "Hugging Face's model, head and loss written in plain PyTorch, the loss's kernel a custom op"
for precision in ("bf16", "fp32"):
    case("llama", LLAMA, 4, 700, precision, "sdpa", loss="chunked", truth=CHUNKED)
    case("gpt2", GPT2, 4, 700, precision, "sdpa", loss="chunked", truth=CHUNKED)
MASTERS = "Hugging Face's model, fp32 masters written in plain PyTorch"
for optimizer in ("adamw_foreach", "adamw_loop", "adafactor", "sgd_momentum"):
    case("gpt2", GPT2, 2, 300, "mixed_bf16", "sdpa", optimizer=optimizer, truth=MASTERS)
case("llama", LLAMA, 2, 300, "mixed_bf16", "sdpa", truth=MASTERS)
case("llama", LLAMA, 4, 300, "mixed_bf16", "sdpa", micro_batches=2, truth=MASTERS)
MEGATRON = "Hugging Face's model, Megatron-LM's loss, main gradients and masters written in plain PyTorch"
for more in ({}, {"micro_batches": 2}, {"optimizer": "adamw_fused"}):
    case("gpt2", GPT2, 4, 300, "megatron_bf16", "sdpa", loss="vocab_parallel", **more, truth=MEGATRON)
    case("llama", LLAMA, 4, 300, "megatron_bf16", "sdpa", loss="vocab_parallel", **more, truth=MEGATRON)
case("gpt2", GPT2, 4, 300, "fp32", "sdpa", loss="vocab_parallel", truth=MEGATRON)

# frozen weights, and LoRA as PEFT has it
PEFT = "Hugging Face's class with PEFT's LoRA"
for precision in ("fp32", "bf16", "amp_bf16", "amp_fp16", "mixed_bf16"):
    case("gpt2", GPT2, 3, 300, precision, "sdpa", lora_rank=8, truth=PEFT)
    case("llama", LLAMA, 3, 300, precision, "sdpa", lora_rank=8, truth=PEFT)
for precision in ("amp_bf16", "fp32"):  # the model in 16 bits, the adapters in fp32, with and without autocast
    half = {"lora_rank": 16, "frozen_dtype": "bf16", "lora_dropout": 0.1}
    case("gpt2-half", GPT2, 2, 257, precision, "sdpa", **half, truth=PEFT)
    case("llama-half", LLAMA, 2, 257, precision, "sdpa", **half, truth=PEFT)
    case("bert-half", BERT, 2, 257, precision, "eager", **half, truth=PEFT)
for precision in ("bf16", "amp_bf16"):
    every = {"lora_rank": 64, "lora_targets": "all-linear"}
    case("llama-every", LLAMA, 4, 777, precision, "eager", **every, truth=PEFT)
    case("gpt2-every", GPT2, 4, 600, precision, "sdpa", **every, lora_dropout=0.05, truth=PEFT)
    case("llama-every", LLAMA, 4, 777, precision, "sdpa", policy="full_ckpt", **every, truth=PEFT)
    case("llama-mlp", LLAMA, 3, 300, precision, "sdpa", lora_rank=4, lora_targets=["up_proj", "down_proj"], truth=PEFT)
case("bert", BERT, 6, 200, "amp_bf16", "sdpa", lora_rank=8, truth=PEFT)
case("mixtral", MIXTRAL, 2, 300, "bf16", "sdpa", lora_rank=8, lora_targets=["q_proj", "v_proj"], truth=PEFT)
case("llama-full-heads", {**LLAMA, "num_key_value_heads": 8}, 4, 300, "fp32", "sdpa", lora_rank=8, truth=PEFT)
case("llama", LLAMA, 4, 300, "amp_bf16", "sdpa", micro_batches=2, lora_rank=8, truth=PEFT)
case("llama", LLAMA, 3, 900, "bf16", "sdpa", policy="save_on_cpu", lora_rank=8, truth=PEFT)
for optimizer in ("adamw_fused", "adamw_loop", "sgd_momentum"):
    case("llama", LLAMA, 2, 100, "bf16", "sdpa", optimizer=optimizer, lora_rank=8, truth=PEFT)
FROZEN = "Hugging Face's class with some of its weights frozen"
for precision in ("fp32", "bf16", "amp_bf16"):
    for name, config, parts in (
        ("gpt2", GPT2, (("wte", "wpe", "h0", "h1"), ("wpe", "h[0-9]", "ln_f"), ("h1", "ln_f"))),
        ("llama", LLAMA, (("embed", "h0", "h1"), ("embed", "h[0-9]", "norm"), ("h1", "head"))),
    ):
        for label, frozen in zip(("first", "body", "middle"), parts, strict=True):
            case(f"{name}-{label}-frozen", config, 3, 300, precision, "sdpa", frozen=list(frozen), truth=FROZEN)


def _give_loads() -> None:
    """Tokens of each expert, as the simulator's routing draws them: an input of both sides."""
    from workloads import experts, models

    for entry in CASES:
        a = entry["arguments"]
        if a["config"].get("experts_implementation") == "loop":
            drawn = experts.routing(models.read_config(a["config"]), a["batch"] * a["sequence"], seed=0, skew=0.0)
            entry["expert_loads"] = [list(drawn[i]) for i in sorted(drawn)]


_give_loads()

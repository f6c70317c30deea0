"""Fine-tuning of a Llama in bf16 with checkpoints and paged batches, loss computed outside the model."""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

if not torch.cuda.is_available():
    raise SystemExit("this script needs a GPU")

dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
    vocab_size=500, use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM(config).to(device="cuda", dtype=dtype)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)


def shifted_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def train_one_step(batch=2, sequence=64):
    model.train()
    tokens = torch.randint(0, 500, (batch, sequence), device="cuda")
    loss = shifted_loss(model(tokens).logits, tokens)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(f"{loss.item():.3f} {norm:.3f} {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")

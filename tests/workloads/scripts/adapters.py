"""LoRA of peft on a frozen OPT: only the adapters are trained."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM


def main(batch=2, length=64):
    config = OPTConfig(
        hidden_size=64, ffn_dim=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=500,
        word_embed_proj_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    base = OPTForCausalLM(config).to(torch.float16).cuda()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=2e-4)
    scaler = torch.amp.GradScaler()
    batch_ = {"input_ids": torch.randint(0, 500, (batch, length)), "attention_mask": torch.ones(batch, length).long()}

    def step():
        model.train()
        inputs = {key: value.cuda() for key, value in batch_.items()}
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(loss.item())

    return step

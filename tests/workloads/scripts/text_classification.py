"""Classification of pairs of sentences with BERT, padded batches, and an accuracy that is counted while it trains."""

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, get_linear_schedule_with_warmup


class Args:
    batch_size, length, learning_rate, max_grad_norm, fp16 = 4, 64, 2e-5, 1.0, True


def collate(examples):
    length = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    labels = torch.tensor([label for _, label in examples])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main(args=Args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = BertConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=500, num_labels=3
    )
    model = AutoModelForSequenceClassification.from_config(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100)
    scaler = torch.cuda.amp.GradScaler(enabled=args.fp16)
    batch = collate([(list(range(2, 2 + args.length)), row % 3) for row in range(args.batch_size)])
    seen = correct = 0

    def train_step():
        nonlocal seen, correct
        inputs = {key: value.to(device) for key, value in batch.items()}
        with torch.cuda.amp.autocast(enabled=args.fp16):
            outputs = model(**inputs)
        scaler.scale(outputs.loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        predictions = outputs.logits.argmax(dim=-1)
        correct += (predictions == inputs["labels"]).sum().item()
        seen += len(predictions)
        print(f"loss {outputs.loss.item():.4f}, accuracy {correct / seen:.3f}, norm {norm.item():.2f}")

    return train_step

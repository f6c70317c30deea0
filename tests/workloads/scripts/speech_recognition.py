"""Speech recognition with wav2vec 2.0 and the CTC loss: the convolutions at the bottom are frozen."""

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

config = Wav2Vec2Config(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=32,
    conv_dim=(32,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    ctc_loss_reduction="mean", pad_token_id=0,
)  # fmt: skip


def main(seconds=1):
    model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    model.cuda().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    waves = torch.randn(2, 16000 * seconds)
    transcripts = torch.randint(1, 32, (2, 20))

    def step():
        labels = transcripts.masked_fill(transcripts.eq(0), -100)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_values=waves.cuda(), labels=labels.cuda()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"ctc {loss.item():.3f}")

    return step

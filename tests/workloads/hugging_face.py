"""A decoder in the style of Hugging Face's Llama: what makes no difference to the result is kept in locals.

Names are assigned again (`hidden_states`), inputs stay in others (`residual`, `inputs_embeds`), layers return tuples,
and the loop over the layers holds the last tuple while the next layer runs.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden_states.to(input_dtype)


class RotaryEmbedding(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 1e4 ** (torch.arange(0, head, 2).float() / head), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos() * 1.0, emb.sin() * 1.0
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(hidden_states, times):
    batch, heads, length, head = hidden_states.shape
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, heads, times, length, head)
    return hidden_states.reshape(batch, heads * times, length, head)


class DecoderAttention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.head, self.times = width // heads, heads // groups
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states, position_embeddings, causal_mask):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head)
        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        query_states = (query_states * cos) + (rotate_half(query_states) * sin)
        key_states = (key_states * cos) + (rotate_half(key_states) * sin)
        key_states, value_states = repeat_kv(key_states, self.times), repeat_kv(value_states, self.times)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.head**-0.5
        attn_weights = attn_weights + causal_mask[:, :, :, : key_states.shape[-2]]
        attn_weights = functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2).contiguous()
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())
        return attn_output, attn_weights


class DecoderMLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.self_attn, self.mlp = DecoderAttention(width, heads, groups), DecoderMLP(width, 3 * width)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)

    def forward(self, hidden_states, position_embeddings, causal_mask):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, self_attn_weights = self.self_attn(hidden_states, position_embeddings, causal_mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        outputs = (hidden_states,)
        outputs += (self_attn_weights,)
        return outputs


class Decoder(nn.Module):
    def __init__(self, layers, width, heads, groups, vocabulary):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, groups) for _ in range(layers))
        self.norm, self.rotary_emb = RMSNorm(width), RotaryEmbedding(width // heads)

    def forward(self, input_ids):
        inputs_embeds = self.embed_tokens(input_ids)
        length = inputs_embeds.shape[1]
        position_ids = torch.arange(0, length, device=inputs_embeds.device).unsqueeze(0)
        causal_mask = torch.full((length, length), -1e9, device=inputs_embeds.device).triu(1)[None, None]
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            layer_outputs = decoder_layer(hidden_states, position_embeddings, causal_mask)
            hidden_states = layer_outputs[0]
        hidden_states = self.norm(hidden_states)
        return (hidden_states, position_embeddings)


class ForCausalLM(nn.Module):
    """Of `layers` decoder layers; gives the logits of all tokens, one row per token."""

    def __init__(self, layers=12, width=32, heads=4, groups=2, vocabulary=50):
        super().__init__()
        self.model = Decoder(layers, width, heads, groups, vocabulary)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids):
        outputs = self.model(input_ids)
        hidden_states = outputs[0]
        logits = self.lm_head(hidden_states)
        return logits.float().flatten(0, 1)

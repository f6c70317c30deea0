"""The models of the cases: Hugging Face's classes from a config, changed where a case says so, and plain modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

CLASSES = {
    "gpt2": transformers.GPT2LMHeadModel,
    "bert": transformers.BertForPreTraining,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "deepseek": transformers.MixtralForCausalLM,
}
CHUNK = 1024

# whether a batch is packed is data, which fake tensors have not: no batch here is
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None


def build(case: dict) -> nn.Module:
    """The model of a case, in fp32."""
    a, values = case["arguments"], dict(case["arguments"]["config"])
    kind = values.pop("model_type")
    values.pop("experts_implementation", None)  # a loop is put in below
    config_class = CLASSES[kind].config_class
    if kind == "deepseek":
        values["num_local_experts"] = values["n_routed_experts"]
        values["intermediate_size"], dense = values["moe_intermediate_size"], values["intermediate_size"]
    if a.get("dropout") is not None:
        raise ValueError("put the probabilities into the config")
    config = config_class(**values, use_cache=False, attn_implementation=a["attention"])
    model = CLASSES[kind](config)
    if kind == "deepseek":
        _share_experts(model, config, dense)
    if "expert_loads" in case:
        for layer, loads in zip(model.model.layers, case["expert_loads"], strict=True):
            layer.mlp = ExpertLoop(config, loads)
    model = LOSSES[a["loss"]](model) if "loss" in a else model
    freeze(model, a.get("frozen", ()))
    return adapted(model, a) if a.get("lora_rank") else model


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Parts of the model are not trained: `h0` is its first layer, `embed` the table of a Llama, `wte` of a GPT-2."""
    for name, parameter in model.named_parameters():
        ours = re.sub(r"^(transformer|model)\.", "", name)
        ours = (
            re.sub(r"^(layers|h)\.(\d+)\.", r"h\2.", ours)
            .replace("embed_tokens.", "embed.")
            .replace("lm_head.", "head.")
        )
        if any(fnmatchcase(ours, f"{part}.*") for part in parts):
            parameter.requires_grad_(False)


def adapted(model: nn.Module, arguments: dict) -> nn.Module:
    """The model with PEFT's LoRA; adapters in fp32 beside a 16-bit model unless all is to be of one type."""
    import peft  # most cases need none

    given = {"target_modules": arguments["lora_targets"]} if "lora_targets" in arguments else {}
    config = peft.LoraConfig(r=arguments["lora_rank"], lora_dropout=arguments.get("lora_dropout", 0.0), **given)
    # adapters are made where they belong, and fake parameters cannot always be moved
    with mock.patch.object(nn.Module, "to", lambda module, *_, **__: module):
        return peft.get_peft_model(model, config, autocast_adapter_dtype="frozen_dtype" in arguments)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers that a checkpoint is put round."""
    inner = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    return inner.h if hasattr(inner, "h") else inner.encoder.layer if hasattr(inner, "encoder") else inner.layers


def batch_of(case: dict, batch: int) -> dict[str, torch.Tensor]:
    """Ids and labels, and for BERT the types of tokens and whether the second sentence follows."""
    shape = (batch, case["arguments"]["sequence"])
    found = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape, dtype=torch.int64)}
    if case["arguments"]["config"]["model_type"] == "bert":
        found["token_type_ids"] = torch.zeros(shape, dtype=torch.int64)
        found["next_sentence_label"] = torch.zeros(batch, dtype=torch.int64)
    return found


# ---- experts -------------------------------------------------------------------------------------


class SharedExperts(nn.Module):
    """Chosen experts, and some that see every token, as one wider MLP."""

    def __init__(self, experts: nn.Module, config, count: int) -> None:
        super().__init__()
        self.experts = experts
        wide = SimpleNamespace(**{**config.to_dict(), "intermediate_size": count * config.intermediate_size})
        wide.mlp_bias = False
        self.shared = LlamaMLP(wide)

    def forward(self, x):
        return self.experts(x) + self.shared(x)


def _share_experts(model: nn.Module, config, dense: int) -> None:
    """DeepSeekMoE: the first layers have a plain MLP, the others shared experts beside the chosen ones."""
    for i, layer in enumerate(model.model.layers):
        if i < config.first_k_dense_replace:
            plain = SimpleNamespace(**{**config.to_dict(), "intermediate_size": dense, "mlp_bias": False})
            layer.mlp = LlamaMLP(plain)
        else:
            layer.mlp = SharedExperts(layer.mlp, config, config.n_shared_experts)


class Expert(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class ExpertLoop(nn.Module):
    """One expert after another, each with weights of its own; how many tokens each gets is given, not computed."""

    def __init__(self, config, loads: list[int]) -> None:
        super().__init__()
        self.loads, self.chosen = loads, config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in loads)

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        shares = torch.softmax(self.router(flat).float(), dim=-1)
        scores, _ = torch.topk(shares, self.chosen, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for rows, expert in zip(self.loads, self.experts, strict=True):
            if not rows:
                continue
            token = torch.empty(rows, dtype=torch.int64, device=x.device)
            place = torch.empty(rows, dtype=torch.int64, device=x.device)
            y = expert(flat[token]) * scores[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out.view_as(x)


# ---- losses and optimizers -----------------------------------------------------------------------


@torch.library.custom_op("truth::loss_gradient_", mutates_args=("logits",))
def loss_gradient_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each row; its gradient is written over the logits, as one fused kernel does."""
    raise NotImplementedError("has no data to work on")


@loss_gradient_.register_fake
def _(logits, labels):
    return logits.new_empty(labels.shape, dtype=torch.float32)


class HeadAndLoss(torch.autograd.Function):
    """Head and cross-entropy over some tokens at a time; all gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, x, weight, labels):
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        losses = []
        for start in range(0, x.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            logits = x[part] @ weight.t()
            losses.append(loss_gradient_(logits, labels[part]))
            torch.mm(logits, weight, out=dx[part])
            dw.addmm_(logits.t(), x[part])
            del logits
        ctx.save_for_backward(dx, dw)
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return dx.mul_(g), dw.mul_(g), None


class ChunkedLoss(nn.Module):
    """A causal model whose head and loss are one function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def base_model(self) -> nn.Module:
        return self.model.base_model

    def forward(self, input_ids, labels):
        x = self.model.base_model(input_ids)[0]
        head = self.model.get_output_embeddings().weight
        loss = HeadAndLoss.apply(x.view(-1, x.shape[-1]), head, labels.view(-1))
        return SimpleNamespace(loss=loss)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """What Megatron-LM's function of that name allocates on one rank, in its order."""

    @staticmethod
    def forward(ctx, logits, labels):
        wide = logits.float()
        wide -= wide.max(dim=-1)[0].unsqueeze(-1)
        at_label = wide[torch.arange(wide.shape[0], device=wide.device), labels].clone()
        exponentials = torch.exp(wide, out=wide)
        total = exponentials.sum(dim=-1)
        loss = torch.log(total) - at_label
        exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponentials, labels)
        return loss

    @staticmethod
    def backward(ctx, g):
        softmax, labels = ctx.saved_tensors
        softmax[torch.arange(softmax.shape[0], device=softmax.device), labels] -= 1.0
        return softmax.mul_(g.unsqueeze(-1)), None


class VocabParallelLoss(nn.Module):
    """A causal model with Megatron-LM's loss, whose labels come shifted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def base_model(self) -> nn.Module:
        return self.model.base_model

    def forward(self, input_ids, labels):
        logits = self.model.get_output_embeddings()(self.model.base_model(input_ids)[0])
        losses = VocabParallelCrossEntropy.apply(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return SimpleNamespace(loss=losses.mean())


LOSSES = {"chunked": ChunkedLoss, "vocab_parallel": VocabParallelLoss}


class Masters:
    """An optimizer over fp32 copies of 16-bit parameters, as a plain training loop writes it.

    Gradients are copied to fp32 for the step, the new weights copied back; all gradients go with zero_grad.
    """

    def __init__(self, parameters, optimizer) -> None:
        self.parameters = parameters
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.inner = optimizer(self.masters)
        self.param_groups = self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None


class MainGradients(Masters):
    """Such an optimizer that adds each gradient to one in fp32 as soon as it is there (Megatron-LM's main_grad)."""

    def __init__(self, parameters, optimizer) -> None:
        super().__init__(parameters, optimizer)
        self.kept: dict = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.keep)

    def keep(self, parameter) -> None:
        if parameter in self.kept:
            self.kept[parameter].add_(parameter.grad)
        else:
            self.kept[parameter] = parameter.grad.float()
        parameter.grad = None

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = self.kept[parameter]
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self.kept.clear()

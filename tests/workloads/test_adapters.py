"""Frozen weights and LoRA beside PyTorch: the adapters are written by hand there, autograd decides what is saved.

The models are those of `sim.measure`, which share no code with the traces that are built. What PyTorch does with them
is seen in two ways: autograd's own hooks and counters on a real CPU step, and a captured step with the CUDA path's
kernels.
"""

from __future__ import annotations

from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from sim.analysis.peak_memory import peak_memory  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from sim.experiment import reference_run  # noqa: E402
from sim.hardware.profile import load_profile  # noqa: E402
from sim.measure.gpt2 import Gpt2, plain  # noqa: E402
from sim.measure.llama import Llama  # noqa: E402
from workloads import capture, transformer  # noqa: E402

BATCH, SEQUENCE = 2, 24
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 211}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 176,
    "vocab_size": 211,
    "tie_word_embeddings": False,
}
NAMES = {  # how the modules of `sim.measure` are called here
    "gpt2": {"qkv": "attn.qkv", "proj": "attn.proj", "fc": "mlp.fc", "out": "mlp.proj"},
    "llama": {**{part: f"attn.{part}" for part in ("q", "k", "v", "proj")}, "gate": "mlp.gate", "up": "mlp.up"},
}
NAMES["llama"]["down"] = "mlp.down"

CASES = {
    # arguments of `transformer`; what they leave trained is done to the module below
    "gpt2 lora": (GPT2, {"lora_rank": 4}),
    "gpt2 lora everywhere": (GPT2, {"lora_rank": 8, "lora_targets": "all-linear"}),
    "gpt2 lora of the mlp": (GPT2, {"lora_rank": 2, "lora_targets": "c_fc"}),
    "gpt2 lora and the head": (GPT2, {"lora_rank": 4, "frozen": "wpe,h[0-2],ln_f"}),
    "gpt2 first layers": (GPT2, {"frozen": "wte,wpe,h[0-1]"}),
    "gpt2 biases": (GPT2, {"frozen": "*.weight"}),
    "llama lora": (LLAMA, {"lora_rank": 4}),
    "llama lora everywhere": (LLAMA, {"lora_rank": 8, "lora_targets": "all-linear"}),
    "llama lora of the mlp": (LLAMA, {"lora_rank": 2, "lora_targets": ["up_proj", "mlp.down"]}),
    "llama first layers": (LLAMA, {"frozen": ["embed", "h0", "h1"]}),
    "llama head": (LLAMA, {"frozen": "embed,h[0-2],norm"}),
    "llama norms": (LLAMA, {"frozen": "embed,h?.attn,h?.mlp,head"}),
}


class Adapted(nn.Module):
    """A linear layer with LoRA: base(x) + B(A(dropout(x))) * scale, adapters in a type of their own."""

    def __init__(self, base, rank, dtype, probability):
        super().__init__()
        inner, columns = base.weight.shape if not isinstance(base, nn.Linear) else reversed(base.weight.shape)
        self.base, self.dropout = base, nn.Dropout(probability) if probability else nn.Identity()
        self.down, self.up = nn.Linear(inner, rank, bias=False), nn.Linear(rank, columns, bias=False)
        self.to(base.weight.dtype)
        self.down.to(dtype), self.up.to(dtype)

    def forward(self, x):
        result = self.base(x)
        added = self.up(self.down(self.dropout(x.to(self.down.weight.dtype)))) * 0.5
        return (result + added).to(result.dtype)


@torch.library.custom_op("adapters::dequantise", mutates_args=())
def dequantise(packed: torch.Tensor, scales: torch.Tensor, columns: int, inner: int, half: bool) -> torch.Tensor:
    """A matrix from 4 bits each and a scale per 64: one kernel."""
    raise NotImplementedError("only its shape is asked for")


@dequantise.register_fake
def _(packed, scales, columns, inner, half):
    return packed.new_empty((columns, inner), dtype=torch.bfloat16 if half else torch.float32)


class Quantised(torch.autograd.Function):
    """A product with a quantised matrix, which is converted for each use: nothing but the packed matrix is kept."""

    @staticmethod
    def forward(ctx, x, packed, scales, bias, columns):
        ctx.given = packed, scales, columns, x.shape[-1], x.dtype == torch.bfloat16
        return torch.nn.functional.linear(x, dequantise(*ctx.given), bias)

    @staticmethod
    def backward(ctx, g):
        return g @ dequantise(*ctx.given), None, None, None, None


class FourBit(nn.Module):
    """A linear layer with a frozen matrix in 4 bits, in the way of bitsandbytes."""

    def __init__(self, base, half):
        super().__init__()
        inner, self.columns = base.weight.shape if not isinstance(base, nn.Linear) else reversed(base.weight.shape)
        elements = inner * self.columns
        self.packed = nn.Parameter(torch.empty(elements // 2, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(-(-elements // 64)), requires_grad=False)
        self.bias, self.compute = base.bias, torch.bfloat16 if half else torch.float32
        self.inner = inner

    def forward(self, x):
        y = Quantised.apply(x.to(self.compute), self.packed, self.scales, self.bias, self.columns)
        return y.to(x.dtype)


class AdaptedFourBit(nn.Module):
    """LoRA beside it, as PEFT has it there: a copy of the result, and no casts under autocast."""

    def __init__(self, base, rank, dtype, probability, casts):
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(probability) if probability else nn.Identity()
        self.casts = casts
        self.down, self.up = nn.Linear(base.inner, rank, bias=False), nn.Linear(rank, base.columns, bias=False)
        self.down.to(dtype), self.up.to(dtype)

    def forward(self, x):
        result = self.base(x).clone()
        if self.casts:
            x = x.to(self.down.weight.dtype)
        added = self.up(self.down(self.dropout(x))) * 0.5
        return result + (added.to(result.dtype) if self.casts else added)


class Step(nn.Module):
    """The loss of a model whose weights are frozen and adapted as the arguments of `transformer` say."""

    def __init__(self, config, attention="eager", precision="fp32", frozen=None, frozen_dtype=None, **lora):
        super().__init__()
        family = config["model_type"]
        model = (
            Gpt2(config, attention=attention, dropout=0.0) if family == "gpt2" else Llama(config, attention=attention)
        )
        trained = torch.bfloat16 if precision == "bf16" else torch.float32
        model.to(torch.bfloat16 if frozen_dtype == "bf16" else trained)
        if lora or frozen is not None:
            patterns = ["*"] if frozen is None else frozen.split(",") if isinstance(frozen, str) else frozen
            self.freeze(model, patterns, family)
        if frozen_dtype == "nf4":
            if precision != "fp32":
                model.to(torch.bfloat16)
            for layer in model.layers:
                for part in NAMES[family]:
                    setattr(layer, part, FourBit(getattr(layer, part), precision != "fp32"))
        if lora:
            self.adapt(model, NAMES[family], family, trained, precision == "amp_bf16", **lora)
        self.model = model
        self.amp = precision == "amp_bf16"

    @staticmethod
    def freeze(model, patterns, family):
        """Spelt out for the patterns of the cases, by the names that the modules have here."""
        by_part = {"wte": ["wte"], "wpe": ["wpe"], "embed": ["embed"], "ln_f": ["ln_f"], "norm": ["norm"]}
        by_part |= {"head": ["lm_head"], "h[0-1]": ["layers.0", "layers.1"], "h[0-2]": ["layers"]}
        by_part |= {"h0": ["layers.0"], "h1": ["layers.1"], "*": [""]}
        parts = [part for pattern in patterns for part in by_part.get(pattern, [])]
        for name, weight in model.named_parameters():
            of_norm = "norm" in name
            is_frozen = any(name.startswith(f"{part}.") or not part for part in parts)
            is_frozen |= "*.weight" in patterns and name.endswith(".weight")
            is_frozen |= "h?.attn" in patterns and name.startswith("layers") and not of_norm
            weight.requires_grad_(not is_frozen)

    @staticmethod
    def adapt(model, names, family, dtype, amp, lora_rank, lora_targets=None, lora_dropout=0.0):
        wanted = {
            None: ["qkv"] if family == "gpt2" else ["q", "v"],
            "all-linear": list(names),
            "c_fc": ["fc"],
        }.get(lora_targets if isinstance(lora_targets, str | None) else "", ["up", "down"])
        for layer in model.layers:
            for part in wanted:
                base = getattr(layer, part)
                kind = partial(AdaptedFourBit, casts=not amp) if isinstance(base, FourBit) else Adapted
                setattr(layer, part, kind(base, lora_rank, dtype, lora_dropout))

    def forward(self, ids, labels):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.amp):
            return self.model(ids, labels, plain)


def built(case, **more):
    config, arguments = CASES[case]
    return transformer(config, batch=BATCH, sequence=SEQUENCE, dropout=0.0, **arguments, **more)


@cache
def stepped(case):
    """What PyTorch does on the CPU in fp32: bytes saved, FLOPs, products of each phase, and bytes of gradients."""
    config, arguments = CASES[case]
    torch.manual_seed(0)
    step = Step(config, **arguments)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    kept, own = {}, {weight.untyped_storage().data_ptr() for weight in (*step.parameters(), ids)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = step(ids, ids)
        forward = counter.get_total_flops()
        saved = sum(kept.values())
        loss.backward()
    gradients = {name: weight.grad.nbytes for name, weight in step.named_parameters() if weight.grad is not None}
    return {
        "saved": saved,
        "forward": forward,
        "total": counter.get_total_flops(),
        "gradients": sum(gradients.values()),
        "weights": len(gradients),
        "parameters": sum(weight.numel() for weight in step.parameters()),
    }


@cache
def captured(case, attention, precision, **more):
    config, arguments = CASES[case]
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device="meta")
    step = lambda: Step(config, attention, precision, **arguments, **more)  # noqa: E731
    return capture(step, (ids, ids), optimizer=torch.optim.AdamW, kernels="cuda")


def products(trace, phase):
    return sum(op.kind == "matmul" and op.phase == phase for op in trace.ops)


def bytes_of(trace, role):
    return sum(t.bytes for t in trace.tensors if t.role == role and t.replaces is None)


def saved_bytes(trace):
    return sum(t.bytes for t in trace.tensors if t.saved_for and t.role == "activation")


def peak(trace):
    return peak_memory(reference_run(trace, load_profile("a100_80_sxm"))).bytes


# ---- beside autograd on the CPU ----------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_and_computed_is_what_autograd_saves_and_computes(case):
    want, trace = stepped(case), built(case, attention="eager")
    assert saved_bytes(trace) == want["saved"]
    forward = sum(op.flops for op in trace.ops if op.phase == "forward" and op.kind == "matmul")
    assert (forward, trace.meta["model_flops"]) == (want["forward"], want["total"])
    gradients = [t for t in trace.tensors if t.role == "gradient" and not t.name.endswith(".part")]
    whole = {t.name.partition(".grad")[0]: t.bytes for t in gradients}
    assert (len(whole), sum(whole.values())) == (want["weights"], want["gradients"])


@pytest.mark.parametrize("case", CASES)
def test_the_metadata_counts_all_weights_and_the_trained_ones(case):
    want, meta = stepped(case), built(case).meta
    assert meta["parameters"] == want["parameters"]
    assert meta["trainable_parameters"] * 4 == want["gradients"]


# ---- beside a captured step --------------------------------------------------------------------

KINDS = (("eager", "fp32", {}), ("eager", "amp_bf16", {}), ("sdpa", "bf16", {}), ("eager", "amp_bf16", {"half": True}))


@pytest.mark.parametrize(("case", "kind"), [(case, KINDS[i % 4]) for i, case in enumerate(CASES)])
def test_a_captured_step_has_the_same_products_bytes_and_peak(case, kind):
    attention, precision, more = kind
    more = {"frozen_dtype": "bf16"} if more and "lora_rank" in CASES[case][1] and "frozen" not in CASES[case][1] else {}
    seen = captured(case, attention, precision, **more)
    trace = built(case, attention=attention, precision=precision, **more)
    for phase in ("forward", "backward"):
        assert products(trace, phase) == products(seen, phase)
    for role in ("weight", "optimizer_state"):
        assert bytes_of(trace, role) == bytes_of(seen, role)
    assert trace.meta["trainable_parameters"] < seen.meta["parameters"] == trace.meta["parameters"]
    # the CPU's layer norms keep their statistics in 16 bits, CUDA's in fp32
    rows = BATCH * SEQUENCE * 7 * 2 * 2 if precision == "bf16" and "gpt2" in case else 0
    assert 0 <= saved_bytes(trace) - saved_bytes(seen) <= rows
    # a Python frame may hold an input of the head (fp32, and its copy) that nothing saves
    assert peak(trace) == pytest.approx(peak(seen), abs=2 * 4 * BATCH * SEQUENCE * 64 + 16)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("gpt2 lora", ("eager", "amp_bf16")),
        ("llama lora everywhere", ("eager", "amp_bf16")),
        ("llama lora", ("sdpa", "bf16")),
        ("llama lora of the mlp", ("eager", "fp32")),
    ],
)
def test_quantised_weights_are_converted_for_each_use_and_leave_nothing(case, kind):
    seen = captured(case, *kind, frozen_dtype="nf4")
    trace = built(case, attention=kind[0], precision=kind[1], frozen_dtype="nf4")
    for phase in ("forward", "backward"):
        assert products(trace, phase) == products(seen, phase)
        uses = [sum("dequantise" in op.name and op.phase == phase for op in t.ops) for t in (trace, seen)]
        assert uses[0] == uses[1] > 0
    for role in ("weight", "optimizer_state"):
        assert bytes_of(trace, role) == bytes_of(seen, role)
    assert saved_bytes(trace) == saved_bytes(seen)
    assert peak(trace) == pytest.approx(peak(seen), abs=16)


def test_bytes_of_a_quantised_llama():
    """Matrices in 4 bits with an fp32 scale per 64; embedding, norms and head in 16 bits."""
    single, double = (
        transformer("llama2-7b", batch=1, sequence=64, precision="bf16", lora_rank=8, frozen_dtype=dtype)
        for dtype in ("nf4", "nf4_double")
    )
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 2 * 32000 * 4096 + (2 * 32 + 1) * 4096
    adapters = 32 * 2 * 8 * 2 * 4096
    assert bytes_of(single, "weight") == matrices // 2 + 4 * matrices // 64 + 2 * (rest + adapters)
    assert bytes_of(double, "weight") == matrices // 2 + matrices // 64 + 4 * matrices // 64 // 256 + 2 * (
        rest + adapters
    )
    assert single.meta["model_flops"] == double.meta["model_flops"]


def test_dropout_before_an_adapter_saves_a_byte_per_element():
    plain_, dropped = (built("llama lora", precision="bf16", lora_dropout=p) for p in (0.0, 0.1))
    inputs = BATCH * SEQUENCE * 64
    # two adapters per layer: for A a result of its own instead of the input that both share, and a mask each, but not
    # in the first layer, whose input needs no gradient
    assert saved_bytes(dropped) - saved_bytes(plain_) == 3 * (2 * 2 * inputs - 2 * inputs) + 2 * 2 * inputs


# ---- closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b"])
def test_bytes_per_token_and_layer_of_a_llama_with_adapters(name, rank):
    """In bf16 with flash attention, adapters at q and v.

    Saved: of each norm the fp32 copy (4 h) and one fp32 number; the input of A (2 h), which both adapters share, and
    what each A gives (2 r); queries, keys, values and result of attention, one fp32 number per head; gate, silu and up
    (2 f each). Not saved: normalised inputs (for a norm's weight), inputs of k, o, gate, up and down (for their
    weights). The first norm depends on nothing that is trained.
    """
    from workloads import read_config

    c = read_config(name)
    tokens = 3 * 128
    trace = transformer(name, batch=3, sequence=128, precision="bf16", lora_rank=rank)
    h, kv = c.hidden, c.kv_heads * c.head
    layer = 14 * h + 4 * kv + 6 * c.ffn + 4 * rank + 4 * c.heads + 8
    for i in range(c.layers):
        saved = sum(t.bytes for t in trace.tensors if t.saved_for and t.layer == i) - 24  # random state
        assert saved == tokens * (layer - (0 if i else 4 * h + 4))
    adapted = c.layers * rank * ((h + h) + (h + kv))
    assert trace.meta["trainable_parameters"] == adapted
    assert sum(t.bytes for t in trace.tensors if t.role == "gradient") == 2 * adapted


def test_products_of_a_frozen_linear_are_two_thirds():
    """A frozen layer multiplies forward and for its input's gradient; below the first adapter only forward."""
    whole, tuned = (
        transformer("llama2-7b", batch=1, sequence=64, precision="bf16", **o) for o in ({}, {"lora_rank": 8})
    )
    head, layers = 32000 * 4096, 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    attention = 32 * 2 * 64 * 4096  # multiply-adds per token of the two products
    adapters = 32 * 2 * 8 * 2 * 4096
    assert whole.meta["model_flops"] == 6 * 64 * (head + layers + attention)
    expected = 2 * 64 * (2 * (head + layers) + 3 * attention + 3 * adapters)
    expected -= 2 * 64 * 3 * 4096**2  # q, k and v of the first layer need no gradient of their input
    expected -= 2 * 64 * 2 * 8 * 4096  # nor do its A
    assert tuned.meta["model_flops"] == expected


# ---- how weights are stored --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "frozen_dtype", "base", "adapter", "state"),
    [
        ("fp32", None, 4, 4, 8),
        ("bf16", None, 2, 2, 4),
        ("amp_bf16", None, 4, 4, 8),
        ("amp_bf16", "bf16", 2, 4, 8),
        ("fp32", "bf16", 2, 4, 8),
        ("mixed_bf16", None, 2, 2, 12),
    ],
)
def test_bytes_of_frozen_and_of_trained_weights(precision, frozen_dtype, base, adapter, state):
    trace = built("llama lora", precision=precision, frozen_dtype=frozen_dtype)
    n, trained = trace.meta["parameters"], trace.meta["trainable_parameters"]
    assert bytes_of(trace, "weight") == base * (n - trained) + adapter * trained
    assert bytes_of(trace, "optimizer_state") == state * trained
    written = {t.name for op in trace.ops for t in map(trace.tensors.__getitem__, op.writes) if t.role == "weight"}
    assert written
    assert all(".lora_" in name for name in written)


def test_peft_and_plain_names_of_targets_are_the_same():
    for peft, ours in (("q_proj,v_proj", ["attn.q", "attn.v"]), ("o_proj", "attn.proj"), ("down_proj", "mlp.down")):
        first, second = (
            transformer(LLAMA, batch=1, sequence=8, lora_rank=2, lora_targets=targets) for targets in (peft, ours)
        )
        assert [op.name for op in first.ops] == [op.name for op in second.ops]
    default, given = (transformer(LLAMA, batch=1, sequence=8, lora_rank=2, **o) for o in ({}, {"lora_targets": "q,v"}))
    assert [op.name for op in default.ops] == [op.name for op in given.ops]


def test_micro_batches_accumulate_only_what_is_trained():
    trace = built("gpt2 lora", micro_batches=2)
    sums = [op.name for op in trace.ops if op.name.endswith(".grad.accumulate")]
    assert len(sums) == 2 * 3
    assert all(".lora_" in name for name in sums)


@pytest.mark.parametrize("loss", ["torch", "fused", "chunked"])
def test_a_frozen_head_has_no_gradient_under_any_loss(loss):
    trace = built("llama lora", loss=loss)
    assert not [t.name for t in trace.tensors if t.role == "gradient" and ".lora_" not in t.name]
    assert not [t.name for t in trace.tensors if t.name == "head.dw"]
    assert trace.meta["model_flops"] == built("llama lora").meta["model_flops"]


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "arguments", "text"),
    [
        (LLAMA, {"lora_rank": 0}, "lora_rank: needs an integer of at least 1, has 0; nearest: 1"),
        (LLAMA, {"lora_rank": 2.5}, "lora_rank: needs an integer of at least 1, has 2.5; nearest: 2"),
        (LLAMA, {"lora_targets": "q"}, "lora_targets: needs adapters: give lora_rank, too"),
        (LLAMA, {"lora_dropout": 0.1}, "lora_dropout: needs adapters: give lora_rank, too"),
        (
            LLAMA,
            {"lora_rank": 4, "lora_dropout": 1},
            "lora_dropout: needs a number from 0 up to 1, has 1; nearest: 0.99",
        ),
        (
            LLAMA,
            {"lora_rank": 4, "lora_targets": "q_prj"},
            "lora_targets: 'q_prj' stands for no linear layer (did you mean 'q_proj'?)",
        ),
        (
            GPT2,
            {"lora_rank": 4, "lora_targets": ["c_atn"]},
            "lora_targets: 'c_atn' stands for no linear layer (did you mean 'c_attn'?)",
        ),
        (LLAMA, {"lora_rank": 4, "lora_targets": []}, "lora_targets: needs names, such as 'a,b' or ['a', 'b'], has []"),
        (LLAMA, {"frozen": "embd"}, "frozen: 'embd' stands for no weight (did you mean 'embed'?)"),
        (LLAMA, {"frozen": 7}, "frozen: needs names, such as 'a,b' or ['a', 'b'], has 7"),
        (LLAMA, {"frozen": "*"}, "frozen: the loss depends on no trained weight: nothing is left to train"),
        (LLAMA, {"frozen_dtype": "bf16"}, "frozen_dtype: nothing is frozen: give frozen or lora_rank, too"),
        (LLAMA, {"lora_rank": 4, "frozen_dtype": "bf61"}, "frozen_dtype 'bf61' is unknown (did you mean 'bf16'?)"),
        (LLAMA, {"lora_rank": 4, "frozen_dtype": "nf4x"}, "frozen_dtype 'nf4x' is unknown (did you mean 'nf4'?)"),
        (
            LLAMA,
            {"frozen": "h0", "frozen_dtype": "bf16"},
            "h0.attn.q would multiply fp32 by bf16, which PyTorch refuses: choose a precision with autocast, or "
            "another frozen_dtype",
        ),
    ],
)
def test_a_bad_argument_is_named_with_the_nearest_good_one(config, arguments, text):
    with pytest.raises(WorkloadError) as error:
        transformer(config, batch=1, sequence=8, **arguments)
    assert str(error.value) == text

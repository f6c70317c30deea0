"""Writes docs/published.md: training iterations that others published, beside the same ones simulated.

python scripts/make_published.py              write the page from docs/published.json
python scripts/make_published.py --check      say whether it is current; exit status 1 where it is not
python scripts/make_published.py --measure [SOURCE or RUN…]
                                              simulate all runs (ten minutes), or some of them, write
                                              docs/published.json and sim/report/error_bars.json, then the page
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.validation.published_runs import (  # noqa: E402
    LAYOUT,
    OF_THE_CARD,
    PERIOD,
    RESERVED,
    printed_peak,
    printed_rate,
    rows,
    simulated,
)

DATA = ROOT / "docs" / "published.json"
PAGE = ROOT / "docs" / "published.md"
BARS = ROOT / "sim" / "report" / "error_bars.json"
Row = Mapping[str, Any]

INTRODUCTION = """\
# Published iterations

Training runs that others measured and printed, beside the same runs simulated. The rows are those of
`tests/validation/data/published_runs.csv`: {count} runs of {sources} public tables, of which {run} are simulated.
A: set up without a guess that matters; B: one or two guesses. Sources are divided into those that were looked at while
the simulator was developed and those that are checked; **no constant of the simulator is fitted to either**. But
where a row of either set was far off the code of its source was read again: what it does is then simulated (what
PaddlePaddle holds, which communicators it has), and a setup that it contradicts was corrected. So peaks of rows to
check are nearer than those of a program that nobody has looked into.
Differences are (ours / theirs − 1): a positive one of a rate is a run that is too fast here. A CPU launches the ops,
under the stack of the row (`dispatch = "cpu"`), or a graph where the row says so. Where PyTorch's own counters were
read, ours are those of its allocator: blocks, or what it reserves. Where the memory of the card was read, ours is what
the allocator would reserve for the tensors and what lies beside them (`card_reading`): the context, 0.4 GB (1.4 with
all kernels, where CUDA is older), cuBLAS's workspaces, and NCCL's buffers, 0.3 to 0.7 GB for each group of ranks that
exchange; where the source's container says which PyTorch ran, or PaddlePaddle did, with what that holds for
collectives. `hf` says how large its context is.

"""

WHAT = {
    "time": "absolute time of an iteration",
    "policies": "ratio of the times of two policies: two rows that differ in policy (and sequence parallelism)",
    "stacks": "ratio of the times of two stacks: two rows of a source that differ in stack, launches or loss alone",
    "layouts": "ratio of the times of two layouts: two rows of a source that differ in how devices divide the job",
    "machines": "ratio of the times on two machines: two rows of a source with the same model on two chips",
    "peak": "peak memory of a device",
}
"""What kinds of statement are measured."""

REASONS = {
    "tune": (
        "Attention kernel and first optimizer are not stated; its code copies keys and values for each query head. It "
        "compiles each layer alone, and the loss: here the loss is one kernel where it is in chunks, and eager where "
        "it is PyTorch's (tune-03). Which 8-bit AdamW ran is not said (tune-08)."
    ),
    "hf": (
        "Adafactor is priced as PyTorch's, of 18 kernels a matrix and 9 a vector; theirs has 24 and 16 and reads "
        "nothing from the device. Clipping of gradients is left out. Gradients are filled with zeros, and so exist in "
        "forward, as before PyTorch 2.0 by default. The model has a head for two classes; ours has "
        "BERT's pre-training heads, a tenth more work under fp32. NVML reads what the allocator holds, cached blocks "
        "included, which the runs without checkpoints fill most. Forty updates with the first, slow one in the mean."
    ),
    "fa": "The micro-batch is not stated.",
    "fpl2": (
        "DeepSpeed gathers one module ahead there (stage3_prefetch_bucket_size is less than a parameter), and so does "
        "this; its hooks of Python round each module, and its step, are left out. Time lost per iteration is the same "
        "0.15 s on both cards: it is not of arithmetic. Were a layer gathered only as it begins, all four would be "
        "within 4 %. Clipping of gradients is left out."
    ),
    "dsbert": ("The head predicts spans; ours has BERT's pre-training heads. The number of cards is not stated."),
    "titanA": (
        "One node's links are those of the profile; the network between 8 nodes is not stated. Nor is which layers "
        "have checkpoints: every second one, which was the default."
    ),
    "fms": (
        "The network is that of a node (400 and 800 Gb/s), each card has an eighth. HSDP is taken to shard within a "
        "node, as it does by default; the shards are summed among nodes, each card over its own eighth. Its loop reads "
        "the loss and the norm of the gradients from the device in each step, which is left out. H100s are twice as "
        "fast as A100s there, 2.5 times here: not explained."
    ),
    "sel": "Transcribed from a paper. Kernels of Megatron-LM compute all scores of causal attention.",
    "fp70": "Recomputation and sequence parallelism are not stated. The network is a node's, 200 Gb/s.",
    "fpgpt": (
        "Its table counts memory in GiB, actual of total, and is taken to be read of the card. Kernels are loaded "
        "from the start, as CUDA 11.8 does by default. PaddlePaddle holds reduced gradients until its CPU knows of "
        "it. How far it is ahead (fpgpt-01) depends on how many kernels it launches: a linear layer adds its bias by "
        "one of its own. With tp and without stages it reads sizes back from the device before each micro-batch "
        "(distributed_dataloader, which FlagPerf sets and PaddleNLP turns off without tp and stages). Its pool of "
        "memory stands as PyTorch's, but it keeps what building the model took: weights in fp32, and with zero 2 all "
        "of them in fp16 in buffers of their own (fpgpt13-01 needs no more in training). With zero 2 each large "
        "gradient is reduced to one rank by itself, and weights are broadcast from one. It has communicators that no "
        "op here uses: of all ranks (its barrier at the start), of all stages, of the first and the last one (which "
        "data take), and of the norm of gradients (with stages, or with tp and zero 1). The softmax of the loss lies "
        "beside the fp32 logits. PaddlePaddle 2.5.1 has version 1 of FlashAttention. Releases of PaddleNLP have 128 "
        "or 40 heads for 13B; which ran is not known, nor does it matter here."
    ),
    "fpll1": (
        "As fpgpt, but weights are made in fp16, and no layer has a bias. PaddleNLP fuses the norms alone "
        "where its page says so (versions of the files for 40 GB say otherwise, of norms and of what is recomputed: "
        "fpll1-05 to -08 are graded B); rotary positions, SwiGLU and the loss are kernels of their own."
    ),
    "fpgpt13": "As fpgpt.",
    "fpll13": "As fpll1.",
    "fpbert": (
        "Memory is read from the card, in whole GiB, context and cached blocks included; whether fp32 "
        "products ran in TF32 is not stated, and is assumed on the A100. AdamW loops over parameters, as in PyTorch "
        "1.13 by default, whose zero_grad keeps gradients. One card (fpbert-04) runs a batch of 16 here, which its "
        "configuration sets and which an earlier version of the page printed, with 42.2 and 36.9; the page now prints "
        "12, which would not explain 5 GiB more than with DDP (Ascend's page and configuration differ in the same "
        "way): a guess, hence graded B. Whether its CUDA loads all kernels (1 GiB) is not known. The network of the "
        "two nodes is 200 Gb/s each."
    ),
    "fpres": (
        "Memory is read from the card, cached blocks and the workspaces of cuDNN's algorithms included; its CUDA, "
        "11.4, loads all kernels. Its code keeps images with channels first, which cuDNN transposes, and reads losses "
        "from the device after each step."
    ),
    "dleres": ("Batch and order of channels are those of the configurations beside the table."),
    "dlebert": ("Only masked tokens reach their head (20 of 128), ours takes all; LAMB stands as a fused Adam."),
    "fpl3": (
        "Parts that the script does not set have Megatron-LM's defaults: biases, learned positions, a tied head and "
        "dropout, where Llama 3 has none of them. Memory is read from the card, in whole GiB, cached blocks, NCCL's "
        "buffers and the context included, those of its barrier and of the norm of gradients among them. Its page "
        "names recompute-activations, its script does not pass it: nothing is recomputed. Gradients are summed after "
        "backward, as without overlap-grad-reduce. The network is taken to be a node's, 200 Gb/s; were it a card's, "
        "fpl3-06 would be 21 % too fast. What FP8 brings beside bf16 (fpl3-03 and -05, -02 and -04) is 1.29 and 1.30 "
        "in print."
    ),
    "nemo": (
        "Recomputation, the type of gradients, and whether weights are kept in FP8 alone are not "
        "said; here gradients are in fp32 and nothing is recomputed, what does not fit with that is refused, and "
        "exchanges of tp run beside products as Megatron-LM does it by default. Nemotron's parts are those of NeMo's "
        "configurations (nemo-08 to -10)."
    ),
    "mllama": "As nemo.",
    "mgold": (
        "Memory alone: times are of a deterministic mode and bound by launches. The last rank logs. Two workspaces of"
        " cuBLAS of 32 MiB are added, as the recipe's CUBLAS_WORKSPACE_CONFIG sets them, one for the thread of "
        "backward; with local layers (mgold-09 to -12) the buffer of a layer's scores as well, which their attention "
        "takes once and keeps; and the mask of scores that their data loader makes, a byte each, where nothing here "
        "has one (mgold-03, -04, and -08 to -12). Of mgold-03, 1.0 GB more is printed than of the same run on an H100"
        " (mgold-04): not explained. The fused kernels that are on by default there stand as the fused stack. Their "
        "buffers of gradients exist from the start, ours from the first backward pass: of a run of one micro-batch "
        "the peak is that of a second one."
    ),
    "tbench": (
        "Which V100, its CPU and the version of PyTorch are not stated. Below 8 images eager runs wait for the CPU, "
        "which takes 1.7 times as long there as the one whose figures are used. As one graph they are within 14 %."
    ),
    "mpt": (
        "FlashAttention 1 in Triton, on an H100 at the rate of version 2 there over what version 2 is faster on an "
        "A100. DecoupledAdamW loops over FSDP's flat parameters, ours over parameters. Microbatches that do not divide "
        "the batch are counted as whole ones. What is left on an H100 grows with tokens: 22 to 28 % of what products "
        "take here without recomputation, 15 to 19 with it, as if those of backward "
        "alone (under CUDA 11.8) were slower; no table of such products was found. So it is not of launches or of "
        "exchanges, except where a microbatch has few tokens for its weights (30B with 6,144, 13B with 4,096): beside "
        "exchanges products are 19 % slower on average (Lee et al. 2025, arXiv:2507.03114), which is left out."
    ),
    "nano": (
        "Sequence parallelism gathers inside autograd there, which saves the gathered input of some layers. A "
        "vocabulary of 50,257 or 50,258 makes its products several times slower, which is left out. With small "
        "microbatches their CPU sets the pace."
    ),
    "nlong": (
        "Printed as TFLOP/s of a device, of which tokens are made here with attention counted whole: that gives whole "
        "numbers back. Counted causal, the longest would have 1.9 times as many."
    ),
    "titanB": (
        "Cards of 500 W: products and memory as measured on such a card, attention as on one of 700 W. Memory is what "
        "PyTorch's allocator reserves. Of an iteration 0.47 to 0.59 s are missing in all of -1a to -3c, eager or "
        "compiled, in bf16 or FP8, on 8 cards or 128: so not of products or of what is compiled. Attention is the "
        "largest part that they have in common, 0.4 s here: not explained."
    ),
    "te": (
        "The card is not printed, and taken to be an H100 of 700 W; with the figures of an H100 PCIe (0.53 of the peak "
        "and 2,039 GB/s) both runs would be 5 to 8 % too slow."
    ),
    "lit": (
        "One product makes queries, keys and values there, and pads what the adapters add with zeros: what autograd "
        "saves for it is held (`joint_adapters`). With 4-bit weights (bitsandbytes 0.41.1) 0.8 to 1.0 GiB are missing "
        "beside the inputs that its products hold: not explained."
    ),
    "mfm": "The configuration file is a guess.",
    "lf": (
        "Recomputation is a default that is not stated. Card readings in whole GB, context and cached blocks included."
    ),
}
"""Known causes of the differences of a source; what is left is the model's own error, or not known."""


def measure(only: Sequence[str]) -> dict[str, Any]:
    """All figures; only: sources and runs that are simulated, all by default."""
    known = {run["id"]: run for run in load()["runs"]} if only else {}
    found = []
    for row in rows():
        if row["setup"] is None:
            continue
        if only and row["id"] in known and not {source_of(row), row["id"]} & set(only):
            found.append(known[row["id"]])
            continue
        ours = simulated(row)
        rate, peak = (None if ours.rate is None else float(f"{ours.rate:.6g}")), ours.peak
        found.append({"id": row["id"], "rate": rate, "peak": peak, "refusal": ours.refusal})
        print(found[-1], file=sys.stderr, flush=True)
    return {"runs": found}


def load() -> dict[str, Any]:
    """The recorded figures."""
    loaded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return loaded


def dump(figures: Mapping[str, Any]) -> str:
    """As JSON."""
    lines = ",\n  ".join(json.dumps(run) for run in figures["runs"])
    return f'{{"runs": [\n  {lines}\n]}}\n'


def source_of(row: Row) -> str:
    """The part of an id that names its source."""
    return str(row["id"]).rsplit("-", 1)[0]


def both(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows that are simulated, with what came of it."""
    ours = {run["id"]: run for run in figures["runs"]}
    return [{**row, "ours": ours[row["id"]]} for row in rows() if row["setup"] is not None]


STACK = ("stack", "dispatch", "loss")
"""A setup's keys that say which kernels run, and how they are launched."""

SOFTWARE = ("batch", "accumulate", "network", "flash", "bucket", "gradient_buffer", "optimizer")
"""A setup's keys that may differ between the same run on two machines: sizes, networks, and libraries' versions."""

USUAL = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "sequence_parallel": False}
"""A layout's keys where a setup leaves them out."""


def counts_tensors(row: Row) -> bool:
    """Whether a printed peak is what tensors hold: neither cached blocks nor a context are in it."""
    return any(words in row["peak_memory_definition"] for words in ("max_memory_allocated", "peak active"))


def reads_card(row: Row) -> bool:
    """Whether a printed peak is said, or taken, to be all that is taken of a card."""
    return row["peak_memory_definition"].startswith(OF_THE_CARD)


def counts_reserved(row: Row) -> bool:
    """Whether a printed peak is what PyTorch's allocator reserves: cached blocks are in it, no context is."""
    return row["peak_memory_definition"].startswith(RESERVED)


# ---- errors --------------------------------------------------------------------------------------


def rate_error(row: Row) -> float | None:
    """(ours / theirs - 1) of the rate."""
    theirs, ours = printed_rate(row), row["ours"]["rate"]
    return None if theirs is None or ours is None else ours / theirs - 1


def peak_error(row: Row) -> float | None:
    """(ours / theirs - 1) of the peak."""
    theirs, ours = printed_peak(row), row["ours"]["peak"]
    return None if theirs is None or ours is None else ours / theirs - 1


def pairs(found: Sequence[Row], differ: Sequence[str], only: Sequence[str] = ()) -> list[tuple[Row, Row, float]]:
    """Pairs of one source whose setups differ in at least one of these keys and in no others but `only`.

    With the error of the ratio of their rates.
    """
    by_source: dict[str, list[Row]] = {}
    for row in found:
        if rate_error(row) is not None:
            by_source.setdefault(source_of(row), []).append(row)
    pairs = []
    for part in by_source.values():
        for (a, s), (b, t) in combinations([(row, {**USUAL, **row["setup"]}) for row in part], 2):
            keys = {k for k in {*s, *t} if s.get(k) != t.get(k)}
            if keys & set(differ) and keys <= {*differ, *only}:
                error = (1 + rate_error(b)) / (1 + rate_error(a)) - 1  # type: ignore[operator]
                pairs.append((a, b, error))
    return pairs


PAIRS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "policies": (["policy"], ["sequence_parallel"]),
    "stacks": (STACK, ()),
    "layouts": (LAYOUT, ["batch", "accumulate", "network", "communicators", "reads_each", "reduces_to_one"]),
    "machines": (["profile", "card"], SOFTWARE),
}
"""Statements about two rows: in which keys of their setups these have to differ, and in which more they may."""


def errors_of(kind: str, found: Sequence[Row]) -> list[float]:
    """All errors of one kind of statement (`WHAT`)."""
    if kind in PAIRS:
        return [error for *_, error in pairs(found, *PAIRS[kind])]
    every = map(rate_error if kind == "time" else peak_error, found)
    return [error for error in every if error is not None]


def errors(found: Sequence[Row]) -> dict[str, list[float]]:
    """All errors by kind of statement."""
    return {kind: errors_of(kind, found) for kind in WHAT}


def bars(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per kind of statement: of how many rows and sources, the errors of the middle, of nine tenths and the worst.

    And of which machines they are: those of its own rows.
    """
    found = both(figures)
    own = {"time": {"by_machine": {name: machine_bar(part) for name, part in by_machine(found).items()}}}
    return {
        kind: {
            "rows": len(part),
            "sources": sources_of(kind, found),
            **bar(part),
            "machines": machines_of(kind, found),
            **own.get(kind, {}),
        }
        for kind, part in errors(found).items()
    }


LARGEST = "mpt"
"""The source with the most rows."""

RECIPES_OF_NVIDIA = ("nemo", "mllama", "mbr", "nlong")
"""Sources that print what NVIDIA measured with its own framework: NeMo and Megatron Bridge, on Megatron Core."""

FEWEST = {"rows": 10, "sources": 3}
"""How many rows and sources of a machine are enough for an error of its own."""


def machine_bar(found: Sequence[Row]) -> dict[str, Any]:
    """The distribution of the errors of times of one machine's rows."""
    return {"sources": len(set(map(source_of, found))), **bar(errors_of("time", found))}


def by_machine(found: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each machine of which there are enough."""
    rows: dict[str, list[Row]] = {}
    for row in found:
        if rate_error(row) is not None:
            rows.setdefault(row["setup"]["profile"], []).append(row)
    return {
        name: rows[name]
        for name in sorted(rows)
        if len(rows[name]) >= FEWEST["rows"] and len(set(map(source_of, rows[name]))) >= FEWEST["sources"]
    }


def sources_of(kind: str, found: Sequence[Row]) -> int:
    """How many sources have rows, or pairs of rows, of one kind of statement."""
    by_source: dict[str, list[Row]] = {}
    for row in found:
        by_source.setdefault(source_of(row), []).append(row)
    return sum(bool(errors_of(kind, part)) for part in by_source.values())


def machines_of(kind: str, found: Sequence[Row]) -> list[str]:
    """The profiles of the rows, or pairs of rows, of one kind of statement."""
    if kind == "machines":  # a pair of two
        two = [row for a, b, _ in pairs(found, *PAIRS[kind]) for row in (a, b)]
        return sorted({row["setup"]["profile"] for row in two})
    rows: dict[str, list[Row]] = {}
    for row in found:
        rows.setdefault(row["setup"]["profile"], []).append(row)
    return sorted(name for name, part in rows.items() if errors_of(kind, part))


def bar(found: Iterable[float]) -> dict[str, float]:
    """The distribution of errors."""
    sizes = sorted(map(abs, found))
    ninth = sizes[max(0, -(-9 * len(sizes) // 10) - 1)]
    return {
        "rows": len(sizes),
        "median": round(statistics.median(sizes), 3),
        "nine_tenths": round(ninth, 3),
        "worst": round(sizes[-1], 3),
    }


# ---- the page ------------------------------------------------------------------------------------


def page(figures: Mapping[str, Any]) -> str:
    """The whole page."""
    found = both(figures)
    everything = rows()
    sources = dict.fromkeys(source_of(row) for row in everything)
    text = [INTRODUCTION.format(count=len(everything), sources=len(sources), run=len(found)), *summary(found)]
    text.append("## The rows\n")
    for source in dict.fromkeys(map(source_of, found)):
        text += table(source, [row for row in found if source_of(row) == source])
    text += missing([row for row in everything if row["setup"] is None])
    return "\n".join(text)


def summary(found: Sequence[Row]) -> list[str]:
    """The distribution of errors, as results print it, and by grade and set."""
    lines = [
        "## How far off\n",
        "| statement | rows | median | nine tenths within | worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    groups = [("", found)]
    groups += [(f", grade {g}", [r for r in found if r["complete"] == g]) for g in "AB"]
    groups += [
        (", to check" if s == "check" else ", develop", [r for r in found if r["set"] == s])
        for s in ("develop", "check")
    ]
    groups += [
        (", a reading of what PyTorch's tensors hold", [row for row in found if counts_tensors(row)]),
        (", a reading of what PyTorch's allocator reserves", [row for row in found if counts_reserved(row)]),
        (", a reading of the whole card", [row for row in found if reads_card(row)]),
        (
            ", a reading of which it is not said",
            [row for row in found if not (counts_tensors(row) or counts_reserved(row) or reads_card(row))],
        ),
        (f", without `{LARGEST}`, the largest source", [row for row in found if source_of(row) != LARGEST]),
        (
            f", grade A without `{LARGEST}`",
            [row for row in found if source_of(row) != LARGEST and row["complete"] == "A"],
        ),
    ]
    machines = []
    for name, part in by_machine(found).items():
        machines.append((f", on `{name}`", part))
        vendors = [row for row in part if source_of(row) in RECIPES_OF_NVIDIA]
        if vendors:
            machines.append((f", on `{name}`, NVIDIA's own recipes", vendors))
            machines.append((f", on `{name}`, all others", [row for row in part if row not in vendors]))
    for kind, what in WHAT.items():
        for name, part in [*groups, *(machines if kind == "time" else ())]:
            told = {"peak": LARGEST not in name, "time": "reading" not in name}
            values = errors_of(kind, part) if not name or told.get(kind) else []
            if values:
                b = bar(values)
                lines.append(
                    f"| {what if not name else '… ' + name.removeprefix(', ')} | {b['rows']} | {b['median']:.1%} | "
                    f"{b['nine_tenths']:.1%} | {b['worst']:.1%} |"
                )
    return [*lines, "", *far(found), *fitting(found), *vendors_own(found), *footing(found), *order(found)]


def vendors_own(found: Sequence[Row]) -> list[str]:
    """How far off the rows of NVIDIA's own recipes on H100 are, by source, and what that says and does not."""
    h100 = by_machine(found).get("h100", [])

    def middle(source: str) -> str:
        own = [rate_error(row) or 0.0 for row in h100 if source_of(row) == source]
        return f"{source} {statistics.median(own):+.1%}"

    if not any(source_of(row) in RECIPES_OF_NVIDIA for row in h100):
        return []
    refused = sum(source_of(row) in RECIPES_OF_NVIDIA and row["ours"]["rate"] is None for row in found)
    return [
        f"On H100 NVIDIA's own recipes, all in FP8 ({refused} more do not fit here), are off to either side: "
        f"{', '.join(map(middle, RECIPES_OF_NVIDIA))} in the median. So is Megatron-LM run by others, in bf16 and FP8: "
        f"{middle('fpl3')}, {middle('fp70')}. Too fast nearly throughout are FSDP under PyTorch ({middle('mpt')}, "
        f"{middle('titanB')}) and Hugging Face's loop ({middle('te')}): no one constant of the card explains all.\n"
    ]


def footing(found: Sequence[Row]) -> list[str]:
    """What the bar for two policies rests on: it is printed with every comparison."""
    these = pairs(found, *PAIRS["policies"])
    rows = {row["id"]: row for a, b, _ in these for row in (a, b)}
    sources = dict.fromkeys(map(source_of, rows.values()))
    checked = sum(a["set"] == "check" for a, *_ in these)
    policies = dict.fromkeys(row["setup"]["policy"] for row in rows.values())
    return [
        f"A comparison of policies prints the worst of the {len(these)} pairs as the model's own error. These are "
        f"few: {len(rows)} rows of {len(sources)} sources ({', '.join(sources)}), some in several pairs, "
        f"{checked or 'none'} of them for checking only, of {', '.join(f'`{p}`' for p in policies)}. Policies that "
        "wait for copies may be off by more; set `model_error=` to what you trust.\n"
    ]


def order(found: Sequence[Row]) -> list[str]:
    """Which pairs of one source come out in another order than printed, beside the bar of their kind."""
    known = {kind: bar(own)["worst"] for kind in ("policies", "stacks") if (own := errors_of(kind, found))}
    every = pairs(found, ["policy", *STACK], ["sequence_parallel"])
    wrong = []
    for a, b, _ in every:
        theirs = (printed_rate(b) or 0) / (printed_rate(a) or 1) - 1
        ours = b["ours"]["rate"] / a["ours"]["rate"] - 1
        if theirs * ours <= 0:
            alike = all(a["setup"].get(key) == b["setup"].get(key) for key in STACK)
            wrong.append((a["id"], b["id"], theirs, ours, known["policies" if alike else "stacks"]))
    lines = [
        f"Of {len(every)} pairs that differ in policy, stack, launches or loss alone, {len(every) - len(wrong)} are in "
        "the printed order. " + recomputed(every, wrong)
    ]
    if not wrong:
        return [*lines, ""]
    beyond = [f"{a}, {b}" for a, b, theirs, ours, most in wrong if max(abs(theirs), abs(ours)) > most]
    said = "none is further apart, in print or here, than the bar of its kind"
    if beyond:
        said = f"these are further apart than the bar of their kind: {'; '.join(beyond)}"
    lines += [
        f"Of the others {said} (the worst pair of two policies, or of two stacks where these differ, too).",
        "",
        "| pair | in print | here | bar |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {a}, {b} | {theirs:+.1%} | {ours:+.1%} | {most:.1%} |" for a, b, theirs, ours, most in wrong]
    return [*lines, ""]


FAR = {"rate": 0.2, "peak": 0.1}
"""Errors beyond which a row of grade A is listed with its reason, of rates and of peaks."""

SLOWER = "in print slower than with 2,048 tokens a sample, as no other model of the table is: not explained"
SMALLER = "not explained: 13B on 16 to 128 of these cards is 6 to 8 % off"
STAGES = "one to four samples a microbatch, on stages: perhaps the CPU of its loop sets the pace; not explained"
MISSES = {
    "tune-08": (
        "which 8-bit AdamW ran is not said: the page that the README links names torchao's, and bitsandbytes' paged "
        "one, whose states would lie outside PyTorch's allocator (9 GiB would be left here). torchao's quantises the "
        "states of the embedding, too, as here; what its compiled update makes depends on the version of PyTorch, not "
        "stated: nothing to 8.8 GiB for the embedding. And from the row before memory falls by 4.2 GiB in print, by "
        "5.9 here: 1.7 are missing without either"
    ),
    "mpt-038": "not explained: half the tokens are 42 % faster in print, 7 % here (13B: 15 in both); 70 of 80 GB taken",
    **dict.fromkeys(("mpt-078", "mpt-079"), SLOWER),
    **dict.fromkeys(("mpt-099", "mpt-100", "mpt-101"), SMALLER),
    "mpt-161": "not explained: an iteration takes 5 s more there (mpt-160, with twice the tokens: 3 s)",
    "mpt-178": "in print slower than on 16 or 64 cards: not explained",
    **dict.fromkeys(("nano-05", "nano-06", "nano-07", "nano-08"), STAGES),
}
"""Why rows of grade A are further off than that."""


def far(found: Sequence[Row]) -> list[str]:
    """The rows of grade A that are far off, each with its reason."""
    graded = [row for row in found if row["complete"] == "A"]
    both = [(row, rate_error(row), peak_error(row)) for row in graded]
    rows = [
        f"| {row['id']} | {'–' if rate is None else f'{rate:+.1%}'} | {'–' if peak is None else f'{peak:+.1%}'} | "
        f"{MISSES.get(row['id'], 'not explained')} |"
        for row, rate, peak in both
        if abs(rate or 0) > FAR["rate"] or abs(peak or 0) > FAR["peak"]
    ]
    return [
        f"Of {len(graded)} rows of grade A {len(rows)} are more than {FAR['rate']:.0%} off in time or "
        f"{FAR['peak']:.0%} in peak:\n",
        "| row | rate | peak | why, as far as it is known |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def fitting(found: Sequence[Row]) -> list[str]:
    """Which rows fit in print and which here, where the two differ: they are in no figure above."""
    never = [row for row in found if row["value"] == "OOM"]
    here = [f"{row['id']} ({row['ours']['peak'] / 2**30:.1f} GiB)" for row in never if not row["ours"]["refusal"]]
    ran = [row["id"] for row in found if row["value"] != "OOM" and row["ours"]["refusal"]]
    return [
        f"{len(never)} rows ran out of memory in print; of these {len(here)} fit here, which is not explained: "
        f"{', '.join(here)}. "
        f"{len(ran)} that ran there do not fit here: {', '.join(ran)}. NVIDIA's recipes do not say in which "
        "type gradients are and what is recomputed.\n"
    ]


def recomputed(every: Sequence[tuple[Row, Row, float]], wrong: Sequence[tuple[Any, ...]]) -> str:
    """Of how many pairs that differ in what is recomputed the printed order is ours."""

    def way(row: Row) -> set[str]:
        return set(re.findall(r"(?:full|selective)_recompute", row["setup"]["policy"]))

    def kernels(row: Row) -> list[Any]:
        return [row["setup"].get(key) for key in STACK]

    found = {(a["id"], b["id"]) for a, b, _ in every if way(a) != way(b) and kernels(a) == kernels(b)}
    right = len(found - {pair[:2] for pair in wrong})
    return f"Of the {len(found)} in which another part is recomputed by the same kernels, {right} are."


def table(source: str, part: Sequence[Row]) -> list[str]:
    """One source."""
    first = part[0]
    lines = [
        f"### {source}: {first['source']}\n",
        f"{address(first['address'])} ({first['date_version']}); {first['set']}. Rate in {unit(first['metric'])}."
        + (f" {REASONS[source]}" if source in REASONS else "")
        + "\n",
        "| run | grade | what runs | theirs | ours | difference | peak, GiB: theirs | ours | difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in part:
        theirs, peak, ours = printed_rate(row), printed_peak(row), row["ours"]
        cells = (
            row["id"],
            row["complete"],
            what(row),
            "does not fit" if row["value"] == "OOM" else number(theirs),
            number(ours["rate"]) if not ours["refusal"] else f"refused: {ours['refusal']}",
            signed(rate_error(row)),
            gib(peak),
            gib(ours["peak"]),
            signed(peak_error(row)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def unit(metric: str) -> str:
    """What a rate is in; a time is printed as one, too."""
    return f"iterations/s, printed as {PERIOD}" if metric.startswith(PERIOD) else metric


def address(text: str) -> str:
    """Where a source stands; a path in its repository reads as one of that repository, not of ours."""
    place, _, path = text.partition(" ")
    return " ".join(filter(None, (place, path.replace("/", " › "))))


def what(row: Row) -> str:
    """What a row runs, in a few words."""
    s = row["setup"]
    model = s.get("cnn") or (s["model"] if isinstance(s["model"], str) else row["model"])
    words = [model, f"{s['batch']}" + (f" x {s['sequence']}" if "sequence" in s else "")]
    words.append(s["precision"] + (", channels last" if s.get("channels_last") else ""))
    words += [f"{s['accumulate']} micro-batches"] if s.get("accumulate", 1) > 1 else []
    keys = "dp", "zero", "shard_within", "tp", "pp"
    words += [f"{key} {s[key]}" for key in keys if s.get(key, 0) > (key != "zero")]
    words += ["sequence parallel"] if s.get("sequence_parallel") else []
    words += [s["stack"]] if "stack" in s else []
    words += [f"fused {s['fuses']}"] if "fuses" in s else []
    words += ["as one graph"] if s.get("dispatch") == "graphs" else []
    card = f" as {s['card']}" if "card" in s else ""
    return ", ".join([*words, f"`{s['policy']}`", f"`{s['profile']}`{card}"])


def missing(left: Sequence[Row]) -> list[str]:
    """What keeps rows from being simulated."""
    lines = ["## Not simulated\n", "| what is missing | rows |", "| --- | --- |"]
    by: dict[str, list[str]] = {}
    for row in left:
        by.setdefault(row["missing"], []).append(row["id"])
    lines += [f"| {why} | {', '.join(ids)} |" for why, ids in sorted(by.items(), key=lambda item: -len(item[1]))]
    return [*lines, ""]


def number(value: float | None) -> str:
    """Four digits."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def gib(value: float | None) -> str:
    """Bytes in GiB."""
    return "–" if value is None else f"{value / 2**30:.2f}"


def signed(value: float | None) -> str:
    """A relative difference."""
    return "–" if value is None else f"{value:+.1%}"


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    if "--measure" in arguments:
        figures = measure([word for word in arguments if not word.startswith("--")])
        DATA.write_text(dump(figures), encoding="utf-8")
        BARS.write_text(json.dumps(bars(figures), indent=1) + "\n", encoding="utf-8")
    text = page(load())
    if "--check" in arguments:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        current = current and json.loads(BARS.read_text(encoding="utf-8")) == bars(load())
        print("docs/published.md is current" if current else "docs/published.md is not current")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The text of docs/parallel.md on other machines, experts, policies inside a schedule, long sequences, and ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from scripts.parallel_page.cost import MICRO_BATCHES, STAGES
from scripts.parallel_page.measure import published

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
KEPT = {
    "none": "everything", "seq": "everything, sequence parallel", "sel": "all but attention's core",
    "seqsel": "all but attention's core, sequence parallel", "full": "layers' inputs",
}  # fmt: skip
PRINTED_ZERO = {
    4: (52.5, 41.3, 30.0), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}  # fmt: skip
"""GB per device of a model of 7.5 billion parameters at levels 1, 2 and 3: Rajbhandari et al., SC 2020, table 1."""


def experts(rows: Rows) -> list[str]:
    """A mixture of experts under each schedule."""
    lines = [
        "## A mixture of experts",
        "",
        "DeepSeek MoE 16B, 64 experts of which six per token, in seven stages of eight replicas that divide the",
        "experts (`dp` 8, `ep` 8), 14 microbatches of one sample per replica, kernels eager, everything kept,",
        "routing even but for chance. Exposed is the part of the devices' time in which they wait for bytes.",
        "",
        "| schedule | s | bubble | exposed | peak per stage, GiB |",
        "| --- " * 5 + "|",
    ]
    for row in rows.get("experts", ()):
        lines.append(f"| `{row['schedule']}` | {_time(row)} | {row['exposed']:.1%} | {_peaks(row)} |")
    return lines


def machines(rows: Rows) -> list[str]:
    """The same models on other machines."""
    lines = [
        "## Other machines",
        "",
        "The models above under `1f1b` in as many stages, of eight devices on Ascend 910B, of four clusters, which",
        "is one node, on MT-3000. Everything is kept in unlimited memory; where a device has less than the peak, it",
        "is bold.",
        "",
        "| model | profile | devices | s | bubble | exposed | peak per stage, GiB | a device has |",
        "| --- " * 8 + "|",
    ]
    for row in rows.get("machines", ()):
        over = "**" if max(row["peak_gib"]) > row["capacity_gib"] else ""
        lines.append(
            f"| {row['model']} | `{row['profile']}` | {row['devices']} | {_time(row)} | {row['exposed']:.1%} "
            f"| {over}{_peaks(row)}{over} | {row['capacity_gib']:.0f} |"
        )
    return lines


def policies(rows: Rows) -> list[str]:
    """Policies inside schedules."""
    lines = [
        "## Which policy inside which schedule, and for which stage",
        "",
        "GPT-3 175B as above on A100, in less memory than the fullest stage of the schedule takes. The fastest that",
        "fits is in bold. Where microbatches in flight fall from stage to stage, it is enough that the first ones",
        "recompute: 12 % faster under 1F1B than where all do, and as fast as offloading to within 2 %. Under `zb_v`",
        "nothing here fits in 54 GiB: on the last stages what binds is what waits for the gradients of weights,",
        "which recomputation does not shorten. Attention's core alone saves next to nothing, since its kernel is",
        "fused here.",
        "",
        "| schedule | each has | policy | s | peak per stage, GiB |",
        "| --- " * 5 + "|",
    ]
    every = rows.get("policies", ())
    for row in every:
        same = [each["seconds"] for each in every if each["schedule"] == row["schedule"] and each["seconds"]]
        if row["seconds"] is None:
            said, peaks = "does not fit", "–"
        else:
            mark = "**" if row["seconds"] == min(same) else ""
            said, peaks = f"{mark}{row['seconds']:.2f}{mark}", _peaks(row)
        lines.append(f"| `{row['schedule']}` | {row['budget']} | `{row['policy']}` | {said} | {peaks} |")
    return lines


def context(rows: Rows) -> list[str]:
    """Long sequences."""
    lines = [
        "## Long sequences",
        "",
        "Llama 2 7B, one sample whose tokens eight devices divide (`cp` 8), everything kept in unlimited memory.",
        "Keys and values are gathered before attention, or go from rank to rank in blocks beside the products",
        "(`ring_attention`). Exposed are gathers, or blocks that products do not hide; the weights' gradients are",
        "summed beside backward.",
        "",
        "| profile | tokens | gathered, s | exposed, s | in blocks, s | exposed, s | peaks, GiB |",
        "| --- " * 7 + "|",
    ]
    every = {(row["profile"], row["tokens"], row["ring_attention"]): row for row in rows.get("context", ())}
    for profile, tokens, ring in every:
        if ring:
            continue
        whole, blocks = (every[profile, tokens, way] for way in (False, True))
        times = " | ".join(f"{row['seconds']:.2f} | {row['seconds'] * row['exposed']:.2f}" for row in (whole, blocks))
        peaks = ", ".join(f"{row['peak_gib'][0]:.1f}" for row in (whole, blocks))
        lines.append(f"| `{profile}` | {tokens:,} | {times} | {peaks} |")
    return lines


def memory(rows: Rows) -> list[str]:
    """What the first stage of four models holds."""
    lines = [
        "## What the first stage holds",
        "",
        f"{published()['sources']['memory']}: GiB on a",
        "device of the first stage of the four models above, with Megatron-LM's 18 bytes of training state per",
        "parameter (`megatron_bf16`, `gradient_buffer`). State and activations are those of the layers, as printed:",
        "what exists from the start, and what forward has made that waits for backward when most microbatches are in",
        "flight. Printed activations of three of the five ways are percentages of the first one, read off a plot. Peak",
        "is all that a device holds at once. It is above the printed sum by what that leaves out: the embedding, with",
        "positions that each rank holds whole (in 530B 2.9 GiB), what backward makes, what other stages have sent, a",
        "layer that is recomputed, masks of scores, which eager attention reads, and in 22B the logits.",
        "",
        "| model | kept | state, printed | here | activations, printed | here | difference | sum, printed | peak |",
        "| --- " * 9 + "|",
    ]
    offs, peaks = [], []
    for row in rows.get("memory", ()):
        state, activations = printed_memory(row)
        offs.append(row["activations_gib"] / activations - 1)
        peaks.append(row["peak_gib"] / (state + activations) - 1)
        lines.append(
            f"| {row['model']} | {KEPT[row['way']]} | {state:.2f} | {row['state_gib']:.2f} | {activations:.2f} "
            f"| {row['activations_gib']:.2f} | {offs[-1]:+.1%} | {state + activations:.1f} | {row['peak_gib']:.1f} |"
        )
    if offs:
        lines += [
            "",
            f"Activations differ by {median(map(abs, offs)):.1%} in the median, from {min(offs):+.1%} to "
            f"{max(offs):+.1%}; the peak is {median(peaks):.1%} above the sum in the median, up to {max(peaks):.1%}.",
        ]
    return lines


def printed_memory(row: Row) -> tuple[float, float]:
    """GiB of state and of activations that are printed for a row."""
    state, none, both, *percents = next(each[1:] for each in published()["memory"] if each[0] == row["model"])
    known = {"none": none, "seqsel": both}
    shares = dict(zip(("seq", "sel", "seqsel", "full"), percents, strict=True))
    return state, known[row["way"]] if row["way"] in known else none * shares[row["way"]] / 100


def cost(rows: Rows) -> list[str]:
    """What a pipeline costs to simulate."""
    found = {(row["what"], row["policy"]): row for row in rows.get("cost", ())}
    lines = [
        "## What it costs to simulate",
        "",
        "GPT-3 175B in 64 microbatches by classes of symmetric ranks, beside one of its stages alone, and beside one",
        "device with a stage's layers: microseconds of processor time per op, the least of three tries. The engine",
        "goes through all events here; a single device that needs none of them is computed as arrays, in a hundredth",
        "of it. Replayed, an op of a pipeline costs little more than one of a stage. That costs more than one of a",
        "plain device for its collectives, a quarter of the ops, each of which queues for links: some 40 µs. Laid out,",
        "planned and replayed an op costs less than twice what it does on a plain device.",
        "",
        "| devices | policy | ops | build | plan | replay | times a stage's | times a plain device's "
        "| in all | times a plain device's |",
        "| --- " * 10 + "|",
    ]
    plain, stage = "one device", "one stage of eight ranks"
    for (what, policy), row in found.items():
        every = {other: found.get((other, policy), row) for other in (what, plain, stage)}
        total = {k: each["build_us"] + each["plan_us"] + each["replay_us"] for k, each in every.items()}
        of_stage, of_plain = (f"{row['replay_us'] / every[k]['replay_us']:.1f}" for k in (stage, plain))
        numbers = f"{row['build_us']:.1f} | {row['plan_us']:.1f} | {row['replay_us']:.1f}"
        lines.append(
            f"| {what} | `{policy}` | {row['ops']:,} | {numbers} | {of_stage if what != plain else '–'} | {of_plain} "
            f"| {total[what]:.1f} | {total[what] / total[plain]:.1f} |"
        )
    return lines


HELD_GB, PER_OP_KB = 0.94, 3.2
"""What the pipeline above holds in one process, and per op. With 1,024 replicas it has as many ops, holds as much, and
takes as long to 2 % (27.9 and 28.2 s of a busy processor, one run each)."""

SCALE = """\
On paper, from the figures above. **One machine.** What a question costs is the number of ops of its trace: those of a
stage times stages times microbatches. Replicas, ranks of tensor and context parallelism, and replicas that divide
experts are classes, of which one is simulated. The pipeline above has {ops:,} ops: {seconds:.0f} s and {held} GB for 64
devices, and the same for 65,536, with 1,024 replicas. At {each:.0f} µs and {kilobytes} kB an op 64 GB hold
{most:.0f} million ops, {minutes:.0f} minutes of one core: 64 such stages in {batches:.0f} microbatches.

**A sweep over a cluster** adds cells, not the speed of one: a replay is one process. Cells share nothing but the store,
and the driver spends less than 2 ms on each ([Sweeps](sweeps.md#on-a-cluster)): a thousand layouts of this size are
{hours:.0f} hours on one core and {shared:.0f} minutes on 32, and thousands of workers could be kept busy.

**A million devices** cost what one of their pipelines costs as long as all replicas do the same. What is left out then
is what makes such machines hard: ranks that differ (stragglers, failures, routing that favours one replica's experts),
switches that several jobs share, jobs that come and go. With all ranks written out (`sim/rewrites/ranks.py`) 2^20
devices have {written:.0f} billion ops: {days:.0f} days of one core and {terabytes:.0f} TB. That needs an event engine
in parallel, whose parts may run ahead of each other by the latency of a network's link, flows per switch in place of
rings, and classes of what is still alike, so that only the ranks around one that differs are written out. None of these
is here."""


def scale(rows: Rows) -> list[str]:
    """How far one machine goes, what a cluster adds, and what a million devices would need."""
    found = [row for row in rows.get("cost", ()) if row["what"].startswith("eight stages")]
    if not found:
        return []
    each, ops = sum(found[0][key] for key in ("build_us", "plan_us", "replay_us")), found[0]["ops"]
    seconds, most, written = each * ops / 1e6, 64e6 / PER_OP_KB, 2**20 * ops / STAGES
    text = SCALE.format(
        ops=ops, seconds=seconds, held=HELD_GB, each=each, kilobytes=PER_OP_KB, most=most / 1e6,
        minutes=most * each / 6e7, batches=most / (ops / (STAGES * MICRO_BATCHES)) / 64,
        hours=1000 * seconds / 3600, shared=1000 * seconds / 60 / 32,
        written=written / 1e9, days=written * each / 1e6 / 86_400, terabytes=written * PER_OP_KB / 1e9,
    )  # fmt: skip
    return ["## How far it goes", "", *text.split("\n")]


def zero(rows: Rows) -> list[str]:
    """ZeRO's table."""
    lines = [
        "## ZeRO's table",
        "",
        "Rajbhandari et al., ZeRO, SC 2020, table 1: GB of training state per device of a model of 7.5 billion",
        "parameters, printed and of a simulated GPT of 36 layers of width 4,096, scaled to that number: weights,",
        "states, and the gradients that are held when the second of two microbatches begins. Differences are those",
        "of rounding.",
        "",
        "| replicas | level 1 | level 2 | level 3 |",
        "| --- " * 4 + "|",
    ]
    for row in rows.get("zero", ()):
        both = zip(PRINTED_ZERO[row["replicas"]], (row[f"level_{level}"] for level in (1, 2, 3)), strict=True)
        lines.append(f"| {row['replicas']:,} | " + " | ".join(f"{a:g} and {b:.2f}" for a, b in both) + " |")
    return lines


def _time(row: Row) -> str:
    return f"{row['seconds']:.2f} | {row['bubble']:.1%}"


def _peaks(row: Row) -> str:
    return " ".join(f"{peak:.0f}" for peak in row["peak_gib"])

"""Recurrent layers over packed sequences have the FLOPs and the peaks of the same step on real tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from sim import load_profile, simulate  # noqa: E402
from sim.analysis.peak_memory import home_peak  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from sim.measure.tracked import PhaseTracker, Tracked  # noqa: E402
from workloads.capture import capture, capture_from_reference  # noqa: E402
from workloads.capturing.packed import LONG  # noqa: E402
from workloads.capturing.recorder import RESERVED  # noqa: E402

SEQUENCES, LONGEST, WIDTH, WORDS = 4, 12, 8, 50
UNEQUAL = [5, 12, 7, 7]


class Model(nn.Module):
    """Words, a recurrent network over as many of them as there are, and scores."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (1 + self.rnn.bidirectional), WORDS)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=ids.shape[1])
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), ids.flatten())


KINDS = [
    ("LSTM", {}),
    ("LSTM", {"num_layers": 2, "bidirectional": True, "dropout": 0.1}),
    ("GRU", {"num_layers": 2}),
    ("RNN", {"bidirectional": True}),
]


def measured(model, *given):
    """FLOPs and peak of a step on real tensors, by PyTorch's counter and tracker."""
    with FlopCounterMode(display=False) as counter:
        model(*given).backward()
    model.zero_grad(set_to_none=True)
    tracker = PhaseTracker()
    tracker.track_external(model, *given)
    with tracker.tracking():
        model(*given).backward()
    return counter.get_total_flops(), max(tracker.highest.values())


def peak(trace):
    return home_peak(simulate(trace, load_profile("a100_40_pcie")).log)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_step_has_the_flops_and_the_peak_of_real_tensors(kind, options):
    ids, lengths = torch.randint(0, WORDS, (SEQUENCES, LONGEST)), torch.tensor(UNEQUAL)
    flops, real = measured(Model(kind, **options), ids, lengths)
    trace = capture(lambda: Model(kind, **options), (ids, lengths), kernels="cpu")
    assert trace.meta["model_flops"] == flops
    assert peak(trace) == real
    assert "assumed" not in trace.meta
    if not options.get("dropout"):  # a kernel of its own, with another mask
        on_a_gpu = capture(lambda: Model(kind, **options), (ids, lengths))
        assert on_a_gpu.meta["model_flops"] == flops
        assert peak(on_a_gpu) == real - 8 * LONGEST  # how many go on at each position lies on the host


def ids_of(model):
    return torch.empty(SEQUENCES, LONGEST, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    "lengths",
    [
        torch.empty(SEQUENCES, dtype=torch.int64, device="meta"),
        torch.zeros(SEQUENCES, dtype=torch.int64),  # no length of a sequence
        torch.full((SEQUENCES,), LONGEST + 1),
    ],
)
def test_lengths_that_are_not_known_are_those_of_the_batch(lengths):
    ids = torch.empty(SEQUENCES, LONGEST, dtype=torch.int64, device="meta")
    trace = capture(lambda: Model("GRU"), (ids, lengths))
    assert trace.meta["assumed"] == {LONG: 1}
    ids, lengths = torch.randint(0, WORDS, (SEQUENCES, LONGEST)), torch.full((SEQUENCES,), LONGEST)
    assert trace.meta["model_flops"] == measured(Model("GRU"), ids, lengths)[0]


def test_an_lstm_over_equal_lengths_is_one_kernel_and_says_what_is_unknown_of_it():
    ids, lengths = torch.randint(0, WORDS, (SEQUENCES, LONGEST)), torch.full((SEQUENCES,), LONGEST)
    trace = capture(lambda: Model("LSTM"), (ids, lengths))
    layer = 2 * SEQUENCES * LONGEST * 2 * 4 * WIDTH * WIDTH
    assert trace.meta["model_flops"] == 3 * layer + 3 * 2 * SEQUENCES * LONGEST * WIDTH * WORDS
    assert RESERVED in trace.meta["assumed"]
    assert (
        capture(lambda: nn.LSTM(4, 4).eval(), torch.zeros(3, 2, 4), loss=lambda out: out[0].sum()).meta.get(
            "assumed", {}
        )
        == {}
    )


class Lengths(nn.Module):
    """Packs by lengths that it computes from a list."""

    def __init__(self, lengths):
        super().__init__()
        self.rnn, self.lengths = nn.GRU(WIDTH, WIDTH), lengths

    def forward(self, x):
        packed = pack_padded_sequence(x, self.lengths(x), enforce_sorted=False)
        return self.rnn(packed)[0].data.mean()


def in_place(_):
    lengths = torch.tensor([1, 1, 1, 1])
    lengths[:2] = torch.tensor([9, 4])
    lengths[2:].add_(1)
    return lengths


LISTS = {
    "a list": (lambda _: [9, 4, 2, 2], 17),
    "a tensor": (lambda _: torch.tensor([2, 9, 4, 2]).cuda().cpu(), 17),
    "computed": (lambda _: (torch.tensor([3, 8]).repeat(2).sort(descending=True).values + 1).clamp(max=6), 20),
    "in place": (in_place, 17),
    "counted in words, which are no padding": (lambda x: (torch.ones_like(x[..., 0]).long() != 0).sum(0).cpu(), 48),
    "drawn": (lambda _: torch.randint(1, LONGEST, (SEQUENCES,)), 48),
    "written by what is unknown": (lambda x: torch.tensor([2, 9, 4, 2]).copy_(x[0, :, 0].long()), 48),
    "a part of what is written": (lambda x: rewritten(x), 48),
}


def rewritten(x):
    lengths = torch.tensor([2, 9, 4, 2])
    lengths[:1].copy_(x[0, :1, 0].long())
    return lengths


@pytest.mark.parametrize("how", LISTS)
def test_lengths_are_followed_from_where_they_are_made(how):
    lengths, rows = LISTS[how]
    trace = capture(lambda: Lengths(lengths), torch.zeros(LONGEST, SEQUENCES, WIDTH))
    (pack,) = (op for op in trace.ops if op.name.endswith("_pack_padded_sequence"))
    assert trace.tensors[pack.writes[0]].shape == (rows, WIDTH)
    assert (LONG in trace.meta.get("assumed", {})) == (rows == 48)


def test_sequences_are_packed_and_padded_again():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            rows, lengths = pad_packed_sequence(pack_sequence([self.line(x[:n]) for n in (5, 3, 2)]), padding_value=1.0)
            assert (rows.shape, lengths.shape) == ((5, 3, WIDTH), (3,))
            assert int(lengths.sum()) == 10
            return rows[: lengths.min()].sum()

    trace = capture(Both, torch.zeros(LONGEST, WIDTH))
    assert trace.meta["model_flops"] == 2 * 2 * 10 * WIDTH * WIDTH
    assert "assumed" not in trace.meta


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([2, 4, 4, 4], "`lengths` array must be sorted"), ([4, 4], "Expected `len.lengths.` to be equal to batch_size")],
)
def test_lengths_that_pytorch_refuses_are_refused(lengths, message):
    class Sorted(Lengths):
        def forward(self, x):
            return pack_padded_sequence(x, lengths).data.sum()

    with pytest.raises(WorkloadError, match=rf"test_capture_packed\.py:\d+ \(return pack_padded.*({message})"):
        capture(lambda: Sorted(None), torch.zeros(LONGEST, SEQUENCES, WIDTH))


SCRIPT = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(50, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True)
    def forward(self, ids):
        lengths = (ids != 0).sum(1)
        packed = pack_padded_sequence(self.embedding(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]

encoder, head = Encoder().cuda(), nn.Linear(8, 2).cuda()
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])

def step(batch=4):
    ids = torch.randint(0, 50, (batch, 12), device="cuda")
    head(encoder(ids)[:, -1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_has_the_peak_of_pytorchs_tracker(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    reference = f"{tmp_path / 'train.py'}:step"
    trace, tracker = capture_from_reference(reference), Tracked("none")
    capture_from_reference(reference, observer=tracker)
    assert peak(trace) == max(tracker.highest.values())
    assert trace.meta["assumed"][LONG] == 1

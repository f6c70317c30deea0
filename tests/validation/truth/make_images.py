"""Writes tests/validation/data/pytorch_images.json: peaks of real PyTorch steps of convolution nets with checkpoints.

python -m tests.validation.truth.make_images            all cases (a minute; needs a C++ compiler)
python -m tests.validation.truth.make_images NAME …     print these only

Tests need the file, not this script.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path

from tests.validation.truth import guard  # noqa: F401, before torch

import torch  # isort: skip
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from tests.validation.truth.image_models import NETS
from tests.validation.truth.ledger import Ledger

TARGET = Path(__file__).parents[1] / "data" / "pytorch_images.json"
CASES = [
    {"net": net, "batch": batch, "policy": policy}
    for net, batch in (
        ("resnet-18", 64),
        ("resnet-50", 64),
        ("resnet-50", 7),
        ("vgg-16", 32),
        ("mobilenet-v2", 48),
        ("densenet-121", 24),
    )
    for policy in ("none", "full_ckpt")
]
"""SGD with momentum, fp32, images of 224 pixels."""


def run(case: dict) -> dict:
    """The figures of one case: live bytes at the start and after forward, and the highest point of each phase."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = NETS[case["net"]]().train()
            images = torch.zeros(case["batch"], 3, 224, 224)
            labels = torch.zeros(case["batch"], dtype=torch.int64)
        if case["policy"] == "full_ckpt":
            for part in model.parts:
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        tuned = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        ledger = Ledger()
        after: list[dict[str, int]] = []

        def iteration() -> None:
            ledger.phase = ledger.phase and "forward"
            loss = nn.functional.cross_entropy(model(images), labels)
            ledger.phase = ledger.phase and "backward"
            after.append(dict(ledger.live))
            loss.backward()
            del loss
            ledger.phase = ledger.phase and "update"
            tuned.step()
            tuned.zero_grad(set_to_none=True)

        iteration()
        after.clear()
        gc.collect()
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.add(tensor, "parameter", "parameter")
        for state in tuned.state.values():
            for tensor in state.values():
                ledger.add(tensor, "rest", "state")
        for tensor in (images, labels):
            ledger.add(tensor, "other", "batch")
        start = dict(ledger.live)
        with ledger.modules(), ledger:
            ledger.phase = "forward"
            iteration()
        ledger.phase = ""
        tracker = MemTracker()
        tracker.track_external(model, images, labels, tuned)
        with tracker:
            iteration()
        total = next(v["Total"] for d, v in tracker.get_tracker_snapshot("peak").items() if d.type == "cuda")
    parameters = sum(p.numel() for p in model.parameters())
    return {
        **case,
        "start": start,
        "after_forward": after[0],
        "peaks": ledger.peaks,
        "parameters": parameters,
        "mem_tracker_peak": total,
    }


def main(names: list[str]) -> None:
    rows = []
    for case in CASES:
        if names and case["net"] not in names:
            continue
        rows.append(run(case))
        peaks = {k: v["total"] for k, v in rows[-1]["peaks"].items()}
        print(case, peaks, rows[-1]["mem_tracker_peak"], file=sys.stderr)
    if not names:
        text = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps({"torch": torch.__version__})
        TARGET.write_text(f'{{"made_with": {head}, "rows": [\n{text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

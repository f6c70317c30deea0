"""What the tables and the changing sentences of the page say, in each of its languages; the rest is in en.md, zh.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = ("`keep_all`", "`full_recompute`", "`swap_all`", "`hybrid`")
WORDS: Mapping[str, Mapping[str, Any]] = {
    "en": {
        "and": " and ",
        "list": ", ",
        "apart": "; ",
        "nothing fits": "nothing fits",
        "none fits": " Nothing that was run makes {} fit.",
        "no layout": " No layout that was tried fits {}.",
        "wrong": " It fails for {}.",
        "each wrong": "{job} on `{where}` ({ratio:.2f}: {faster})",
        "recomputation": "recomputes",
        "copies": "copies",
        "crossed": "{at:.2f} ({job})",
        "layout": "{job}: {layout} with `{policy}`",
        "too large": "weights, gradients and optimizer state alone exceed all memory of the machine in {} of {} cells",
        "others": " (not in {})",
        "d2h": "out of the zone",
        "h2d": "back into it",
        "of our own": "as below",
        "named": {},
        "jobs": ["job", "model", "precision", "samples", "tokens each", "wants"],
        "machines": ["job", "machine", "memory", "best", "against unlimited", "only recomputes", "only copies"],
        "rates": ["job", "link, each way", "pressure", "only recomputes", "only copies", "`hybrid`"],
        "directions": ["link slowed down", "to", "only copies", "`hybrid`", "only recomputes"],
        "fused": [
            *("job", "machine", "best", "against unlimited", "only recomputes", "only copies"),
            *("pressure, eager", "pressure, fused"),
        ],
        "together": [
            *("job", "layout", "best", "clusters", "fullest cluster", "samples/s"),
            *SHOWN,
        ],
        "kinds": {"recomputation": "recomputes", "copies": "copies", "both": "both", "neither": "–"},
        "policies": [
            *("policy", "does", "largest job here", "fits here", "costs here", "fits the cards", "costs there"),
        ],
        "effects": ["figure", "correlation"],
        "told": "`{}` ({:+.2f})",
        "noise": "The other {} are below {noise:.2f}, which a figure without any effect reaches in one of twenty "
        "studies of {draws} draws.",
        "winning": ["job", "draws"],
        "elsewhere": ["job", "machine", "draws", "the fastest recomputes"],
        "claims": ["claim", "found"],
        "claimed": [
            (
                "swapping first is not always right (4.1)",
                "confirmed: copying alone is the faster of the two in {swap} of {swap_of} jobs on `mt3000_survey`, "
                "and in {card} of {card_of} cells of the three cards behind PCIe",
            ),
            (
                "even splits mislead on uneven memory (4.1)",
                "`rotor`, which plans its segments, fits {planned_alone} cells that even ones (`chen(method=sqrt)`) do "
                "not; of the {splits} where both fit, even segments are slower in {even_slower}",
            ),
            (
                "DELTA for tight memory, TSO for speed (6.5)",
                "of {cells} cells `delta` alone fits in {delta_alone} and `tso` alone in {tso_alone}; of the {both} "
                "where both fit, `tso` is the faster in {tso_faster}",
            ),
            (
                "a layered scheme suits MT-3000 (6.5)",
                "`mt3000_layered` and `hybrid` both fit {layered} of {own} jobs there; it is at most {gap:.1f} "
                "points slower, and what each part brings is on [a page of its own](mt3000_layered.md)",
            ),
        ],
    },
    "zh": {
        "and": "和",
        "list": "、",
        "apart": "；",
        "nothing fits": "都放不下",
        "none fits": "所试的任何策略都放不下 {}。",
        "no layout": "所试的布局都放不下 {}。",
        "wrong": "判错的是：{}。",
        "each wrong": "{job}，`{where}`（{ratio:.2f}：{faster}更快）",
        "recomputation": "重算",
        "copies": "卸载",
        "crossed": "{at:.2f}（{job}）",
        "layout": "{job}：{layout}，`{policy}`",
        "too large": "在“都放不下”的 {1} 格中，有 {0} 格仅权重、梯度与优化器状态就超过了机器的全部内存",
        "others": "（其余为 {}）",
        "d2h": "移出加速区",
        "h2d": "移回加速区",
        "of our own": "见下",
        "named": {"small Mixtral": "小型 Mixtral"},
        "jobs": ["任务", "模型", "精度", "样本数", "每个样本的词元数", "所需内存"],
        "machines": ["任务", "机器", "内存", "最佳", "相对不受限内存", "仅重算", "仅卸载"],
        "rates": ["任务", "链路（每个方向）", "压力", "仅重算", "仅卸载", "`hybrid`"],
        "directions": ["放慢的方向", "降到", "仅卸载", "`hybrid`", "仅重算"],
        "fused": ["任务", "机器", "最佳", "相对不受限内存", "仅重算", "仅卸载", "压力（逐个执行）", "压力（融合）"],
        "together": ["任务", "布局", "最佳", "簇数", "最满的簇", "样本/秒", *SHOWN],
        "kinds": {"recomputation": "重算", "copies": "卸载", "both": "两者", "neither": "–"},
        "policies": ["策略", "做法", "此机放得下的最大任务", "此机放得下", "此机代价", "各卡放得下", "各卡代价"],
        "effects": ["数字", "相关"],
        "told": "`{}`（{:+.2f}）",
        "noise": "其余 {} 个低于 {noise:.2f}：{draws} 次抽样时，毫无影响的数字也有二十分之一的机会达到这一值。",
        "winning": ["任务", "抽样"],
        "elsewhere": ["任务", "机器", "抽样", "最快者用到重算"],
        "claims": ["说法", "结果"],
        "claimed": [
            (
                "先卸载并非总是对的（4.1）",
                "证实：在 `mt3000_survey` 上，{swap_of} 个任务中有 {swap} 个仅卸载更快；在 PCIe 后面的三种卡上，"
                "{card_of} 格中有 {card} 格",
            ),
            (
                "均匀切分在内存不均时会误导（4.1）",
                "按计划分段的 `rotor` 比均匀分段（`chen(method=sqrt)`）多放得下 {planned_alone} 格；"
                "两者都放得下的 {splits} 格中，均匀分段更慢的有 {even_slower} 格",
            ),
            (
                "内存紧张用 DELTA，求速度用 TSO（6.5）",
                "{cells} 格中，只有 `delta` 放得下的有 {delta_alone} 格，只有 `tso` 放得下的有 {tso_alone} 格；"
                "两者都放得下的 {both} 格中，`tso` 更快的有 {tso_faster} 格",
            ),
            (
                "分层方案适合 MT-3000（6.5）",
                "`mt3000_layered` 与 `hybrid` 都放得下其中 {own} 个任务里的 {layered} 个；前者最多慢 {gap:.1f} "
                "个百分点，各部分的作用见[单独一页](mt3000_layered.md)（英文）",
            ),
        ],
    },
}
"""Words by language. `claimed`: each claim with what was found, to be filled in."""

"""Colours: the same thing has the same colour in every figure.

The hues are those of Okabe and Ito, "Color Universal Design", 2008: told apart by readers with any common kind of
colour blindness. Figures never rely on hue alone but add a second sign: a marker, a hatch or a label.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#7F7F7F"
INK = "#222222"
WHITE = "#FFFFFF"
FAINT = "#B8B8B8"

ROLE_COLOURS = {
    "weight": BLUE,
    "optimizer_state": SKY,
    "gradient": VERMILION,
    "input": YELLOW,
    "activation": GREEN,
    "temporary": ORANGE,
    "workspace": GREY,
}
"""Colours of `sim.analysis.peak_memory.CATEGORIES`, in the order in which they are stacked.

The longest-lived are lowest. Neighbours differ in lightness, so that they can be told apart in print without colour.
"""

WHY_COLOURS = {"run": BLUE, "recompute": ORANGE, "move": GREEN, "codec": PURPLE, "stall": VERMILION}
"""Colours of the reasons why a lane is busy."""

POLICY_HUES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
POLICY_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
BASELINE_COLOURS = {"keep_all": BLACK}


def role_colour(role: str) -> str:
    """Colour of a role; "workspace" stands for bytes that belong to no tensor. Grey for an unknown one."""
    return ROLE_COLOURS.get(role, GREY)


def why_colour(why: str) -> str:
    """Colour of a kind of interval. Raises KeyError for one that is not in `sim.log.WHYS`."""
    return WHY_COLOURS[why]


def contrast(a: str, b: str) -> float:
    """The contrast of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio"); text is to have 4.5 at least."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of a colour `#RRGGBB` in sRGB (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(ground: str) -> str:
    """The colour of text on a ground: dark or white, whichever contrasts more."""
    return max((INK, WHITE), key=lambda ink: contrast(ink, ground))


def policy_colour(policy: str) -> str:
    """Colour of a policy, the same in every figure and process: from its name alone.

    There are more policies than distinct hues, so two may share one: `policy_signs` tells those of one figure apart by
    their markers. Parameters in brackets do not change the hue: `chen(segments=4)` has that of `chen`.
    """
    name = policy.partition("(")[0].strip()
    return BASELINE_COLOURS.get(name) or POLICY_HUES[crc32(name.encode("utf-8", "surrogatepass")) % len(POLICY_HUES)]


def policy_marker(policy: str) -> str:
    """Marker of a policy, from its name and parameters alone."""
    if policy in BASELINE_COLOURS:
        return POLICY_MARKERS[0]
    # another part of the checksum than the hue's, so that two policies of one hue mostly differ here
    return POLICY_MARKERS[crc32(policy.encode("utf-8", "surrogatepass")) // len(POLICY_HUES) % len(POLICY_MARKERS)]


def policy_signs(policies: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each policy of one figure or page, no two of them alike as long as there are other signs.

    Each has that of its name; of policies that would share it the later ones, by name, have another marker of the same
    colour, or where that colour has none left the first sign that is free.
    """
    named = sorted(set(policies))
    own = {name: (policy_colour(name), policy_marker(name)) for name in named}
    found: dict[str, tuple[str, str]] = {}
    taken = set()
    for name in named:
        if own[name] not in taken:  # whoever can keep its sign does, whatever others are given
            found[name] = own[name]
            taken.add(own[name])
    every = [(hue, marker) for hue in POLICY_HUES for marker in POLICY_MARKERS]
    for name in named:
        if name not in found:
            free = [
                sign for sign in [*((own[name][0], marker) for marker in POLICY_MARKERS), *every] if sign not in taken
            ]
            found[name] = free[0] if free else own[name]
            taken.add(found[name])
    return {name: found[name] for name in policies}

"""What a run's log says: each analysis reads the log alone and gives a small frozen record or a table."""

# Made by scripts/make_figures.py: the public names of the files of this folder.

from sim.analysis.bounds import Bounds, bounds
from sim.analysis.bubbles import Bubbles, bubbles
from sim.analysis.card_reading import CardReading, card_reading
from sim.analysis.fragmentation import Fragmentation, fragmentation
from sim.analysis.lifetimes import lifetimes
from sim.analysis.overlap import Overlap, overlap
from sim.analysis.pareto import pareto, pareto_front
from sim.analysis.peak_memory import (
    Holder,
    Peak,
    fullest_home,
    home_peak,
    mean_bytes,
    memory_over_time,
    peak_bytes,
    peak_memory,
    peaks_by_phase,
    roles_over_time,
)
from sim.analysis.pinning import Pinning, pinning
from sim.analysis.priced_as import Pricing, priced_as
from sim.analysis.residence import residence
from sim.analysis.stages import Stage, stages
from sim.analysis.stalls import Stalls, stalls, stalls_by_op
from sim.analysis.summary import Reference, Summary, samples_in, summarize
from sim.analysis.traffic import LinkTraffic, traffic
from sim.analysis.waits import waits

__all__ = [
    "Bounds",
    "Bubbles",
    "CardReading",
    "Fragmentation",
    "Holder",
    "LinkTraffic",
    "Overlap",
    "Peak",
    "Pinning",
    "Pricing",
    "Reference",
    "Stage",
    "Stalls",
    "Summary",
    "bounds",
    "bubbles",
    "card_reading",
    "fragmentation",
    "fullest_home",
    "home_peak",
    "lifetimes",
    "mean_bytes",
    "memory_over_time",
    "overlap",
    "pareto",
    "pareto_front",
    "peak_bytes",
    "peak_memory",
    "peaks_by_phase",
    "pinning",
    "priced_as",
    "residence",
    "roles_over_time",
    "samples_in",
    "stages",
    "stalls",
    "stalls_by_op",
    "summarize",
    "traffic",
    "waits",
]

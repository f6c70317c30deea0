"""The machine: its parts, the cost of ops on it, and the profiles that describe machines."""

from sim.hardware.platform import Allocator, Engine, Fact, Link, Member, Platform, Pool, Tier
from sim.hardware.profile import fit_error, load_profile, profile_names, profile_table, profile_text

__all__ = [
    "Allocator",
    "Engine",
    "Fact",
    "Link",
    "Member",
    "Platform",
    "Pool",
    "Tier",
    "fit_error",
    "load_profile",
    "profile_names",
    "profile_table",
    "profile_text",
]

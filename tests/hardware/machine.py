"""A profile with every part that there is, small enough that each of them can run short."""

MACHINE = """
description = "made up"
notes = ["none"]
devices = 2

[tiers.hbm]
kind = "hbm"
per_device = true
source = "sheet"
standing = "vendor"
nominal = "16 MB"
capacity = { value = "15 MB", source = "a run", standing = "measured" }
bandwidth = "1 GB/s"
latency = "0 ns"
allocator = "exact"

[tiers.near]
kind = "lpddr"
per_device = true
source = "sheet"
standing = "vendor"
nominal = "60 MB"
capacity = "60 MB"
bandwidth = "1 GB/s"
allocator = { name = "caching", expandable_segments = false, max_split_size = "128 MiB" }

[tiers.host]
kind = "ddr"
source = "sheet"
standing = "vendor"
nominal = "70 MB"
capacity = "60 MB"
bandwidth = "1 GB/s"

[tiers.drive]
kind = "nvme"
source = "sheet"
standing = "vendor"
nominal = "600 MB"
capacity = "600 MB"
bandwidth = "0.5 GB/s"

[engines.gpu]
home = "hbm"
main = true
source = "sheet"
standing = "vendor"
launch = "5 us"
power = "300 W"
peak = { fp16 = "100 GFLOP/s", fp32 = "10 GFLOP/s" }
efficiency = { source = "a fit", standing = "estimate", matmul = 0.8, default = 0.5 }
bandwidth_share = { norm = { value = 0.5, source = "a run", standing = "measured" } }

[engines.vector]
home = "hbm"
main = false
source = "sheet"
standing = "vendor"
launch = "9 us"
power = "100 W"
cores = 5
clock = "125 MHz"
vector = "128 bit"
units = { fp32 = 1 }
runs = { embedding = "scalar", conv = "none" }

[engines.cpu]
main = false
home = "host"
reaches = ["hbm"]
source = "guess"
standing = "assumed"
launch = "1 us"
power = "50 W"
bandwidth = "0.25 GB/s"
peak = { fp32 = "1 GFLOP/s" }
bandwidth_share = { optimizer = 0.5 }

[links.d2h]
from = "hbm"
to = "host"
source = "a run"
standing = "measured"
rate = "1 GB/s"
fixed = "10 us"
copy_engines = 1
energy = "60 pJ/B"

[links.h2d]
from = "host"
to = "hbm"
source = "a run"
standing = "measured"
rate = "2 GB/s"
fixed = "8 us"
energy = "60 pJ/B"

[links.side]
from = "hbm"
to = "near"
source = "a run"
standing = "measured"
rate = "4 GB/s"
fixed = "2 us"
energy = "60 pJ/B"

[links.back]
from = "near"
to = "hbm"
source = "a run"
standing = "measured"
rate = "4 GB/s"
fixed = "2 us"
energy = "60 pJ/B"

[links.peer]
from = "hbm"
to = "hbm"
peer = true
source = "a run"
standing = "measured"
rate = "2 GB/s"
egress = "2 GB/s"
fixed = "2 us"
energy = "60 pJ/B"

[links.fetch]
from = "drive"
to = "host"
source = "a run"
standing = "measured"
rate = "1 GB/s"
fixed = "2 us"
energy = "60 pJ/B"

[links.store]
from = "host"
to = "drive"
source = "a run"
standing = "measured"
rate = "1 GB/s"
fixed = "2 us"
energy = "60 pJ/B"

[pools.dram]
source = "a run"
standing = "measured"
rate = "3 GB/s"
charges = { d2h = 1, h2d = 1.5, cpu = 1 }

[pools.pcie]
per_device = true
source = "a run"
standing = "measured"
factors = { d2h = 0.95, h2d = 0.47 }

[networks.net]
source = "a run"
standing = "measured"
per_node = 2
rate = "0.5 GB/s"
fixed = "3 us"

[fit]
source = "a run"
standing = "measured"
op_time = 0.07
transfer_time = "no measurement"
"""

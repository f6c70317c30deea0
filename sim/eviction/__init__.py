"""Building blocks of policies that evict under pressure: what may be evicted, in which order, at what cost."""

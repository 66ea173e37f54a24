//! Floor 5: token sources, the cache and the loader. Never knows strategies or file layouts of checkpoints.

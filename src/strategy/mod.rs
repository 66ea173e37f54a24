//! Floor 7: engines over a store. Never knows flags.

//! Floor 5: optimizers, clipping, schedules. Never knows strategies or file layouts.

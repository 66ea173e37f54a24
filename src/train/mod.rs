//! Floor 8: from flags to a finished run.

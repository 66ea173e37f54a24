//! Floor 6: checkpoints as plain safetensors. Never knows the loop.

//! The families as data: names, shapes and parts of their layers. One file each.
pub(super) mod gpt;
pub(super) mod llama;

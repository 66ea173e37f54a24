//! The families as data: names, shapes and parts of their layers. One file each.
pub(super) mod gpt; // GPT-2
pub(super) mod llama; // Llama, and what is spelled like it

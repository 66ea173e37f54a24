//! Model families as data: names, shapes and shards of their layers. One file per family.
pub(super) mod gpt; // GPT-2
pub(super) mod llama; // Llama and its descendants
mod names; // tensors of a layout by name
mod recurrent; // of mixers other than attention
mod table; // what each family calls things

pub use names::expert_names;
pub use table::Family;

//! The order of a tensor's elements in a GGUF file, where it is not that of Hugging Face files. Never reads or writes
//! a file.
use super::family::{is_llama, is_qwen35};
use crate::nn::{Recurrence, Spec};

/// Where a file has stretches of a tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum GgufOrder {
    Same,
    /// Heads have so many rows: row i of a head's first half and row i of its second half become neighbors, since
    /// llama.cpp rotates neighbors and not halves.
    Interleaved {
        head: usize,
    },
    /// Behind `before` rows, value heads of `width` rows each.
    TiledRows {
        heads: ValueHeads,
        width: usize,
        before: usize,
    },
    /// Value heads of `width` columns each.
    TiledColumns {
        heads: ValueHeads,
        width: usize,
    },
}

/// The value heads of a gated delta net. Hugging Face files have those of a key head together; llama.cpp has the first
/// of each key head, then the second of each, and so on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ValueHeads {
    keys: usize,
    per_key: usize,
}

impl ValueHeads {
    fn place(self, head: usize) -> usize {
        head % self.per_key * self.keys + head / self.per_key
    }
}

impl GgufOrder {
    /// The order of the tensor `source`.
    pub fn of(spec: &Spec, source: &str) -> GgufOrder {
        if is_llama(spec.arch) && [".q_proj.", ".k_proj."].iter().any(|name| source.contains(name)) {
            return GgufOrder::Interleaved { head: spec.head_dim };
        }
        let (true, Some(Recurrence::Delta(net)), Some((_, name))) =
            (is_qwen35(spec.arch), &spec.recurrence, source.split_once(".linear_attn."))
        else {
            return GgufOrder::Same;
        };
        let shape = &net.shape;
        let heads = ValueHeads { keys: shape.key_heads, per_key: shape.value_heads / shape.key_heads };
        let (rows, width) = (|width, before| GgufOrder::TiledRows { heads, width, before }, shape.value_dim);
        match name {
            _ if heads.per_key == 1 => GgufOrder::Same,
            "in_proj_qkv.weight" | "conv1d.weight" => rows(width, 2 * shape.keys()),
            "in_proj_z.weight" => rows(width, 0),
            "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias" => rows(1, 0),
            "out_proj.weight" => GgufOrder::TiledColumns { heads, width },
            _ => GgufOrder::Same,
        }
    }
    /// Elements that stay together in rows of `row` elements.
    pub fn unit(self, row: usize) -> usize {
        if let GgufOrder::TiledColumns { width, .. } = self { width } else { row }
    }
    /// Where the file has stretch `index`.
    pub fn place(self, index: usize) -> usize {
        match self {
            GgufOrder::Same => index,
            GgufOrder::Interleaved { head } => {
                let (first, i) = (index - index % head, index % head);
                first + i % (head / 2) * 2 + i / (head / 2)
            }
            GgufOrder::TiledRows { before, .. } if index < before => index,
            GgufOrder::TiledRows { heads, width, before } => {
                let row = index - before;
                before + heads.place(row / width) * width + row % width
            }
            GgufOrder::TiledColumns { heads, .. } => {
                let count = heads.keys * heads.per_key;
                index - index % count + heads.place(index % count)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stretch_has_a_place_of_its_own() {
        let heads = ValueHeads { keys: 2, per_key: 3 };
        for order in [
            GgufOrder::Interleaved { head: 6 },
            GgufOrder::TiledRows { heads, width: 2, before: 12 },
            GgufOrder::TiledColumns { heads, width: 4 },
        ] {
            let mut places: Vec<usize> = (0..24).map(|index| order.place(index)).collect();
            assert!(places.iter().enumerate().any(|(index, place)| index != *place));
            places.sort();
            assert_eq!(places, (0..24).collect::<Vec<_>>(), "{order:?}");
        }
        // transformers: the three value heads of key head 0, then those of key head 1.
        let columns = GgufOrder::TiledColumns { heads, width: 4 };
        assert_eq!([0, 1, 2, 3, 4, 5].map(|index| columns.place(index)), [0, 2, 4, 1, 3, 5]);
    }
}

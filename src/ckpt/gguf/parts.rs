//! Tensors that a GGUF file has transposed, or as two: which elements are where. Never reads or writes a file.
use crate::base::Result;
use crate::nn::{Arch, Recurrence, Spec};
use std::ops::Range;

/// What a tensor of the file has of the model's.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum GgufPart {
    Rows(PickedRows),
    Turned(Turned),
}

/// Some rows of each of `heads` heads of `head` rows: those of one range of all heads are together, range after range.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PickedRows {
    heads: usize,
    head: usize,
    ranges: [[usize; 2]; 3],
}

impl PickedRows {
    /// Where the file has row `row`, if it has it.
    pub fn place(self, row: usize) -> Option<usize> {
        let of_head = row % self.head;
        let mut before = 0;
        for [from, to] in self.ranges {
            if (from..to).contains(&of_head) {
                return Some(before + row / self.head * (to - from) + of_head - from);
            }
            before += self.heads * (to - from);
        }
        None
    }
}

/// The first `count` rows of heads of `head` rows, as columns: the rows of the file are every `every`-th column of the
/// model, from `first` on, head after head.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Turned {
    head: usize,
    count: usize,
    columns: usize,
    first: usize,
    every: usize,
}

impl Turned {
    /// All columns of matrices of `head` rows.
    fn whole(head: usize, columns: usize) -> Turned {
        Turned { head, count: head, columns, first: 0, every: 1 }
    }
    /// Calls `f` with runs of `values` that follow each other in the file, and with the place of the first of each.
    /// `stretches` says which elements of the model the values are.
    pub fn runs(
        self,
        stretches: &[(Range<usize>, usize)],
        values: &[f32],
        f: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let Turned { head, count, columns, first, every } = self;
        // Parts of rows: the row, its first column, and its values.
        let mut parts: Vec<(usize, usize, &[f32])> = Vec::new();
        for (range, place) in stretches {
            let (mut at, mut rest) = (*place, &values[range.clone()]);
            while !rest.is_empty() {
                let (part, behind) = rest.split_at(rest.len().min(columns - at % columns));
                parts.push((at / columns, at % columns, part));
                (at, rest) = (at + part.len(), behind);
            }
        }
        parts.retain(|(row, ..)| row % head < count);
        let (mut run, mut begin) = (Vec::new(), 0);
        for of_head in parts.chunk_by(|a, b| a.0 / head == b.0 / head) {
            for column in (first..columns).step_by(every) {
                for (row, from, part) in of_head {
                    let Some(value) = column.checked_sub(*from).and_then(|i| part.get(i)) else { continue };
                    let row_of_file = row / head * (columns / every) + column / every;
                    let place = row_of_file * count + row % head;
                    if place != begin + run.len() {
                        if !run.is_empty() {
                            f(begin, &run)?;
                        }
                        run.clear();
                        begin = place;
                    }
                    run.push(*value);
                }
            }
        }
        if run.is_empty() { Ok(()) } else { f(begin, &run) }
    }
}

impl GgufPart {
    /// The tensors of the file that the tensor `source` becomes, by their names behind the block's; none if it is one
    /// of its own, in another order of rows at most.
    pub fn of(spec: &Spec, source: &str) -> Vec<(&'static str, GgufPart)> {
        let experts = source.split_once(".mlp.experts.").filter(|_| spec.arch == Arch::GptOss);
        if let (Some((_, tensor)), Some(of)) = (experts, &spec.experts) {
            let turned = |turned| GgufPart::Turned(turned);
            let half = |turned, first| GgufPart::Turned(Turned { first, every: 2, ..turned });
            // Gates and ups alternate.
            return match tensor.split_once('[').map_or("", |(kind, _)| kind) {
                "gate_up_proj" => {
                    let all = Turned::whole(spec.dim, 2 * of.ff);
                    vec![("ffn_gate_exps.weight", half(all, 0)), ("ffn_up_exps.weight", half(all, 1))]
                }
                "gate_up_proj_bias" => {
                    let all = Turned::whole(of.ff, 2);
                    vec![("ffn_gate_exps.bias", half(all, 0)), ("ffn_up_exps.bias", half(all, 1))]
                }
                "down_proj" => vec![("ffn_down_exps.weight", turned(Turned::whole(of.ff, spec.dim)))],
                _ => Vec::new(),
            };
        }
        let rows = |heads, head, ranges| GgufPart::Rows(PickedRows { heads, head, ranges });
        if let (Some(latent), true) = (&spec.latent, source.ends_with(".kv_b_proj.weight")) {
            let (head, nope) = (latent.nope + latent.value, latent.nope);
            let keys = Turned { count: nope, ..Turned::whole(head, latent.kv_rank) };
            return vec![
                ("attn_k_b.weight", GgufPart::Turned(keys)),
                ("attn_v_b.weight", rows(spec.heads, head, [[nope, head], [0; 2], [0; 2]])),
            ];
        }
        if let (Some(Recurrence::Delta(net)), true) = (&spec.recurrence, source.ends_with(".in_proj_qkvz.weight")) {
            let shape = &net.shape;
            let (key, value) = (shape.key_dim, shape.value_heads / shape.key_heads * shape.value_dim);
            let (values, gates) = (2 * key, 2 * key + value);
            let head = gates + value;
            return vec![
                ("attn_qkv.weight", rows(shape.key_heads, head, [[0, key], [key, values], [values, gates]])),
                ("attn_gate.weight", rows(shape.key_heads, head, [[gates, head], [0; 2], [0; 2]])),
            ];
        }
        Vec::new()
    }

    /// The shape in the file of a tensor of this shape.
    pub fn shape(self, source: &[usize]) -> Vec<usize> {
        match (self, source) {
            (GgufPart::Rows(PickedRows { heads, ranges, .. }), _) => {
                let rows = ranges.iter().map(|[from, to]| to - from).sum::<usize>();
                [&[heads * rows], &source[1..]].concat()
            }
            (GgufPart::Turned(Turned { every, .. }), [all]) => vec![all / every],
            (GgufPart::Turned(Turned { head, count, columns, every, .. }), _) => {
                vec![source[0] / head * (columns / every), count]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The columns of two heads of three rows, of which the file has two, whatever stretches come together.
    #[test]
    fn runs_are_columns() {
        let turned = Turned { count: 2, ..Turned::whole(3, 4) };
        let half = Turned { first: 1, every: 2, ..turned };
        let values: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let whole = [0, 4, 1, 5, 2, 6, 3, 7, 12, 16, 13, 17, 14, 18, 15, 19];
        let odd = [1, 5, 3, 7, 13, 17, 15, 19];
        let cuts = [&[0, 24][..], &[0, 5, 6, 19, 24], &(0..25).collect::<Vec<usize>>()];
        for (part, want) in [(turned, &whole[..]), (half, &odd)] {
            for cut in cuts {
                let stretches: Vec<_> = cut.windows(2).map(|ends| (ends[0]..ends[1], ends[0])).collect();
                let mut found = vec![-1.0; want.len()];
                let mut put = |at: usize, run: &[f32]| {
                    found[at..at + run.len()].copy_from_slice(run);
                    Ok(())
                };
                // All stretches at once, and one after the other.
                part.runs(&stretches, &values, &mut put).unwrap();
                stretches.iter().for_each(|one| part.runs(std::slice::from_ref(one), &values, &mut put).unwrap());
                assert_eq!(found, want.iter().map(|x| *x as f32).collect::<Vec<_>>(), "{part:?} of {cut:?}");
            }
        }
        let mut runs = Vec::new();
        let mut count = |at: usize, run: &[f32]| {
            runs.push((at, run.len()));
            Ok(())
        };
        turned.runs(&[(0..24, 0)], &values, &mut count).unwrap();
        assert_eq!(runs, [(0, 16)], "a whole tensor is one run");
    }

    #[test]
    fn rows_of_heads_are_together() {
        let rows = PickedRows { heads: 2, head: 5, ranges: [[0, 1], [1, 3], [0; 2]] };
        let found: Vec<Option<usize>> = (0..10).map(|row| rows.place(row)).collect();
        assert_eq!(found, [Some(0), Some(2), Some(3), None, None, Some(1), Some(4), Some(5), None, None]);
    }
}

//! Matrices that are columns of wider ones in files, as the gates and ups of Llama 4's experts are. Never reads or
//! writes.
use crate::nn::{SlicePart, sliced};

/// One half of the columns of a matrix of `rows`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnHalf {
    half: usize,
    rows: usize,
    /// Columns of the half.
    pub(super) own: usize,
}

impl ColumnHalf {
    /// What a tensor of this name and shape is, if it is such a half.
    pub fn of(name: &str, shape: &[usize]) -> Option<ColumnHalf> {
        match (sliced(name)?.2, shape) {
            (SlicePart::Columns(half), &[rows, own]) if rows > 0 => Some(ColumnHalf { half, rows, own }),
            _ => None,
        }
    }
    /// Elements from the half's first one to where it would be if the halves followed each other.
    pub fn before(self) -> usize {
        self.half * (self.rows - 1) * self.own
    }
    /// Element `at` of the half, counted in the file from the half's first one.
    pub fn place(self, at: usize) -> usize {
        at + at / self.own.max(1) * self.own
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::FileTensor;
    use super::*;
    use crate::nn::columns_name;
    use safetensors::Dtype;

    #[test]
    fn halves_of_rows_alternate() {
        // Two rows of the left and of the right half, with three columns each.
        for (half, elements) in [(0, [0, 1, 2, 6, 7, 8]), (1, [3, 4, 5, 9, 10, 11])] {
            let (name, shape) = (columns_name("x", 0, half), vec![2, 3]);
            let columns = ColumnHalf::of(&name, &shape);
            let offset = 4 * (6 * half - columns.unwrap().before()) as u64;
            let tensor = FileTensor { name, shape, dtype: Dtype::F32, file: 0, offset, coding: None, columns };
            for range in [0..6, 1..2, 2..5, 3..6, 4..4] {
                let runs = tensor.runs(range.start, range.len());
                let found = runs.flat_map(|(run, at)| run.enumerate().map(move |(i, own)| (own, at / 4 + i as u64)));
                let want = range.clone().map(|i| (i - range.start, elements[i]));
                assert!(found.eq(want), "half {half}, {range:?}");
            }
        }
    }
}

//! Matrices whose transposes files have, as Qwen 3 VL's experts were published. Never writes.
use super::elements::widen;
use safetensors::Dtype;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Columns, from `first` on, of a matrix (`rows`, `columns`) in a file: they are the model's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Transposed {
    pub(super) dtype: Dtype,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) first: usize,
}

impl Transposed {
    /// Assigns `out` from the matrix at `offset` of `file`: the model's elements `at..`.
    pub fn read(&self, file: &File, offset: u64, at: usize, out: &mut [f32]) -> io::Result<()> {
        let size = self.dtype.bitsize() / 8;
        let rows = at / self.rows..(at + out.len()).div_ceil(self.rows);
        // In u16, so that elements are aligned.
        let mut bytes = vec![0u16; rows.len() * size / 2];
        let mut values = vec![0f32; rows.len()];
        for row in 0..self.rows {
            let place = row * self.columns + self.first + rows.start;
            file.read_exact_at(bytemuck::cast_slice_mut(&mut bytes), offset + (place * size) as u64)?;
            widen(bytemuck::cast_slice(&bytes), self.dtype, &mut values);
            for (i, value) in values.iter().enumerate() {
                let element = (rows.start + i) * self.rows + row;
                if let Some(x) = element.checked_sub(at).and_then(|i| out.get_mut(i)) {
                    *x = *value;
                }
            }
        }
        Ok(())
    }
}

//! Elements of a tensor in a GGUF file, read as the model has them. Never knows a tensor's name.
use super::codes::GgmlCode;
use super::order::GgufOrder;
use safetensors::Dtype;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// How the elements of a tensor in a file become the model's, which has other rows first, or its norms without the 1.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufCoding {
    pub code: GgmlCode,
    /// Elements of a row.
    pub row: usize,
    pub order: GgufOrder,
    pub minus_one: bool,
}

impl GgufCoding {
    /// Elements that are the model's, stored as `code`.
    pub fn plain(code: GgmlCode) -> GgufCoding {
        GgufCoding { code, row: 1, order: GgufOrder::Same, minus_one: false }
    }
    /// The type of the elements, if they are the model's as they stand.
    pub fn stored(&self) -> Option<Dtype> {
        match self.code {
            _ if self.order != GgufOrder::Same || self.minus_one => None,
            GgmlCode::F32 => Some(Dtype::F32),
            GgmlCode::F16 => Some(Dtype::F16),
            GgmlCode::BF16 => Some(Dtype::BF16),
            _ => None,
        }
    }

    /// Assigns `out` from the tensor at `offset`: the model's elements `at..`.
    pub fn read(&self, file: &File, offset: u64, at: usize, out: &mut [f32]) -> io::Result<()> {
        if self.order == GgufOrder::Same {
            self.stretch(file, offset, at, out)?;
        } else {
            let unit = self.order.unit(self.row);
            let mut at = at;
            let mut rest = &mut *out;
            while !rest.is_empty() {
                let (index, within) = (at / unit, at % unit);
                let (part, behind) = rest.split_at_mut(rest.len().min(unit - within));
                self.stretch(file, offset, self.order.place(index) * unit + within, part)?;
                at += part.len();
                rest = behind;
            }
        }
        if self.minus_one {
            out.iter_mut().for_each(|x| *x -= 1.0);
        }
        Ok(())
    }

    /// Elements `at..` as the file has them.
    fn stretch(&self, file: &File, offset: u64, at: usize, out: &mut [f32]) -> io::Result<()> {
        let (block, size) = (self.code.block(), self.code.block_bytes());
        let first = at / block;
        let count = (at + out.len()).div_ceil(block) - first;
        let mut bytes = vec![0; count * size];
        file.read_exact_at(&mut bytes, offset + (first * size) as u64)?;
        let mut values = vec![0.0; count * block];
        self.code.decode(&bytes, &mut values);
        let skipped = at - first * block;
        out.copy_from_slice(&values[skipped..skipped + out.len()]);
        Ok(())
    }
}

//! The tensors of a vision-language model besides its text model, which are carried through byte for byte. Never
//! changes one, and never holds more than a chunk of them.
use super::checksum::checksum;
use super::disk::{CHUNK, Disk};
use super::layout::{Carried, FilePlan, FileTensor};
use super::state::{Checksums, hex};
use super::writer::open_made;
use crate::base::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files that stay open, so that they can be read after their directory was removed.
pub type OpenFiles = Arc<Vec<(PathBuf, File)>>;

/// The tensors of a vision-language model besides its text model.
#[derive(Clone, Debug, Default)]
pub struct Tower {
    pub carried: Carried,
    pub files: OpenFiles,
}

impl Tower {
    pub fn bytes(&self) -> u64 {
        self.carried.tensors.iter().map(FileTensor::bytes).sum()
    }

    /// Calls `f` with the bytes of `tensor`, in chunks, each with its offset. Returns its checksum.
    fn read(&self, tensor: &FileTensor, f: &mut dyn FnMut(&[u8], u64) -> Result<()>) -> Result<u64> {
        let (path, file) = &self.files[tensor.file];
        let (len, mut at, mut sum, mut buf) = (tensor.bytes(), 0, 0u64, vec![0; CHUNK]);
        while at < len {
            let n = (len - at).min(CHUNK as u64) as usize;
            file.read_exact_at(&mut buf[..n], tensor.offset + at)
                .map_err(|e| Error::in_file(path, format!("cannot read tensor {}: {e}", tensor.name)))?;
            f(&buf[..n], at)?;
            // In whole words; only the last chunk can end within one.
            let words = n.next_multiple_of(4);
            buf[n..words].fill(0);
            sum = sum.wrapping_add(checksum(&buf[..words], (at / 4) as usize));
            at += n as u64;
        }
        Ok(sum)
    }

    /// Copies all tensors to their places in the files of `plan` in `dir`. Returns their checksums by name.
    pub fn copy(&self, disk: &Disk, dir: &Path, plan: &FilePlan) -> Result<Vec<(String, String)>> {
        let mut sums = Vec::with_capacity(plan.carried.len());
        let mut open = None;
        for (from, to) in self.carried.tensors.iter().zip(&plan.carried) {
            let file = match open.take_if(|(file, _)| *file == to.file) {
                Some((_, file)) => file,
                None => open_made(disk, &dir.join(&plan.files[to.file].name))?,
            };
            let sum = self.read(from, &mut |bytes, at| file.write_at(bytes, to.offset + at))?;
            sums.push((to.name.clone(), hex(sum)));
            file.sync()?;
            open = Some((to.file, file));
        }
        Ok(sums)
    }

    /// Compares all tensors with their checksums in a checkpoint.
    pub fn verify(&self, checksums: &Checksums) -> Result<()> {
        for tensor in &self.carried.tensors {
            let found = hex(self.read(tensor, &mut |_, _| Ok(()))?);
            let stored = checksums.tensors.get(&tensor.name).map_or("none", String::as_str);
            if stored != found {
                return Err(changed(&self.files[tensor.file].0, &tensor.name, &found, stored));
            }
        }
        Ok(())
    }
}

/// The error of a tensor whose checksum is not the stored one.
pub(super) fn changed(path: &Path, tensor: &str, found: &str, stored: &str) -> Error {
    let what = format!("tensor {tensor} was changed after it was saved: its checksum is {found}, not {stored}");
    Error::in_file(path, what).damaged()
}

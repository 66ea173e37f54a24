//! Which algorithm computes each matrix product, as a table and as a file that later runs read. Never times one.
//!
//! The library's description of an algorithm is 64 bytes that may be stored and restored with the same version of the
//! library (cuBLAS documentation, cublasLtMatmulAlgo_t). So a file belongs to one kind of machine: GPU, driver and
//! library. Files are replaced whole, so that ranks and jobs that write one at the same time do not damage it; the last
//! one wins.
use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Algorithms by the names of their products.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Choices(BTreeMap<String, String>);

impl Choices {
    pub fn len(&self) -> usize {
        self.0.len()
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub(super) fn get(&self, product: &str) -> Option<cublasLtMatmulAlgo_t> {
        let hex = self.0.get(product)?.as_bytes();
        let mut data = [0; 8];
        if hex.len() != 128 || !hex.is_ascii() {
            return None;
        }
        for (word, digits) in data.iter_mut().zip(hex.chunks_exact(16)) {
            *word = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(cublasLtMatmulAlgo_t { data })
    }
    pub(super) fn set(&mut self, product: String, algorithm: cublasLtMatmulAlgo_t) {
        self.0.insert(product, algorithm.data.iter().map(|word| format!("{word:016x}")).collect());
    }
    /// Adds the entries of `other` for products that this has none for.
    pub fn fill_from(&mut self, other: &Choices) {
        for (product, algorithm) in &other.0 {
            self.0.entry(product.clone()).or_insert_with(|| algorithm.clone());
        }
    }

    fn sum(&self) -> String {
        let lines: String = self.0.iter().map(|(product, algorithm)| format!("{product}\n{algorithm}\n")).collect();
        format!("{:016x}", xxh3_64(lines.as_bytes()))
    }
    pub fn path(dir: &Path, machine: &str) -> PathBuf {
        dir.join(format!("products-{:016x}.json", xxh3_64(machine.as_bytes())))
    }
    /// The table that earlier runs on such a machine left in `dir`; empty if there is none. An error says why the file
    /// cannot be used.
    pub fn read(dir: &Path, machine: &str) -> Result<Choices, String> {
        let path = Choices::path(dir, machine);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Choices::default()),
            Err(e) => return Err(format!("{}: {e}", path.display())),
        };
        let file: ChoiceFile =
            serde_json::from_str(&text).map_err(|e| format!("{} is damaged: {e}", path.display()))?;
        if file.machine != machine {
            return Err(format!("{} is for another machine: {}", path.display(), file.machine));
        }
        match file.sum == file.products.sum() {
            true => Ok(file.products),
            false => Err(format!("{} is damaged: its checksum is wrong", path.display())),
        }
    }
    /// Replaces the file in `dir`.
    pub fn write(&self, dir: &Path, machine: &str) -> io::Result<()> {
        let path = Choices::path(dir, machine);
        fs::create_dir_all(dir)?;
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        let file = ChoiceFile { machine: machine.into(), sum: self.sum(), products: self.clone() };
        let written = File::create(&partial).and_then(|mut to| {
            to.write_all(serde_json::to_string_pretty(&file)?.as_bytes())?;
            to.sync_all()
        });
        let placed = written.and_then(|()| fs::rename(&partial, &path));
        if placed.is_err() {
            let _ = fs::remove_file(&partial); // the error is what matters
        }
        placed
    }
}

#[derive(Serialize, Deserialize)]
struct ChoiceFile {
    machine: String,
    sum: String,
    products: Choices,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(names: &[&str]) -> Choices {
        let mut table = Choices::default();
        for (i, name) in names.iter().enumerate() {
            table.set(name.to_string(), cublasLtMatmulAlgo_t { data: [u64::MAX - i as u64; 8] });
        }
        table
    }

    #[test]
    fn a_table_is_read_as_it_was_written_and_the_last_writer_wins() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("new");
        assert_eq!(Choices::read(&at, "H100"), Ok(Choices::default()));
        table(&["a", "b"]).write(&at, "H100").unwrap();
        let read = Choices::read(&at, "H100").unwrap();
        assert_eq!((read.len(), read.get("b").unwrap().data), (2, [u64::MAX - 1; 8]));
        assert!(Choices::read(&at, "A100").unwrap().is_empty());
        std::thread::scope(|scope| {
            for names in [["c", "d"], ["e", "f"], ["g", "h"]] {
                let at = &at;
                scope.spawn(move || (0..20).for_each(|_| table(&names).write(at, "H100").unwrap_or(())));
            }
        });
        assert_eq!(Choices::read(&at, "H100").unwrap().len(), 2);
    }

    #[test]
    fn a_file_that_is_damaged_or_foreign_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let whole = table(&["a", "b"]);
        whole.write(dir.path(), "H100").unwrap();
        let path = Choices::path(dir.path(), "H100");
        let text = fs::read_to_string(&path).unwrap();
        let after = |text: &str| {
            fs::write(&path, text).unwrap();
            Choices::read(dir.path(), "H100").unwrap_err()
        };
        assert!(after(&text[..text.len() / 2]).contains("products-") && after("").contains("damaged"));
        assert!(after(&text.replace("fffe", "fffd")).contains("checksum"));
        assert!(after(&text.replace("H100", "A100")).contains("another machine: A100"));
    }

    #[test]
    fn entries_of_the_first_table_stay_and_others_are_added() {
        let (mut first, mut second) = (table(&["a"]), table(&["b", "a"]));
        first.fill_from(&second);
        assert_eq!((first.len(), first.get("a").unwrap().data[0]), (2, u64::MAX));
        second.0.insert("a".into(), "not hexadecimal".into());
        assert!(second.get("a").is_none() && second.get("c").is_none());
    }
}

//! Collects the kernel sources into a table of the names and texts of `kernels/*.ptx`, which `src/kernels/variant.rs`
//! embeds.
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let kernels = fs::canonicalize("kernels")?;
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", kernels.display());
    let files = fs::read_dir(&kernels)?.map(|file| Ok(file?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    let mut sources: Vec<_> = files.iter().filter(|file| file.extension().is_some_and(|e| e == "ptx")).collect();
    sources.sort();
    let mut table = String::from("const SOURCES: &[(&str, &str)] = &[\n");
    for path in sources {
        let name = path.file_name().unwrap_or_default();
        table += &format!("    ({name:?}, include_str!({path:?})),\n");
    }
    table += "];\n";
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("OUT_DIR is not set"))?;
    fs::write(Path::new(&out).join("sources.rs"), table)
}

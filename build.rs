//! Expands every kernel variant, so that an error in `kernels/` fails the build with its file and line, and writes what
//! `src/device/gpu/kernels.rs` includes: a table, and the texts, compressed from 35 MB to 0.3, because variants of a
//! kernel are nearly equal. Needs no toolkit and no network.
use flatshard_ptx::kernels::{entries, target, variants};
use std::path::Path;
use std::{env, fs, io};
use zstd::zstd_safe::CParameter;

/// Higher levels take a tenth off, and five times as long.
const LEVEL: i32 = 9;
/// Of the distance at which equal text is found: all of it.
const WINDOW_LOG: u32 = 27;

fn main() {
    // The sources are part of flatshard-ptx: a change there rebuilds this script, which then runs again.
    println!("cargo::rerun-if-changed=../../build.rs"); // from src/device, whose build script this is
    let Some(out) = env::var_os("OUT_DIR") else { return println!("cargo::error=OUT_DIR is not set") };
    let (mut table, mut texts) = (String::from("&[\n"), String::new());
    for variant in variants() {
        let (name, file) = (variant.name, variant.file);
        match variant.expand() {
            Ok(text) => {
                let (target, entries) = (target(&text), entries(&text).collect::<Vec<_>>());
                let within = texts.len()..texts.len() + text.len();
                texts += &text;
                table += &format!(
                    "    Text {{ variant: {name:?}, file: {file:?}, target: {target:?}, entries: &{entries:?}, within: {within:?} }},\n",
                );
            }
            Err(e) => format!("kernels/{e}").lines().for_each(|line| println!("cargo::error={line}")),
        }
    }
    table += "]\n";
    let out = Path::new(&out);
    let write = |packed| {
        fs::write(out.join("kernels.rs"), table)?;
        fs::write(out.join("kernels.zst"), packed)
    };
    if let Err(e) = compressed(texts.as_bytes()).and_then(write) {
        println!("cargo::error={e}");
    }
}

fn compressed(texts: &[u8]) -> io::Result<Vec<u8>> {
    let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
    compressor.set_parameter(CParameter::EnableLongDistanceMatching(true))?;
    compressor.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
    compressor.compress(texts)
}

//! Expands every kernel variant, so that a mistake in `kernels/` ends the build with its file and line, and writes down
//! what each has: `src/device/gpu/kernels.rs` includes the table. The library expands a text again when it is asked for
//! it: 2.5 ms, where all of them would be 16 MB in every binary. Needs no toolkit and no network.
use flatshard_ptx::kernels::{entries, target, variants};
use std::path::Path;
use std::{env, fs};

fn main() {
    // The sources are a part of flatshard-ptx: a change there builds this script again, which runs it again.
    println!("cargo::rerun-if-changed=build.rs");
    let Some(out) = env::var_os("OUT_DIR") else { return println!("cargo::error=cargo sets no OUT_DIR") };
    let mut table = String::from("pub const TEXTS: &[Text] = &[\n");
    for variant in variants() {
        let name = variant.name;
        match variant.expand() {
            Ok(text) => {
                let (target, entries) = (target(&text), entries(&text).collect::<Vec<_>>());
                table += &format!("    Text {{ variant: {name:?}, target: {target:?}, entries: &{entries:?} }},\n");
            }
            Err(e) => format!("kernels/{e}").lines().for_each(|line| println!("cargo::error={line}")),
        }
    }
    table += "];\n";
    if let Err(e) = fs::write(Path::new(&out).join("kernels.rs"), table) {
        println!("cargo::error={e}");
    }
}

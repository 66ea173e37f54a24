//! Expands every kernel variant, so that an error in `kernels/` fails the build with its file and line, and writes a
//! table of their contents that `src/device/gpu/kernels.rs` includes. The library expands a text again on demand: this
//! takes 2.5 ms, while embedding all of them would add 16 MB to every binary. Needs no toolkit and no network.
use flatshard_ptx::kernels::{entries, target, variants};
use std::path::Path;
use std::{env, fs};

fn main() {
    // The sources are part of flatshard-ptx: a change there rebuilds this script, which then runs again.
    println!("cargo::rerun-if-changed=../../build.rs"); // from src/device, whose build script this is
    let Some(out) = env::var_os("OUT_DIR") else { return println!("cargo::error=OUT_DIR is not set") };
    let mut table = String::from("&[\n");
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
    table += "]\n";
    if let Err(e) = fs::write(Path::new(&out).join("kernels.rs"), table) {
        println!("cargo::error={e}");
    }
}

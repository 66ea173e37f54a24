//! Expands every kernel variant into plain PTX, which the library embeds (`src/device/gpu/kernels.rs`). A mistake in
//! `kernels/` ends the build with its file and line. Needs no toolkit and no network.
use flatshard_ptx::kernels::variants;
use std::path::Path;
use std::{env, fs};

fn main() {
    // The sources are a part of flatshard-ptx: a change there builds this script again, which runs it again.
    println!("cargo::rerun-if-changed=build.rs");
    let Some(out) = env::var_os("OUT_DIR") else { return println!("cargo::error=cargo sets no OUT_DIR") };
    let mut table = String::from("pub const TEXTS: &[Text] = &[\n");
    for variant in variants() {
        let path = Path::new(&out).join(format!("{}.ptx", variant.name));
        let written = variant
            .expand()
            .map_err(|e| format!("kernels/{e}"))
            .and_then(|text| fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display())));
        if let Err(what) = written {
            what.lines().for_each(|line| println!("cargo::error={line}"));
        }
        let (name, file) = (variant.name, variant.file);
        table += &format!("    Text {{ variant: {name:?}, file: {file:?}, ptx: include_str!({path:?}) }},\n");
    }
    table += "];\n";
    if let Err(e) = fs::write(Path::new(&out).join("kernels.rs"), table) {
        println!("cargo::error={e}");
    }
}

//! `expand_kernels DIR`: writes every variant of every kernel as plain PTX into DIR, for ptxas and for readers.
use flatshard_ptx::kernels::variants;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(dir) = std::env::args().nth(1).filter(|dir| !dir.starts_with('-')) else {
        eprintln!("usage: expand_kernels DIR");
        return ExitCode::from(2);
    };
    for variant in variants() {
        let path = std::path::Path::new(&dir).join(format!("{}.ptx", variant.name));
        let written = variant.expand().map_err(|e| e.to_string()).and_then(|text| {
            std::fs::create_dir_all(&dir)
                .and_then(|()| std::fs::write(&path, text))
                .map_err(|e| format!("{}: {e}", path.display()))
        });
        if let Err(what) = written {
            eprintln!("{what}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

//! Programs that a test writes and runs. Another process writes them: a descriptor open for writing in this process
//! would be inherited by processes that other tests start, and running the program would fail with "text file busy".
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// An executable file; its directory is made, too.
pub fn write_program(path: &Path, content: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = install.spawn().unwrap();
    child.stdin.take().unwrap().write_all(content.as_ref()).unwrap();
    assert!(child.wait().unwrap().success(), "install {}", path.display());
}

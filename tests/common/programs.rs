//! Programs that a test starts, and those that it writes. Another process writes them: a descriptor open for writing in
//! this process would be inherited by processes that other tests start, and running the program would fail with "text
//! file busy".
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// What a launcher tells each rank.
pub const LAUNCHED: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

/// A command that starts its own ranks, whatever launched the tests.
pub fn unlaunched(program: &str) -> Command {
    let mut command = Command::new(program);
    for variable in LAUNCHED {
        command.env_remove(variable);
    }
    command
}
/// An executable file; its directory is made, too.
pub fn write_program(path: &Path, content: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = install.spawn().unwrap();
    child.stdin.take().unwrap().write_all(content.as_ref()).unwrap();
    assert!(child.wait().unwrap().success(), "install {}", path.display());
}

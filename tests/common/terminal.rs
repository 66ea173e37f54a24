//! A program on a terminal of its own: what it writes there. Never asserts.
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::Read;
use std::process::Command;

/// Our end of a new terminal, and the program's.
pub fn open() -> (File, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    (File::from(ours), File::options().read(true).write(true).open(path).unwrap())
}

/// All that `command` writes to its terminal, with the bytes that move the cursor and switch colors.
pub fn on_a_terminal(mut command: Command) -> String {
    let (mut ours, theirs) = open();
    let mut child = command.stdout(theirs.try_clone().unwrap()).stderr(theirs).spawn().unwrap();
    drop(command); // and with it the last copy of theirs that is not the program's
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    // An error once nobody has the other end.
    while let Ok(n @ 1..) = ours.read(&mut buffer) {
        text.extend_from_slice(&buffer[..n]);
    }
    child.wait().unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

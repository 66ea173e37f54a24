//! `print!` and `println!` that ignore a closed pipe (`| head`), where those of std panic. Any other error of standard
//! output, such as a full disk, ends the program with status 1. Messages go to standard error, never through here.
use std::io::{ErrorKind, Write, stdout};

pub fn out(text: std::fmt::Arguments) {
    let mut out = stdout();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            eprintln!("error: write standard output: {e}");
            std::process::exit(1)
        }
        _ => {}
    }
}

macro_rules! print {
    ($($words:tt)*) => { $crate::say::out(format_args!($($words)*)) };
}
macro_rules! println {
    ($($words:tt)*) => { $crate::say::out(format_args!("{}\n", format_args!($($words)*))) };
}

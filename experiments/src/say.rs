//! `print!` and `println!` that ignore a closed pipe (`| head`), where std's panic. Any other error of standard output,
//! such as a full disk, ends the program with status 1. Never prints errors, which go to standard error.
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

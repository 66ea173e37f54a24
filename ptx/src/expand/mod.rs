//! A text expander for hand-written PTX, small enough for a build script. The input is PTX plus:
//!
//! ```text
//! .include "name"             the text of another source: macros that kernels share
//! .const NAME = expr          a default; a definition handed to `expand` wins
//! .for i in 0 .. 8 { .. }     unrolled; also  .for d in 16, 8, 4 { .. }
//! .if expr { .. } .else { .. }                 also  .else .if expr { .. }
//! .macro NAME(a, b) { .. }    called as NAME!(x, y);  the body stands in braces, so its registers are its own
//! $NAME  ${expr}              the value as text
//! %acc[expr]  %acc[a .. b]    %acc5  and  %acc4, %acc5, %acc6, %acc7; also  $x[expr]  where x stands for a register
//! ```
//!
//! Everything else passes through, with comments and strings unchanged. A macro sees the names defined before it and
//! its arguments, never the caller's. `# line "file"` markers make errors of ptxas and the emulator refer to source
//! lines; within a macro the marker's file also names the call. Only integers are evaluated.
mod expr; // integer expressions
mod scan; // a cursor over source text
mod expander; // directives, macros, markers

pub use expander::{ExpandError, expand};

//! What a reduction does with the elements that ranks contribute. Never says who reduces them.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    Sum,
    Max,
}

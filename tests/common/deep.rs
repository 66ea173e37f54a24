//! How much a test covers. The gate runs representative cases on the emulator, which is slow. FLATSHARD_TEST_DEEP=1
//! runs all of them: `.ci/full` does, and `.ci/run` after a change that asks for it.
pub fn deep() -> bool {
    std::env::var_os("FLATSHARD_TEST_DEEP").is_some()
}
/// The first `n` cases, which are the representative ones, or all.
pub fn first<T>(n: usize, cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    cases.into_iter().take(if deep() { usize::MAX } else { n })
}
/// Whether case `i` of one kind meets case `j` of another: each meets one of `n` others, or all of them.
pub fn meets(i: usize, j: usize, n: usize) -> bool {
    deep() || i % n == j % n
}

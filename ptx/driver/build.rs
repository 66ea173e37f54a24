//! A library that has threads and remembers streams must not leave the process when its last user lets go of it.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}

//! Keeps the library loaded after its last dlclose, because it has threads and thread-local state.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}

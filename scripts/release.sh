#!/usr/bin/env bash
# Builds what a release has, in release-files/ of cargo's target directory: the wheel, a tarball of the same binaries with completions and
# manual pages, their debug information, and SHA256SUMS. scripts/release.sh [--zig]: see scripts/wheel.sh, which builds and tries them.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(scripts/target.sh)
out=$target/release-files
triple=$(rustc -vV | sed -n 's/^host: //p')
version=$(sed -n '/^\[package\]/,/^version/ s/^version = "\(.*\)"/\1/p' Cargo.toml)
name=flatshard-v$version-$triple # as [package.metadata.binstall] says

scripts/wheel.sh "$@"
[ -d "$target/wheel/bin" ] || { echo "release: there is no wheel, and the tarball has its binaries"; exit 1; }
rm -rf "$out"
mkdir -p "$out/$name/completions" "$out/$name/man"
cp "$target"/wheel/bin/* LICENSE README.md CHANGELOG.md "$out/$name"
for binary in flatshard run_fsdp run_ddp experiments; do
    for shell in bash zsh fish; do
        "$out/$name/$binary" --completions "$shell" > "$out/$name/completions/$binary.$shell"
    done
    "$out/$name/$binary" --man > "$out/$name/man/$binary.1"
done
cd "$out"
# The same files, the same bytes.
pack() {
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@"${SOURCE_DATE_EPOCH:-0}" -C "$1" -cf - "$2" | gzip -9n > "$3"
}
pack . "$name" "$name.tar.gz"
pack "$target/wheel" debug "$name.debug.tar.gz"
cp "$target"/wheel/*.whl .
rm -r "$name"
sha256sum -- *.tar.gz *.whl > SHA256SUMS
cat SHA256SUMS

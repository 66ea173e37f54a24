#!/usr/bin/env bash
# The pages as a site with search: mdBook over README.md, docs/ and what they link to, then a check of every link and anchor
# (scripts/site_links.py). The site is in site/ under cargo's target directory. SITE_REPO (https://host/owner/name/blob/COMMIT) sends
# links to source files there; without it the files are copied into the site. MDBOOK names the program where it is not in PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

mdbook=${MDBOOK:-$(command -v mdbook || true)}
skip() {
    echo "site: SKIPPED, $1: the pages were not built as a site"
    exit 0
}
[ -n "$mdbook" ] || skip "no mdbook (cargo install mdbook --locked)"
command -v python3 > /dev/null || skip "no python3, which checks the links"

site=$(scripts/target.sh)/site
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
# The layout is the repository's, so that the pages' own links hold.
cp -r README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE docs "$stage"
sed -E 's#\]\(\.\./#](#; t; s#\]\(([a-z-]+\.md)\)#](docs/\1)#' docs/SUMMARY.md > "$stage/SUMMARY.md"
rm "$stage/docs/SUMMARY.md"
files='(src|tests|examples|experiments|ptx|benches|configs|kernels|scripts)/[^)#]*'
for page in "$stage"/*.md "$stage"/docs/*.md; do
    { grep -oE "\]\((\.\./)?$files" "$page" || true; } | sed -E 's#\]\((\.\./)?##' | while read -r file; do
        mkdir -p "$stage/$(dirname "$file")"
        cp "$file" "$stage/$file"
    done
    [ -z "${SITE_REPO:-}" ] || sed -i -E "/\.png\)/! s#\]\((\.\./)?($files)#](${SITE_REPO}/\2#g" "$page"
done
sed 's/^language = .*/&\nsrc = "."/' book.toml > "$stage/book.toml"
rm -rf "$site"
"$mdbook" build "$stage" --dest-dir "$site"
python3 -B scripts/site_links.py "$site"

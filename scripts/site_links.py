"""Every link, image and anchor of a built site leads somewhere: site_links.py DIRECTORY. Links to other hosts are not followed."""
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        self.links += [attributes[name] for name in ("href", "src", "srcset") if attributes.get(name)]


site = Path(sys.argv[1]).resolve()
pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
dead, checked = [], 0
for path, page in pages.items():
    if path.name in ("404.html", "toc.html"):  # their links are relative to other places
        continue
    for link in page.links:
        url = urlsplit(link)
        if url.scheme or url.netloc:
            continue
        to = (path.parent / unquote(url.path)).resolve() if url.path else path
        checked += 1
        anchor = to in pages and url.fragment and unquote(url.fragment) not in pages[to].ids
        if not to.is_file() or anchor:
            dead.append(f"{path.relative_to(site)}: {link}")
print(f"{len(pages)} pages, {checked} links", *sorted(set(dead)), sep="\n  dead: ")
sys.exit(bool(dead))

"""The study's page in a real browser: everything it shows is inside the file, and its parts can be opened."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "results" / "recall-demonstration" / "report.html"
BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)

LOOK = """
<script>
addEventListener("load", () => {
  const parts = [...document.querySelectorAll("details")];
  const heights = parts.map(part => part.getBoundingClientRect().height);
  document.querySelectorAll("details > summary").forEach(summary => summary.click());
  const fetched = performance.getEntriesByType("resource").map(entry => entry.name);
  document.title = JSON.stringify({
    images: [...document.images].map(image => [image.naturalWidth, image.alt]),
    opened: parts.filter((part, i) => part.getBoundingClientRect().height > heights[i]).length,
    headings: [...document.querySelectorAll("h2")].map(heading => heading.textContent.trim()),
    fetched: fetched.filter(name => !name.startsWith("data:")),
    wide: document.documentElement.scrollWidth > innerWidth,
  });
});
</script>
"""


def look(page: Path, folder: Path, size: str) -> dict:
    """What the browser says of ``page`` in a window of that size."""
    copy = folder / "page.html"
    copy.write_text(page.read_text() + LOOK)
    command = [BROWSER, "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"]
    command += ["--disable-background-networking", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    command += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    command += [f"--window-size={size}", "--dump-dom", copy.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
    assert title, shown[:500]
    return json.loads(html.unescape(title[1]))


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize("size", ["1200,900", "500,900"])
def test_the_page_is_whole_and_can_be_opened(tmp_path, size) -> None:
    seen = look(PAGE, tmp_path, size)
    assert seen["fetched"] == [], "the page is self-contained"
    assert len(seen["images"]) == 7 and all(width > 0 and alt for width, alt in seen["images"])
    assert {"Held-out result", "Mean cache", "Verdicts", "Development", "Diagnostics"} <= set(seen["headings"])
    assert seen["opened"] >= 25, "a click opens each held-out problem"
    assert not seen["wide"], "nothing makes the page scroll sideways"

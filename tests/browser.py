"""A headless browser without network, for tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium (apt-get install chromium)")
DARK = "--blink-settings=preferredColorScheme=0"
STARTS, SECONDS = 3, 120  # Chromium itself hangs once in some hundred starts under virtual time, whatever the page


def browse(page: Path | str, profile: Path, *options: str) -> str:
    """The DOM of a file or an address after its scripts ran; of a browser that hangs, the next one's."""
    fixed = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    command = [
        BROWSER,
        *fixed,
        "--disable-sync",
        "--virtual-time-budget=5000",
        *options,
        "--dump-dom",
        f"file://{page}" if isinstance(page, Path) else page,
    ]
    for start in range(1, STARTS + 1):
        try:
            return subprocess.run(
                [*command, f"--user-data-dir={profile}{start}"],
                capture_output=True,
                text=True,
                check=True,
                timeout=SECONDS,
            ).stdout
        except subprocess.TimeoutExpired as hangs:
            hung = hangs
    raise hung

"""A headless browser without network, for tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium (apt-get install chromium)")
DARK = "--blink-settings=preferredColorScheme=0"


def browse(page: Path | str, profile: Path, *options: str) -> str:
    """The DOM of a file or an address after its scripts ran."""
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [BROWSER, *fixed, "--disable-sync", f"--user-data-dir={profile}", "--virtual-time-budget=5000", *options]
    return subprocess.run(
        [*command, "--dump-dom", f"file://{page}" if isinstance(page, Path) else page], capture_output=True, text=True, check=True, timeout=240
    ).stdout

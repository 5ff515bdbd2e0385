"""README.md is the site's first page. A link to anything else than a page of the site leads to the repository. Logs are
history, which a search leaves out.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/kvbits/kvbits/blob/main/"


def on_files(files: Any, config: Any) -> None:
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if "/log/" in page.file.src_uri:
        page.meta["search"] = {"exclude": True}
    pages = {Path(f.abs_src_path): f.src_uri for f in files if f.abs_src_path and not f.inclusion.is_excluded()}

    def led(link: re.Match) -> str:
        path, mark, anchor = link[1].partition("#")
        target = (Path(page.file.abs_src_path).parent / path).resolve()
        if "://" in path or not path or not target.is_relative_to(ROOT) or not target.exists():
            return link[0]
        to = (
            os.path.relpath(pages[target], Path(page.file.src_uri).parent)
            if target in pages
            else REPOSITORY + target.relative_to(ROOT).as_posix()
        )
        return f"]({to}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", led, markdown)

"""The report as one HTML file, which needs no network: scripts, styles and payloads are inside.

    header, nav, main       empty; app.js fills them
    script type JSON        one for each payload, `payload-NAME`
    d3, plot                the libraries (assets/NOTICE.md)
    dom, charts, app        elements, charts, sections; a page that fetches its payloads uses the same files
    embedded                starts app.js with the payloads of this file

The content security policy allows these scripts alone, by their digests.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from html import escape
from importlib.resources import files

from esper.telemetry.record.reader import Record
from esper.telemetry.report.payloads import PAYLOADS, payload

SCRIPTS = ("d3.min.js", "plot.min.js", "dom.js", "charts.js", "app.js", "embedded.js")


def asset(name: str) -> str:
    """The text of a file that is part of the page."""
    return files("esper.telemetry.report").joinpath("assets", name).read_text(encoding="utf-8")


def colors(scheme: str) -> dict[str, str]:
    """The colours of a page, #rrggbb by name; `scheme` is "light" or "dark"."""
    blocks = re.findall(r":root \{(.*?)\}", asset("style.css"), re.DOTALL)[: 2 if scheme == "dark" else 1]
    return {name: color for block in blocks for name, color in re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)}


def payloads_of(record: Record, on_section: Callable[[int, int, str], None]) -> dict[str, object]:
    """All payloads, by name; `on_section` is called with the sections done, those in all, and the name of the next."""
    found: dict[str, object] = {}
    for number, name in enumerate(PAYLOADS):
        on_section(number, len(PAYLOADS), name)
        found[name] = payload(record, name)
    return found


def document(payloads: Mapping[str, object], title: str) -> str:
    """The page with these payloads; `title` is shown until it is drawn."""
    scripts = [asset(name) for name in SCRIPTS]
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    data = "\n".join(
        f'<script type="application/json" id="payload-{name}">{embedded(value)}</script>'
        for name, value in payloads.items()
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{asset('style.css')}</style>\n</head>\n<body>",
            '<header></header>\n<nav aria-label="Sections"></nav>\n<main>',
            "<noscript>This report is drawn by the scripts in it; allow them to run.</noscript></main>",
            data,
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def digest(script: str) -> str:
    """The name of a script in a content security policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def embedded(value: object) -> str:
    """JSON that cannot end the script element that it stands in, whatever its strings are."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

"""Reports from the results of `kvbits eval`: one HTML page without network, and Markdown tables.

collect.py    result files -> Results, one row per model and cache
markdown.py   tables, and which scheme to take
arithmetic.py the byte arithmetic the page's calculator runs on
page.py       the HTML page (assets/: Chart.js, style, script)
"""

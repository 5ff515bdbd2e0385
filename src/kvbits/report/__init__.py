"""HTML page without network, and Markdown tables, from the results of `kvbits eval`.

collect.py     result files -> Results, one row per model and cache
markdown.py    tables, and which scheme to take
plan_page.py   users and tokens that fit a GPU, as a page to play with: also the calculator of the report
page.py        the HTML page (assets/: Chart.js, style, scripts, models and figures of the calculator)
"""

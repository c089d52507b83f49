"""Charts as strings of SVG, made of numbers: for the page, the report, and whoever has no browser.

Each function takes arrays of numpy and returns one `<svg>` with a role, a title and a description
for screen readers. It has no script, no inline style, and classes that `charts.css` colours, in
light and dark. Names of anybody are escaped. Equal arguments give equal strings.
"""

from tocsin.console.charts.bar_chart import Bar, Box, bar_chart, box_chart, share_bar
from tocsin.console.charts.decimation import decimate
from tocsin.console.charts.heat_map import heat_map
from tocsin.console.charts.histogram import histogram
from tocsin.console.charts.line_chart import Line, line_chart
from tocsin.console.charts.marks import Mark
from tocsin.console.charts.numbers import value_text
from tocsin.console.charts.ribbon_chart import ribbon_chart
from tocsin.console.charts.sparkline import sparkline
from tocsin.console.charts.stacked_chart import stacked_chart
from tocsin.console.charts.stylesheet import style_source, stylesheet

__all__ = [
    "Bar",
    "Box",
    "Line",
    "Mark",
    "bar_chart",
    "box_chart",
    "decimate",
    "heat_map",
    "histogram",
    "line_chart",
    "ribbon_chart",
    "share_bar",
    "sparkline",
    "stacked_chart",
    "style_source",
    "stylesheet",
    "value_text",
]

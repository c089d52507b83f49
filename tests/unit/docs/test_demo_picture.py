"""The picture of the demo: which lines it keeps, and that it loads nothing."""

from __future__ import annotations

from rich.text import Text

from demo_picture import WIDTH, svg_of, telling


def test_a_picture_keeps_few_steps_and_each_notice_once() -> None:
    printed = [
        "     nan a ResNet learns",
        "  tocsin webhooks go to a receiver on http://127.0.0.1:1/hook",
        *(f"     nan step {step} loss 0.5" for step in range(0, 50, 10)),
        *(f" healthy step {step} loss 0.5" for step in range(0, 200, 50)),
        "     nan tocsin: critical: nonfinite at step 40",
        "     nan tocsin:   nonfinite -> demo-hook: delivered (204 No Content)",
        "   36  issue: nonfinite  ",
        "  tocsin mail 'x': /tmp/mail-1.html",
    ]
    assert [line.plain for line in telling(map(Text, printed))] == [
        "     nan a ResNet learns",
        "     nan step 0 loss 0.5",
        "     nan step 20 loss 0.5",
        "     nan step 30 loss 0.5",
        "     nan step 40 loss 0.5",
        " healthy step 0 loss 0.5",
        " healthy step 100 loss 0.5",
        "     nan tocsin: critical: nonfinite at step 40",
        "   36  issue: nonfinite",
    ]


def test_the_picture_is_cut_at_its_width_and_loads_nothing() -> None:
    svg = svg_of([Text("long " * WIDTH)])
    assert svg.startswith("<svg")
    assert "…" in svg
    assert "url(http" not in svg
    assert "@font-face" not in svg

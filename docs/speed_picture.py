"""The picture of the README: speed against eager PyTorch, from the table of docs/benchmarks.md."""

from __future__ import annotations

import re

__all__ = ["speed_picture"]

# Row of the table -> label. Variants of these rows are left to the page.
_ROWS = {
    "MLP 784-512-10, batch 64": "MLP",
    "six convolutions with batch norm, 16 x 32 x 32": "six convolutions",
    "ResNet-18, 16 x 32 x 32": "ResNet-18",
    "two-layer LSTM of 256, 16 x 32 tokens": "two-layer LSTM",
    "BERT, 4 layers of 256, 8 x 128 tokens": "BERT",
    "GPT-2, 4 layers of 256, vocabulary 8000, 8 x 128 tokens": "GPT-2",
}
# Contender -> label and color. All colors can be read on white and on black.
_CONTENDERS = {"ort_trainer": ("ort_trainer", "#2f81d6"), "compile": ("torch.compile", "#a08a4f")}
_TEXT = "#7a7f87"
_LEFT, _TOP, _UNIT = 130, 44, 330  # the bars' left end, that of the first row, and the length of 1
_BAR, _ROW, _WIDTH = 13, 36, 720


def speed_picture(page: str) -> str:
    """Returns an SVG with the bars of two contenders for each row.

    Args:
        page: The text of docs/benchmarks.md.
    """
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    speeds = {tuple(row[:2]): float(re.findall(r"[\d.]+", row[4])[0]) for row in cells if row[1:2] and row[0] in _ROWS}
    height = _TOP + _ROW * len(_ROWS) + 6
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}" role="img">',
        "<title>Speed of a training step against eager PyTorch, on two CPU cores</title>",
        f'<text x="{_LEFT}" y="16">Steps in the time of one in eager PyTorch</text>',
    ]
    for number, (label, color) in enumerate(_CONTENDERS.values()):
        x = _LEFT + 370 + 110 * number
        drawn.append(
            f'<rect x="{x}" y="6" width="12" height="12" fill="{color}"/><text x="{x + 18}" y="16">{label}</text>'
        )
    one = _LEFT + _UNIT
    for row, (model, label) in enumerate(_ROWS.items()):
        top = _TOP + _ROW * row
        drawn.append(f'<text x="{_LEFT - 10}" y="{top + _BAR + 4}" text-anchor="end">{label}</text>')
        for number, (contender, (_, color)) in enumerate(_CONTENDERS.items()):
            speed, y = speeds[model, contender], top + (_BAR + 1) * number
            drawn.append(f'<rect x="{_LEFT}" y="{y}" width="{speed * _UNIT:.0f}" height="{_BAR}" fill="{color}"/>')
            end = _LEFT + speed * _UNIT
            end = one if one - 34 < end < one else end  # not across the line
            drawn.append(f'<text x="{end + 6:.0f}" y="{y + 11}" font-size="11">{speed:.2f}</text>')
    drawn.append(f'<path d="M{one} {_TOP - 6}V{height - 6}" stroke="{_TEXT}" stroke-dasharray="4 3"/>')
    drawn.append(f'<text x="{one}" y="{_TOP - 10}" text-anchor="middle" font-size="11">eager</text></svg>')
    return "\n".join(drawn) + "\n"

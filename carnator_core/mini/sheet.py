"""Contact sheets: clips as rows of frames, for eyes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw


def frames_row(clip: torch.Tensor, zoom: int) -> Image.Image:
    """(3, T, H, W) in [-1, 1] -> its frames side by side, enlarged without smoothing."""
    _, t, h, w = clip.shape
    pixels = ((clip.permute(2, 1, 3, 0).reshape(h, t * w, 3) + 1) * 127.5).round().clamp(0, 255).byte().numpy()
    return Image.fromarray(pixels).resize((t * w * zoom, h * zoom), Image.Resampling.NEAREST)


def sheet(clips: Sequence[torch.Tensor], titles: Sequence[str], columns: int = 2, zoom: int = 3) -> Image.Image:
    """A picture of all clips with their prompts above them."""
    rows = [frames_row(c, zoom) for c in clips]
    width, height, line, gap = rows[0].width, rows[0].height, 14, 8
    lines = -(-len(rows) // columns)
    page = Image.new("RGB", (columns * (width + gap) + gap, lines * (height + line + gap) + gap), "white")
    draw = ImageDraw.Draw(page)
    for i, (row, title) in enumerate(zip(rows, titles, strict=True)):
        x = gap + (i % columns) * (width + gap)
        y = gap + (i // columns) * (height + line + gap)
        draw.text((x, y), title[: width // 6], fill="black")
        page.paste(row, (x, y + line))
    return page


def save(path: Path, clips: Sequence[torch.Tensor], titles: Sequence[str], **options: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(clips, titles, **options).save(path)

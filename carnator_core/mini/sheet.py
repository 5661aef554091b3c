"""Contact sheets: clips as rows of frames, for eyes.

python -m carnator_core.mini.sheet --out docs/sheet.png
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from . import codec, sample, world
from . import model as mini

PROMPTS = 8


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


def of_model(model, path: Path, size: int = 32, steps: int = 50, guidance: float = sample.GUIDANCE) -> None:
    """Clips of eight fixed prompts that training never saw, whatever they look like."""
    rng = random.Random(11)
    prompts = [world.caption(world.random_scene(rng, "calibrate")) for _ in range(PROMPTS)]
    latents = sample.sample(model, prompts, range(PROMPTS), size=size, steps=steps, guidance=guidance)
    save(path, list(codec.decode(latents)), prompts, zoom=128 // size)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="carnator_core.mini.sheet", description=of_model.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    parser.add_argument("--size", type=int, choices=(32, 64), default=32, help="pixels of a frame's side")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(argv)
    of_model(mini.load(), options.out, options.size, options.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

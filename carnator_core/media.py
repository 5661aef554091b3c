"""Clips as files that people can look at: GIF, a PNG strip, MP4 where PyAV is installed."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import torch
from PIL import Image

from .mini.sheet import frames_row

FRAME_MILLISECONDS = 240
FRAMES_A_SECOND = 4
MP4_REPEATS = 3  # players show a clip of five frames for a moment only


def frames(clip: torch.Tensor, zoom: int = 1) -> list[Image.Image]:
    """(3, T, H, W) in [-1, 1] -> T pictures, enlarged without smoothing."""
    return [frames_row(clip[:, t : t + 1], zoom) for t in range(clip.shape[1])]


def gif(clip: torch.Tensor, zoom: int = 1) -> bytes:
    """An endless GIF."""
    first, *rest = frames(clip, zoom)
    out = io.BytesIO()
    first.save(out, "GIF", save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0)
    return out.getvalue()


def strip(clip: torch.Tensor, zoom: int = 1) -> bytes:
    """A PNG of all frames side by side."""
    return png(frames_row(clip, zoom))


def png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


def can_mp4() -> bool:
    return importlib.util.find_spec("av") is not None


def write_mp4(path: Path, clip: torch.Tensor, zoom: int = 1) -> None:
    """H.264, the clip a few times over. ImportError without PyAV."""
    import av  # an option of the user's, never required

    pictures = frames(clip, zoom) * MP4_REPEATS
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FRAMES_A_SECOND, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = *pictures[0].size, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())


def write_all(folder: Path, name: str, clip: torch.Tensor, zoom: int = 4) -> dict[str, str]:
    """Write `name` as every kind of file that this machine can; file names by kind."""
    files = {"gif": f"{name}.gif", "png": f"{name}.png"}
    (folder / files["gif"]).write_bytes(gif(clip, zoom))
    (folder / files["png"]).write_bytes(strip(clip, zoom))
    if can_mp4():
        files["mp4"] = f"{name}.mp4"
        write_mp4(folder / files["mp4"], clip, zoom)
    return files

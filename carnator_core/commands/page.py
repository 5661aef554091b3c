"""The demo's page: one HTML file that holds all of its pictures, loads nothing and runs no script."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

import torch

from .. import media
from ..mini import world
from ..report import RunReport, StepRow
from .page_style import STYLE

if TYPE_CHECKING:
    from .demo import Shown

DECISIONS = {
    "exact": "exact: the stored result",
    "joint": "joint: borrows predictions",
    "miss": "miss: computed in full",
    "off": "off: passed through",
}
KINDS = {
    "dense": "computed",
    "skipped": "answered from a donor",
    "region": "computed in a region",
    "sparse": "computed with sparse attention",
    "cached": "partly from the model's own cache",
    "exact": "not needed, the result was stored",
}


def page(shown: list[Shown], size: int, steps: int) -> str:
    cards = "".join(_card(number, one, shown[0]) for number, one in enumerate(shown, start=1))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Carnator demo</title><style>{STYLE}</style></head><body><main>"
        f"{_opening(shown, size, steps)}{_overview(shown)}"
        f'<div class="runs">{cards}</div></main></body></html>\n'
    )


# --- the top of the page ---


def _opening(shown: list[Shown], size: int, steps: int) -> str:
    return (
        "<h1>Carnator demo</h1>"
        f"<p>{len(shown)} requests to the embedded model, in this order, with one bank that was empty before the first."
        " Each clip stands beside its own dense run: the same prompt and the same seed with every step computed. A clip"
        " that borrows is an approximation of that run, not the same clip.</p>"
        f"<p>{_on_reading(shown)}</p>"
        f'<p class="quiet">{size} × {size} pixels, {world.FRAMES} frames, {steps} steps. One run of each request: this'
        " page shows how reuse works and is no measurement of how good it is. Seconds are this machine's; a speedup is"
        " estimated from the steps that the run itself computed.</p>"
    )


def _on_reading(shown: list[Shown]) -> str:
    """What the judge could make of the dense clips, and so what faithfulness is worth here."""
    apart = {(one.asked.prompt, one.asked.seed): one.read_dense.attributes for one in shown}
    words = [word for attributes in apart.values() for word in attributes.values()]
    read = sum(word is not None for word in words)
    rule = (
        f"A judge measures {len(world.ATTRIBUTES)} attributes in each clip; faithfulness is the share that it reads as"
        f" asked. In the {len(apart)} dense clips it could read {read} of {len(words)} attributes."
    )
    if read == len(words):
        return rule
    rule += " What it cannot read counts as wrong, with reuse and without"
    if 2 * read >= len(words):
        return f"{rule}."
    return f"{rule}. <strong>With so little readable, faithfulness says next to nothing about reuse here.</strong>"


def _overview(shown: list[Shown]) -> str:
    rows = "".join(
        f'<tr><td><a href="#run-{number}">{escape(one.asked.name)}</a></td>'
        f'<td class="{one.clip.report.decision}"><strong>{one.clip.report.decision}</strong></td>'
        f"<td>{_computed(one.clip.report)}</td><td>{_speedup(one.clip.report)}</td><td>{_likeness(one)}</td></tr>"
        for number, one in enumerate(shown, start=1)
    )
    head = "<tr><th>request</th><th>decision</th><th>steps</th><th>speedup</th><th>PSNR</th></tr>"
    return f'<div class="wide"><table>{head}{rows}</table></div>'


# --- one run ---


def _card(number: int, one: Shown, first: Shown) -> str:
    report = one.clip.report
    title = f"{number}. {escape(one.asked.name)}"
    left = f"{_clips(one)}{_frames(one)}"
    right = f"{_risk(report)}{_steps(report)}{_facts(one)}{_readings(one)}"
    return (
        f'<article class="run" id="run-{number}"><header><h2>{title}</h2>'
        f'<span class="chip {report.decision}">{DECISIONS[report.decision]}</span></header>'
        f"<p>“{_prompt(one, first)}” <span class=quiet>seed {one.asked.seed}</span></p>"
        f'<p class="quiet">{escape(_sentence(report.reason))}</p>{_surprise(one)}'
        f'<div class="body"><div>{left}</div><div>{right}</div></div></article>'
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _prompt(one: Shown, first: Shown) -> str:
    """The prompt, with the words marked that the first request does not have."""
    known = {word.strip(",") for word in first.asked.prompt.split()}
    words = one.asked.prompt.split()
    return " ".join(f"<mark>{escape(w)}</mark>" if w.strip(",") not in known else escape(w) for w in words)


def _surprise(one: Shown) -> str:
    if one.as_expected:
        return ""
    text = f"This request is here to show “{one.asked.expected}”; the decision was “{one.clip.report.decision}”."
    return f'<p class="note">{escape(text)}</p>'


def _data(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _clips(one: Shown) -> str:
    return (
        '<div class="pair">'
        + _moving(one.clip.frames, "this run", one.asked.prompt)
        + _moving(one.dense_frames, "its own dense run", one.asked.prompt)
        + "</div>"
    )


def _moving(clip: torch.Tensor, note: str, prompt: str) -> str:
    """A GIF; a still frame for those who asked their system for less motion."""
    still = _data("png", media.png(media.frames(clip)[clip.shape[1] // 2]))
    return (
        f'<figure><picture><source media="(prefers-reduced-motion: reduce)" srcset="{still}">'
        f'<img src="{_data("gif", media.gif(clip))}" alt="{escape(note)}: {escape(prompt)}"></picture>'
        f"<figcaption>{escape(note)}</figcaption></figure>"
    )


def _frames(one: Shown) -> str:
    """All frames of both runs; over this run's, the evidence region where the gate went by it."""
    region = one.clip.evidence.region if one.clip.evidence and _compared(one.clip.report) else None
    heading, drawing = "The frames", ""
    if region is not None:
        share = region.float().mean().item()
        heading = f"The frames; outlined, where the gate saw a difference to the donor: {share:.0%} of the clip"
        drawing = _outline(region, one.clip.frames.shape[-1])
    return (
        f"<h3>{heading}</h3>"
        + _strip(one.clip.frames, "this run", drawing)
        + _strip(one.dense_frames, "its own dense run", "")
    )


def _compared(report: RunReport) -> bool:
    """Whether the gate compared predictions; between two seeds it has the words alone."""
    return "region" in report.discrepancies


def _strip(clip: torch.Tensor, note: str, drawing: str) -> str:
    source = _data("png", media.strip(clip))
    return (
        f'<figure><div class="frames"><img src="{source}" alt="frames of {note}">{drawing}</div>'
        f"<figcaption>{note}</figcaption></figure>"
    )


def _outline(region: torch.Tensor, size: int) -> str:
    """The borders of a region (t, h, w) of bool over a strip of t frames of `size` x `size` pixels, as SVG."""
    t, h, w = region.shape
    path = "".join(_borders(region[frame], frame * size, size / h, size / w) for frame in range(t))
    box = f"0 0 {t * size} {size}"
    return f'<svg viewBox="{box}" preserveAspectRatio="none" aria-hidden="true"><path d="{path}"/></svg>'


def _borders(region: torch.Tensor, left: float, high: float, wide: float) -> str:
    """Path commands for every token side at which one frame's region (h, w) ends; the frame's edge ends it too."""
    inside = torch.nn.functional.pad(region, (1, 1, 1, 1))
    across = (inside[:, 1:] != inside[:, :-1])[1:-1].nonzero().tolist()  # vertical sides
    down = (inside[1:] != inside[:-1])[:, 1:-1].nonzero().tolist()
    parts = [f"M{left + x * wide:g} {y * high:g}v{high:g}" for y, x in across]
    return "".join(parts + [f"M{left + x * wide:g} {y * high:g}h{wide:g}" for y, x in down])


def _risk(report: RunReport) -> str:
    """The gate's risk beside what it accepts; only where it went by a comparison of the two clips."""
    if report.risk is None or report.threshold is None or not _compared(report):
        return ""
    side = "high" if report.risk > report.threshold else "low"
    found = ", ".join(f"{name} {value:.2f}" for name, value in report.discrepancies.items())
    words = "more than" if side == "high" else "within"
    return (
        f"<h3>Risk {report.risk:.2f}, {words} the accepted {report.threshold:.2f}</h3>"
        f'<div class="meter" role="img" aria-label="risk {report.risk:.2f} of {report.threshold:.2f}">'
        f'<i class="{side}" style="width:{100 * report.risk:.1f}%"></i>'
        f'<b style="left:{100 * report.threshold:.1f}%"></b></div>'
        f'<p class="quiet">By the differences to the nearest donor: {escape(found)}.'
        f" {escape(_sentence(report.certificate))}{_error(report)}</p>"
    )


def _error(report: RunReport) -> str:
    """What the run itself found of its answers; nothing where none were given."""
    if report.answer_error is None:
        return ""
    return f" The answers were off by at most {report.answer_error:.1%} of the clip's contrast, and corrected."


def _steps(report: RunReport) -> str:
    rows = sorted(report.steps, key=lambda row: row.index)
    cells = "".join(f'<span class="k-{row.kind}" title="{escape(_about(row))}"></span>' for row in rows)
    kinds = dict.fromkeys(row.kind for row in rows)
    keys = "".join(f'<span><i class="key k-{kind}"></i>{KINDS[kind]}</span> ' for kind in kinds)
    label = ", ".join(f"{sum(row.kind == kind for row in rows)} {KINDS[kind]}" for kind in kinds)
    return (
        f'<h3>Steps, from noise to clip</h3><div class="steps" role="img" aria-label="{escape(label)}">{cells}</div>'
        f'<p class="quiet keys">{keys}</p>'
    )


def _about(row: StepRow) -> str:
    return f"step {row.index + 1}, sigma {row.sigma:.3f}: {KINDS[row.kind]}, {1000 * row.seconds:.0f} ms"


def _computed(report: RunReport) -> str:
    return f"{report.forwards:g} of {len(report.steps)}"


def _speedup(report: RunReport) -> str:
    """An estimate, for runs that reused some steps: of those that computed all it would be the clock's noise."""
    if report.decision == "exact":
        return "stored"
    if all(row.kind == "dense" for row in report.steps):
        return "none"
    if report.speedup is None:
        return "unknown"
    return f"≈ {report.speedup:.0f}x" if report.speedup >= 10 else f"≈ {report.speedup:.2f}x"


def _likeness(one: Shown) -> str:
    return "bit-equal" if one.bit_equal else f"{one.psnr:.1f} dB"


def _facts(one: Shown) -> str:
    report = one.clip.report
    own = report.seconds.get("carnator", 0.0)
    total = len(world.ATTRIBUTES)
    facts = {
        "computed": _computed(report),
        "speedup": _speedup(report),
        "model": f"{report.seconds.get('model', 0.0):.2f} s",
        "Carnator": f"{own:.2f} s",
        "dense (est.)": f"{report.dense_seconds:.2f} s" if report.dense_seconds else "unknown",
        "PSNR to dense": _likeness(one),
        "as asked": f"{round(one.faithfulness(one.read) * total)} of {total}",
        "dense as asked": f"{round(one.faithfulness(one.read_dense) * total)} of {total}",
    }
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _readings(one: Shown) -> str:
    """What the judge read, by attribute; folded away where it could read nothing in either clip."""
    rows = "".join(
        f"<tr><td>{name}</td><td>{getattr(one.asked.scene, name)}</td>"
        f"{_reading(one.read.attributes[name], one, name)}{_reading(one.read_dense.attributes[name], one, name)}</tr>"
        for name in world.ATTRIBUTES
    )
    head = "<tr><th>attribute</th><th>asked</th><th>this run</th><th>dense run</th></tr>"
    table = f'<div class="wide"><table>{head}{rows}</table></div>'
    why = _list("this run", one.read.reasons) + _list("dense run", one.read_dense.reasons)
    if not any(one.read.attributes.values()) and not any(one.read_dense.attributes.values()):
        return f"<details><summary>The judge can read neither clip; why</summary>{table}{why}</details>"
    folded = f"<details><summary>Why some of it is unreadable</summary>{why}</details>" if why else ""
    return f"<h3>What the judge reads</h3>{table}{folded}"


def _reading(word: str | None, one: Shown, name: str) -> str:
    if word is None:
        return '<td class="unread">unreadable</td>'
    right = word == getattr(one.asked.scene, name)
    return f'<td class="{"right" if right else "wrong"}">{escape(word)} {"✓" if right else "✗"}</td>'


def _list(note: str, reasons: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}: {escape(reason)}</li>" for reason in reasons)
    return f"<ul>{items}</ul>" if items else ""

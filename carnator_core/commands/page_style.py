"""The looks of the demo's page: light and dark, from a phone to a wide screen."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f6f3; --card: #ffffff; --ink: #1d2326; --quiet: #5a6468; --line: #d9dcd8; --mark: #fff0b8;
  --exact: #1f5fae; --joint: #1d7a46; --sparse: #0d7580; --miss: #6a6f73; --off: #6a6f73;
  --dense: #9aa3a7; --wrong: #b3261e; --region: #e8590c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181a; --card: #1d2326; --ink: #e8ecec; --quiet: #a3adb0; --line: #353d40; --mark: #5b4a10;
    --exact: #7db4f5; --joint: #6fcf97; --sparse: #5fc7d2; --miss: #a9b1b4; --off: #a9b1b4;
    --dense: #6d777b; --wrong: #f28b82; --region: #ff922b;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 0; }
h3 { font-size: 0.95rem; margin: 1.1rem 0 0.3rem; }
p { margin: 0.4rem 0; max-width: 46rem; }
.quiet, figcaption, summary { color: var(--quiet); font-size: 0.9rem; }
.runs { display: grid; gap: 1rem; }
.run { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; min-width: 0; }
.run > header { display: flex; flex-wrap: wrap; gap: 0.3rem 0.8rem; align-items: center; }
.chip { border: 2px solid currentColor; border-radius: 1rem; padding: 0 0.7rem; font-weight: 600; font-size: 0.9rem; }
.exact { color: var(--exact); } .joint { color: var(--joint); }
.miss { color: var(--miss); } .off { color: var(--off); }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 0.15em; }
.note { border-left: 4px solid var(--wrong); padding-left: 0.6rem; }
.body { display: grid; gap: 0 2rem; }
.body > div { min-width: 0; }
figure { margin: 0; min-width: 0; }
img { display: block; width: 100%; image-rendering: pixelated; border-radius: 4px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0.7rem; margin-top: 0.8rem; max-width: 30rem; }
.frames { position: relative; margin-top: 0.3rem; }
.frames svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.frames path { stroke: var(--region); stroke-width: 2; vector-effect: non-scaling-stroke; fill: none; }
.meter { position: relative; height: 14px; margin: 0.3rem 0 0.1rem; border-radius: 7px; background: var(--line); }
.meter i { position: absolute; inset: 0 auto 0 0; border-radius: 7px; }
.meter b { position: absolute; top: -4px; bottom: -4px; width: 3px; margin-left: -1.5px; background: var(--ink); }
.low { background: var(--joint); } .high { background: var(--wrong); }
.steps { display: flex; gap: 1px; height: 22px; }
.steps span { flex: 1 1 0; min-width: 1px; border-radius: 2px; }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin: 0 0.3em 0 0; }
.k-dense { background: var(--dense); } .k-skipped { background: var(--joint); } .k-exact { background: var(--exact); }
.k-region { background: var(--region); } .k-sparse, .k-cached { background: var(--sparse); }
.keys span + span { margin-left: 0.5em; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.4rem, 1fr)); gap: 0.5rem; margin: 1rem 0 0; }
.facts div { border: 1px solid var(--line); border-radius: 6px; padding: 0.35rem 0.6rem; }
.facts dt { color: var(--quiet); font-size: 0.8rem; }
.facts dd { margin: 0; font-weight: 600; }
.wide { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-size: 0.92rem; }
th, td { text-align: left; padding: 0.2rem 0.9rem 0.2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
td.right { color: var(--joint); } td.wrong { color: var(--wrong); } td.unread { color: var(--quiet); }
details { margin-top: 0.7rem; }
details ul { margin: 0.3rem 0; padding-left: 1.2rem; font-size: 0.9rem; overflow-wrap: anywhere; }
a { color: var(--exact); }
@media (min-width: 56rem) { .body { grid-template-columns: 1fr 1fr; } }
@media (max-width: 30rem) {
  main { padding: 0.6rem; }
  .run { padding: 0.7rem; }
  table { font-size: 0.86rem; }
  th, td { padding-right: 0.5rem; }
}
"""

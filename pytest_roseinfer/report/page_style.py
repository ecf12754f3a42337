"""How the page looks, and the few lines of script that step through a strip."""

from __future__ import annotations

from pytest_roseinfer.findings.drawn.style import DRAWN, PALETTE

STYLE = f"""{PALETTE}{DRAWN}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
main {{ max-width: 64rem; margin: 0 auto; padding: 2rem 1rem 4rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.3; margin: 0 0 .3rem; }}
h2 {{ font-size: 1.15rem; line-height: 1.4; margin: 0 0 .2rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .5rem; }}
code, pre, .name {{ font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
.badge {{ padding: .1rem .7rem; border-radius: 1rem; margin-left: .5rem; font-size: .95rem;
  vertical-align: middle; white-space: nowrap; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .faint {{ color: var(--faint); }}
.badge.good {{ background: var(--good); color: var(--paper); }}
.badge.bad {{ background: var(--bad); color: var(--paper); }}
section {{ margin-top: 3rem; }}
article {{ margin-top: 2rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }}
p {{ margin: .4rem 0; }}
table {{ border-collapse: collapse; margin: .8rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0;
  border-bottom: 1px solid var(--line); }}
th {{ color: var(--faint); font-weight: 500; overflow-wrap: normal; }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.scrolls, figure {{ margin: .8rem 0; overflow-x: auto; }}
figure svg {{ display: block; }}
figcaption {{ color: var(--faint); font-size: .9rem; }}
dl.beside {{ display: flex; flex-wrap: wrap; gap: .6rem; margin: .8rem 0; }}
dl.beside > div {{ flex: 1 1 16rem; padding: .5rem .8rem; background: var(--soft);
  border-left: 3px solid var(--line); }}
dl.beside > .is {{ border-color: var(--bad); }}
dt {{ color: var(--faint); font-size: .85rem; }} dd {{ margin: 0; }}
.strip {{ margin: 1rem 0; padding: .8rem .6rem; border: 1px solid var(--line);
  border-radius: 6px; }}
.strip:focus-visible, button:focus-visible, a:focus-visible {{ outline: 2px solid var(--shade);
  outline-offset: 2px; }}
.steps {{ display: flex; flex-wrap: wrap; align-items: center; gap: .6rem; }}
.history {{ position: relative; list-style: none; margin: .6rem 0; padding: 0;
  max-height: 18rem; overflow-y: auto; }}
@media (max-width: 40rem) {{ .keys {{ display: none; }} }}
button {{ font: inherit; color: inherit; cursor: pointer; background: var(--soft);
  border: 1px solid var(--line); border-radius: 4px; padding: .2rem .8rem; min-height: 2rem; }}
button:disabled {{ color: var(--faint); cursor: default; opacity: .6; }}
.history button {{ display: block; width: 100%; text-align: left; background: none;
  border: 0; border-left: 3px solid transparent; border-radius: 0; padding: .15rem .6rem; }}
.history button[aria-current] {{ background: var(--soft); border-color: var(--shade); }}
.frames {{ list-style: none; margin: 0; padding: 0; }}
.frame + .frame {{ margin-top: 1.2rem; }}
.states {{ display: flex; flex-wrap: wrap; gap: 0 2rem; }}
.states figure {{ max-width: 100%; margin: .3rem 0; }}
[hidden] {{ display: none !important; }}
details {{ margin: .6rem 0; }} summary {{ cursor: pointer; color: var(--faint); }}
pre {{ background: var(--soft); padding: .8rem; overflow-x: auto; overflow-wrap: normal; }}
a {{ color: var(--shade); }} ul {{ margin: .3rem 0; padding-left: 1.2rem; }}
svg .cell {{ fill: var(--shade); }} svg .empty {{ fill: none; stroke: var(--line); }}
svg text.dark {{ fill: var(--paper); }}
"""
SCRIPT = """
for (const strip of document.querySelectorAll(".strip")) {
  const frames = [...strip.querySelectorAll(".frame")];
  const picks = [...strip.querySelectorAll(".history button")];
  const [back, next] = strip.querySelectorAll(".steps button");
  let at = 0;
  const show = (to) => {
    at = Math.max(0, Math.min(to, frames.length - 1));
    frames.forEach((frame, step) => { frame.hidden = step !== at; });
    picks.forEach((pick, step) => pick.toggleAttribute("aria-current", step === at));
    strip.querySelector(".at").textContent = `step ${at + 1} of ${frames.length}`;
    picks[at].closest("ol").scrollTop = picks[at].offsetTop - 40;
    back.disabled = at === 0;
    next.disabled = at === frames.length - 1;
  };
  picks.forEach((pick, step) => pick.addEventListener("click", () => show(step)));
  back.addEventListener("click", () => show(at - 1));
  next.addEventListener("click", () => show(at + 1));
  strip.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way) { event.preventDefault(); show(at + way); }
  });
  strip.querySelectorAll(".scripted").forEach((part) => { part.hidden = false; });
  show(frames.length - 1);
}
"""
"""It begins where the history ends, with what is wrong. Without it all frames are shown."""

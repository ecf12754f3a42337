"""The colours of pages and drawings, light and dark, and how what is drawn looks in them."""

from __future__ import annotations

PALETTE = """
:root { --paper: #ffffff; --ink: #1c2330; --faint: #5d6775; --line: #d5dbe3; --shade: #12707a;
  --good: #17743f; --bad: #b8202a; --soft: #f5f7f9;
  --of-0: #d6e6f5; --of-1: #fbe2c4; --of-2: #d5edd9; --of-3: #e9dcf3; --of-4: #fadbe3;
  --of-5: #e6e3c6; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e4e8ee; --faint: #9aa4b2; --line: #39424f; --shade: #35b3bf;
    --good: #4cc580; --bad: #ff7b80; --soft: #1b212a;
    --of-0: #1f3d59; --of-1: #573a1b; --of-2: #1f482b; --of-3: #422f59; --of-4: #592d3b;
    --of-5: #474520; } }
"""
"""``--of-0`` and so on are the tokens of one sequence each."""
COLOURS_OF_SEQUENCES = 6
DRAWN = """
svg text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); }
svg .faint { fill: var(--faint); } svg .bad { fill: var(--bad); } svg .strong { font-weight: 700; }
svg .block { fill: none; stroke: var(--faint); }
svg .shared { stroke: var(--ink); stroke-width: 2; }
svg .slot { fill: var(--paper); stroke: var(--line); }
svg .unwritten, svg .cached { fill: none; stroke: var(--faint); stroke-dasharray: 3 3; }
svg .free { fill: none; stroke: var(--line); }
svg .hatch { stroke: var(--line); }
svg .new { stroke: var(--ink); stroke-width: 1.5; }
svg .wrong { fill: none; stroke: var(--bad); stroke-width: 2.5; }
""" + "".join(
    f"svg .of-{number} {{ fill: var(--of-{number}); stroke: var(--line); }}\n"
    for number in range(COLOURS_OF_SEQUENCES)
)

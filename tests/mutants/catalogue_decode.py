"""Bugs in decoding with the state on the device: slots, steps, running ahead, fused kernels."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROWS = "roseinfer.decode.slot_rows"
_ROWS = "roseinfer.decode.slot_rows"
_SLOTS = "roseinfer.decode.slots"
_RESIDENT = "roseinfer.decode.resident"
_STEPS = "roseinfer.decode.row_steps"
_PENALTIES = "roseinfer.decode.slot_penalties"
_READBACK = "roseinfer.decode.readback"
_RUNNER = "roseinfer.engine.runner"
_FLIGHT = "roseinfer.engine.flight"
_DECODE = "roseinfer.kernels.attend_decode"
_GPT2 = "roseinfer.models.families.gpt2"
_LIKELIEST = "roseinfer.kernels.likeliest"
_HEAD = "roseinfer.models.padded_head"


def _mutant(
    name: str, wrong: str, module: str, find: str, replace: str, rows: tuple[str, ...] = ()
) -> Mutant:
    return Mutant(name, wrong, module, find, replace, rows, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "new-block-not-uploaded",
        "The device is not told of the block that a resident sequence was given.",
        _RESIDENT,
        "            self.slots.touch(each.slot)\n",
        "            pass\n",
    ),
    _mutant(
        "padding-row-on-a-real-block",
        "The row of a sequence that left points to the first block of the cache.",
        _ROWS,
        "*SlotFields(), *[SCRATCH] * (width",
        "*SlotFields(), *[SCRATCH + 1] * (width",
        ("6", "S15"),
    ),
    _mutant(
        "slot-freed-twice",
        "A slot that is given back enters the free ones twice, and two sequences get it.",
        _SLOTS,
        "        heappush(self._free, slot)\n",
        "        heappush(self._free, slot)\n        heappush(self._free, slot)\n",
        ("12",),
    ),
    _mutant(
        "slot-left-active",
        "The slot of a request that ended before its last token stays active on the device.",
        _RUNNER,
        "        self.give_up_slot(request)\n        forget_tokens_in_flight(request)\n",
        "        left = request.resident\n"
        "        self.give_up_slot(request)\n"
        "        if self._resident is not None and left is not None:\n"
        "            self._resident.slots._changed.pop(left.slot, None)\n"
        "        forget_tokens_in_flight(request)\n",
        ("12",),
    ),
    _mutant(
        "parameters-in-each-others-columns",
        "Rows on the device have top_p and min_p in each other's place.",
        _ROWS,
        "            top_p=_bits(params.top_p),\n            min_p=_bits(params.min_p),\n",
        "            top_p=_bits(params.min_p),\n            min_p=_bits(params.top_p),\n",
    ),
    _mutant(
        "seed-cut-to-a-bit",
        "Rows on the device keep the lowest bit of a seed.",
        _ROWS,
        "        seed=signed64(seed),\n",
        "        seed=signed64(seed & 1),\n",
    ),
    _mutant(
        "tally-of-the-sequence-before",
        "A slot's tally is not cleared when another sequence gets it.",
        _PENALTIES,
        "        row.zero_()\n",
        "",
    ),
    _mutant(
        "penalties-left-behind",
        "A slot keeps its penalties when its sequence leaves.",
        _PENALTIES,
        "        self.rows[slot].copy_(self._none)\n",
        "        pass\n",
    ),
    _mutant(
        "newest-token-not-tallied",
        "Resident steps do not count the tokens that they store.",
        _PENALTIES,
        "tallies.scatter_add_(1, tokens[:, None], active[:, None].int())",
        "tallies",
    ),
    _mutant(
        "told-of-others-tokens",
        "What a resident step tells is read as if its requests stood in the first slots.",
        _FLIGHT,
        "own = told[row * each : (row + 1) * each]",
        "at = self.requests.index(request); own = told[at * each : (at + 1) * each]",
    ),
    _mutant(
        "slots-packed-when-read",
        "Tokens are read as if residents stood in the first slots, one after another.",
        _RUNNER,
        "        rows = [each.slot for each in residents]\n",
        "        rows = list(range(len(residents)))\n",
    ),
    _mutant(
        "entered-with-anothers-token",
        "Of a prefill, the first tokens go to those who become resident, whosever they are.",
        _RUNNER,
        "else self._sessions.picked(chosen, own_rows),\n",
        "else chosen[: len(own_rows)],\n",
    ),
    _mutant(
        "greedy-as-the-first-is",
        "A step is greedy for all where the first of the residents is.",
        _RESIDENT,
        "        self.steps.run(count, kind)\n",
        "        self.steps.run("
        "count, kind._replace(greedy=residents[0].params.temperature == 0))\n",
        ("S18",),
    ),
    _mutant(
        "drawn-from-the-position-before",
        "A resident step draws with the noise of the position of the token it stores.",
        _STEPS,
        ".choose(logits, lengths + 1, tally)",
        ".choose(logits, lengths, tally)",
    ),
    _mutant(
        "block-taken-a-token-late",
        "A resident sequence is given a block when its last one has been written past.",
        _RESIDENT,
        "due = [each for each in soon if each.session.stored >= each.session.room]",
        "due = [each for each in soon if each.session.stored > each.session.room]",
    ),
    _mutant(
        "due-blocks-given-early",
        "Blocks that a step needs are given to sequences that will need one later.",
        _RUNNER,
        "        return max(0, kv.num_free_blocks(0) - step.blocks)\n",
        "        return kv.num_free_blocks(0)\n",
    ),
    _mutant(
        "blocks-given-early-to-all-that-ask",
        "More sequences are given a block early than there are blocks for.",
        _RESIDENT,
        "most = min(-(-len(residents) // _SOON), early_blocks // len(self._kv.groups))",
        "most = -(-len(residents) // _SOON)",
    ),
    _mutant(
        "left-a-step-early",
        "A sequence leaves its slot one step before its last.",
        _RUNNER,
        "            if coming == request.full_length:\n",
        "            if coming == request.full_length - 1:\n",
    ),
    _mutant(
        "in-flight-for-ever",
        "Tokens that were read still count as on their way.",
        _FLIGHT,
        "request.in_flight -= 1\n                    yield request, tokens[row], None",
        "yield request, tokens[row], None",
    ),
    _mutant(
        "token-behind-the-end",
        "What a step that was launched before an end brings is given to the request all the same.",
        _FLIGHT,
        "                if request.finish_reason is None:\n",
        "                if request.session is not None:\n",
        ("12",),
    ),
    _mutant(
        "buffer-used-while-it-fills",
        "Tokens are copied to a buffer that another step's tokens are still in.",
        _READBACK,
        "        return Arrival(buffer, count, self._buffers.append)\n",
        "        self._buffers.append(buffer)\n"
        "        return Arrival(buffer, count, lambda _: None)\n",
    ),
    _mutant(
        "new-token-seen-twice",
        "The context that the decode kernel goes through ends behind the new token.",
        _DECODE,
        "    end = tl.minimum(part_begin(last_part), own)\n",
        "    end = tl.minimum(part_begin(last_part), own + 1)\n",
    ),
    Mutant(
        "captured-on-live-rows",
        "Graphs are captured on the rows of sequences that live, whose blocks are written to.",
        _ROWS,
        "        self._rows.zero_()\n",
        "",
        rows=("30",),
        targets=(),
        directed="capture_beside_the_living",
    ),
    Mutant(
        "tokens-lost-to-a-capture",
        "After a graph was captured, sequences go on from what was computed meanwhile.",
        _ROWS,
        "            self.tokens.copy_(tokens)\n",
        "",
        rows=("30",),
        targets=(),
        directed="capture_beside_the_living",
    ),
    _mutant(
        "likeliest-stays-where-it-is",
        "The kernel that ends a greedy step chooses a token and goes on from the same position.",
        _LIKELIEST,
        "length + tl.load(active + row * a_r))",
        "length)",
    ),
    _mutant(
        "likeliest-not-handed-on",
        "The kernel that ends a greedy step hands on the token before the one that it chose.",
        _LIKELIEST,
        "    tl.store(tokens + row, tl.where(usable, token, 0))\n",
        "    tl.store(tokens + row, tl.where(usable, tl.maximum(token - 1, 0), 0))\n",
    ),
    _mutant(
        "padding-of-the-head-chosen",
        "A padded head returns the logits of its padding too, as if they were tokens.",
        _HEAD,
        "[..., : self._outputs]",
        "",
    ),
    _mutant(
        "head-padded-in-front",
        "A head's padding stands before its weights, and every logit is another token's.",
        _HEAD,
        "pad(head.weight.detach(), (0, 0, 0, more))",
        "pad(head.weight.detach(), (0, 0, more, 0))",
    ),
)

"""Bugs in decoding with state on the device: slots, steps, run-ahead, kernels."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROWS = "roseinfer.decode.slots"
_SLOTS = "roseinfer.decode.slots"
_RESIDENT = "roseinfer.decode.step"
_STEPS = "roseinfer.decode.step"
_PENALTIES = "roseinfer.decode.slots"
_READBACK = "roseinfer.kv.transfers"
_RUNNER = "roseinfer.engine.runner"
_FLIGHT = "roseinfer.engine.in_flight"
_DECODE = "roseinfer.kernels.triton.decode_attention"
_GPT2 = "roseinfer.models.families.gpt2"
_GREEDY = "roseinfer.kernels.triton.greedy"
_HEAD = "roseinfer.models.loading"


def _mutant(
    name: str,
    wrong: str,
    module: str,
    function: str,
    find: str,
    replace: str,
    rows: tuple[str, ...] = (),
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, rows, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "new-block-not-uploaded",
        "A resident sequence's new block is not uploaded to the device.",
        _RESIDENT,
        "ResidentDecode._reserve",
        "self.slots.mark_new_blocks(each.slot)",
        "pass",
    ),
    _mutant(
        "padding-row-on-a-real-block",
        "The row of a sequence that has left points to the first block of the cache.",
        _ROWS,
        "SlotRows.__init__",
        "self.num_padding_rows = [*SlotFields(), *[SCRATCH] * (width * groups)]",
        "self.num_padding_rows = [*SlotFields(), *[SCRATCH + 1] * (width * groups)]",
        ("6", "S15"),
    ),
    _mutant(
        "slot-freed-twice",
        "A released slot is freed twice, so that two sequences get it.",
        _SLOTS,
        "DecodeSlots.give_back",
        "heappush(self._free, slot)",
        """
        heappush(self._free, slot)
        heappush(self._free, slot)
        """,
        ("12",),
    ),
    _mutant(
        "slot-left-active",
        "The slot of a request that ends early stays active on the device.",
        _RUNNER,
        "StepRunner.withdraw",
        "self.release_request_slot(request)",
        """
        left = request.resident
        self.release_request_slot(request)
        if self._resident is not None and left is not None:
            self._resident.slots._dirty_rows.pop(left.slot, None)
        """,
        ("12",),
    ),
    _mutant(
        "top-p-and-min-p-swapped",
        "Rows on the device have top_p and min_p in each other's column.",
        _ROWS,
        "SlotFields.of",
        """
        return cls(
            active=1,
            seed=signed64(seed),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.top_p),
            min_p=_bits(params.min_p),
        )
        """,
        """
        return cls(
            active=1,
            seed=signed64(seed),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.min_p),
            min_p=_bits(params.top_p),
        )
        """,
    ),
    _mutant(
        "seed-truncated-to-one-bit",
        "Rows on the device keep only the lowest bit of a seed.",
        _ROWS,
        "SlotFields.of",
        """
        return cls(
            active=1,
            seed=signed64(seed),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.top_p),
            min_p=_bits(params.min_p),
        )
        """,
        """
        return cls(
            active=1,
            seed=signed64(seed & 1),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.top_p),
            min_p=_bits(params.min_p),
        )
        """,
    ),
    _mutant(
        "token-counts-not-cleared",
        "A slot's token counts are not cleared for its next sequence.",
        _PENALTIES,
        "SlotPenalties.begin",
        "row.zero_()",
        "",
    ),
    _mutant(
        "penalties-not-cleared",
        "A slot keeps its penalties when its sequence leaves.",
        _PENALTIES,
        "SlotPenalties.end",
        "self.rows[slot].copy_(self._no_penalties)",
        "pass",
    ),
    _mutant(
        "newest-token-not-counted",
        "Resident steps do not count the tokens that they store for penalties.",
        _PENALTIES,
        "SlotPenalties.tally",
        "return tallies.scatter_add_(1, tokens[:, None], active[:, None].int())",
        "return tallies",
    ),
    _mutant(
        "logprobs-of-other-requests",
        "Logprobs of a resident step are read as if its requests were in the first slots.",
        _FLIGHT,
        "TokensInFlight.iter_tokens",
        "own = told[row * each : (row + 1) * each] if request.params.logprobs else None",
        """
        at = self.requests.index(request)
        own = told[at * each : (at + 1) * each] if request.params.logprobs else None
        """,
    ),
    _mutant(
        "tokens-read-from-the-first-slots",
        "Tokens are read as if residents were in the first slots, one after another.",
        _RUNNER,
        "StepRunner._launch_residents",
        "rows = [each.slot for each in residents]",
        "rows = list(range(len(residents)))",
    ),
    _mutant(
        "resident-enters-with-another-token",
        "New residents get the first tokens of a prefill, whichever requests these belong to.",
        _RUNNER,
        "StepRunner._assign_slots",
        "chosen = self._sequence_runner.select_rows(chosen, own_rows)",
        "chosen = chosen[: len(own_rows)]",
    ),
    _mutant(
        "greedy-by-the-first-resident",
        "A step is greedy for all residents if it is for the first.",
        _RESIDENT,
        "ResidentDecode.launch",
        "self.steps.run(count, kind)",
        "self.steps.run(count, kind._replace(greedy=residents[0].params.temperature == 0))",
        ("S18",),
    ),
    _mutant(
        "noise-of-the-previous-position",
        "A resident step samples with the noise of the previous position.",
        _STEPS,
        "RowSteps._choose",
        "chosen = batch.sample_tokens(logits, lengths + 1, tally)",
        "chosen = batch.sample_tokens(logits, lengths, tally)",
    ),
    _mutant(
        "block-reserved-a-token-late",
        "A resident sequence gets a block one token after its last one is full.",
        _RESIDENT,
        "ResidentDecode._due",
        "due = [each for each in soon if each.session.stored >= each.session.room]",
        "due = [each for each in soon if each.session.stored > each.session.room]",
    ),
    _mutant(
        "needed-blocks-reserved-early",
        "Blocks that a step needs are reserved early for other sequences.",
        _RUNNER,
        "StepRunner._early_blocks",
        "return max(0, kv.num_free_blocks(0) - step.blocks)",
        "return kv.num_free_blocks(0)",
    ),
    _mutant(
        "early-blocks-without-limit",
        "More sequences get a block early than there are free blocks.",
        _RESIDENT,
        "ResidentDecode._due",
        """
        max_early = min(
            -(-len(residents) // _EARLY_BLOCK_TOKENS), early_blocks // len(self._kv.groups)
        )
        """,
        "max_early = -(-len(residents) // _EARLY_BLOCK_TOKENS)",
    ),
    _mutant(
        "slot-released-a-step-early",
        "A sequence leaves its slot one step before its last.",
        _RUNNER,
        "StepRunner._launch_residents",
        """
        if coming == request.max_total_length:
            ...
        """,
        """
        if coming == request.max_total_length - 1:
            ...
        """,
    ),
    _mutant(
        "in-flight-forever",
        "Tokens still count as in flight after they were read.",
        _FLIGHT,
        "TokensInFlight.iter_tokens",
        """
        if request.finish_reason is None:
            request.in_flight -= 1
            yield request, tokens[row], None
        """,
        """
        if request.finish_reason is None:
            yield request, tokens[row], None
        """,
    ),
    _mutant(
        "token-after-the-end",
        "A token of a step launched before a request's end is added to the request.",
        _FLIGHT,
        "TokensInFlight.iter_tokens",
        """
        for request, row in zip(self.requests, self.rows, strict=True):
            if request.finish_reason is None:
                ...
        """,
        """
        for request, row in zip(self.requests, self.rows, strict=True):
            if request.sequence is not None:
                ...
        """,
        ("12",),
    ),
    _mutant(
        "readback-buffer-reused-early",
        "Tokens are copied to a readback buffer that still has another step's tokens.",
        _READBACK,
        "Readback.start",
        "return PendingReadback(buffer, count, self._buffers.append)",
        """
        self._buffers.append(buffer)
        return PendingReadback(buffer, count, lambda _: None)
        """,
    ),
    _mutant(
        "new-token-attended-twice",
        "The decode kernel's stored context includes the new token, which thus counts twice.",
        _DECODE,
        "_decode_kernel",
        "end = tl.minimum(part_begin(last_part), own)",
        "end = tl.minimum(part_begin(last_part), own + 1)",
    ),
    Mutant(
        "captured-on-live-rows",
        "Graphs are captured on rows of live sequences, whose blocks are written.",
        _ROWS,
        "SlotRows.all_padding",
        "self._rows.zero_()",
        "",
        rows=("30",),
        targets=(),
        directed="capture_with_live_sequences",
    ),
    Mutant(
        "tokens-lost-to-a-capture",
        "After a graph's capture, sequences continue from tokens that the capture computed.",
        _ROWS,
        "SlotRows.all_padding",
        "self.tokens.copy_(tokens)",
        "",
        rows=("30",),
        targets=(),
        directed="capture_with_live_sequences",
    ),
    _mutant(
        "argmax-without-advance",
        "The kernel that ends a greedy step chooses a token and keeps the position.",
        _GREEDY,
        "_advance_kernel",
        "tl.store(lengths + row * l_r, length + tl.load(active + row * a_r))",
        "tl.store(lengths + row * l_r, length)",
    ),
    _mutant(
        "next-token-off-by-one",
        "The kernel that ends a greedy step passes on the token id before the chosen one.",
        _GREEDY,
        "_advance_kernel",
        "tl.store(tokens + row, tl.where(usable, token, 0))",
        "tl.store(tokens + row, tl.where(usable, tl.maximum(token - 1, 0), 0))",
    ),
    _mutant(
        "logits-of-head-padding",
        "A padded LM head returns the logits of its padding too.",
        _HEAD,
        "PaddedHead.forward",
        "return linear(x, self._weight, self._bias)[..., : self._outputs]",
        "return linear(x, self._weight, self._bias)",
    ),
    _mutant(
        "head-padded-at-the-front",
        "The padding of an LM head precedes its weights: every logit is another token's.",
        _HEAD,
        "PaddedHead.__init__",
        "self._weight = pad(head.weight.detach(), (0, 0, 0, more))",
        "self._weight = pad(head.weight.detach(), (0, 0, more, 0))",
    ),
)

"""Bugs in decoding with the state on the device: slots, steps, running ahead, fused kernels."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROWS = "roseinfer.decode.slots"
_ROWS = "roseinfer.decode.slots"
_SLOTS = "roseinfer.decode.slots"
_RESIDENT = "roseinfer.decode.step"
_STEPS = "roseinfer.decode.step"
_PENALTIES = "roseinfer.decode.slots"
_READBACK = "roseinfer.decode.readback"
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
        "The device is not told of the block that a resident sequence was given.",
        _RESIDENT,
        "ResidentDecode._reserve",
        "self.slots.mark_new_blocks(each.slot)",
        "pass",
    ),
    _mutant(
        "padding-row-on-a-real-block",
        "The row of a sequence that left points to the first block of the cache.",
        _ROWS,
        "SlotRows.__init__",
        "self.num_padding_rows = [*SlotFields(), *[SCRATCH] * (width * groups)]",
        "self.num_padding_rows = [*SlotFields(), *[SCRATCH + 1] * (width * groups)]",
        ("6", "S15"),
    ),
    _mutant(
        "slot-freed-twice",
        "A slot that is given back enters the free ones twice, and two sequences get it.",
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
        "The slot of a request that ended before its last token stays active on the device.",
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
        "parameters-in-each-others-columns",
        "Rows on the device have top_p and min_p in each other's place.",
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
        "seed-cut-to-a-bit",
        "Rows on the device keep the lowest bit of a seed.",
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
        "tally-of-the-sequence-before",
        "A slot's tally is not cleared when another sequence gets it.",
        _PENALTIES,
        "SlotPenalties.begin",
        "row.zero_()",
        "",
    ),
    _mutant(
        "penalties-left-behind",
        "A slot keeps its penalties when its sequence leaves.",
        _PENALTIES,
        "SlotPenalties.end",
        "self.rows[slot].copy_(self._no_penalties)",
        "pass",
    ),
    _mutant(
        "newest-token-not-tallied",
        "Resident steps do not count the tokens that they store.",
        _PENALTIES,
        "SlotPenalties.tally",
        "return tallies.scatter_add_(1, tokens[:, None], active[:, None].int())",
        "return tallies",
    ),
    _mutant(
        "told-of-others-tokens",
        "What a resident step tells is read as if its requests stood in the first slots.",
        _FLIGHT,
        "TokensInFlight.iter_tokens",
        "own = told[row * each : (row + 1) * each] if request.params.logprobs else None",
        """
        at = self.requests.index(request)
        own = told[at * each : (at + 1) * each] if request.params.logprobs else None
        """,
    ),
    _mutant(
        "slots-packed-when-read",
        "Tokens are read as if residents stood in the first slots, one after another.",
        _RUNNER,
        "StepRunner._launch_residents",
        "rows = [each.slot for each in residents]",
        "rows = list(range(len(residents)))",
    ),
    _mutant(
        "entered-with-anothers-token",
        "Of a prefill, the first tokens go to those who become resident, whosever they are.",
        _RUNNER,
        "StepRunner._assign_slots",
        """
        residents = self._resident.add_sequences(
            [
                NewResident(
                    request.session,
                    request.params,
                    request.seed,
                    request.max_total_length - 1,
                    request.prompt_length,
                    request.guide,
                )
                for _, request in entering
            ],
            chosen
            if len(own_rows) == len(chosen)
            else self._sequence_runner.picked(chosen, own_rows),
        )
        """,
        """
        residents = self._resident.add_sequences(
            [
                NewResident(
                    request.session,
                    request.params,
                    request.seed,
                    request.max_total_length - 1,
                    request.prompt_length,
                    request.guide,
                )
                for _, request in entering
            ],
            chosen if len(own_rows) == len(chosen) else chosen[: len(own_rows)],
        )
        """,
    ),
    _mutant(
        "greedy-as-the-first-is",
        "A step is greedy for all where the first of the residents is.",
        _RESIDENT,
        "ResidentDecode.launch",
        "self.steps.run(count, kind)",
        "self.steps.run(count, kind._replace(greedy=residents[0].params.temperature == 0))",
        ("S18",),
    ),
    _mutant(
        "drawn-from-the-position-before",
        "A resident step draws with the noise of the position of the token it stores.",
        _STEPS,
        "RowSteps._choose",
        "chosen = batch.sample_tokens(logits, lengths + 1, tally)",
        "chosen = batch.sample_tokens(logits, lengths, tally)",
    ),
    _mutant(
        "block-taken-a-token-late",
        "A resident sequence is given a block when its last one has been written past.",
        _RESIDENT,
        "ResidentDecode._due",
        "due = [each for each in soon if each.session.stored >= each.session.room]",
        "due = [each for each in soon if each.session.stored > each.session.room]",
    ),
    _mutant(
        "due-blocks-given-early",
        "Blocks that a step needs are given to sequences that will need one later.",
        _RUNNER,
        "StepRunner._early_blocks",
        "return max(0, kv.num_free_blocks(0) - step.blocks)",
        "return kv.num_free_blocks(0)",
    ),
    _mutant(
        "blocks-given-early-to-all-that-ask",
        "More sequences are given a block early than there are blocks for.",
        _RESIDENT,
        "ResidentDecode._due",
        """
        most = min(
            -(-len(residents) // _EARLY_BLOCK_TOKENS), early_blocks // len(self._kv.groups)
        )
        """,
        "most = -(-len(residents) // _EARLY_BLOCK_TOKENS)",
    ),
    _mutant(
        "left-a-step-early",
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
        "in-flight-for-ever",
        "Tokens that were read still count as on their way.",
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
        "token-behind-the-end",
        "What a step that was launched before an end brings is given to the request all the same.",
        _FLIGHT,
        "TokensInFlight.iter_tokens",
        """
        for request, row in zip(self.requests, self.rows, strict=True):
            if request.finish_reason is None:
                ...
        """,
        """
        for request, row in zip(self.requests, self.rows, strict=True):
            if request.session is not None:
                ...
        """,
        ("12",),
    ),
    _mutant(
        "buffer-used-while-it-fills",
        "Tokens are copied to a buffer that another step's tokens are still in.",
        _READBACK,
        "Readback.start",
        "return PendingReadback(buffer, count, self._buffers.append)",
        """
        self._buffers.append(buffer)
        return PendingReadback(buffer, count, lambda _: None)
        """,
    ),
    _mutant(
        "new-token-seen-twice",
        "The context that the decode kernel goes through ends behind the new token.",
        _DECODE,
        "_decode_kernel",
        "end = tl.minimum(part_begin(last_part), own)",
        "end = tl.minimum(part_begin(last_part), own + 1)",
    ),
    Mutant(
        "captured-on-live-rows",
        "Graphs are captured on the rows of sequences that live, whose blocks are written to.",
        _ROWS,
        "SlotRows.all_padding",
        "self._rows.zero_()",
        "",
        rows=("30",),
        targets=(),
        directed="capture_beside_the_living",
    ),
    Mutant(
        "tokens-lost-to-a-capture",
        "After a graph was captured, sequences go on from what was computed meanwhile.",
        _ROWS,
        "SlotRows.all_padding",
        "self.tokens.copy_(tokens)",
        "",
        rows=("30",),
        targets=(),
        directed="capture_beside_the_living",
    ),
    _mutant(
        "likeliest-stays-where-it-is",
        "The kernel that ends a greedy step chooses a token and goes on from the same position.",
        _GREEDY,
        "_advance_kernel",
        "tl.store(lengths + row * l_r, length + tl.load(active + row * a_r))",
        "tl.store(lengths + row * l_r, length)",
    ),
    _mutant(
        "likeliest-not-handed-on",
        "The kernel that ends a greedy step hands on the token before the one that it chose.",
        _GREEDY,
        "_advance_kernel",
        "tl.store(tokens + row, tl.where(usable, token, 0))",
        "tl.store(tokens + row, tl.where(usable, tl.maximum(token - 1, 0), 0))",
    ),
    _mutant(
        "padding-of-the-head-chosen",
        "A padded head returns the logits of its padding too, as if they were tokens.",
        _HEAD,
        "PaddedHead.forward",
        "return linear(x, self._weight, self._bias)[..., : self._outputs]",
        "return linear(x, self._weight, self._bias)",
    ),
    _mutant(
        "head-padded-in-front",
        "A head's padding stands before its weights, and every logit is another token's.",
        _HEAD,
        "PaddedHead.__init__",
        "self._weight = pad(head.weight.detach(), (0, 0, 0, more))",
        "self._weight = pad(head.weight.detach(), (0, 0, more, 0))",
    ),
)

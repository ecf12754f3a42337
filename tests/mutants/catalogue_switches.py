"""Bugs in which a switch chooses the wrong one of two paths with equal results."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, PER_LAYER, Mutant

MUTANTS = (
    Mutant(
        "batched-switch-inverted",
        "Batches of rows are appended row by row if `batched` is on, and at once if it is off.",
        "roseinfer.kv.manager",
        "KVBlockManager.append_token_batch",
        """
        if not self._append_executor.policy.batched:
            ...
        """,
        """
        if self._append_executor.policy.batched:
            ...
        """,
        targets=(PER_LAYER,),
    ),
    Mutant(
        "prefix-cache-switch-inverted",
        "Prefixes are cached only if `prefix_cache` is off.",
        "roseinfer.engine.engine",
        "Engine.__init__",
        "self.prefixes = PrefixCache(kv) if config.prefix_cache else None",
        "self.prefixes = None if config.prefix_cache else PrefixCache(kv)",
        targets=(ENGINE,),
    ),
    Mutant(
        "admission-policies-swapped",
        "Requests are admitted out of order under `fifo`, and in order under `pack`.",
        "roseinfer.engine.scheduler",
        "PrefillBudget.schedule_prompts",
        'first_come = self.config.prefill_admission_policy == "fifo"',
        'first_come = self.config.prefill_admission_policy != "fifo"',
        targets=(ENGINE,),
    ),
)

"""Subjects of the sweep: classes of models with their configs, by default or varied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@dataclass(frozen=True, slots=True)
class Subject:
    kind: str
    """Model type in transformers' mappings."""
    variant: str = ""
    """Difference from the class's defaults in words; empty for none."""
    changes: dict[str, Any] = field(default_factory=dict, compare=False)
    """Values of the config that differ."""
    max_length: int | None = None
    dtype: str = "float32"

    @property
    def model_class(self) -> str:
        return _class_names(self.kind)[0]

    @property
    def config_class(self) -> str:
        name: str = CONFIG_MAPPING_NAMES.get(self.kind, "")
        return name

    def __str__(self) -> str:
        varied = f", {self.variant}" if self.variant else ""
        return f"{self.model_class} by {self.config_class}{varied}"


def every_class() -> list[Subject]:
    """Return every pair of a class and its config in transformers' mapping of causal models."""
    subjects: dict[tuple[str, str], Subject] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        subject = Subject(kind)
        subjects.setdefault((subject.model_class, subject.config_class), subject)
    return sorted(subjects.values(), key=str)


def _class_names(kind: str) -> tuple[str, ...]:
    """Return the classes of a model type, of which the mapping may have several."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)
    return names if isinstance(names, tuple) else (names,)
